"""``python -m fused_mlp gpu-check``: test, tune and measure on a GPU, in under 5 minutes and
without a network.

Three steps, each with its own share of the time, and one table at the end: shape, path, µs,
fraction of the roofline, and how that compares with eager, torch.compile and (where installed)
Liger. The roofline is the larger of arithmetic over the GPU's measured peak and least traffic over
its measured bandwidth; both peaks are measured here, not read from a brochure.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from . import machine, measuring, ops, plan, tuning
from .measuring import Case, EagerMLP

PASSED, FAILED, NOTHING = 0, 1, 4
TESTS_SECONDS, TUNE_SECONDS, MEASURE_SECONDS = 110, 70, 80
CORE = [
    Case(768, 3072, 8192, "bfloat16", activation="gelu"),
    Case(4096, 14336, 1, "bfloat16"),
    Case(4096, 14336, 16, "bfloat16"),
    Case(4096, 14336, 512, "bfloat16"),
    Case(4096, 14336, 8192, "bfloat16"),
    Case(1024, 4096, 6304, "bfloat16", gated=False, activation="gelu"),
    Case(768, 3072, 8192, "bfloat16", training=True, activation="gelu"),
    Case(4096, 14336, 4096, "bfloat16", training=True),
    Case(768, 3072, 8192, "float16", activation="gelu"),
    Case(768, 3072, 2048, "float32", activation="gelu"),
]


@dataclass(frozen=True)
class Peaks:
    """What this device reaches: FLOP/s by dtype, bytes/s."""

    flops: dict[str, float]
    bandwidth: float

    def roofline_us(self, case: Case) -> float:
        """The least time a case could take."""
        return 1e6 * max(case.flop / self.flops[case.dtype], case.least_bytes / self.bandwidth)


@dataclass(frozen=True)
class Line:
    """One row of the table; ``others`` holds microseconds by provider, None where it could not run."""

    case: Case
    path: str
    fused: float
    roofline: float
    error: float
    others: dict[str, float | None]


def main(folder: Path, *, as_json: bool = False, device: torch.device | None = None) -> int:
    """Run all of it; returns 0 passed, 1 failed, 4 where there is no GPU."""
    device = device or torch.device("cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("fused_mlp: no GPU on this machine, so nothing was checked", file=sys.stderr)
        return NOTHING
    if device.type == "cuda" and machine.interpreted():
        print("fused_mlp: TRITON_INTERPRET is set; unset it, to check the GPU", file=sys.stderr)
        return NOTHING
    begin = time.monotonic()
    tests = run_tests(TESTS_SECONDS)
    tune_within(CORE, device, folder, TUNE_SECONDS)
    peaks = measure_peaks(device, {case.dtype for case in CORE})
    lines, broken = [], []
    for case in CORE:
        if time.monotonic() - begin > TESTS_SECONDS + TUNE_SECONDS + MEASURE_SECONDS:
            broken.append(f"{case}: left out, the time was up")
            continue
        try:
            lines.append(measure(case, device, peaks, seconds=0.5))
        except Exception as error:  # Triton's own errors too are no RuntimeError; this case alone
            broken.append(f"{case}: {str(error) or type(error).__name__}")
    seconds = time.monotonic() - begin
    if as_json:
        print(
            json.dumps(
                {"tests": tests, "lines": [asdict(x) for x in lines], "broken": broken}, indent=2
            )
        )
    else:
        print(table(lines))
        for text in broken:
            print(f"not measured  {text}")
        print(f"\ntests: {tests}; {seconds:.0f} s in all")
    return verdict(tests, lines, broken)


def verdict(tests: str, lines: Sequence[Line], broken: Sequence[str]) -> int:
    """0 if the tests passed and every case is as exact as eager and no case failed; 4 if nothing was
    measured.
    """
    if not lines:
        return NOTHING
    wrong = [x for x in lines if not x.error <= 2]
    failed = [b for b in broken if "the time was up" not in b]
    return FAILED if tests != "passed" or wrong or failed else PASSED


def run_tests(seconds: int, command: Sequence[str] | None = None) -> str:
    """The tests marked ``gpu``, in a process of their own: passed, failed, none, or out of time."""
    tests = Path(__file__).parent.parent / "tests" / "fused_mlp" / "test_gpu.py"
    if command is None and (not tests.is_file() or importlib.util.find_spec("pytest") is None):
        return "none: the tests are not installed with the package; run from a checkout with the extra test"
    if command is None:
        # One file and no options of the project: a GPU machine may lack what the others need. The
        # time is the compiler's, so several processes where pytest can.
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-m", "gpu", str(tests)]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(8, os.cpu_count() or 1))]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds} s"
    finally:  # its workers too, which would go on beside what is measured next
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {0: "passed", 5: "none were collected"}.get(code, f"failed ({code})")


def tune_within(cases: Sequence[Case], device: torch.device, folder: Path, seconds: float) -> None:
    """Tune as many of the cases as the time allows; the tuner keeps each as it goes."""
    end = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() < end:
            try:
                tuning.tune([case], device, folder, seconds=0.5)
            except Exception as error:  # whatever the compiler raises costs this case alone
                print(f"{case}: not tuned, {type(error).__name__}: {error}", file=sys.stderr)


def measure_peaks(device: torch.device, dtypes: set[str], size: int = 8192) -> Peaks:
    """Peak of a large vendor GEMM in each dtype, and of a large copy."""
    flops = {}
    for name in dtypes:
        a = torch.randn(size, size, device=device).to(getattr(torch, name))
        us = measuring.interleaved({"gemm": functools.partial(a.mm, a)}, device, 0.3)["gemm"]
        flops[name] = 2 * size**3 / us * 1e6
    source = torch.empty(size * size, device=device)
    target = torch.empty_like(source)
    us = measuring.interleaved({"copy": lambda: target.copy_(source)}, device, 0.3)["copy"]
    return Peaks(flops, 2 * source.numel() * 4 / us * 1e6)


def measure(case: Case, device: torch.device, peaks: Peaks, seconds: float) -> Line:
    """This package by its own plan against the others, in turn within one run."""
    fused, x, dy = measuring.build(case, device)
    eager = EagerMLP(fused)
    # Else graphs of the cases before decide: sizes become symbolic from the third on, and past torch's
    # limit of eight the column would silently be eager's.
    torch._dynamo.reset()
    providers: dict[str, nn.Module | None] = {
        "eager": eager,
        "compile": cast(nn.Module, torch.compile(eager)),
        "liger": liger(fused),
    }
    calls: dict[str, Callable[[], None]] = {
        "fused": measuring.step(fused, x, dy, case.training, None)
    }
    for name, module in providers.items():
        if module is not None and _runs(step := measuring.step(module, x, dy, case.training, None)):
            calls[name] = step
    times = measuring.interleaved(calls, device, seconds)
    p = fused._fused_mlp.params(fused._modules)
    path = ops.plan_for(x, p, case.activation, case.training).path
    able = (
        path
        if plan.obstacle(path, measuring.query(replace(case, training=False), device)) is None
        else "eager"
    )
    error = measuring.error_over_eager(case, device, able)
    others = {name: times.get(name) for name in providers}
    return Line(case, path, times["fused"], peaks.roofline_us(case) / times["fused"], error, others)


def _runs(call: Callable[[], None]) -> bool:
    try:
        call()
    except Exception as error:  # a provider that cannot run costs its own column
        print(f"left out: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True


class _Liger(nn.Module):
    """Liger's fused activation between the same linear layers."""

    def __init__(self, mlp, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))


