"""The noise of one comparison's benchmarks: own history, else A/A runs, else neighbours."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .case import Case
from .noise import Noise, measure, windows
from .rule import Rule


@dataclass(frozen=True)
class Level:
    """Noise models of many cases, their histories, and where each model came from, in words."""

    noise: Noise
    history: np.ndarray  # logs, turned so that larger is worse
    source: list[str]


def level(cases: Sequence[Case], rule: Rule) -> Level:
    """The noise model of each case, from the best source it has."""
    history = np.full((len(cases), rule.window), np.nan)
    for row, case in zip(history, cases, strict=True):
        past = np.asarray(case.history, dtype=float)
        past = past[np.isfinite(past) & (past > 0)][-rule.window :]
        if len(past):
            sign = -1.0 if case.better == "higher" else 1.0
            row[-len(past) :] = sign * np.log(past)
    history = windows(history, rule)
    noise = measure(history, rule)
    own = (noise.points >= rule.least_history) & np.isfinite(noise.sigma)
    sigma = np.where(own, noise.sigma, np.nan)
    source = [f"its history of {n}" if ok else "" for n, ok in zip(noise.points, own, strict=True)]
    for i in np.flatnonzero(~own).tolist():
        spread, runs = a_a(cases[i], history[i])
        if math.isfinite(spread):
            sigma[i] = max(spread, rule.least_noise)
            source[i] = runs
    _from_neighbours(cases, own, sigma, source)
    center = np.where(own, noise.center, np.nan)
    found = Noise(
        center, sigma, noise.upper, noise.lower, noise.points, noise.multimodal, noise.drifting
    )
    return Level(found, history, source)


def a_a(case: Case, history: np.ndarray) -> tuple[float, str]:
    """Spread between runs or processes that share the code; nan where fewer than three did.

    The largest of what base re-runs, a short history and the processes of each run show: a spread
    from so few is easily too small, never much too large.
    """
    found = []
    again = _log(np.r_[case.base.value, case.base_reruns])
    if len(again) >= 3:
        found.append((float(np.std(again, ddof=1)), f"{len(again)} runs of base"))
    past = history[np.isfinite(history)]
    if len(past) >= 4:
        # Successive differences: a step in a short history raises one of them, not all.
        moves = np.abs(np.diff(past))
        found.append((1.4826 * float(np.median(moves)) / math.sqrt(2), f"{len(past)} commits"))
    groups = [_log(side.processes) for side in (case.base, case.head)]
    groups = [g for g in groups if len(g) >= 2]
    degrees = sum(len(g) - 1 for g in groups)
    if degrees >= 2:
        squares = sum(float(np.sum((g - g.mean()) ** 2)) for g in groups)
        found.append((math.sqrt(squares / degrees), f"{degrees + len(groups)} processes"))
    return max(found, default=(math.nan, ""))


def _from_neighbours(
    cases: Sequence[Case], own: np.ndarray, sigma: np.ndarray, source: list[str]
) -> None:
    """Fill what is still unknown, and raise what few runs made too small, by kin with a history.

    Kin: other parameters of the same benchmark, else other benchmarks of the same metric. Three
    quarters of them are quieter than the value taken.
    """
    kin: dict[tuple[str, str], list[float]] = defaultdict(list)
    for i in np.flatnonzero(own).tolist():
        series = cases[i].series
        kin[series.machine, series.benchmark].append(sigma[i])
        kin[series.machine, cases[i].metric].append(sigma[i])
    for i in np.flatnonzero(~own).tolist():
        series = cases[i].series
        near = kin.get((series.machine, series.benchmark)) or kin.get(
            (series.machine, cases[i].metric)
        )
        if near and len(near) >= 3:
            typical = float(np.quantile(near, 0.75))
            if not sigma[i] >= typical:
                sigma[i], source[i] = typical, f"{len(near)} neighbours"


def _log(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    return np.log(values[np.isfinite(values) & (values > 0)])
