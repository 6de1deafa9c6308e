"""The timelines of real devices, and what is known of their caches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .clock import Settings

if TYPE_CHECKING:
    import torch

CPU_SETTINGS = Settings(sample_seconds=3e-3, warm_seconds=0.01, warm_limit=0.08)
CUDA_SETTINGS = Settings(sample_seconds=400e-6, warm_seconds=0.02, warm_limit=0.3)


class HostTimeline:
    """The host is the device: a mark is a reading of the clock."""

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def reached(self, mark: float) -> bool:
        return False

    def hold(self, seconds: float) -> None:
        pass

    def flush(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CudaTimeline:
    """Device events; a spinning kernel holds the device while the host queues calls."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._scratch = torch.empty(2 * last_level_cache("cuda"), dtype=torch.int8, device="cuda")
        self._cycles_a_second = self._calibrate()

    def _calibrate(self) -> float:
        cycles = 10_000_000
        self._torch.cuda._sleep(cycles)
        self.synchronize()
        start = self.mark()
        self._torch.cuda._sleep(cycles)
        end = self.mark()
        self.synchronize()
        return cycles / self.elapsed(start, end)

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) * 1e-3

    def reached(self, mark: Any) -> bool:
        return mark.query()

    def hold(self, seconds: float) -> None:
        # Enough even for the first sample, whose host time is not known yet.
        self._torch.cuda._sleep(int(max(seconds, 50e-6) * self._cycles_a_second))

    def flush(self) -> None:
        self._scratch.zero_()

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


def graphed(calls: list, number: int) -> Any:
    """One CUDA graph that runs `number` calls: the optional mode for work smaller than a launch."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [calls[i % len(calls)]() for i in range(number)]
    # The graph owns the outputs' memory: they live as long as it does.
    graph.kept = kept  # type: ignore[attr-defined]
    return graph.replay


def timeline_of(kind: str) -> HostTimeline | CudaTimeline:
    return CudaTimeline() if kind == "cuda" else HostTimeline()


def settings_of(kind: str) -> Settings:
    return CUDA_SETTINGS if kind == "cuda" else CPU_SETTINGS


def last_level_cache(kind: str) -> int:
    """Bytes of the cache that a rotation of buffers must exceed."""
    if kind == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.rstrip("KM")) * (1024 if text.endswith("K") else 1024**2)
    except (OSError, ValueError):
        return 32 * 1024**2


def rotation(nbytes: int, kind: str) -> int:
    """How many copies of the weights take turns, so that none is still cached when it is used.

    Small shapes would need hundreds: there the last copies stay cached, and the note says so.
    """
    most = 16 if kind == "cuda" else 4
    return max(1, min(most, -(-2 * last_level_cache(kind) // max(nbytes, 1))))
