"""What this machine can measure, what it cannot and why, and the smallest change it could see.

example:
  python -m benchmarks doctor
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..suite.__main__ import measure
from ..suite.harness import readings, selection, shapes, specimens
from ..suite.harness.shapes import Combination
from . import aa

# Two calls that bound what a machine's noise does: nearly all host, and nearly all arithmetic.
_PROBES = {
    "cpu": ("fp32", ("tiny", "prompt"), ("gpt2", "16")),
    "cuda": ("bf16", ("tiny", "prompt"), ("article", "batch")),
}
_LOAD_WINDOW = 1.0


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `state` is "yes", "no" (not measurable) or "warn" (will be noisy)."""

    what: str
    state: str
    why: str


def findings(kind: str) -> Iterator[Finding]:
    """Everything that decides what can be measured here, without importing torch."""
    yield from _python()
    yield from (_gpu() if kind == "cuda" else _no_gpu())
    yield _load()
    yield _compiler(kind)
    for name, distribution in (("liger_kernel", "liger-kernel"), ("quack", "quack-kernels")):
        there = importlib.util.find_spec(name) is not None
        why = "installed" if there else f"{distribution} is not installed"
        if there and kind == "cpu":
            there, why = False, "installed, but it runs on GPUs only"
        yield Finding(f"provider {distribution}", "yes" if there else "no", why)


def _python() -> Iterator[Finding]:
    for name in ("torch", "triton", "fused_mlp"):
        found = importlib.util.find_spec(name) is not None
        yield Finding(name, "yes" if found else "no", _version(name) if found else "not installed")
    triton = importlib.util.find_spec("triton") is not None
    yield Finding(
        "kernels' machine code",
        "yes" if triton else "no",
        f"compiled for {', '.join(specimens.ARCHITECTURES)} without a GPU"
        if triton
        else "triton is not installed",
    )


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "from the source tree"


def _no_gpu() -> Iterator[Finding]:
    yield Finding("GPU", "no", "no device node of one; the CPU is measured, on one thread")
    for metric in ("energy", "reserved_memory"):
        yield Finding(metric, "no", selection.ABSENT["cpu", metric])
    yield Finding("launches", "yes", "operators that would launch, counted in their place")
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor.exists():
        name = governor.read_text().strip()
        state = "yes" if name == "performance" else "warn"
        yield Finding("CPU clock", state, f"governor {name}")
    else:
        yield Finding(
            "CPU clock", "warn", "not visible from here, so it cannot be fixed or checked"
        )


def _gpu() -> Iterator[Finding]:
    reading = readings.gpu_reading()
    if reading is None:
        yield Finding("GPU state", "no", "nvidia-smi is missing or does not answer")
    else:
        text = f"{reading.get('sm_mhz')} MHz, {reading.get('celsius')} °C, {reading.get('watts')} W"
        yield Finding("GPU state", "yes", text)
        problem = readings.throttled(reading)
        yield Finding("throttling", "warn" if problem else "yes", problem or "none")
    users = readings.gpu_users()
    yield Finding(
        "GPU idle", "warn" if users else "yes", "; ".join(users[:3]) or "nobody else on it"
    )
    there = importlib.util.find_spec("pynvml") is not None
    yield Finding(
        "energy", "yes" if there else "no", "NVML" if there else "nvidia-ml-py is missing"
    )
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    locked = os.environ.get("FUSED_MLP_CLOCKS")
    why = locked or ("can be locked (root)" if root else "cannot be locked: needs root")
    yield Finding("clock lock", "yes" if locked or root else "warn", why)


def _load() -> Finding:
    before = readings.cpu_times()
    if before is None:
        return Finding("other load", "warn", "/proc/stat is not readable: load cannot be seen")
    time.sleep(_LOAD_WINDOW)
    after = readings.cpu_times()
    assert after is not None
    problem = readings.foreign_load(before, after, os.cpu_count() or 1)
    return Finding("other load", "warn" if problem else "yes", problem or "none to speak of")


def _compiler(kind: str) -> Finding:
    if kind == "cuda":
        # Triton builds a small launcher in C for each kernel, fused_mlp's own too.
        name, other = os.environ.get("CC", "gcc"), "clang"
        without = "no Triton kernel can be launched, fused_mlp's own neither"
    else:
        name, other = os.environ.get("CXX", "g++"), "clang++"
        without = "torch.compile is not applicable on a CPU"
    found = shutil.which(name) or shutil.which(other)
    why = "ready" if found else f"{name} is not installed: {without}"
    return Finding("torch.compile", "yes" if found else "no", why)


def probe(kind: str, processes: int) -> list[aa.Spread]:
    """A short A/A run of two combinations."""
    dtype, *calls = _PROBES[kind]
    wanted = {
        Combination("Inference", shape, tokens, dtype, "eager"): frozenset({"latency"})  # type: ignore[misc]
        for shape, tokens in calls
    }
    table = measure(wanted, kind, shapes.SIZES["full"], processes)
    return [
        aa.spread(str(c), entry.samples["latency"])
        for c, entry in table.items()
        if entry.samples.get("latency") and not entry.failure
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=5, help="of the A/A run; 0 leaves it out")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 if something can be measured, 2 bad usage, 4 if nothing can."""
    if args.device:
        os.environ["FUSED_MLP_DEVICE"] = args.device
    try:
        kind = shapes.device_kind()
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    if args.processes < 0:
        print("doctor: --processes must not be negative", file=sys.stderr)
        return 2
    looked = list(findings(kind))
    able = all(f.state == "yes" for f in looked if f.what in ("torch", "fused_mlp"))
    spreads = probe(kind, args.processes) if able and args.processes else []
    counts = _counts(kind)
    if args.json:
        record: dict[str, Any] = {"device": kind, "findings": [asdict(f) for f in looked]}
        record.update(sizes=counts, noise=[asdict(s) for s in spreads])
        print(json.dumps(record))
        return 0 if able else 4
    print(f"device: {kind}")
    for finding in looked:
        mark = {"yes": "ok  ", "no": "n/a ", "warn": "note"}[finding.state]
        print(f"  {mark}  {finding.what:22} {finding.why}")
    print("\ncombinations a suite size measures here (FUSED_MLP_SUITE):")
    for name, count in counts.items():
        size = shapes.SIZES[name]
        print(f"  {name:8} {count:5} in each of {size.processes} processes")
    if spreads:
        print("\nnoise, the same code against itself:")
        print(aa.table(spreads))
        print(aa.summary(spreads))
        worst = max(s.detectable for s in spreads)
        print(f"so a slowdown of {aa.percent(worst)} is the smallest the gate could call on both")
    return 0 if able else 4


def _counts(kind: str) -> dict[str, int]:
    return {
        name: sum(len(shapes.chosen(mode, kind, size)) for mode in shapes.MODES)
        for name, size in shapes.SIZES.items()
    }
