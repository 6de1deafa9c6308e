"""gate --history: steps and drifts found after the fact, over all that was ever measured."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from ..judging.noise import measure
from ..judging.rule import DEFAULT, Rule
from ..judging.steps import Piece, pieces
from ..judging.verdict import Outcome, Report, Series, Verdict, percent
from ..results import Run
from .accepted import Reviewed
from .cases import unlike
from .metric import Kind, kind_of

# Shorter than what `replay` calls a step: a person looks at what is found here, and a step should
# not have to be fifteen commits old first.
_PIECE = 10
# A drift is followed so many commits to either side of where it was noticed.
_REACH = 40
# A ramp has two more numbers than a step: what it fits better must be worth more, in sigma^2.
_RAMP_PRICE = 12.0
# Chi squared with one degree of freedom, 95 %: places of a step that fit within this are named too.
_PLAUSIBLE = 3.84


@dataclass(frozen=True)
class Move:
    """The level changed between two values: indices of the last before and the first after."""

    before: int
    after: int
    size: float  # log scale, positive is worse
    drift: bool = False  # spread over several steps

    @property
    def words(self) -> str:
        return "drift" if self.drift else "step"


def moves(logs: np.ndarray, rule: Rule = DEFAULT) -> list[Move]:
    """Lasting changes of level in a history (logarithms, larger is worse, all finite).

    Steps of one direction that follow each other within two pieces' least length are one drift.
    """
    found = pieces(logs, _PIECE)
    sigma = _noise(logs, rule, found)
    steps = [Move(a.stop - 1, b.start, b.level - a.level) for a, b in itertools.pairwise(found)]
    joined: list[Move] = []
    for step in steps:
        last = joined[-1] if joined else None
        close = last is not None and step.before - last.after < 2 * _PIECE
        if last is not None and close and last.size * step.size > 0:
            joined[-1] = Move(last.before, step.after, last.size + step.size, drift=True)
        else:
            joined.append(step)
    least = max(rule.history_effect, rule.named_z * sigma)
    kept = [m for m in joined if abs(m.size) > least]
    lasts = [m.before for m in kept[1:]] + [len(logs) - 1] * bool(kept)
    out: list[Move] = []
    for m, stop in zip(kept, lasts, strict=True):
        low = max(out[-1].after if out else 0, m.before - _REACH - _PIECE)
        low = min(low, m.before)
        out.append(_spread_out(m, logs, low, min(stop + 1, m.after + _REACH + _PIECE), sigma))
    return out


def _spread_out(move: Move, logs: np.ndarray, low: int, high: int, sigma: float) -> Move:
    """The move with its true range: that of a straight ramp where that fits clearly better.

    Else a step, in the range of commits where it fits nearly as well. Only values `low` to `high`
    (excluded) count: beyond lie other moves.
    """
    x = logs[low:high]
    index = np.arange(low, high)
    starts = index[index <= move.before][-_REACH:]
    ends = index[index >= move.after][:_REACH]
    start, end = (g.ravel()[:, None] for g in np.meshgrid(starts, ends, indexing="ij"))
    size, square = _ramps(x, index, start, end)
    best = int(np.argmin(square))
    _, steps = _ramps(x, index, index[:-1, None], index[1:, None])
    unit = max(sigma, DEFAULT.least_noise) ** 2
    long = end[best, 0] - start[best, 0] >= _PIECE // 2
    if long and steps.min() - square[best] > _RAMP_PRICE * unit:
        whole = math.copysign(abs(float(size[best])), move.size)
        return Move(int(start[best, 0]), int(end[best, 0]), whole, drift=True)
    likely = index[:-1][steps - steps.min() <= _PLAUSIBLE * unit]
    near = likely[np.abs(likely - move.before) <= _PIECE]
    if move.drift or not len(near):
        return move
    return Move(min(move.before, int(near[0])), max(move.after, int(near[-1]) + 1), move.size)


def _ramps(
    x: np.ndarray, index: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Least squares of level + size * ramp: the size of each ramp, and what it leaves."""
    ramp = np.clip((index - start) / (end - start), 0.0, 1.0)
    centred = ramp - ramp.mean(axis=1, keepdims=True)
    spread = (centred**2).sum(axis=1)
    size = np.divide(centred @ x, spread, out=np.zeros_like(spread), where=spread > 0)
    return size, ((x - x.mean()) ** 2).sum() - size**2 * spread


def _noise(logs: np.ndarray, rule: Rule, level: Sequence[Piece] | None = None) -> float:
    """Sigma of one run about its level: real steps are no noise."""
    still = np.array(logs, dtype=float)
    for piece in pieces(logs, _PIECE) if level is None else level:
        still[piece.start : piece.stop] -= piece.level
    sigma = float(measure(still[None, :], rule).sigma[0])
    return sigma if math.isfinite(sigma) else rule.least_noise


