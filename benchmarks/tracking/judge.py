"""From samples to verdicts: a pure function that reads no files and runs nothing.

A case is one benchmark's history, its base and its head. Exact metrics are compared exactly.
Sampled ones pass a loose screen, and what the screen flags is decided by runs made again (see rule.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .noise import Noise, measure
from .rule import DEFAULT, Rule
from .verdict import Outcome, Series, Verdict

_NONE = np.empty(0)


@dataclass(frozen=True)
class Side:
    """One benchmark at one commit: its value, one median per process, and how it ended."""

    value: float = math.nan
    processes: np.ndarray = field(default_factory=lambda: _NONE)
    state: str = "ok"  # ok, failed, skipped or absent
    version: str = ""


@dataclass(frozen=True)
class Case:
    """All the judge knows about one benchmark."""

    series: Series
    metric: str
    unit: str
    kind: str  # sampled, exact or derived
    better: str  # lower or higher
    base: Side
    head: Side
    history: np.ndarray = field(
        default_factory=lambda: _NONE
    )  # values up to and with base, oldest first
    base_reruns: np.ndarray = field(default_factory=lambda: _NONE)
    head_reruns: np.ndarray = field(default_factory=lambda: _NONE)
    rule: Rule = DEFAULT


def judge(cases: Sequence[Case], rule: Rule = DEFAULT) -> list[Verdict]:
    """One verdict a case, in the same order; cases of all machines together."""
    verdicts = [_without_numbers(c) or _exact(c) for c in cases]
    rest = [i for i, v in enumerate(verdicts) if v is None]
    for i, verdict in zip(rest, _sampled([cases[i] for i in rest], rule), strict=True):
        verdicts[i] = verdict
    return [v for v in verdicts if v is not None]


def _verdict(case: Case, outcome: Outcome, reason: str, **more: object) -> Verdict:
    return Verdict(
        series=case.series,
        metric=case.metric,
        unit=case.unit,
        kind=case.kind,
        outcome=outcome,
        reason=reason,
        **({"old": case.base.value, "new": case.head.value} | more),  # type: ignore[arg-type]
    )


def _without_numbers(case: Case) -> Verdict | None:
    """The cases that no number decides; None where there are two sound ones to compare."""
    base, head = case.base, case.head
    if head.state == "failed" and base.state == "ok":
        return _verdict(case, Outcome.REGRESSED, "worked before, fails now")
    for side, name in ((head, "head"), (base, "base")):
        if side.state != "ok":
            words = {"failed": "failed", "skipped": "not applicable", "absent": "has no result"}
            return _verdict(case, Outcome.NOT_MEASURED, f"{name} {words[side.state]}")
    if base.version != head.version:
        return _verdict(case, Outcome.NOT_MEASURED, "the benchmark itself changed (its version)")
    for side, name in ((head, "head"), (base, "base")):
        if not math.isfinite(side.value):
            return _verdict(case, Outcome.NOT_MEASURED, f"{name} is not a finite number")
        if side.value < 0 or (side.value == 0 and case.kind == "sampled"):
            what = "negative" if side.value < 0 else "zero"
            return _verdict(
                case, Outcome.NOT_MEASURED, f"{name} is {what}, which no {case.metric} can be"
            )
    return None


def _exact(case: Case) -> Verdict | None:
    if case.kind != "exact":
        return None
    old, new = case.base.value, case.head.value
    slower = (
        (math.log(new / old) if old > 0 and new > 0 else math.copysign(math.inf, new - old))
        if new != old
        else 0.0
    )
    if case.better == "higher":
        slower = -slower
    exact = {"slower": slower, "noise": 0.0, "detectable": 0.0}
    if new == old:
        return _verdict(case, Outcome.PASS, "unchanged", **exact)
    if slower > 0:
        return _verdict(
            case, Outcome.REGRESSED, f"{case.metric} is exact, so any change is a fact", **exact
        )
    return _verdict(
        case, Outcome.IMPROVED, f"{case.metric} is exact, so any change is a fact", **exact
    )


def _sampled(cases: Sequence[Case], rule: Rule) -> list[Verdict]:
    if not cases:
        return []
    noise = _noise(cases, rule)
    return [_one(case, i, noise, rule) for i, case in enumerate(cases)]


def _noise(cases: Sequence[Case], rule: Rule) -> Noise:
    width = rule.base_window + rule.error_window
    logs = np.full((len(cases), width), np.nan)
    for row, case in zip(logs, cases, strict=True):
        past = case.history[-width:]
        row[width - len(past) :] = np.log(np.where(past > 0, past, np.nan))
    return measure(logs, rule)


def _one(case: Case, i: int, noise: Noise, rule: Rule) -> Verdict:
    sign = -1.0 if case.better == "higher" else 1.0
    old, new = math.log(case.base.value), math.log(case.head.value)
    slower = sign * (new - old)
    sigma = noise.sigma[i]
    if not math.isfinite(sigma):
        both = [p for p in (case.base.processes, case.head.processes) if len(p) >= 3]
        spreads = [float(np.std(np.log(p[p > 0]), ddof=1)) for p in both]
        sigma = max([rule.least_noise, *spreads]) if spreads else math.nan
    if not math.isfinite(sigma):
        return _verdict(
            case,
            Outcome.INCONCLUSIVE,
            "no history and too few processes to know its noise",
            slower=slower,
        )
    detectable = max(rule.least_effect, 3 * sigma)
    known = {"slower": slower, "noise": float(sigma), "detectable": detectable}
    if abs(slower) <= detectable:
        return _verdict(case, Outcome.PASS, "within the noise seen", **known)
    if slower > 0:
        return _verdict(
            case, Outcome.REGRESSED, "slower than the noise seen explains", rerun=True, **known
        )
    return _verdict(case, Outcome.IMPROVED, "faster than the noise seen explains", **known)
