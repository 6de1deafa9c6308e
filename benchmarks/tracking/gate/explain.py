"""Why: what else changed where a benchmark regressed, from metrics, side records and identities."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..judging.verdict import Outcome, Series, Verdict
from ..results import read_notes
from .cases import Pair, unlike
from .render import amount, change

_Key = tuple[str, tuple[str, ...]]
# Fields of a "measured" record that say nothing about the code.
_NOT_CODE = {"kind", "benchmark", "params", "pids", "seconds", "process"}
_MOST = 6
# The last parameter of what the suite compares everything with.
YARDSTICK = "eager"


@dataclass(frozen=True)
class Records:
    """Side records of one run, by what they say."""

    launches: dict[_Key, Counter[str]] = field(default_factory=dict)
    measured: dict[_Key, dict[str, Any]] = field(default_factory=dict)
    kernels: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    failures: dict[_Key, str] = field(default_factory=dict)


def records(notes: Sequence[Mapping[str, Any]]) -> Records:
    """Sort side records; whatever is not of the expected form is left out."""
    found = Records()
    for note in notes:
        benchmark, params = note.get("benchmark"), note.get("params")
        if not isinstance(benchmark, str) or not isinstance(params, list):
            continue
        combo = tuple(str(p) for p in params)
        key = (_class(benchmark + ".x"), combo)
        kind = note.get("kind")
        if kind == "launches" and isinstance(note.get("names"), list):
            found.launches[key] = Counter(str(n)[:120] for n in note["names"])
        elif kind == "measured":
            found.measured[key] = {k: v for k, v in note.items() if k not in _NOT_CODE}
        elif kind == "kernel" and isinstance(note.get("sass_sha256"), str):
            found.kernels[combo] = dict(note)
        elif kind == "failure":
            found.failures[key] = str(note.get("text", ""))[:300]
    return found


def explain(verdicts: Sequence[Verdict], pair: Pair, base: str, head: str) -> list[Verdict]:
    """The same verdicts; regressions and doubts say what changed with them, and how to repeat."""
    sides = [records(read_notes(run)) if run else Records() for run in (pair.base, pair.head)]
    kin: dict[_Key, list[Verdict]] = defaultdict(list)
    for v in verdicts:
        kin[_class(v.series.benchmark), v.series.params].append(v)
    known = {(v.series.benchmark, v.series.params): v for v in verdicts}
    code = compiled(*sides)
    if code and not _runs_kernels(pair):
        code = None  # compiled here, run elsewhere: they explain no latency of this machine
    place = environment(pair)
    out = []
    for v in verdicts:
        if v.outcome not in (Outcome.REGRESSED, Outcome.INCONCLUSIVE):
            out.append(v)
            continue
        key = (_class(v.series.benchmark), v.series.params)
        lines = [
            *_kin(v, kin[key]),
            *_beside(v, known.get((v.series.benchmark, (*v.series.params[:-1], YARDSTICK)))),
            *_launched(sides[0].launches.get(key), sides[1].launches.get(key)),
            *_plan(sides[0].measured.get(key), sides[1].measured.get(key)),
        ]
        if key in sides[1].failures and v.reason.endswith("fails now"):
            lines.append(f"it said: {sides[1].failures[key]}")
        if v.series.benchmark.startswith("kernels."):
            lines += _sass(
                sides[0].kernels.get(v.series.params), sides[1].kernels.get(v.series.params)
            )
        elif v.kind == "sampled":
            same = not _launched(sides[0].launches.get(key), sides[1].launches.get(key))
            lines += _blame(code, same)
        lines += place
        lines.append(f"repeat: {command(v.series, base, head)}")
        out.append(v.but(explanation=tuple(lines)))
    return out


def command(series: Series, base: str, head: str) -> str:
    """The one command that measures this benchmark again at both commits and judges it."""
    pattern = regex(series).replace("'", "'\\''")
    return f"python -m benchmarks gate {base[:12]} {head[:12]} --rerun --bench '{pattern}'"


def regex(series: Series) -> str:
    """A pattern for `asv run --bench` that matches this series alone."""
    if not series.params:
        return f"^{re.escape(series.benchmark)}$"
    # asv writes parameters as repr() does, strings with their quotes.
    params = ", ".join(f".?{re.escape(p)}.?" for p in series.params)
    return rf"^{re.escape(series.benchmark)}\({params}\)$"


def _runs_kernels(pair: Pair) -> bool:
    """Whether the machine has a GPU, so that a latency there can come from a kernel's code."""
    return any(run.params.get("gpu") != "none" for run in (pair.base, pair.head) if run)


