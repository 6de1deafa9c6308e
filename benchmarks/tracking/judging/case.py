"""What the judge is told: one benchmark's history, its base and its head."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .verdict import Series

_NONE = np.empty(0)


@dataclass(frozen=True)
class Side:
    """One benchmark at one commit: its value, one median per process, and how it ended."""

    value: float = math.nan
    processes: np.ndarray = field(default_factory=lambda: _NONE)
    state: str = "ok"  # ok, failed, skipped, absent, hollow or disturbed
    version: str = ""
    still: bool = False  # every sample is the same number


@dataclass(frozen=True)
class Case:
    """All the judge knows about one benchmark; values in the metric's own unit."""

    series: Series
    metric: str
    unit: str
    kind: str  # sampled, exact or derived
    better: str  # lower or higher
    base: Side
    head: Side
    history: np.ndarray = field(default_factory=lambda: _NONE)  # up to and with base, oldest first
    base_reruns: np.ndarray = field(default_factory=lambda: _NONE)
    head_reruns: np.ndarray = field(default_factory=lambda: _NONE)
    tolerance: float = 0.0  # exact metrics: a change, in the metric's unit, that says nothing
    least_effect: float | None = None  # a pattern's own, log scale
    may_gate: bool = True  # a pattern may say that it only informs


def sign_of(case: Case) -> float:
    """-1 where logarithms were turned because higher is better."""
    return -1.0 if case.better == "higher" else 1.0
