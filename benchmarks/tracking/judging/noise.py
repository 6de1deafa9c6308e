"""How much a benchmark moves when nothing changed, and what kind of benchmark it is.

Everything works on many series at once: rows are series, columns commits, oldest first, natural
logarithms, nan where there is no value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .rule import DEFAULT, Rule

# 1.4826 x the median absolute deviation, and the 95th percentile of |x| over 1.96, both estimate
# sigma of a normal distribution; the second is the larger where tails are heavy.
_MAD = 1.4826
_P95 = 1.96
# The standard error of a median of n normal values is this times sigma / sqrt(n).
MEDIAN_COST = 1.2533


@dataclass(frozen=True)
class Noise:
    """The noise of many series; each field has one entry a series."""

    center: np.ndarray  # log of where the series stands now
    sigma: np.ndarray  # one-step-ahead error of one run
    upper: np.ndarray  # slow mode of the recent past
    lower: np.ndarray  # fast mode
    points: np.ndarray  # how many values it rests on
    multimodal: np.ndarray
    drifting: np.ndarray

    def mirrored(self) -> Noise:
        """The same noise seen by a benchmark for which faster is worse."""
        return Noise(
            -self.center,
            self.sigma,
            -self.lower,
            -self.upper,
            self.points,
            self.multimodal,
            self.drifting,
        )

    def rows(self, which: np.ndarray) -> Noise:
        return Noise(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def measure(logs: np.ndarray, rule: Rule = DEFAULT) -> Noise:
    """The noise model of the last `rule.window` values of each row."""
    logs = windows(logs, rule)
    return Noise(
        center=nan_median(logs[:, -rule.base_window :]),
        sigma=spread(one_step_errors(logs, rule), rule),
        upper=nan_quantile(logs, rule.mode_quantile),
        lower=nan_quantile(logs, 1 - rule.mode_quantile),
        points=np.isfinite(logs).sum(axis=1),
        multimodal=multimodal(logs, rule),
        drifting=drifting(logs, rule),
    )


def windows(logs: np.ndarray, rule: Rule = DEFAULT) -> np.ndarray:
    """Rows cut or padded on the left to the rule's window, gaps closed: a gap ages no history."""
    logs = np.atleast_2d(np.asarray(logs, dtype=float))
    finite = np.isfinite(logs)
    if not finite.all():
        order = np.argsort(finite, axis=1, kind="stable")
        logs = np.take_along_axis(np.where(finite, logs, np.nan), order, axis=1)
    logs = logs[:, -rule.window :]
    missing = rule.window - logs.shape[1]
    return np.pad(logs, ((0, 0), (missing, 0)), constant_values=np.nan) if missing else logs


def one_step_errors(logs: np.ndarray, rule: Rule = DEFAULT) -> np.ndarray:
    """Each value minus the median of the `base_window` values before it."""
    views = np.lib.stride_tricks.sliding_window_view(logs, rule.base_window, axis=1)[:, :-1]
    enough = np.isfinite(views).sum(axis=-1) >= 3
    return np.where(enough, logs[:, rule.base_window :] - nan_median(views), np.nan)


def spread(errors: np.ndarray, rule: Rule = DEFAULT) -> np.ndarray:
    """Robust sigma of each row of errors, heavy tails counted; nan with fewer than five errors."""
    mad = _MAD * nan_median(np.abs(errors - nan_median(errors)[:, None]))
    tail = nan_quantile(np.abs(errors), 0.95) / _P95
    sigma = np.maximum(np.fmax(mad, tail), rule.least_noise)
    return np.where(np.isfinite(errors).sum(axis=1) >= 5, sigma, np.nan)


def multimodal(logs: np.ndarray, rule: Rule = DEFAULT) -> np.ndarray:
    """Rows that live on two levels in turn: far apart, each narrow, each visited several times."""
    width = logs.shape[1]
    full = np.isfinite(logs).all(axis=1)
    x = np.where(full[:, None], logs, 0.0)
    s = np.sort(x, axis=1)
    sums = np.cumsum(s, axis=1)
    left = np.arange(1, width)
    gap = (sums[:, -1:] - sums[:, :-1]) / (width - left) - sums[:, :-1] / left
    between = left * (width - left) * gap**2  # Otsu's criterion
    few = width // 5  # a level seen in less than a fifth of the runs is a tail, not a mode
    between[:, : few - 1] = between[:, width - few :] = -1
    at = np.argmax(between, axis=1)[:, None]
    cut = (np.take_along_axis(s, at, axis=1) + np.take_along_axis(s, at + 1, axis=1)) / 2
    slow = x > cut
    high, low = np.where(slow, x, np.nan), np.where(slow, np.nan, x)
    top, bottom = nan_median(high), nan_median(low)
    wide = _MAD * np.maximum(
        nan_median(np.abs(high - top[:, None])), nan_median(np.abs(low - bottom[:, None]))
    )
    apart = top - bottom
    visits = (slow[:, 1:] != slow[:, :-1]).sum(axis=1)
    far = (apart > rule.mode_gap * np.fmax(wide, 1e-3)) & (apart > rule.least_effect)
    return full & far & (visits >= rule.mode_visits)


def drifting(logs: np.ndarray, rule: Rule = DEFAULT) -> np.ndarray:
    """Rows whose five successive fifths all moved on in one direction; a step moves one or two."""
    n, width = logs.shape
    fifths = nan_median(logs[:, width % 5 :].reshape(n, 5, width // 5))
    moves = np.diff(fifths, axis=1)
    total = fifths[:, -1] - fifths[:, 0]
    steady = (moves * np.sign(total)[:, None]).min(axis=1) > 0.05 * np.abs(total)
    return np.isfinite(total) & steady & (np.abs(total) > rule.drift)


def nan_median(x: np.ndarray) -> np.ndarray:
    return nan_quantile(x, 0.5)


def nan_quantile(x: np.ndarray, q: float) -> np.ndarray:
    """Linear quantile over the last axis without nan; one sort, far faster than np.nanquantile."""
    x = np.sort(x, axis=-1)  # nan goes last
    count = np.isfinite(x).sum(axis=-1)
    place = q * np.maximum(count - 1, 0)
    low = np.floor(place).astype(np.intp)
    high = np.minimum(low + 1, np.maximum(count - 1, 0))
    a = np.take_along_axis(x, low[..., None], axis=-1)[..., 0]
    b = np.take_along_axis(x, high[..., None], axis=-1)[..., 0]
    return np.where(count > 0, a + (b - a) * (place - low), np.nan)
