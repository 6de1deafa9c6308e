"""The search behind `bisect`: where between two commits a step lies, and how sure that is.

Every commit between may be the one. Each measurement multiplies its odds: a fast value speaks for a
later commit, a slow one for an earlier, by how well it fits the levels of base and head and their
spread, with tails heavy enough that one outlier cannot settle anything. Measured next is the commit
that halves what is still likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..commits import Usage
from ..judging.noise import MEDIAN_COST
from ..judging.rule import DEFAULT, Rule

# One measurement of one commit in fresh processes: its location, or None where it does not build.
Measure = Callable[[str], "float | None"]
# Base and head are each looked at so often before anything is concluded from them, and at most so
# often before they are said to be alike.
_ENDS = 4
_MOST_ENDS = 12
# The two must be this many standard errors apart: the whole search rests on it.
_CLEAR = 5.0
# Student's t with 3 degrees: an outlier of 10 sigma counts like one of 3.
_TAIL = 3.0
# The spread seen is that of ends that happened to look clearly apart: too small, if anything.
_SPREADS = np.array([1.0, 1.4, 2.0])
# Measurements of one machine within an hour are not independent; at full weight, simulated searches
# with steps of under two sigmas claim 95 % and are right in 82 %.
_WEIGHT = 0.7
SURE = 0.95


@dataclass
class Search:
    """The state of one search: commits from base to head and every value measured so far (logs)."""

    commits: list[str]
    values: dict[str, list[float]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def add(self, commit: str, value: float | None) -> None:
        if value is None or not math.isfinite(value) or value <= 0:
            self.broken.append(commit)
        else:
            self.values.setdefault(commit, []).append(math.log(value))

    @property
    def levels(self) -> tuple[float, float]:
        ends = (self.values.get(self.commits[i], []) for i in (0, -1))
        fast, slow = (float(np.median(e)) if e else math.nan for e in ends)
        return fast, slow

    def sigma(self, rule: Rule = DEFAULT) -> float:
        """Spread between measurements of one commit, pooled; never below the least noise."""
        groups = [np.array(v) for v in self.values.values() if len(v) > 1]
        degrees = sum(len(g) - 1 for g in groups)
        if not degrees:
            return rule.noisy
        squares = sum(float(((g - g.mean()) ** 2).sum()) for g in groups)
        return max(math.sqrt(squares / degrees), rule.least_noise)

    def error(self, rule: Rule = DEFAULT) -> float:
        """The standard error of the difference between head and base."""
        counts = [len(self.values.get(self.commits[i], [])) for i in (0, -1)]
        if not all(counts):
            return math.inf
        return MEDIAN_COST * self.sigma(rule) * math.sqrt(1 / counts[0] + 1 / counts[1])

    def posterior(self, rule: Rule = DEFAULT) -> np.ndarray:
        """The probability that each commit after base is the first slow one.

        Base's level, the step's size and the spread are not known but weighed, all that fit: the
        best fit alone would be too sure, the more so because only ends that happen to look far
        apart are searched between.
        """
        n = len(self.commits) - 1
        at = np.array([i for i, c in enumerate(self.commits) for _ in self.values.get(c, [])])
        x = np.array([v for c in self.commits for v in self.values.get(c, [])])
        fast, slow = self.levels
        sigma, error = self.sigma(rule), self.error(rule)
        around = np.linspace(-2.5, 2.5, 11)
        base, step, spread = (
            grid[:, None]
            for grid in map(
                np.ravel,
                np.meshgrid(
                    fast + error * around,
                    np.linspace(0, 1.5, 16) * (slow - fast),
                    max(sigma, rule.least_noise) * _SPREADS,
                ),
            )
        )
        good = _density((x - base) / spread) - np.log(spread)
        bad = _density((x - base - step) / spread) - np.log(spread)
        # If commit k is the first slow one, all before it are fast and the others slow.
        before = (at[:, None] < np.arange(1, n + 1)).astype(float)
        log = bad.sum(axis=1, keepdims=True) + (good - bad) @ before
        p = np.exp(_WEIGHT * (log - log.max())).sum(axis=0)
        return p / p.sum()

    def next(self, rule: Rule = DEFAULT) -> str | None:
        """The commit whose measurement halves what is likely; None where none is left."""
        p = self.posterior(rule)
        below = np.cumsum(p)[
            :-1
        ]  # of commits 1..n-1 (inner ones): P(first slow one is at or before)
        usable = [
            (abs(below[i] - 0.5), i)
            for i, commit in enumerate(self.commits[1:-1])
            if commit not in self.broken
        ]
        return self.commits[1 + min(usable)[1]] if usable else None


def _density(t: np.ndarray) -> np.ndarray:
    return -(_TAIL + 1) / 2 * np.log1p(t * t / _TAIL)


@dataclass(frozen=True)
class Answer:
    """What a search found."""

    commit: str  # empty where base and head do not differ
    sure: float
    candidates: tuple[str, ...]
    slower: float
    sigma: float
    measurements: int


def search(
    state: Search, measure: Measure, save: Callable[[], None], budget: int, rule: Rule = DEFAULT
) -> Answer:
    """Measure until one commit is nearly sure, or `budget` measurements are spent."""
    spent = 0
    first, last = state.commits[0], state.commits[-1]
    for i, commit in enumerate([first, last, last, first] * (_MOST_ENDS // 2)):
        fast, slow = state.levels
        clear = slow - fast > max(rule.screen_effect, _CLEAR * state.error(rule))
        if (i >= 2 * _ENDS and clear) or spent >= budget:
            break
        if len(state.values.get(commit, [])) > i // 2:
            continue  # measured before the search was interrupted
        value = measure(commit)
        spent += 1
        if value is None:
            raise Usage(f"{commit[:8]} cannot be measured, so there is nothing to bisect between")
        state.add(commit, value)
        save()
    fast, slow = state.levels
    sigma = state.sigma(rule)
    if not slow - fast > max(rule.screen_effect, _CLEAR * state.error(rule)):
        return Answer("", 0.0, (), slow - fast, sigma, spent)
    while spent < budget:
        p = state.posterior(rule)
        if p.max() >= SURE:
            break
        target = state.next(rule)
        if target is None:
            break
        state.add(target, measure(target))
        spent += 1
        save()
    p = state.posterior(rule)
    order = np.argsort(-p, kind="stable")
    enough = int(np.searchsorted(np.cumsum(p[order]), SURE)) + 1
    likely = tuple(state.commits[1 + i] for i in sorted(order[:enough]))
    best = int(p.argmax())
    return Answer(
        state.commits[1 + best], float(p[best]), likely, slow - fast, state.sigma(rule), spent
    )
