"""python -m benchmarks replay FILE: how often the gate's rule errs on a recorded history."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..judging.decide import decide, detectable, may_fail, screen, too_noisy
from ..judging.noise import Noise, measure
from ..judging.rule import DEFAULT, Rule
from ..judging.verdict import USAGE
from .recorded import BadHistory, Comparisons, Recorded, read

EXAMPLE = """\
example:
  python -m benchmarks replay tests/histories/cuda_jl.csv.gz --inject 2,5,10

A false alarm is a comparison with no change that the gate would fail. Real steps in histories with
one value a commit are removed first. `power` is the share of injected slowdowns found, of all
comparisons: what the gate names noisy or multi-modal and lets pass counts as missed. The interval
of false alarms is exact for a Poisson count; `fa_ci95_series` resamples whole series instead, since
alarms of one series come in clusters.
"""


@dataclass(frozen=True)
class Alarms:
    """What a rule said about comparisons; each field has one entry a comparison."""

    alarm: np.ndarray
    reruns: np.ndarray  # how many runs of head it asked for


RuleFunction = Callable[[Comparisons, float], Alarms]


class Gate:
    """The gate's own rule over comparisons; the noise model is kept between injections."""

    def __init__(self, rule: Rule = DEFAULT) -> None:
        self.rule = rule
        self._for: tuple[Comparisons, Noise] | None = None

    def noise(self, c: Comparisons) -> Noise:
        if self._for is None or self._for[0] is not c:
            self._for = (c, measure(c.history, self.rule))
        return self._for[1]

    def __call__(self, c: Comparisons, step: np.ndarray | float) -> Alarms:
        rule, noise = self.rule, self.noise(c)
        step = np.broadcast_to(np.asarray(step, dtype=float), c.head.shape)
        alarm = np.zeros(len(c), dtype=bool)
        reruns = np.zeros(len(c), dtype=int)
        flagged = np.flatnonzero(screen(noise, c.head + step, c.shift, rule))
        if not len(flagged):
            return Alarms(alarm, reruns)
        n, part = noise.rows(flagged), c.rows(flagged)
        head = np.column_stack([part.head, part.reruns]) + step[flagged, None]
        first = decide(n, part.history, head[:, : rule.first_reruns + 1], part.base, rule)
        last = decide(n, part.history, head, part.base, rule)
        alarm[flagged] = last.worse & ~first.done & may_fail(n, last.effect, rule)
        reruns[flagged] = np.where(first.done, rule.first_reruns, rule.reruns)
        return Alarms(alarm, reruns)


def replay(
    recorded: Recorded, rule: RuleFunction, steps: list[float], seed: int = 0
) -> dict[str, Any]:
    """Error rates of `rule`; `steps` are injected slowdowns in percent."""
    started = time.perf_counter()
    quiet = recorded.comparisons.rows(recorded.comparisons.label < 0)
    said = rule(quiet, 0.0)
    count, n = int(said.alarm.sum()), len(quiet)
    low, high = poisson_interval(count)
    power = {}
    for step in steps:
        found = rule(quiet, math.log1p(step / 100)).alarm
        power[f"{step:g}"] = round(float(found.mean()), 4) if n else None
    changed = recorded.comparisons.rows(recorded.comparisons.label >= 0)
    hits = len(set(changed.label[rule(changed, 0.0).alarm].tolist())) if len(changed) else 0
    return {
        "kind": recorded.layout,
        "comparisons": n,
        "series": recorded.series,
        "false_alarms": count,
        "fa_per_300": _per_300(count, n),
        "fa_ci95": [_per_300(low, n), _per_300(high, n)],
        "fa_ci95_series": _by_series(said.alarm, quiet.series, seed),
        "power": power,
        "hits": hits,
        "labels": recorded.labels,
        "rerun_share": round(float((said.reruns > 0).mean()), 4) if n else None,
        "reruns_per_comparison": round(float(said.reruns.mean()), 3) if n else None,
        "dropped_values": recorded.dropped,
        "seconds": round(time.perf_counter() - started, 2),
    }


