"""The same commit against itself: how much each benchmark moves when nothing changed.

example:
  python -m benchmarks aa --processes 10 --shape tiny,gpt2 --provider eager,fused
  python -m benchmarks aa --shape gpt2 --tokens 16 --provider eager --slow 5,10,20
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..suite.__main__ import add_filters, aligned, chosen, measure, readable
from ..suite.harness.shapes import SAMPLES_PER_PROCESS
from .judging.noise import _MAD, MEDIAN_COST
from .judging.rule import DEFAULT


@dataclass(frozen=True)
class Spread:
    """How far one benchmark's latency moves, as fractions of itself.

    Attributes:
        latency: median over processes of the process medians, seconds.
        between: robust spread (sigma) of process medians.
        expected: the spread that the samples inside the processes would suggest.
        halves: even processes against odd ones: an A/A comparison.
        detectable: the smallest slowdown the gate could call with as many processes a run.
    """

    name: str
    processes: int
    latency: float
    between: float
    expected: float
    halves: float
    detectable: float


def spread(name: str, samples: Sequence[float], per_process: int = SAMPLES_PER_PROCESS) -> Spread:
    """Judge the samples of one benchmark, those of each process in a row.

    >>> s = spread("x", [1.00] * 5 + [1.02] * 5 + [1.00] * 5 + [1.02] * 5)
    >>> round(s.halves, 3), s.processes
    (0.02, 4)
    """
    groups = [samples[i : i + per_process] for i in range(0, len(samples), per_process)]
    logs = [math.log(statistics.median(group)) for group in groups]
    between = _sigma(logs)
    inside = statistics.median(_sigma([math.log(x) for x in group]) for group in groups)
    halves = statistics.median(logs[1::2] or logs) - statistics.median(logs[::2])
    # One run is the median of its processes; the gate compares the medians of as many re-runs.
    run = MEDIAN_COST * between / math.sqrt(len(groups))
    pair = run * MEDIAN_COST * math.sqrt(2 / (DEFAULT.first_reruns + 1))
    return Spread(
        name=name,
        processes=len(groups),
        latency=math.exp(statistics.median(logs)),
        between=between,
        expected=MEDIAN_COST * inside / math.sqrt(per_process),
        halves=halves,
        detectable=max(DEFAULT.least_effect, DEFAULT.rank_z * pair),
    )


def _sigma(values: Sequence[float]) -> float:
    """Robust sigma; for as few values as three the plain one is no worse."""
    if len(values) < 4:
        return statistics.stdev(values) if len(values) > 1 else 0.0
    center = statistics.median(values)
    return float(_MAD) * statistics.median(abs(value - center) for value in values)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


_LEGEND = """\
spread: between process medians; expected: that spread, from the samples inside a process;
halves: one half of the processes against the other; can see: the smallest slowdown"""


def table(spreads: Sequence[Spread]) -> str:
    """One line a benchmark, the noisiest last, and what the columns are."""
    head = ["mode", "shape", "tokens", "dtype", "provider", "latency"]
    rows = [[*head, "spread", "expected", "halves", "can see"]]
    for s in sorted(spreads, key=lambda s: s.between):
        rows.append(
            [
                *s.name.split(),
                readable(s.latency),
                percent(s.between),
                percent(s.expected),
                f"{100 * s.halves:+.1f} %",
                percent(s.detectable),
            ]
        )
    return f"{aligned(rows)}\n{_LEGEND}"


def summary(spreads: Sequence[Spread]) -> str:
    """The noise floor in a sentence."""
    between = sorted(s.between for s in spreads)
    ratios = [s.between / s.expected for s in spreads if s.expected]
    factor = statistics.median(ratios) if ratios else math.nan
    return (
        f"{len(spreads)} benchmarks, {spreads[0].processes} processes each: process medians spread "
        f"by {percent(statistics.median(between))} (median), {percent(between[-1])} (worst); "
        f"that is {factor:.1f} times what the samples inside a process suggest"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_filters(parser)
    parser.set_defaults(processes=10)
    parser.add_argument(
        "--slow",
        metavar="P,P",
        help="also slow each call by these percentages, and say what the clock finds",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 measured, 2 bad usage, 4 nothing measured."""
    try:
        wanted, kind, size = chosen(args)
        slow = [float(part) / 100 for part in (args.slow or "").split(",") if part]
        if any(not 0 < fraction < 10 for fraction in slow):
            raise ValueError(f"--slow {args.slow}: percentages above 0 are expected")
    except ValueError as error:
        print(f"aa: {error}", file=sys.stderr)
        return 2
    wanted = {c: frozenset({"latency"}) for c in wanted}
    measured = measure(wanted, kind, size, args.processes, {"slow": slow})
    spreads = [
        spread(str(c), entry.samples["latency"])
        for c, entry in measured.items()
        if entry.samples.get("latency") and not entry.failure
    ]
    found = {
        str(c): {f"{100 * f:g}": entry.samples[f"slower by {f:g}"] for f in slow}
        for c, entry in measured.items()
        if not entry.failure and entry.samples.get("latency")
    }
    disturbed = sum(1 for entry in measured.values() if entry.disturbed)
    if args.json:
        record = {"spreads": [asdict(s) for s in spreads], "slowed": found, "invalid": disturbed}
        print(json.dumps(record))
        return 0 if spreads else 4
    for c, entry in measured.items():
        if entry.absent or entry.failure:
            print(f"{c}: {entry.absent or entry.failure}", file=sys.stderr)
    if not spreads:
        print("aa: nothing was measured", file=sys.stderr)
        return 4
    print(table(spreads))
    print(summary(spreads))
    if slow:
        print(slowdowns(found))
    if disturbed:
        print(f"{disturbed} of {len(measured)} were measured while others used the machine")
    return 0


def slowdowns(found: dict[str, dict[str, list[float]]]) -> str:
    """What was added to each call, and what the clock saw, median and spread over processes."""
    rows = [["mode", "shape", "tokens", "dtype", "provider", "added", "found", "between processes"]]
    for name, by_percent in found.items():
        for added, values in by_percent.items():
            seen = statistics.median(values)
            rows.append([*name.split(), f"{added} %", percent(seen), percent(_sigma(values))])
    return aligned(rows)
