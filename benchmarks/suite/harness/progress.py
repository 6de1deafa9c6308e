"""Progress people can read, although asv swallows what a benchmark prints.

FUSED_MLP_PROGRESS names a file that gets whole lines (asv's plugin shows them); without it the
lines go to the terminal itself, where there is one. FUSED_MLP_PROGRESS=off is silent.
"""

from __future__ import annotations

import os
import time
from typing import TextIO

VARIABLE = "FUSED_MLP_PROGRESS"
# A file gets a line now and then; every combination would flood a log of hours.
EVERY_SECONDS = 2.0


def words(seconds: float) -> str:
    """
    >>> words(75), words(9.6)
    ('1 min 15 s', '10 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """Says what runs and how long is left."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._begin = self._said = time.monotonic()
        self._done_before = 0
        self._sink = self._open()

    def restart(self) -> None:
        """Measuring begins now: what came before says nothing about how long it will take."""
        self._begin, self._done_before = time.monotonic(), self.done

    @staticmethod
    def _open() -> TextIO | None:
        path = os.environ.get(VARIABLE, "/dev/tty")
        if path == "off":
            return None
        try:
            return open(path, "a", encoding="utf-8", buffering=1)
        except OSError:
            return None

    def say(self, text: str) -> None:
        """A line that must not be missed."""
        self._said = time.monotonic()
        if self._sink is not None:
            try:
                self._sink.write(text + "\n")
            except OSError:
                self._sink = None

    def step(self, text: str, finished: int = 0) -> None:
        """What runs now; `finished` measurements have ended since the last step."""
        self.done += finished
        now = time.monotonic()
        if now - self._said < EVERY_SECONDS:
            return
        left = ""
        done = self.done - self._done_before
        if done > 0:
            left = f", {words((now - self._begin) / done * (self.total - self.done))} left"
        self.say(f"{self.done} of {self.total}{left}: {text}")

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None
