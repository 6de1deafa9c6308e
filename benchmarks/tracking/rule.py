"""Every number the gate's decisions rest on, each stated once, with its reason.

Effects are differences of logarithms: 0.05 is about 5 % slower, and the rule is the same for
microseconds and minutes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """The rule's parameters; round numbers, the same for all unless a pattern says else."""

    # How far back: 10 values settle a median to 0.4 sigma and still follow a slow drift.
    base_window: int = 10
    # One-step-ahead errors kept: the 95th percentile of 40 has two points beyond it.
    error_window: int = 40
    # Nothing repeats better than this over days; also the guard against all-equal values.
    least_noise: float = 0.003
    # The screen only decides what is worth running again, so it is loose.
    screen_z: float = 1.5
    screen_effect: float = 0.015
    # Runs added of what was flagged, base and head each, in fresh processes.
    reruns: int = 5
    # The verdict: rank test against the most recent values, and a least effect worth anyone's time.
    rank_window: int = 20
    rank_z: float = 3.0
    least_effect: float = 0.03
    # Above the slow mode the history already knows, by more than a hair.
    mode_quantile: float = 0.95
    mode_margin: float = 0.005
    # A suite's median is a machine's, not a benchmark's, from this many benchmarks on.
    least_suite: int = 8
    # Noisier than this between runs, a benchmark cannot carry a verdict on a few percent.
    noisy: float = 0.02
    # Histories shorter than this say nothing about noise.
    least_history: int = 10


DEFAULT = Rule()
