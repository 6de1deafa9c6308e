"""Runs rungs: interleaved timing without a profiler, then one profiled call each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .counting import Traffic, counted, saved_bytes
from .rung import Rung, Setting

GEMM = (
    "mm",
    "linear_pointwise",
    "gemm",
    "cutlass",
    "nvjet",
    "matmul",
    "qlinear",
    "xmma",
    "wgmma",
    "_scaled",
)
_NOT_GEMM = ("linear_backward",)


@dataclass
class Kernel:
    """One kernel, or operator on a CPU, as one call of a rung ran it."""

    name: str
    count: int
    microseconds: float

    @property
    def gemm(self) -> bool:
        return any(word in self.name.lower() for word in GEMM)


@dataclass
class Measured:
    """What one rung showed. Times in seconds, sizes in bytes; None where this machine cannot
    tell."""

    rung: Rung
    kernels: list[Kernel] = field(default_factory=list)
    latency: float | None = None
    low: float = 0.0
    high: float = 0.0
    host: float | None = None
    device: float | None = None
    launches: int | None = None
    moved: int | None = None
    peak: int | None = None
    saved: int | None = None
    energy: float | None = None

    @property
    def count(self) -> int:
        return sum(k.count for k in self.kernels)

    @property
    def gemms(self) -> int:
        return sum(k.count for k in self.kernels if k.gemm)

    def mismatches(self, setting: Setting) -> list[str]:
        """Where what was seen is not what was stated before."""
        rung = self.rung
        found: list[str] = []
        if rung.missing:
            return found
        if not self.kernels:
            return [f"the profiler saw no {setting.unit}" + (
                ": CUPTI is missing or not permitted" if setting.device == "cuda" else ""
            )]  # fmt: skip
        if rung.expected is not None and self.count != rung.expected:
            found.append(f"{self.count} {setting.unit}, expected {rung.expected}")
        if rung.gemms is not None and self.gemms != rung.gemms:
            found.append(f"{self.gemms} GEMMs, expected {rung.gemms}")
        if rung.saved is not None and self.saved is not None:
            # x itself may be kept too; half an activation is more than x is.
            mids = self.saved / setting.mid
            if abs(mids - rung.saved) > 0.6:
                found.append(f"{mids:.1f} activations kept, expected {rung.saved:g}")
        return found


def measure(
    rungs: Sequence[Rung], setting: Setting, *, repeats: int = 5, traces: Path | None = None
) -> list[Measured]:
    """Measure rungs, in turn so that a machine's drift meets all alike; medians of ``repeats``
    calls.

    Args:
        traces: folder for one Chrome trace a rung (``01-linear.json``, ...), which
            https://ui.perfetto.dev opens.

    A rung that raises is not measured; ``rung.missing`` says what it raised.

    Raises:
        ValueError: the folder cannot be written.
    """
    if traces is not None:
        writable(traces)
    results = [Measured(rung) for rung in rungs]
    with torch.set_grad_enabled(setting.training):
        for r in results:
            _warm_up(r)
        able = [r for r in results if r.rung.missing is None]
        _time(able, setting, repeats)
        for r in able:
            _profile(r, setting, traces / trace_name(r.rung) if traces else None)
            _count(r, setting)
    return results


def trace_name(rung: Rung) -> str:
    """The same file for a rung whichever others are measured with it.

    >>> trace_name(Rung("matmul + add", "", None, 2, 1, "", 0, place=1))
    '01-matmul-add.json'
    """
    return f"{rung.place:02d}-{re.sub(r'[^a-z0-9]+', '-', rung.name)}.json"


def _warm_up(r: Measured) -> None:
    """Compile, autotune, pack: none of it is to be timed."""
    if r.rung.missing is not None or r.rung.call is None:
        return
    try:
        for _ in range(3):
            r.rung.call()
    except Exception as error:  # no C++ compiler, no memory: the other rungs are still worth it
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        r.rung = dataclasses.replace(r.rung, missing=f"failed: {text[:200]}")


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Drops the lines that torch 2.13's profiler writes to stderr at each start and stop; whatever
    else is said there is passed on."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            lines = [line for line in said.read().splitlines(True) if not line.startswith(b"USDT:")]
            os.write(2, b"".join(lines))


def writable(folder: Path) -> None:
    """Make ``folder`` and try it; ValueError says what is wrong."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"traces cannot be written to {folder}: {error.strerror or error}; give a folder that "
            "can with --out"
        ) from error


