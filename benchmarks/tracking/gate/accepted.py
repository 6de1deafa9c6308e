"""results/accepted.toml: regressions that people have reviewed, and thresholds of their own.

[[accepted]]                        # this got slower, and we live with it
benchmark = "latency.Inference.*"   # pattern over the benchmark's name
params = "*llama*"                  # pattern over its parameters, "a, b, c" (optional)
machine = "*"                       # (optional)
commit = "1a2b3c4"                  # where it got slower
reason = "exact gelu costs 4 % and was asked for"
at_most = 6.0                       # percent; more than that is not accepted (optional)
until = 2027-06-30                  # accepted until then (optional)
baseline = true                     # or for good: history starts anew at that commit

[[threshold]]
benchmark = "latency.*.track_cold_start"
least_effect = 10.0                 # percent
gating = false                      # only inform
reason = "a cold start reads the disk"
"""

from __future__ import annotations

import datetime
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..commits import Usage
from ..judging.verdict import Outcome, Series, Verdict

NAME = "accepted.toml"
_LARGEST = 2**20


@dataclass(frozen=True)
class Pattern:
    """Which benchmarks an entry is about."""

    benchmark: str
    params: str = "*"
    machine: str = "*"

    def matches(self, series: Series) -> bool:
        return (
            fnmatchcase(series.benchmark, self.benchmark)
            and fnmatchcase(", ".join(series.params), self.params)
            and fnmatchcase(series.machine, self.machine)
        )


@dataclass(frozen=True)
class Acceptance:
    """A regression that was reviewed."""

    pattern: Pattern
    commit: str
    reason: str
    at_most: float = math.inf  # log scale
    until: datetime.date | None = None
    baseline: bool = False


@dataclass(frozen=True)
class Threshold:
    """Another least effect for some benchmarks, or none at all."""

    pattern: Pattern
    least_effect: float | None = None  # log scale
    gating: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Reviewed:
    """The whole file."""

    accepted: tuple[Acceptance, ...] = ()
    thresholds: tuple[Threshold, ...] = ()

    def threshold(self, series: Series) -> Threshold | None:
        """The last threshold that matches: a later entry refines an earlier one."""
        return next((t for t in reversed(self.thresholds) if t.pattern.matches(series)), None)

    def baseline(self, series: Series, within: Callable[[str], bool]) -> str:
        """The commit at which this series' history starts anew, of those that `within` holds."""
        found = [a.commit for a in self.accepted if a.baseline and a.pattern.matches(series)]
        return next((c for c in reversed(found) if within(c)), "")

    def apply(
        self, verdict: Verdict, within: Callable[[str], bool], today: datetime.date
    ) -> Verdict:
        """The verdict, not gating where its regression was accepted; an expired one says so."""
        if verdict.outcome is not Outcome.REGRESSED:
            return verdict
        but = ""
        for entry in self.accepted:
            if not entry.pattern.matches(verdict.series) or not within(entry.commit):
                continue
            by = f"accepted at {entry.commit[:8]}: {entry.reason}"
            if entry.until is not None and today > entry.until:
                but = but or f"acceptance expired on {entry.until}"
            elif not verdict.slower <= entry.at_most:
                most = f"{100 * math.expm1(entry.at_most):.1f} %"
                but = but or f"only up to {most} was accepted"
            else:
                return verdict.but(gating=False, accepted=by)
        return verdict.but(flags=(*verdict.flags, but)) if but else verdict


def read(folder: Path) -> Reviewed:
    """`accepted.toml` of a results folder; Usage in one line where it is malformed."""
    path = folder / NAME
    try:
        if path.stat().st_size > _LARGEST:
            raise Usage(f"{NAME} is larger than {_LARGEST >> 20} MB")
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Reviewed()
    except (OSError, ValueError, RecursionError) as error:
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise Usage(f"{NAME} cannot be read: {text}") from None
    unknown = data.keys() - {"accepted", "threshold"}
    if unknown:
        raise Usage(f"{NAME}: unknown table {sorted(unknown)[0]!r}; known: accepted, threshold")
    return Reviewed(
        tuple(_acceptance(e, f"accepted {i}") for i, e in _entries(data, "accepted")),
        tuple(_threshold(e, f"threshold {i}") for i, e in _entries(data, "threshold")),
    )


def _entries(data: dict[str, Any], name: str) -> list[tuple[int, dict[str, Any]]]:
    entries = data.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise Usage(f"{NAME}: write [[{name}]], once for each entry")
    return list(enumerate(entries, 1))


_KINDS: dict[str, tuple[type, ...]] = {
    "benchmark": (str,),
    "params": (str,),
    "machine": (str,),
    "commit": (str,),
    "reason": (str,),
    "at_most": (int, float),
    "until": (datetime.date,),
    "baseline": (bool,),
    "least_effect": (int, float),
    "gating": (bool,),
}


def _checked(entry: dict[str, Any], where: str, need: set[str], may: set[str]) -> dict[str, Any]:
    if missing := need - entry.keys():
        raise Usage(f"{NAME}: {where} lacks {sorted(missing)[0]!r}")
    if unknown := entry.keys() - need - may:
        raise Usage(f"{NAME}: {where} has an unknown {sorted(unknown)[0]!r}")
    for name, value in entry.items():
        right = isinstance(value, _KINDS[name])
        if isinstance(value, bool) and bool not in _KINDS[name]:
            right = False
        if isinstance(value, int | float) and not isinstance(value, bool):
            right = right and 0 < value < 1e6
        if not right:
            raise Usage(f"{NAME}: {where}: {name} = {value!r} is not allowed")
    if not entry.get("reason", "-").strip():
        raise Usage(f"{NAME}: {where}: the reason is empty; write why it was accepted")
    return entry


def _pattern(entry: dict[str, Any]) -> Pattern:
    return Pattern(entry["benchmark"], entry.get("params", "*"), entry.get("machine", "*"))


def _acceptance(entry: dict[str, Any], where: str) -> Acceptance:
    need = {"benchmark", "commit", "reason"}
    e = _checked(entry, where, need, {"params", "machine", "at_most", "until", "baseline"})
    if not re.fullmatch(r"[0-9a-f]{7,64}", e["commit"]):
        raise Usage(f"{NAME}: {where}: commit must be at least 7 hexadecimal digits")
    until = e.get("until")
    if isinstance(until, datetime.datetime):
        until = until.date()
    most = math.log1p(e["at_most"] / 100) if "at_most" in e else math.inf
    return Acceptance(_pattern(e), e["commit"], e["reason"], most, until, e.get("baseline", False))


def _threshold(entry: dict[str, Any], where: str) -> Threshold:
    e = _checked(
        entry, where, {"benchmark", "reason"}, {"params", "machine", "least_effect", "gating"}
    )
    least = math.log1p(e["least_effect"] / 100) if "least_effect" in e else None
    return Threshold(_pattern(e), least, e.get("gating", True), e["reason"])
