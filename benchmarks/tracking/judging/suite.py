"""What all verdicts of a run say together: an invalid run, a doubtful one, what stands apart."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from .case import Case
from .rule import DEFAULT, Rule
from .verdict import Outcome, Report, Verdict, percent


def assemble(
    base: str,
    head: str,
    cases: Sequence[Case],
    verdicts: Sequence[Verdict],
    notes: Iterable[str] = (),
    rule: Rule = DEFAULT,
) -> Report:
    """The report of one comparison, with what holds for the run as a whole."""
    # A machine leaves most of the table out: what neither side could measure is nobody's news.
    idle = {c.series for c in cases if {c.base.state, c.head.state} <= {"skipped", "absent"}}
    verdicts = [v for v in verdicts if v.series not in idle]
    shared = common_shift(verdicts, rule)
    return Report(
        base,
        head,
        tuple(verdicts),
        notes=(*notes, *doubts(verdicts, rule)),
        apart=apart([c for c in cases if c.series not in idle]),
        invalid="; ".join(shared),
    )


def common_shift(verdicts: Sequence[Verdict], rule: Rule = DEFAULT) -> list[str]:
    """In words, each machine on which nearly everything moved alike at first look.

    A change of code moves some benchmarks more than others and some not at all (the suite measures
    eager and compiled providers beside ours); a machine or a driver moves all of them.
    """
    by_home: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for v in verdicts:
        looked_at = v.kind == "sampled" and math.isfinite(v.slower) and "re-runs" not in v.reason
        if looked_at and math.isfinite(v.noise):
            by_home[v.series.machine, v.series.env].append(v)
    found = []
    for (machine, _), group in sorted(by_home.items()):
        if len(group) < rule.least_suite:
            continue
        moved = np.array([v.slower for v in group])
        middle = float(np.median(moved))
        near = np.abs(moved - middle) <= np.maximum(abs(middle) / 2, [v.noise for v in group])
        if abs(middle) > rule.least_effect and near.mean() >= rule.shift_share:
            words = "slower" if middle > 0 else "faster"
            found.append(
                f"{machine}: this run is invalid: {near.mean():.0%} of {len(group)} benchmarks "
                f"moved alike, {abs(percent(middle)):.1f} % {words}; that is the machine or its "
                "driver. Measure base and head again on it"
            )
    return found


def doubts(verdicts: Sequence[Verdict], rule: Rule = DEFAULT) -> list[str]:
    """Much got slower and nothing faster: more often a bad run than a bad commit."""
    sampled = [v for v in verdicts if v.kind == "sampled"]
    worse = [v for v in sampled if v.outcome is Outcome.REGRESSED and v.gating]
    better = [v for v in sampled if v.outcome is Outcome.IMPROVED]
    unsure = [v for v in worse if "re-runs" not in v.reason]
    if len(unsure) < rule.many or better:
        return []
    return [
        f"doubtful: {len(worse)} of {len(sampled)} benchmarks got slower and none faster, most "
        "seen once; --rerun measures them again, base and head in turn"
    ]


def apart(cases: Sequence[Case]) -> dict[str, tuple[str, ...]]:
    """Names of benchmarks that no comparison can be made of, by why."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        base, head = case.base.state, case.head.state
        name = case.series.name
        if base == "absent" and head != "absent":
            found["new"].append(name)
        elif head == "absent" and base != "absent":
            found["removed"].append(name)
        elif base == head == "failed":
            found["failing on both"].append(name)
        elif base == "failed" and head == "ok":
            found["failed before, works now"].append(name)
        elif base == "ok" and head == "skipped":
            found["no longer applicable"].append(name)
        elif case.base.version != case.head.version:
            found["changed version"].append(name)
    return {why: tuple(sorted(names)) for why, names in found.items()}