def judge_history(
    runs: Sequence[Run],
    line: Sequence[str],
    units: Mapping[str, str],
    keep: Callable[[str], bool],
    reviewed: Reviewed,
    notes: Sequence[str] = (),
    rule: Rule = DEFAULT,
) -> Report:
    """One verdict a series: whether it stands worse now than before its last lasting change."""
    place = {commit: i for i, commit in enumerate(line)}
    homes: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if run.commit in place:
            homes[run.machine, run.env].append(run)
    verdicts: list[Verdict] = []
    said = list(notes)
    for (machine, env), home in sorted(homes.items()):
        home.sort(key=lambda r: (place[r.commit], r.date))
        alike = [r for r in home if not unlike(r, home[-1])]
        if len(alike) < len(home):
            said.append(f"{machine}: {len(home) - len(alike)} runs of an unlike system left out")
        for name in sorted({n for r in alike for n in r.rows}):
            verdicts += _series(machine, env, name, alike, units.get(name, ""), keep, rule)
    within = _reach(line)
    today = date.today()
    verdicts = [reviewed.apply(v, within(v.base, v.head), today) if v.head else v for v in verdicts]
    if not verdicts:
        said.append("no results of this history's commits; run asv first")
    first, last = _ends(homes, place, line)
    short = sorted({v.series.name for v in verdicts if v.outcome is Outcome.NOT_MEASURED})
    apart = {f"fewer values than the {2 * _PIECE} that steps need": tuple(short)} if short else {}
    return Report(first, last, tuple(verdicts), tuple(said), apart=apart)


def _reach(line: Sequence[str]) -> Callable[[str, str], Callable[[str], bool]]:
    place = {c: i for i, c in enumerate(line)}

    def between(base: str, head: str) -> Callable[[str], bool]:
        inside = line[place.get(base, -1) + 1 : place.get(head, -1) + 1]
        return lambda commit: any(c.startswith(commit) for c in inside)

    return between


def _ends(
    homes: Mapping[tuple[str, str], Sequence[Run]], place: Mapping[str, int], line: Sequence[str]
) -> tuple[str, str]:
    seen = [place[r.commit] for home in homes.values() for r in home]
    return (line[min(seen)], line[max(seen)]) if seen else (line[0], line[-1])


def _series(
    machine: str,
    env: str,
    name: str,
    runs: Sequence[Run],
    unit: str,
    keep: Callable[[str], bool],
    rule: Rule,
) -> list[Verdict]:
    rows = [(r.commit, r.rows[name]) for r in runs if name in r.rows]
    version = rows[-1][1].version
    rows = [(c, row) for c, row in rows if row.version == version]
    kind = kind_of(name, unit, any(row.processes.size for _, row in rows))
    if kind.kind == "derived":
        return []
    found = []
    for combo in dict.fromkeys(c for _, row in rows for c in row.params):
        series = Series(machine, env, name, combo)
        if not keep(series.name):
            continue
        at = [
            (c, float(row.locations[row.params.index(combo)]))
            for c, row in rows
            if combo in row.params
        ]
        good = [
            (c, v)
            for c, v in at
            if math.isfinite(v) and (v > 0 or (kind.kind == "exact" and v == 0))
        ]
        if good:
            found.append(
                _verdict(series, kind, [c for c, _ in good], np.array([v for _, v in good]), rule)
            )
    return found


def _verdict(
    series: Series, kind: Kind, commits: list[str], values: np.ndarray, rule: Rule
) -> Verdict:
    sign = -1.0 if kind.better == "higher" else 1.0
    if kind.kind == "exact":
        found = _exact_moves(values, sign, kind.tolerance)
        sigma = 0.0
    else:
        logs = sign * np.log(values)
        found = moves(logs, rule)
        sigma = _noise(logs, rule)
    known: dict[str, Any] = {
        "metric": kind.metric,
        "unit": kind.unit,
        "kind": kind.kind,
        "noise": sigma,
        "detectable": 0.0
        if kind.kind == "exact"
        else max(rule.history_effect, rule.named_z * sigma),
    }
    if not found:
        short = kind.kind != "exact" and len(values) < 2 * _PIECE
        reason = (
            f"only {len(values)} values, steps need {2 * _PIECE}"
            if short
            else f"level over {len(values)} commits"
        )
        outcome = Outcome.NOT_MEASURED if short else Outcome.PASS
        level = float(np.median(values))
        return Verdict(
            series, outcome=outcome, reason=reason, old=level, new=level, slower=0.0, **known
        )
    last = found[-1]
    old, new = _levels(values, found, last)
    story = tuple(
        f"{m.words} of {abs(percent(m.size)):.1f} % {'worse' if m.size > 0 else 'better'} "
        f"between {commits[m.before][:10]} and {commits[m.after][:10]}"
        for m in reversed(found)
        if math.isfinite(m.size)
    )
    return Verdict(
        series,
        outcome=Outcome.REGRESSED if last.size > 0 else Outcome.IMPROVED,
        reason=f"{last.words} between {commits[last.before][:10]} and {commits[last.after][:10]}",
        old=old,
        new=new,
        slower=last.size,
        base=commits[last.before],
        head=commits[last.after],
        explanation=story[:10],
        **known,
    )


def _levels(values: np.ndarray, found: Sequence[Move], last: Move) -> tuple[float, float]:
    start = found[-2].after if len(found) > 1 else 0
    return float(np.median(values[start : last.before + 1])), float(np.median(values[last.after :]))


def _exact_moves(values: np.ndarray, sign: float, tolerance: float = 0.0) -> list[Move]:
    """Each change beyond the tolerance from where the last one led, so that small ones add up."""
    found = []
    a = float(values[0])
    for i, b in enumerate(map(float, values[1:])):
        if abs(b - a) <= tolerance:
            continue
        size = math.log(b) - math.log(a) if a > 0 and b > 0 else math.copysign(math.inf, b - a)
        found.append(Move(i, i + 1, sign * size))
        a = b
    return found
