"""What each shipped kernel costs in machine code, compiled for GPUs that need not be here."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from typing import Any

from .harness import selection, shapes, specimens
from .harness.metrics import METRICS
from .harness.notes import note

VERSION = "1; exact"
_MISSING = ("ModuleNotFoundError", "ImportError")


class Static:
    """Kernel × architecture; no GPU, no driver, no noise."""

    params = (list(specimens.KERNELS), list(specimens.ARCHITECTURES))
    param_names = ("kernel", "arch")
    version = VERSION
    timeout = 60.0

    def setup_cache(self) -> dict[tuple[str, str], dict[str, Any]]:
        return compile_all_kernels()

    setup_cache.timeout = 3600.0  # type: ignore[attr-defined]

    def _look_up(self, cache: dict, metric: str, kernel: str, arch: str) -> float:
        found = cache.get((kernel, arch), {})
        if "failure" in found:
            raise RuntimeError(found["failure"])
        return found.get(metric, math.nan)

    def track_registers(self, cache: dict, kernel: str, arch: str) -> float:
        return self._look_up(cache, "registers", kernel, arch)

    def track_spills(self, cache: dict, kernel: str, arch: str) -> float:
        return self._look_up(cache, "spills", kernel, arch)

    def track_shared_memory(self, cache: dict, kernel: str, arch: str) -> float:
        return self._look_up(cache, "shared_memory", kernel, arch)

    def track_instructions(self, cache: dict, kernel: str, arch: str) -> float:
        return self._look_up(cache, "instructions", kernel, arch)


for _name in ("registers", "spills", "shared_memory", "instructions"):
    getattr(Static, f"track_{_name}").unit = METRICS[_name].unit


def compile_all_kernels() -> dict[tuple[str, str], dict[str, Any]]:
    """Static metrics of the kernels that are asked for; {} where one is not applicable."""
    from .harness.progress import Progress

    jobs = selection.wanted_kernels(shapes.size_of())
    progress = Progress(len(jobs))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    try:
        from .harness.static import Failure, compile_all
    except ImportError as error:
        note("absent", benchmark="kernels.Static", params=[], reason=str(error))
        return {job: {} for job in jobs}
    for kernel, arch, metrics in compile_all(jobs):
        where = {"benchmark": "kernels.Static", "params": [kernel, arch]}
        progress.step(f"compiled {kernel} for {arch}", finished=1)
        if isinstance(metrics, Failure):
            reason = _not_applicable(kernel, metrics.reason)
            if reason:
                found[kernel, arch] = {}
                note("absent", reason=reason, **where)
            else:
                found[kernel, arch] = {"failure": metrics.reason}
                note("failure", text=metrics.reason, **where)
            continue
        found[kernel, arch] = {
            "registers": metrics.registers,
            "spills": metrics.spills,
            "shared_memory": metrics.shared_memory,
            "instructions": metrics.instructions,
        }
        note(
            "kernel",
            classes=metrics.instruction_classes,
            sass_sha256=metrics.sass_sha256,
            compiler=metrics.compiler,
            fp_fusion=metrics.fp_fusion,
            tensor_memory=metrics.tensor_memory,
            **where,
        )
    progress.close()
    return found


def _not_applicable(kernel: str, reason: str) -> str | None:
    """A kernel this commit does not have, or a machine without triton: not a failure."""
    # A KeyError over anything else is the compiler's, and a failure.
    if reason == f"KeyError: {kernel!r}":
        return "this commit has no such kernel for this architecture"
    if reason.startswith(_MISSING) or "specimens() got an unexpected keyword" in reason:
        return reason
    if reason.startswith("AttributeError: 'Specimen' object has no attribute"):
        return f"this commit's kernels do not say what is needed to compile them ({reason})"
    # It ends before its first job where nothing can be imported from, as in an old commit.
    return _missing() if reason.startswith("the compiler's process ended") else None


@functools.cache
def _missing() -> str | None:
    """Why there are no kernels to compile at all, as the interpreter says it; None if there are."""
    command = [sys.executable, "-P", "-c", "from fused_mlp.kernels import specimens"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return last if last.startswith(_MISSING) else None
