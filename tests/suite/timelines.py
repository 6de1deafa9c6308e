"""Devices whose every duration is known."""

from __future__ import annotations

from collections.abc import Callable


class FakeDevice:
    """A device that works a queue off while the host goes on, as a GPU does.

    A call made with `work` costs the host `launch` seconds and the device the given duration.
    """

    def __init__(self, launch: float = 5e-6, holds: bool = True) -> None:
        self.host = self.free = 0.0
        self.launch, self.holds = launch, holds
        self.flushed = self.held = 0
        self.log: list[str] = []

    def work(self, seconds: float | Callable[[], float], name: str = "") -> Callable[[], None]:
        def call() -> None:
            duration = seconds() if callable(seconds) else seconds
            self.host += self.launch
            self.free = max(self.free, self.host) + duration
            self.log.append(name)

        return call

    def now(self) -> float:
        return self.host

    def mark(self) -> dict[str, float]:
        self.free = max(self.free, self.host)
        return {"at": self.free}

    def elapsed(self, start: dict[str, float], end: dict[str, float]) -> float:
        return end["at"] - start["at"]

    def reached(self, mark: dict[str, float]) -> bool:
        return self.host > mark["at"]

    def hold(self, seconds: float) -> None:
        self.held += 1
        if self.holds:
            self.free = max(self.free, self.host) + max(seconds, 50e-6)

    def flush(self) -> None:
        self.flushed += 1
        self.free = max(self.free, self.host) + 30e-6

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)


class FakeHost:
    """A CPU: a call takes its time on the host's clock. Reading the clock takes a nanosecond."""

    def __init__(self) -> None:
        self.time = 0.0

    def work(self, seconds: float | Callable[[], float]) -> Callable[[], None]:
        def call() -> None:
            self.time += seconds() if callable(seconds) else seconds

        return call

    def now(self) -> float:
        self.time += 1e-9
        return self.time

    mark = now

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
