"""Energy of one call from NVML's counter, where there is one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from .built import NotApplicable
from .readings import gpu_id

# The counter moves some ten times a second; a window this long is off by a few percent.
WINDOW_SECONDS = 0.4


def _handle() -> tuple[Any, Any]:
    try:
        import pynvml
    except ImportError as error:
        raise NotApplicable("NVML is not readable: nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
        name = gpu_id()
        if name.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        raise NotApplicable(f"NVML gives no energy counter: {error}") from error
    return pynvml, handle


def joules_a_call(
    calls: Sequence[Callable[[], Any]],
    synchronize: Callable[[], None],
    counter: Callable[[], float] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> float:
    """Joules of one call, idle power included. `counter` reads joules; NVML's by default."""
    if counter is None:
        nvml, handle = _handle()

        def counter() -> float:
            return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3

    turn, done = itertools.cycle(calls), 0
    synchronize()
    before, end = counter(), now() + WINDOW_SECONDS
    while now() < end:
        for _ in range(10):
            next(turn)()
        done += 10
        synchronize()
    return (counter() - before) / done