def liger(mlp) -> nn.Module | None:
    """Liger's MLP on the same parameters, or None where it is not installed or has no such MLP."""
    if importlib.util.find_spec("liger_kernel") is None or "gate_proj" not in mlp._modules:
        return None
    if mlp.activation == "silu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Product
    elif mlp.activation == "gelu_tanh":
        from liger_kernel.ops.geglu import LigerGELUMulFunction as Product
    else:
        return None
    return _Liger(mlp, Product.apply)


def table(lines: Sequence[Line]) -> str:
    """Aligned, with units, in words."""
    others = ("eager", "compile", "liger")
    head = f"{'shape':<20}{'dtype':<10}{'mode':<11}{'tokens':>7}  {'path':<10}{'µs':>10}{'roofline':>10}{'error':>7}"
    rows = [head + "".join(f"  {'against ' + name:<16}" for name in others)]
    for x in lines:
        c = x.case
        against = ""
        for name in others:
            us = x.others.get(name)
            against += f"  {plan.comparison(us / x.fused) if us else '-':<16}"
        rows.append(
            f"{f'{c.hidden}/{c.intermediate} ' + ('gated' if c.gated else 'plain'):<20}{c.dtype:<10}"
            f"{'training' if c.training else 'inference':<11}{c.tokens:>7}  {x.path:<10}{x.fused:>10.1f}"
            f"{x.roofline:>9.0%} {x.error:>6.2f}{against}"
        )
    rows.append(
        "error: largest against float64, over eager's own in the same dtype plus half a rounding; at most 2"
    )
    return "\n".join(row.rstrip() for row in rows)
