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
    repeats: int = 5,
) -> float:
    """The slowdown the clock sees where each call was made slower by `fraction`.

    Measured as A B B A, so that a drift of the machine falls on both sides alike; the median of
    some repeats, since one disturbed reading spoils the four it is among.
    """

    def median(which: Sequence[Callable[[], Any]]) -> float:
        return statistics.median(clock.measure(which).latency)

    found = []
    for _ in range(repeats):
        first = median(calls)
        slower = [delayed(call, fraction * first, now) for call in calls]
        slow = median(slower) + median(slower)
        plain = first + median(calls)
        # What was added to both slow readings is this fraction of twice the first plain one.
        found.append((slow - plain) / (2 * first))
    return statistics.median(found)
