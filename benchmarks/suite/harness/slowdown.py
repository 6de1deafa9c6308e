"""Is the clock honest? A known delay is added to each call, and must be found again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .clock import Clock


def delayed(
    call: Callable[[], Any], seconds: float, now: Callable[[], float] = time.perf_counter
) -> Callable[[], Any]:
    """The call and then, on the host, this long of busy waiting."""

    def slower() -> Any:
        result = call()
        end = now() + seconds
        while now() < end:
            pass
        return result

    return slower


def recover(
    clock: Clock,
    calls: Sequence[Callable[[], Any]],
    fraction: float,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """The slowdown the clock sees where each call was made slower by `fraction`.

    Measured as A B B A, so that a drift of the machine falls on both sides alike.
    """

    def median(which: Sequence[Callable[[], Any]]) -> float:
        return statistics.median(clock.measure(which).latency)

    first = median(calls)
    slower = [delayed(call, fraction * first, now) for call in calls]
    slow = median(slower) + median(slower)
    added = fraction * first * 2
    plain = first + median(calls)
    # What was added is a fraction of `first`; what is found is a fraction of all plain readings.
    return (slow - plain) / added * fraction
