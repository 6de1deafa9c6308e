"""``python -m fused_mlp tune``: measures every path on this device and writes its table. It never
runs by itself.

Tiles that would spill or exceed shared memory are left out before anything is timed, by the rule
in `tiles`. The file is written after every case, so a run can be stopped at any time (Ctrl-C) and
goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import torch

from . import machine, measuring, plan, tables
from .measuring import Case
from .modules import FusedMLP
from .tiles import Tile, candidates, math_of, problem_of

SHAPES = [(768, 3072), (1024, 4096), (2048, 5632), (4096, 14336)]
TOKENS = [1, 4, 16, 64, 128, 197, 512, 2048, 8192]
CPU_TOKENS = [1, 4, 16, 64, 128, 197, 512]


def tune(
    cases: Iterable[Case],
    device: torch.device,
    folder: Path,
    *,
    seconds: float = 1.0,
    again: bool = False,
    out: TextIO = sys.stderr,
    measure: Callable[[Case, torch.device, float], tuple[dict[str, float], dict[str, dict]]]
    | None = None,
) -> Path:
    """Measure ``cases`` and lay them over the table in ``folder``; returns its file.

    Args:
        seconds: time for each case.
        again: measure also what the table has already.
        measure: ``(case, device, seconds)`` to microseconds by path, and tiles; tests put their
            own in.
    """
    measure = measure or measured
    architecture = machine.architecture(device)
    file = folder / f"{architecture}.json"
    table = _read(file, architecture)
    have = {tables.identity(e): e for e in table["entries"]}
    cases = list(cases)
    for i, case in enumerate(cases, 1):
        label = f"[{i}/{len(cases)}] {case}"
        dtype = tables.arithmetic(case.dtype, architecture)
        key = tables.identity(dataclasses.asdict(case) | {"dtype": dtype})
        if key in have and not again:
            print(f"{label}: measured before", file=out)
            continue
        times, tiles = measure(case, device, seconds)
        print(f"{label}: {_verdict(times)}", file=out)
        entry = {
            "dtype": dtype, "gated": case.gated, "training": case.training,
            "hidden": case.hidden, "intermediate": case.intermediate, "tokens": case.tokens,
            "microseconds": {path: round(us, 2) for path, us in times.items()},
        }  # fmt: skip
        have[key] = entry | ({"tiles": tiles} if tiles else {})
        table["measured"] = measured_by(device)
        table["entries"] = [have[k] for k in sorted(have)]
        _write(file, table)
    plan.forget()
    return file


def _verdict(times: dict[str, float]) -> str:
    """The fastest path, and by how much: against eager, or, where that won, the runner-up."""
    best, *others = sorted(times, key=times.__getitem__)
    text = f"{best} {times[best]:.1f} µs"
    if best != "eager":
        return f"{text}, {times['eager'] / times[best]:.2f}x faster than eager"
    if not others:
        return f"{text}, nothing else runs here"
    return f"{text}; {others[0]} {plan.comparison(times[best] / times[others[0]])}"


def measured(
    case: Case, device: torch.device, seconds: float
) -> tuple[dict[str, float], dict[str, dict]]:
    """Microseconds of each path that can run, and the best tile of those that have one."""
    module, x, dy = measuring.build(case, device)
    calls = {
        path: measuring.step(module, x, dy, case.training, path)
        for path in measuring.able_paths(case, device)
    }
    # The module as an author writes it, not this package's own eager path, is what must not be
    # slower.
    calls["eager"] = measuring.step(measuring.EagerMLP(module), x, dy, case.training, None)
    if "epilogue" not in calls:
        return measuring.interleaved(calls, device, seconds), {}
    best = best_tiles(case, device, module, x, dy, seconds)
    with plan.use_tiles(*best):
        times = measuring.interleaved(calls, device, seconds)
    named = {"epilogue": best.forward, "epilogue_backward": best.backward}
    return times, {name: dataclasses.asdict(tile) for name, tile in named.items() if tile}


def best_tiles(
    case: Case,
    device: torch.device,
    module: FusedMLP,
    x: torch.Tensor,
    dy: torch.Tensor,
    seconds: float,
) -> plan.Tiles:
    """The fastest forward tile and, in training, with it the fastest backward tile; None where the
    default wins.
    """
    step = measuring.step(module, x.detach(), dy, False, "epilogue")
    forward = _fastest(
        step,
        [plan.Tiles(t) for t in tiles_worth_timing(case, device)],
        plan.Tiles(),
        device,
        seconds,
    )
    if not case.training:
        return forward
    step = measuring.step(module, x, dy, True, "epilogue")
    backward = [plan.Tiles(forward.forward, t) for t in tiles_worth_timing(case, device, True)]

    def gradients() -> None:
        # For a GPU autograd runs every backward in one thread of its own, which would compile one
        # kernel after another. Nothing is laid down in ``.grad``, which threads would share.
        with torch.autograd.set_multithreading_enabled(False), plan.use_path("epilogue"):
            torch.autograd.grad(module(x), [x, *module.parameters()], dy)

    return _fastest(step, backward, forward, device, seconds, compiling=gradients)


def _fastest(
    step: Callable[[], None],
    choices: Sequence[plan.Tiles],
    default: plan.Tiles,
    device: torch.device,
    seconds: float,
    *,
    compiling: Callable[[], None] | None = None,
) -> plan.Tiles:
    """Which tiles make ``step`` fastest; what does not compile or run is named and left out.

    ``compiling`` runs the kernels of ``step``, and can do so in several threads at once; ``step``
    itself by default.
    """

    def cut(tiles: plan.Tiles, step: Callable[[], None] = step) -> Callable[[], None]:
        def once() -> None:
            with plan.use_tiles(*tiles):
                step()

        return once

    calls = {default: cut(default)}
    # Compiling takes far longer than timing, and Triton's compiler leaves Python's lock to others.
    workers = min(8, os.cpu_count() or 1) if device.type == "cuda" else 1
    with ThreadPoolExecutor(workers) as pool:
        compiled = [pool.submit(cut(tiles, compiling or step)) for tiles in choices]
    for tiles, done in zip(choices, compiled, strict=True):
        if (error := done.exception()) is not None:
            print(f"{tiles}: left out, {type(error).__name__}: {error}", file=sys.stderr)
            continue
        calls[tiles] = cut(tiles)
    times = measuring.interleaved(calls, device, seconds)
    return min(times, key=times.__getitem__)


def tiles_worth_timing(case: Case, device: torch.device, backward: bool = False) -> list[Tile]:
    """The tuner's tiles for a case, after the rule of `tiles` pruned them."""
    architecture = machine.architecture(device)
    tf32 = tables.arithmetic(case.dtype, architecture) == "tf32"
    math = math_of(getattr(torch, case.dtype), "tf32" if tf32 else "ieee", architecture)
    problem = problem_of(case.gated, backward)
    return [
        t
        for t in candidates(architecture, math, problem)
        if t.refusal(architecture, math, problem) is None
    ]


def measured_by(device: torch.device) -> dict[str, object]:
    """What a table says of the machine that measured it; no name that identifies one machine."""
    by: dict[str, object] = {
        "torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads(),
    }  # fmt: skip
    if device.type == "cuda":
        by["device"] = torch.cuda.get_device_name(device)
    else:
        by["capability"] = torch.backends.cpu.get_cpu_capability()
    return by


def _read(file: Path, architecture: str) -> dict:
    if not file.is_file():
        return {"architecture": architecture, "entries": []}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{file} is damaged ({error}); move it away and tune again") from None


def _write(file: Path, table: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join("    " + json.dumps(e) for e in table["entries"])
    head = {k: v for k, v in table.items() if k != "entries"}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "entries": [\n' + rows + "\n  ]\n}\n"
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)  # a run stopped while writing leaves the old table whole
