"""How long a call takes, on any device: warm-up, batched samples, launch gaps left out.

A `Timeline` is where work happens. On a CPU that is the host's own clock; on a GPU the device's
events. Everything else is the same code, so a timeline with known durations tests it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


class Timeline(Protocol):
    """Where calls run, and the marks that time them. All times in seconds."""

    def now(self) -> float:
        """The host's monotonic clock."""

    def mark(self) -> Any:
        """A mark behind all work queued so far."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Device time from one mark to another; both must have been reached."""

    def reached(self, mark: Any) -> bool:
        """Whether the device has already come to the mark."""

    def hold(self, seconds: float) -> None:
        """Keep the device from starting what is queued next for about this long."""

    def flush(self) -> None:
        """Push earlier data out of the device's cache."""

    def synchronize(self) -> None:
        """Wait for all queued work."""


@dataclass(frozen=True)
class Settings:
    """`sample_seconds` is the least work in one sample; warm-up ends after `warm_seconds` once
    batches agree within `tolerance`, or after `warm_limit` in any case."""

    samples: int = 5
    sample_seconds: float = 200e-6
    warm_seconds: float = 0.02
    warm_limit: float = 0.5
    tolerance: float = 0.03
    most_calls: int = 500


@dataclass
class Reading:
    """What the clock saw: seconds a call, one number a sample."""

    latency: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    calls: int = 1
    warm_seconds: float = 0.0
    stable: bool = True
    launch_bound: bool = False

    def per_call(self, batch: int) -> Reading:
        """The reading of single calls where each call timed was a batch of them."""
        latency, host = ([x / batch for x in samples] for samples in (self.latency, self.host))
        return replace(self, latency=latency, host=host, calls=self.calls * batch)


class Clock:
    """Times calls on a timeline. `calls` are the same work on different buffers, used in turn."""

    def __init__(self, timeline: Timeline, settings: Settings | None = None) -> None:
        self.timeline = timeline
        self.settings = settings or Settings()

    def first(self, call: Callable[[], Any]) -> float:
        """Seconds until the result of a first call is there, everything included."""
        timeline = self.timeline
        timeline.synchronize()
        start = timeline.now()
        call()
        timeline.synchronize()
        return timeline.now() - start

    def measure(self, calls: Sequence[Callable[[], Any]]) -> Reading:
        """Warm up, then take the samples."""
        turn = itertools.cycle(calls)
        reading = Reading()
        estimate = self._warm_up(turn, len(calls), reading)
        wanted = math.ceil(self.settings.sample_seconds / max(estimate, 1e-9))
        reading.calls = max(1, min(wanted, self.settings.most_calls))
        hold = self._enough(turn, reading)
        for _ in range(self.settings.samples):
            hold = self._sample(turn, reading, hold)
        return reading

    def _enough(self, turn: Any, reading: Reading) -> float:
        """More calls a sample where warm-up, timed by the host, saw mostly the gaps between
        launches; returns the hold found meanwhile."""
        pilot = Reading(calls=reading.calls)
        hold = self._sample(turn, pilot, 0.0)
        if pilot.latency[0] * pilot.calls < 0.5 * self.settings.sample_seconds:
            wanted = math.ceil(self.settings.sample_seconds / max(pilot.latency[0], 1e-9))
            reading.calls = max(reading.calls, min(wanted, self.settings.most_calls))
            hold *= reading.calls / pilot.calls
        return hold

    def _warm_up(self, turn: Any, rotation: int, reading: Reading) -> float:
        timeline, settings = self.timeline, self.settings
        begin, batches, number = timeline.now(), [], rotation
        while True:
            timeline.synchronize()
            start = timeline.now()
            for _ in range(number):
                next(turn)()
            timeline.synchronize()
            spent = timeline.now() - start
            batches.append(spent / number)
            # A batch long enough that synchronizing is little of it, but no longer than a sample.
            if spent < settings.sample_seconds and number < settings.most_calls:
                number = min(number * 2, settings.most_calls)
            reading.warm_seconds = timeline.now() - begin
            recent = batches[-3:]
            reading.stable = len(recent) == 3 and (
                max(recent) <= min(recent) * (1 + settings.tolerance)
            )
            if reading.warm_seconds >= settings.warm_limit or (
                reading.stable and reading.warm_seconds >= settings.warm_seconds
            ):
                return statistics.median(recent)

    def _sample(self, turn: Any, reading: Reading, hold: float) -> float:
        """One sample. The device is held while the host queues the calls, so that it runs them
        back to back and the gaps between launches are not in the time; returns the hold used."""
        timeline, number = self.timeline, reading.calls
        for _attempt in range(4):
            timeline.flush()
            timeline.synchronize()
            timeline.hold(hold)
            start = timeline.mark()
            before = timeline.now()
            for _ in range(number):
                next(turn)()
            host = timeline.now() - before
            overtaken = timeline.reached(start)
            end = timeline.mark()
            timeline.synchronize()
            if not overtaken:
                break
            hold = max(2 * hold, 1.5 * host)
        reading.launch_bound |= overtaken
        reading.latency.append(timeline.elapsed(start, end) / number)
        reading.host.append(host / number)
        return hold
