"""The rule itself: screen one look at head, then decide on runs made again. Many series at once.

`judge` (one commit, many benchmarks) and `replay` (a recorded history, all its commits) both call
these two functions, so the error rates that replay prints are those of the gate.
All values are logarithms turned so that larger is worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .noise import MEDIAN_COST, Noise, nan_median, nan_quantile
from .rule import DEFAULT, Rule
from .steps import settled


@dataclass(frozen=True)
class Decision:
    """What re-runs showed; each field has one entry a series."""

    worse: np.ndarray  # bool: all demands are met
    done: np.ndarray  # bool: no further re-run would be made
    effect: np.ndarray  # the smaller of the effects against history and against base re-run
    vetoed: np.ndarray  # bool: only the slow mode that the history knows stands against it


def screen(
    noise: Noise, head: np.ndarray, shift: np.ndarray | float = 0.0, rule: Rule = DEFAULT
) -> np.ndarray:
    """Which heads are worth running again; `shift` is what the whole suite moved by.

    The shift may only clear: a suite that got faster as a whole must not make the rest look slower.
    """
    raw = head - noise.center
    effect = np.minimum(raw, raw - shift)
    with np.errstate(invalid="ignore"):
        return (effect > rule.screen_effect) & (effect > rule.screen_z * noise.sigma)


def decide(
    noise: Noise,
    history: np.ndarray,
    head: np.ndarray,
    base: np.ndarray | None = None,
    rule: Rule = DEFAULT,
    least_effect: np.ndarray | float | None = None,
) -> Decision:
    """Judge flagged series on all runs of head (the first look and the re-runs), nan where none.

    `history` (series, commits) and `base` (series, re-runs) are what head must be worse than: each
    that has enough values must be beaten, and at least one significantly.
    """
    least = rule.least_effect if least_effect is None else least_effect
    history = settled(history)
    count = np.isfinite(head).sum(axis=1)
    middle = nan_median(head)
    known = np.isfinite(history).sum(axis=1) >= rule.least_history

    share, z = pairs_won(head, history)
    effect = middle - noise.center
    beyond = middle > nan_quantile(history, rule.mode_quantile) + rule.mode_margin
    with np.errstate(invalid="ignore"):
        worse = ~known | ((share > rule.superiority) & (effect > least))
        significant = known & (z > rule.rank_z)
        effect = np.where(known, effect, np.inf)
        if base is not None:
            fresh = np.isfinite(base).sum(axis=1) >= rule.first_reruns
            share, z = pairs_won(head, base)
            against = middle - nan_median(base)
            worse &= ~fresh | np.where(
                known,
                share > rule.superiority_agreed,
                (share > rule.superiority) & (against > least),
            )
            significant |= fresh & (z > rule.rank_z)
            effect = np.where(fresh, np.minimum(effect, against), effect)
    enough = count > rule.first_reruns
    hopeless = enough & (effect <= rule.dismiss)
    met = enough & worse & significant & ~hopeless
    return Decision(
        worse=met & (beyond | ~known),
        done=hopeless | (count > rule.reruns),
        effect=np.where(np.isfinite(effect), effect, np.nan),
        vetoed=met & known & ~beyond,
    )


def pairs_won(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row by row, the share of pairs in which `a` is larger (ties half), and Mann-Whitney's z."""
    m, n = np.isfinite(a).sum(axis=1), np.isfinite(b).sum(axis=1)
    won = np.zeros(len(a))
    with np.errstate(invalid="ignore", divide="ignore"):
        for column in a.T:
            won += (column[:, None] > b).sum(axis=1) + 0.5 * (column[:, None] == b).sum(axis=1)
        share = won / (m * n)
        z = (won - m * n / 2) / np.sqrt(m * n * (m + n + 1) / 12)
    return share, z


def decisive(noise: Noise, rule: Rule = DEFAULT) -> np.ndarray:
    """The effect beyond which one look may call a change; more where there is no history yet."""
    young = noise.points < rule.least_history
    return np.where(young, rule.unproven * rule.decisive_effect, rule.decisive_effect)


def detectable(
    noise: Noise, reruns: int, rule: Rule = DEFAULT, least: np.ndarray | float | None = None
) -> np.ndarray:
    """The smallest slowdown found nine times in ten, with that many re-runs (0: one look)."""
    least = rule.least_effect if least is None else least
    # 1.28 standard errors turn "found as often as not" into nine in ten.
    if not reruns:
        seen = np.maximum(decisive(noise, rule), rule.decisive_z * noise.sigma)
        return seen + 1.28 * noise.sigma
    error = MEDIAN_COST * noise.sigma / np.sqrt(reruns + 1)
    # A normal value exceeds another in nine of ten pairs when they are 1.81 sigma apart.
    known = np.where(np.isfinite(noise.upper), noise.upper - noise.center + rule.mode_margin, 0.0)
    return np.maximum(np.maximum(least, known), 1.81 * noise.sigma) + 1.28 * error


def may_fail(noise: Noise, effect: np.ndarray, rule: Rule = DEFAULT) -> np.ndarray:
    """Whether a confirmed effect fails a run: any does, unless the benchmark bears a name.

    Multi-modal, drifting and noisy benchmarks are reported; they fail a run only beyond twice the
    least effect and two sigmas, where neither modes nor drift nor noise explain it.
    """
    named = noise.multimodal | noise.drifting | too_noisy(noise, rule)
    with np.errstate(invalid="ignore"):
        return ~named | (effect > np.maximum(rule.named_effect, rule.named_z * noise.sigma))


def too_noisy(noise: Noise, rule: Rule = DEFAULT) -> np.ndarray:
    """Even all re-runs leave the median uncertain by more than `rule.noisy`."""
    return MEDIAN_COST * noise.sigma / np.sqrt(rule.reruns + 1) > rule.noisy