def compiled(base: Records, head: Records) -> list[str] | None:
    """Kernels whose machine code changed; None where that is not known for both sides."""
    if not base.kernels or not head.kernels:
        return None
    both = base.kernels.keys() | head.kernels.keys()
    return [
        " ".join(name)
        for name in sorted(both)
        if base.kernels.get(name, {}).get("sass_sha256")
        != head.kernels.get(name, {}).get("sass_sha256")
    ]


def environment(pair: Pair) -> list[str]:
    """What differs between the two runs besides the code."""
    if pair.base is None or pair.head is None:
        return []
    differs = unlike(pair.base, pair.head)
    known = {**pair.base.params}, {**pair.head.params}
    for name in sorted((known[0].keys() & known[1].keys()) - pair.base.identity.keys()):
        if known[0][name] != known[1][name]:
            differs.append(f"{name} {known[0][name]} → {known[1][name]}")
    return [f"environment differs: {', '.join(differs[:_MOST])}"] if differs else []


def _class(benchmark: str) -> str:
    """`Inference` of `latency.Inference.track_latency`: modules share classes and parameters."""
    parts = benchmark.split(".")
    return parts[-2] if len(parts) > 1 else benchmark


def _beside(v: Verdict, eager: Verdict | None) -> list[str]:
    """How PyTorch's own code, which no commit here changes, moved in the same two runs."""
    if v.kind != "sampled" or eager is None or eager.series == v.series:
        return []
    if not (math.isfinite(eager.slower) and math.isfinite(v.slower)):
        return []
    moved = f"{amount(eager.old, v.unit)} → {amount(eager.new, v.unit)}, {change(eager)}"
    if eager.slower * v.slower > 0 and abs(eager.slower) > abs(v.slower) / 2:
        return [f"{YARDSTICK} moved as well, which no commit changes: {moved}; so did the machine"]
    return [f"{YARDSTICK} beside it: {moved}"]


def _kin(v: Verdict, kin: Sequence[Verdict]) -> list[str]:
    changed = [
        f"{k.metric} {amount(k.old, k.unit)} → {amount(k.new, k.unit)}"
        for k in kin
        if k.series != v.series
        and (k.outcome in (Outcome.REGRESSED, Outcome.IMPROVED))
        and k.old != k.new
    ]
    return [f"changed with it: {', '.join(changed[:_MOST])}"] if changed else []


def _launched(old: Counter[str] | None, new: Counter[str] | None) -> list[str]:
    if old is None or new is None or old == new:
        return []
    more = [f"{n}× {name}" for name, n in (new - old).items()]
    less = [f"{n}× {name}" for name, n in (old - new).items()]
    lines = []
    if more:
        lines.append(f"launched in addition: {', '.join(more[:_MOST])}")
    if less:
        lines.append(f"no longer launched: {', '.join(less[:_MOST])}")
    return lines


def _plan(old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[str]:
    if not old or not new:
        return []
    changed = [
        f"{name} {str(old[name])[:80]} → {str(new[name])[:80]}"
        for name in sorted(old.keys() & new.keys())
        # Flags are of the measurement (did the clock settle?), not of what was measured.
        if isinstance(old[name], str | list | dict) and old[name] != new[name]
    ]
    return [f"the plan changed: {'; '.join(changed[:_MOST])}"] if changed else []


def _sass(old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[str]:
    if not old or not new:
        return []
    if old.get("sass_sha256") == new.get("sass_sha256"):
        return ["its machine code is unchanged"]
    before, after = old.get("classes"), new.get("classes")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ["its machine code changed"]
    moves = {}
    for name in before.keys() | after.keys():
        a, b = before.get(name, 0), after.get(name, 0)
        if isinstance(a, int) and isinstance(b, int) and a != b:
            moves[str(name)] = b - a
    worst = sorted(moves.items(), key=lambda m: (-abs(m[1]), m[0]))[:_MOST]
    words = ", ".join(f"{n:+d} {name}" for name, n in worst)
    return [f"its machine code changed: {words or 'other instructions, as many of each class'}"]


def _blame(code: list[str] | None, same_launches: bool) -> list[str]:
    if code is None:
        return []
    if code:
        more = f" and {len(code) - _MOST} more" if len(code) > _MOST else ""
        return [f"machine code changed in: {', '.join(code[:_MOST])}{more}"]
    if same_launches:
        return [
            "no kernel's machine code changed and the launches are the same: look at host code, "
            "configuration or the environment"
        ]
    return ["no kernel's machine code changed, but what is launched did"]
