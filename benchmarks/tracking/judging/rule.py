"""Every number the gate's decisions rest on, each stated once, with its reason.

Effects are differences of logarithms: 0.05 is about 5 % slower, and the rule is the same for
microseconds and minutes. README.md shows what moving each number does to the error rates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """The rule's parameters: the same for all benchmarks unless a pattern says else."""

    # Noise. 10 values settle a median to 0.4 sigma and still follow a slow drift; the 95th
    # percentile of 40 errors has two points beyond it.
    base_window: int = 10
    error_window: int = 40
    # Nothing repeats better than this over days; also the guard against all-equal values.
    least_noise: float = 0.003
    # With fewer values than this a history says nothing about noise.
    least_history: int = 10

    # The screen only decides what is worth running again, so it is loose: half the least effect,
    # and half a sigma.
    screen_effect: float = 0.015
    screen_z: float = 0.5

    # Runs made again of what was flagged, base and head each, in fresh processes. After the first
    # five, what shows less than `dismiss` is let go; the others get five more.
    first_reruns: int = 5
    reruns: int = 10
    dismiss: float = 0.015

    # The verdict, all of: a least effect worth anyone's time; head slower than base in this share
    # of all pairs (the rank test's statistic itself: its p-value would assume independent runs,
    # which real histories are not); significance; and beyond the slow mode the history knows.
    least_effect: float = 0.03
    superiority: float = 0.90
    # Where the history already says so, base run again only has to agree: it is there to notice
    # that the machine, not the code, has moved, and then it wins half of all pairs.
    superiority_agreed: float = 0.75
    rank_z: float = 3.0
    mode_quantile: float = 0.90
    mode_margin: float = 0.005

    # Without re-runs one look must do: only what no history explains.
    decisive_z: float = 5.0
    decisive_effect: float = 0.06
    doubtful_z: float = 3.0
    # Without a history of its own, noise is what processes of one run show; what all of them share
    # (a warm machine, a neighbour's job) no one saw yet. So one look must show twice as much.
    unproven: float = 2.0

    # Names for benchmarks. Noisy: even the median of all re-runs is uncertain by more than 2 %.
    # What bears a name is reported and fails a run only beyond `named_effect` and `named_z` sigmas.
    noisy: float = 0.02
    named_effect: float = 0.06
    named_z: float = 2.0
    # Two modes: 5 times as far apart as either is wide, and visited in turn.
    mode_gap: float = 5.0
    mode_visits: int = 4
    # Over a whole history, dozens of values on either side: the smallest lasting change reported.
    history_effect: float = 0.02
    # Drifting: five successive tenths of the window all moved the same way, by this in all.
    drift: float = 0.02

    # A suite's median is the machine's doing, not a benchmark's, from this many benchmarks on.
    least_suite: int = 8
    # Moved alike: this share of a suite within half of its median move, which exceeds least_effect.
    shift_share: float = 0.80
    # As many regressions with no improvement are doubted.
    many: int = 10

    @property
    def window(self) -> int:
        return self.base_window + self.error_window


DEFAULT = Rule()