def poisson_interval(count: int) -> tuple[float, float]:
    """Exact two-sided 95 % interval of a Poisson count (Garwood 1936).

    >>> [round(x, 2) for x in poisson_interval(0)]
    [0.0, 3.69]
    """
    from scipy.stats import chi2

    low = chi2.ppf(0.025, 2 * count) / 2 if count else 0.0
    return float(low), float(chi2.ppf(0.975, 2 * count + 2) / 2)


def by_spread(recorded: Recorded, gate: Gate, step: float) -> list[tuple[str, int, float]]:
    """Power by run-to-run spread: (class, comparisons, share of `step` percent slowdowns found)."""
    c = recorded.comparisons.rows(recorded.comparisons.label < 0)
    sigma = gate.noise(c).sigma
    found = gate(c, math.log1p(step / 100)).alarm
    edges = [0.0, 0.01, 0.02, 0.04, math.inf]
    names = ["under 1 %", "1 to 2 %", "2 to 4 %", "over 4 %"]
    rows = []
    for name, low, high in zip(names, edges, edges[1:], strict=False):
        here = (sigma >= low) & (sigma < high)
        rows.append((name, int(here.sum()), float(found[here].mean()) if here.any() else math.nan))
    return rows


def at_detectable(recorded: Recorded, gate: Gate) -> float:
    """Share found when each series is slowed by what it claims to see; nine in ten is right."""
    c = recorded.comparisons.rows(recorded.comparisons.label < 0)
    noise = gate.noise(c)
    able = ~(noise.multimodal | noise.drifting | too_noisy(noise, gate.rule))
    c, noise = c.rows(able), noise.rows(able)
    step = detectable(noise, gate.rule.reruns, gate.rule)
    return float(Gate(gate.rule)(c, step).alarm.mean()) if len(c) else math.nan


def _per_300(count: float, n: int) -> float | None:
    return round(300 * count / n, 3) if n else None


def _by_series(alarm: np.ndarray, series: np.ndarray, seed: int) -> list[float | None]:
    if not len(alarm):
        return [None, None]
    _, at = np.unique(series, return_inverse=True)
    alarms, sizes = np.bincount(at, alarm), np.bincount(at)
    draws = np.random.default_rng(seed).integers(len(sizes), size=(2000, len(sizes)))
    rates = 300 * alarms[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    return [round(float(x), 3) for x in np.quantile(rates, [0.025, 0.975])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="history, CSV or CSV.gz (see tests/histories)")
    parser.add_argument(
        "--inject", default="2,3,5,10,20", help="slowdowns in percent (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the resampling of series")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    started = time.perf_counter()
    try:
        steps = [float(s) for s in args.inject.split(",") if s.strip()]
        if not all(0 < s <= 1000 for s in steps):
            raise ValueError
    except ValueError:
        print(f"replay: --inject {args.inject!r} is not a list of percentages like 2,5,10")
        return USAGE
    if not 0 <= args.seed < 2**32:
        print("replay: --seed must be between 0 and 4294967295")
        return USAGE
    gate = Gate()
    try:
        recorded = read(args.file)
        out = replay(recorded, gate, steps, args.seed)
    except BadHistory as error:
        print(f"replay: {error}")
        return USAGE
    out["seconds"] = round(time.perf_counter() - started, 2)
    if args.json:
        try:
            args.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"replay: cannot write {args.json} ({error.strerror})")
            return USAGE
    table = Table(show_header=False, show_edge=False, box=None)
    table.add_row(
        "history", f"{out['series']} series, {out['comparisons']} comparisons without a change"
    )
    low, high = out["fa_ci95"]
    table.add_row(
        "false alarms",
        f"{out['false_alarms']}, that is {out['fa_per_300']} in 300 (95 %: {low} to {high})",
    )
    for step, share in out["power"].items():
        table.add_row(f"{step} % slower", f"found in {100 * (share or 0):.1f} %")
    for name, n, share in by_spread(recorded, gate, 5.0):
        if n:
            table.add_row(f"5 % at spread {name}", f"found in {100 * share:.1f} % of {n}")
    if out["labels"]:
        table.add_row("labelled", f"{out['hits']} of {out['labels']} found")
    table.add_row(
        "run again", f"{100 * (out['rerun_share'] or 0):.1f} % of benchmarks with no change"
    )
    if recorded.dropped:
        table.add_row("left out", f"{recorded.dropped} values that are no positive number")
    Console(width=100).print(table)
    return 0