def _time(results: Sequence[Measured], setting: Setting, repeats: int) -> None:
    samples: dict[int, list[tuple[float, float]]] = {id(r): [] for r in results}
    for _ in range(repeats):
        for r in results:
            _synchronize(setting)
            start = time.perf_counter()
            r.rung.call()
            host = time.perf_counter() - start
            _synchronize(setting)
            samples[id(r)].append((host, time.perf_counter() - start))
    for r in results:
        r.host = statistics.median(s[0] for s in samples[id(r)])
        times = [s[1] for s in samples[id(r)]]
        r.latency, r.low, r.high = statistics.median(times), min(times), max(times)
    if setting.device == "cuda":
        for r in results:
            r.energy = _energy(r)


def _synchronize(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def _energy(r: Measured, seconds: float = 0.3) -> float | None:
    """Joules of one call, from NVML's counter, which moves every 20 to 100 ms."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # NVML counts the machine's GPUs, torch those of CUDA_VISIBLE_DEVICES: only the UUID is common.
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        calls = max(1, int(seconds / max(r.latency or seconds, 1e-6)))
        torch.cuda.synchronize()
        before = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        for _ in range(calls):
            r.rung.call()
        torch.cuda.synchronize()
        return (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1000 / calls
    except (
        Exception
    ):  # no NVML, no permission, or a GPU without the counter: the column stays empty
        return None


def _profile(r: Measured, setting: Setting, trace: Path | None) -> None:
    cuda = setting.device == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    options: Any = {"profile_memory": True, "record_shapes": True}
    with _without_chatter(), profile(activities=activities, **options) as prof:
        r.rung.call()
        _synchronize(setting)
    events = prof.events()
    if cuda:
        r.kernels = _group((e.name, e.device_time_total) for e in _on_device(events))
        if r.kernels:  # without CUPTI nothing was counted, which is not none
            r.device = sum(k.microseconds for k in r.kernels) / 1e6
            r.launches = sum("LaunchKernel" in e.name for e in events)
        r.peak = torch.cuda.max_memory_allocated() - base
    else:
        # A wrapper's time is its own and its children's, since only the innermost that computes is
        # named.
        r.kernels = _group((e.name, e.cpu_time_total) for e in counted(events))
        r.peak = peak_bytes(prof)
    if trace is not None:
        prof.export_chrome_trace(str(trace))


def _on_device(events: Any) -> list[Any]:
    """What a GPU did. A `record_function`, as around a compiled graph, is shown there too, over the
    kernels in it, whose time would count twice.
    """
    cuda = torch.autograd.DeviceType.CUDA
    return [e for e in events if e.device_type == cuda and not e.is_user_annotation]


def _group(pairs: Any) -> list[Kernel]:
    grouped: dict[str, Kernel] = {}
    for name, microseconds in pairs:
        kernel = grouped.setdefault(name, Kernel(name, 0, 0.0))
        kernel.count += 1
        kernel.microseconds += microseconds
    return list(grouped.values())


def peak_bytes(prof: Any) -> int:
    """The most bytes held at once beyond the start, from the allocator's own events."""
    events = prof.profiler.kineto_results.events()
    held = peak = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += change
        peak = max(peak, held)
    return peak


def _count(r: Measured, setting: Setting) -> None:
    traffic = r.rung.traffic
    if callable(traffic):
        with torch.no_grad(), Traffic() as seen:
            traffic()
        r.moved = seen.total
    else:
        r.moved = traffic
    if setting.training:
        with saved_bytes(r.rung.parameters) as total:
            r.rung.call()
        r.saved = total[0]
