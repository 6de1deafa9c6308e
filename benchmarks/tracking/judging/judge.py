"""From samples to verdicts: a pure function that reads no files and runs nothing.

A case is one benchmark's history, its base and its head. Exact metrics are compared exactly.
Sampled ones pass a loose screen; what the screen flags is decided by runs made again (rule.py has
the numbers, decide.py the rule, which `replay` shares).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .case import Case, sign_of
from .decide import Decision, decide, decisive, detectable, may_fail, screen, too_noisy
from .model import Level, level
from .noise import Noise, nan_median
from .rule import DEFAULT, Rule
from .verdict import Outcome, Verdict


def judge(cases: Sequence[Case], rule: Rule = DEFAULT) -> list[Verdict]:
    """One verdict a case, in the same order; derived metrics give none."""
    cases = [c for c in cases if c.kind != "derived"]
    verdicts = [_without_numbers(c) or _exact(c) for c in cases]
    rest = [i for i, v in enumerate(verdicts) if v is None]
    for i, verdict in zip(rest, _sampled([cases[i] for i in rest], rule), strict=True):
        verdicts[i] = verdict
    verdicts = [_but_still(c, v) for c, v in zip(cases, verdicts, strict=True)]
    pairs = zip(cases, verdicts, strict=True)
    return [v if c.may_gate else v.but(gating=False) for c, v in pairs if v is not None]


def _verdict(case: Case, outcome: Outcome, reason: str, **more: Any) -> Verdict:
    given = {"old": case.base.value, "new": case.head.value} | more
    return Verdict(case.series, case.metric, case.unit, case.kind, outcome, reason, **given)


_ENDED = {
    "failed": "failed",
    "skipped": "is not applicable",
    "absent": "has no result",
    "hollow": "has no sample that is a number",
    "disturbed": "was disturbed in every process (throttled, or others used the machine)",
}


def _without_numbers(case: Case) -> Verdict | None:
    """The cases that no number decides; None where there are two sound numbers to compare."""
    base, head = case.base, case.head
    same = base.version == head.version or "absent" in (base.state, head.state)
    if not same:
        return _verdict(case, Outcome.NOT_MEASURED, "the benchmark itself changed (its version)")
    if head.state == "failed" and base.state == "ok":
        return _verdict(case, Outcome.REGRESSED, "worked before, fails now")
    for side, name in ((head, "head"), (base, "base")):
        if side.state != "ok":
            return _verdict(case, Outcome.NOT_MEASURED, f"{name} {_ENDED[side.state]}")
    for side, name in ((head, "head"), (base, "base")):
        wrong = ""
        if not math.isfinite(side.value):
            wrong = "not a finite number"
        elif side.value < 0:
            wrong = "negative"
        elif side.value == 0 and case.kind == "sampled":
            wrong = "zero"
        elif case.kind == "sampled" and (side.processes <= 0).any():
            wrong = "made of samples that are zero or negative"
        if wrong:
            return _verdict(case, Outcome.NOT_MEASURED, f"{name} is {wrong}")
    return None


def _but_still(case: Case, verdict: Verdict | None) -> Verdict | None:
    """A change is a change, but a clock that stands still cannot say that nothing changed."""
    name = "head" if case.head.still else "base" if case.base.still else ""
    if verdict is None or case.kind != "sampled" or not name or verdict.outcome != Outcome.PASS:
        return verdict
    reason = f"every sample of {name} is the same number: its clock stood still"
    return verdict.but(outcome=Outcome.NOT_MEASURED, reason=reason, rerun=False)


def _exact(case: Case) -> Verdict | None:
    if case.kind != "exact":
        return None
    old, new = case.base.value, case.head.value
    if new == old:
        slower = 0.0
    elif old > 0 and new > 0:
        slower = math.log(new) - math.log(old)
    else:
        slower = math.copysign(math.inf, new - old)
    slower = -slower if case.better == "higher" else slower
    least = math.log1p(case.tolerance / old) if case.tolerance and old > 0 else 0.0
    facts = {"slower": slower, "noise": 0.0, "detectable": least}
    if slower == 0:
        return _verdict(case, Outcome.PASS, "unchanged", **facts)
    if abs(new - old) <= case.tolerance:
        reason = f"within {case.tolerance:g} {case.unit}, as another order of rounding gives"
        return _verdict(case, Outcome.PASS, reason, **facts)
    outcome = Outcome.REGRESSED if slower > 0 else Outcome.IMPROVED
    return _verdict(case, outcome, f"{case.metric} is exact: a change is a fact", **facts)


@dataclass(frozen=True)
class _Look:
    """All sampled cases seen in one direction: larger is worse."""

    noise: Noise
    history: np.ndarray
    base: np.ndarray  # (n,) level of base
    head: np.ndarray  # (n,) first look
    heads: np.ndarray  # (n, 1 + re-runs)
    bases: np.ndarray  # (n, 1 + re-runs)
    least: np.ndarray

    def mirrored(self) -> _Look:
        return _Look(
            self.noise.mirrored(),
            -self.history,
            -self.base,
            -self.head,
            -self.heads,
            -self.bases,
            self.least,
        )

    def effect(self) -> np.ndarray:
        """The smaller of the effects against base and against where the history stands."""
        return np.fmin(self.head - self.base, self.head - self.noise.center)


def _sampled(cases: Sequence[Case], rule: Rule) -> list[Verdict]:
    if not cases:
        return []
    model = level(cases, rule)
    signs = np.array([-1.0 if c.better == "higher" else 1.0 for c in cases])
    least = np.array(
        [rule.least_effect if c.least_effect is None else c.least_effect for c in cases]
    )
    heads = (
        _logs([np.r_[c.head.value, c.head_reruns] for c in cases], rule.reruns + 1) * signs[:, None]
    )
    bases = (
        _logs([np.r_[c.base.value, c.base_reruns] for c in cases], rule.reruns + 1) * signs[:, None]
    )
    base = nan_median(bases)
    noise = replace(
        model.noise,
        center=np.where(np.isfinite(model.noise.center), model.noise.center, base),
    )
    look = _Look(noise, model.history, base, heads[:, 0], heads, bases, least)
    # Where base itself lies off its history (a step just before it), the history lends its noise,
    # not its level.
    away = base - model.noise.center
    off = np.abs(away) > np.maximum(least, rule.doubtful_z * model.noise.sigma)
    look = _moved(look, off & np.isfinite(away), away)
    worse, better = (_judged(side, rule) for side in (look, look.mirrored()))
    return [
        _one(case, i, look, model, worse, better, bool(off[i]), rule)
        for i, case in enumerate(cases)
    ]


def _logs(rows: list[np.ndarray], width: int) -> np.ndarray:
    out = np.full((len(rows), width), np.nan)
    for to, row in zip(out, rows, strict=True):
        row = np.asarray(row, dtype=float)[:width]
        good = np.isfinite(row) & (row > 0)
        to[: len(row)][good] = np.log(row[good])
    return out


def _moved(look: _Look, which: np.ndarray, by: np.ndarray) -> _Look:
    shift = np.where(which, by, 0.0)
    n = look.noise
    moved = Noise(
        n.center + shift,
        n.sigma,
        n.upper + shift,
        n.lower + shift,
        n.points,
        n.multimodal,
        n.drifting,
    )
    return _Look(
        moved,
        look.history + shift[:, None],
        look.base,
        look.head,
        look.heads,
        look.bases,
        look.least,
    )


@dataclass(frozen=True)
class _Judged:
    flagged: np.ndarray
    decision: Decision


def _judged(look: _Look, rule: Rule) -> _Judged:
    effects = look.head - look.noise.center
    shift = float(np.median(effects)) if len(effects) >= rule.least_suite else 0.0
    flagged = screen(look.noise, look.head, shift, rule)
    decision = decide(look.noise, look.history, look.heads, look.bases, rule, look.least)
    return _Judged(flagged, decision)


def _one(
    case: Case, i: int, look: _Look, model: Level, up: _Judged, down: _Judged, off: bool, rule: Rule
) -> Verdict:
    sigma = float(model.noise.sigma[i])
    count = int(np.isfinite(look.heads[i]).sum())
    if not math.isfinite(sigma):
        slower = float(look.head[i] - look.base[i])
        reason = "no history, too few processes and no neighbour to know its noise"
        return _verdict(case, Outcome.INCONCLUSIVE, reason, slower=slower, rerun=True)
    row = look.noise.rows(np.array([i]))
    names = _names(row, rule)
    seen = float(detectable(row, count - 1, rule, look.least[i : i + 1])[0])
    known: dict[str, Any] = {
        "noise": sigma,
        "detectable": seen,
        "flags": (*names, f"noise from {model.source[i]}"),
    }
    if off:
        known["flags"] += ("base lies off its history",)
    if count == 1:
        return _first_look(case, i, look, up, down, known, rule)
    effect = float(nan_median(look.heads[i : i + 1])[0] - look.base[i])
    known["slower"] = effect
    known["new"] = math.exp(sign_of(case) * float(nan_median(look.heads[i : i + 1])[0]))
    known["old"] = math.exp(sign_of(case) * float(look.base[i]))
    for judged, outcome in ((up, Outcome.REGRESSED), (down, Outcome.IMPROVED)):
        d = judged.decision
        if d.worse[i] and d.done[i]:
            gating = bool(may_fail(row, d.effect[i : i + 1], rule)[0])
            reason = f"confirmed by {count - 1} re-runs in fresh processes"
            return _verdict(case, outcome, reason, gating=gating, **known)
        if d.vetoed[i] and d.done[i] and outcome is Outcome.REGRESSED:
            reason = (
                "slower than base run again, but no slower than the slow mode its history knows"
            )
            return _verdict(case, Outcome.INCONCLUSIVE, reason, gating=False, **known)
    flagged = (up if effect > 0 else down).flagged[i]
    if flagged and not (up if effect > 0 else down).decision.done[i]:
        reason = f"not settled after {count - 1} re-runs"
        return _verdict(case, Outcome.INCONCLUSIVE, reason, rerun=True, gating=not names, **known)
    return _verdict(case, Outcome.PASS, f"{count - 1} re-runs did not confirm a change", **known)


def _first_look(
    case: Case, i: int, look: _Look, up: _Judged, down: _Judged, known: dict[str, Any], rule: Rule
) -> Verdict:
    sigma = known["noise"]
    slower = float(look.head[i] - look.base[i])
    known["slower"] = slower
    side, outcome = (up, Outcome.REGRESSED) if slower > 0 else (down, Outcome.IMPROVED)
    effect = float((look if slower > 0 else look.mirrored()).effect()[i])
    z = effect / sigma
    row = look.noise.rows(np.array([i]))
    gating = bool(may_fail(row, np.array([effect]), rule)[0])
    beyond = max(2 * float(look.least[i]), float(decisive(row, rule)[0]))
    if effect > beyond and z > rule.decisive_z and _apart(case, slower):
        reason = f"beyond {rule.decisive_z:g} sigma of its noise at first look"
        return _verdict(case, outcome, reason, gating=gating, rerun=True, **known)
    flagged = bool(side.flagged[i])
    if flagged and slower > 0 and effect > look.least[i] and z > rule.doubtful_z:
        reason = "one look cannot tell this from noise; run it again (--rerun)"
        return _verdict(case, Outcome.INCONCLUSIVE, reason, rerun=True, gating=gating, **known)
    return _verdict(case, Outcome.PASS, "within its noise", rerun=flagged, **known)


def _apart(case: Case, slower: float) -> bool:
    """Whether no process of one side is within the other's; true where there are too few to ask."""
    old, new = case.base.processes, case.head.processes
    if len(old) < 2 or len(new) < 2:
        return True
    if sign_of(case) * slower > 0:
        return bool(new.min() > old.max())
    return bool(new.max() < old.min())


def _names(row: Noise, rule: Rule) -> list[str]:
    names = []
    if row.multimodal[0]:
        names.append("multi-modal")
    if row.drifting[0]:
        names.append("drifting")
    if too_noisy(row, rule)[0]:
        names.append("too noisy for small changes")
    elif row.sigma[0] > rule.noisy:
        names.append("noisy")
    return names
