"""What the gate says: one object from which every table, page and file is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """Per benchmark; a run has the worst of them."""

    PASS = "pass"
    IMPROVED = "improved"
    REGRESSED = "regressed"
    INCONCLUSIVE = "inconclusive"
    NOT_MEASURED = "not measured"


EXIT = {
    Outcome.PASS: 0,
    Outcome.IMPROVED: 0,
    Outcome.REGRESSED: 1,
    Outcome.INCONCLUSIVE: 3,
    Outcome.NOT_MEASURED: 4,
}
USAGE = 2


@dataclass(frozen=True, order=True)
class Series:
    """What is compared with itself over time: one metric of one benchmark on one machine."""

    machine: str
    env: str
    benchmark: str
    params: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.benchmark}({', '.join(self.params)})" if self.params else self.benchmark


@dataclass(frozen=True)
class Verdict:
    """One benchmark's verdict, and all that is needed to explain it."""

    series: Series
    metric: str
    unit: str
    kind: str
    outcome: Outcome
    reason: str
    old: float = math.nan
    new: float = math.nan
    slower: float = math.nan  # log(new/old), turned so that positive is worse
    noise: float = math.nan  # sigma between runs, log scale
    detectable: float = math.nan  # smallest change this benchmark can see, log scale
    gating: bool = True
    flags: tuple[str, ...] = ()
    rerun: bool = False  # the screen wants it run again
    accepted: str = ""
    base: str = ""  # history mode: the last commit before the change
    head: str = ""  # and the first after it
    explanation: tuple[str, ...] = ()

    @property
    def percent(self) -> float:
        """How much worse (positive) or better in percent of the old value."""
        return percent(self.slower)

    def but(self, **changes: Any) -> Verdict:
        return replace(self, **changes)


@dataclass(frozen=True)
class Report:
    """All verdicts of one comparison."""

    base: str
    head: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()  # about the whole run: invalid, doubted, files skipped
    apart: dict[str, tuple[str, ...]] = field(default_factory=dict)  # new, removed, ... by name
    invalid: str = ""  # why the whole run cannot be judged
    commands: tuple[str, ...] = ()

    def of(self, outcome: Outcome, gating: bool | None = None) -> list[Verdict]:
        """Verdicts of one outcome, worst first."""
        found = [
            v
            for v in self.verdicts
            if v.outcome is outcome and (gating is None or v.gating == gating)
        ]
        return sorted(found, key=lambda v: (-abs(_sortable(v.slower)), v.series))

    @property
    def outcome(self) -> Outcome:
        """The worst that counts; nothing measured at all is never a pass."""
        regressed = self.of(Outcome.REGRESSED, gating=True)
        if any(v.kind == "exact" or not self.invalid for v in regressed):
            return Outcome.REGRESSED
        if self.invalid:
            return Outcome.INCONCLUSIVE
        if self.of(Outcome.INCONCLUSIVE, gating=True):
            return Outcome.INCONCLUSIVE
        if self.of(Outcome.PASS) or self.of(Outcome.IMPROVED) or self.of(Outcome.REGRESSED):
            return Outcome.PASS
        return Outcome.NOT_MEASURED

    @property
    def exit_code(self) -> int:
        return EXIT[self.outcome]


def percent(log: float) -> float:
    """A difference of logarithms as percent; inf where no float holds it."""
    return 100 * math.expm1(log) if log < 700 else math.inf if log == log else math.nan


def _sortable(x: float) -> float:
    return x if math.isfinite(x) else 0.0
