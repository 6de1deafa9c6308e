"""How much a benchmark moves when nothing changed: from its own past, else from its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .rule import DEFAULT, Rule

# 1.4826 x the median absolute deviation, and the 95th percentile of |x| over 1.96, both estimate
# sigma of a normal distribution; the second is the larger where tails are heavy.
_MAD = 1.4826
_P95 = 1.96


@dataclass(frozen=True)
class Noise:
    """The noise of many series at once; every field is an array with one entry a series."""

    center: np.ndarray  # log of where the series stands now
    sigma: np.ndarray  # one-step-ahead error of a single run, log scale
    upper: np.ndarray  # slow mode of the recent past, log scale
    lower: np.ndarray  # fast mode
    points: np.ndarray  # how many finite values it rests on


def measure(logs: np.ndarray, rule: Rule = DEFAULT) -> Noise:
    """The noise model of `logs` (series, commits): logarithms, oldest first, nan where missing."""
    logs = right_aligned(np.atleast_2d(np.asarray(logs, dtype=float)))
    window = rule.base_window + rule.error_window
    logs = logs[:, -window:]
    n, width = logs.shape
    if width < window:
        logs = np.concatenate([np.full((n, window - width), np.nan), logs], axis=1)
    points = np.isfinite(logs).sum(axis=1)
    errors = one_step_errors(logs, rule)
    with np.errstate(invalid="ignore"):
        sigma = spread(errors, rule)
        center = nan_median(logs[:, -rule.base_window :])
        upper = nan_quantile(logs, rule.mode_quantile)
        lower = nan_quantile(logs, 1 - rule.mode_quantile)
    return Noise(center, sigma, upper, lower, points)


def one_step_errors(logs: np.ndarray, rule: Rule = DEFAULT) -> np.ndarray:
    """Each of the last values minus the median of the `base_window` before it."""
    views = np.lib.stride_tricks.sliding_window_view(logs, rule.base_window, axis=1)[:, :-1]
    forecast = nan_median(views)
    enough = np.isfinite(views).sum(axis=-1) >= 3
    return np.where(enough, logs[:, rule.base_window :] - forecast, np.nan)


def spread(errors: np.ndarray, rule: Rule = DEFAULT) -> np.ndarray:
    """Robust sigma of each row of errors, heavy tails counted; nan with fewer than five errors."""
    middle = nan_median(errors)
    mad = _MAD * nan_median(np.abs(errors - middle[:, None]))
    tail = nan_quantile(np.abs(errors), 0.95) / _P95
    sigma = np.maximum(np.fmax(mad, tail), rule.least_noise)
    return np.where(np.isfinite(errors).sum(axis=1) >= 5, sigma, np.nan)


def right_aligned(logs: np.ndarray) -> np.ndarray:
    """Rows with their finite values moved to the right end, in order; gaps do not age a history."""
    finite = np.isfinite(logs)
    if finite.all():
        return logs
    order = np.argsort(finite, axis=1, kind="stable")
    return np.take_along_axis(np.where(finite, logs, np.nan), order, axis=1)


def nan_median(x: np.ndarray) -> np.ndarray:
    return nan_quantile(x, 0.5)


def nan_quantile(x: np.ndarray, q: float) -> np.ndarray:
    """Linear quantile over the last axis, nan left out; one sort, far faster than np.nanquantile."""
    x = np.sort(x, axis=-1)  # nan goes last
    count = np.isfinite(x).sum(axis=-1)
    place = q * np.maximum(count - 1, 0)
    low = np.floor(place).astype(np.intp)
    high = np.minimum(low + 1, np.maximum(count - 1, 0))
    a = np.take_along_axis(x, low[..., None], axis=-1)[..., 0]
    b = np.take_along_axis(x, high[..., None], axis=-1)[..., 0]
    return np.where(count > 0, a + (b - a) * (place - low), np.nan)
