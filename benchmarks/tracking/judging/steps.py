"""Where a history stepped: the best cut into level pieces, found over the whole of it at once.

Optimal partitioning (Jackson et al. 2005) with squared error and a penalty a cut. Values are first
pulled in to three robust sigmas around their running median, so an outlier or a flip of a few
commits is no step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .noise import nan_median, nan_quantile

# A shorter piece cannot be told from a mode flip; `replay` removes real steps by the same measure.
LEAST_PIECE = 15
# Penalty a cut in units of sigma^2 log n. 2 is the usual choice for independent errors; real
# histories are autocorrelated, which makes chance cuts cheap: at 12 the published error rates of
# known rules on the CUDA.jl history come out again, below it more of the noise is cut away.
PENALTY = 12.0
_LEAST_SIGMA = 1e-3


@dataclass(frozen=True)
class Piece:
    """Values start:stop lie on one level (log scale)."""

    start: int
    stop: int
    level: float


def pieces(logs: np.ndarray, least: int = LEAST_PIECE, penalty: float = PENALTY) -> list[Piece]:
    """Cut finite `logs` into level pieces of at least `least` values."""
    x = np.asarray(logs, dtype=float)
    n = len(x)
    if n < 2 * least:
        return [Piece(0, n, float(np.median(x)))] if n else []
    y = winsorized(x, least)
    steps = np.diff(x)
    sigma = 1.4826 * np.median(np.abs(steps - np.median(steps))) / np.sqrt(2)
    price = penalty * max(float(sigma), _LEAST_SIGMA) ** 2 * np.log(n)
    total = np.concatenate([[0.0], np.cumsum(y)])
    square = np.concatenate([[0.0], np.cumsum(y * y)])
    best = np.full(n + 1, np.inf)
    best[0] = -price
    previous = np.zeros(n + 1, dtype=np.intp)
    for j in range(least, n + 1):
        i = np.arange(0, j - least + 1)
        cost = square[j] - square[i] - (total[j] - total[i]) ** 2 / (j - i)
        sums = best[i] + cost + price
        previous[j] = np.argmin(sums)
        best[j] = sums[previous[j]]
    cuts = [n]
    while cuts[-1] > 0:
        cuts.append(int(previous[cuts[-1]]))
    cuts.reverse()
    return [Piece(a, b, float(np.median(x[a:b]))) for a, b in itertools.pairwise(cuts)]


def winsorized(x: np.ndarray, width: int) -> np.ndarray:
    """`x` pulled in to three robust sigmas around its running median of `width`."""
    half = width // 2
    padded = np.concatenate([np.full(half, np.nan), x, np.full(half, np.nan)])
    middle = nan_median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1))
    away = x - middle
    bound = 3 * max(1.4826 * float(np.median(np.abs(away))), _LEAST_SIGMA)
    return middle + np.clip(away, -bound, bound)


def residuals(logs: np.ndarray) -> np.ndarray:
    """`logs` with every piece's level taken out: what remains when nothing really changed."""
    out = np.array(logs, dtype=float)
    finite = np.isfinite(out)
    values = out[finite]
    for piece in pieces(values):
        values[piece.start : piece.stop] -= piece.level
    out[finite] = values
    return out


def settled(windows: np.ndarray, least: int = LEAST_PIECE) -> np.ndarray:
    """Rows of (series, commits) without what lies before their last clear step.

    A clear step: `least` values on either side, and nearly every value after it on one side of
    nearly every value before it, so a level that is still visited in turn stays in.
    """
    width = windows.shape[1]
    if width < 2 * least:
        return windows
    x = np.where(np.isfinite(windows), windows, 0.0)
    there = np.isfinite(windows)
    count, total = np.cumsum(there, axis=1), np.cumsum(x, axis=1)
    cut = np.arange(least, width - least + 1)
    left_n, left = count[:, cut - 1], total[:, cut - 1]
    right_n, right = count[:, -1:] - left_n, total[:, -1:] - left
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.abs(right / right_n - left / left_n)
        score = np.where(left_n >= least, gap * np.sqrt(left_n * right_n), -1.0)
    at = cut[np.argmax(score, axis=1)]
    before = np.arange(width) < at[:, None]
    old, new = np.where(before, windows, np.nan), np.where(before, np.nan, windows)
    apart = (nan_quantile(old, 0.05) > nan_quantile(new, 0.95)) | (
        nan_quantile(old, 0.95) < nan_quantile(new, 0.05)
    )
    clear = apart & (score.max(axis=1) > 0)
    return np.where(clear[:, None], new, windows)
