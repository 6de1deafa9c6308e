"""One benchmark's cells in asv's result file as numbers: a value and process medians a combination.

Samples become one location (median) per process, as samples of one process are not independent.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from .judging.noise import nan_median

# Parameter products beyond this are no benchmark of anyone's; they only use up memory.
LARGEST_PRODUCT = 100_000

# As many equal samples are no luck: every clock the suite reads varies in its last digits.
LEAST_STILL = 5

OK, FAILED, SKIPPED = 0, 1, 2

_GROUPS = re.compile(r"(\d{1,6})\s*samples/process")


@dataclass(frozen=True)
class Row:
    """One benchmark of one run: all its parameter combinations, in asv's order."""

    params: tuple[tuple[str, ...], ...]
    values: np.ndarray  # (combinations,) nan where there is no number
    state: np.ndarray  # (combinations,) OK, FAILED or SKIPPED
    processes: (
        np.ndarray
    )  # (combinations, processes) medians, nan-padded; (combinations, 0) without
    version: str
    # Combinations whose every sample is the same number: that clock stood still.
    still: frozenset[int] = frozenset()

    @cached_property
    def locations(self) -> np.ndarray:
        """One number a combination: the median of its process medians, else the value itself."""
        if not self.processes.shape[1]:
            return self.values
        middle = _median(self.processes)
        middle = np.where(np.isfinite(middle), middle, self.values)
        return np.where(self.state == OK, middle, np.nan)


def samples_per_process(version: str) -> int:
    """How many consecutive samples came from one process; 1 where the version does not say.

    >>> samples_per_process("1; 5 samples/process"), samples_per_process("abc")
    (5, 1)
    """
    found = _GROUPS.search(version)
    return max(1, int(found.group(1))) if found else 1


def process_medians(samples: list[Any], group: int) -> np.ndarray:
    """Medians of consecutive groups of samples; what is not a finite number is left out.

    A group without any number gives nan: its process keeps its place.
    """
    numbers = [as_number(s) for s in samples]
    groups = [numbers[i : i + group] for i in range(0, len(numbers), group)]
    finite = [[x for x in g if math.isfinite(x)] for g in groups]
    return np.array([float(np.median(g)) if g else math.nan for g in finite])


def _combinations(params: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(params, list) or not all(isinstance(p, list) for p in params):
        return ((),)
    if math.prod(len(p) for p in params) > LARGEST_PRODUCT:
        return ()
    # asv stores the repr() of each value: strings arrive with their quotes.
    return _product(tuple(tuple(as_text(v) for v in p) for p in params))


@lru_cache(maxsize=1024)
def _product(params: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Cached: a history repeats the same few parameter lists a thousand times."""
    return tuple(itertools.product(*([_bare(v) for v in p] for p in params)))


def _bare(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def row_of(cells: dict[str, Any]) -> Row | None:
    combos = _combinations(cells.get("params") or [])
    result = cells.get("result")
    if not combos:
        return None
    if result is None:  # the whole benchmark failed, asv stores one null for all combinations
        result = [None] * len(combos)
    if not isinstance(result, list):
        return None
    result = (result + [None] * len(combos))[: len(combos)]
    values, state = _values(result)
    version = cells.get("version")
    version = version[:300] if isinstance(version, str) else ""
    samples = cells.get("samples")
    samples = samples if isinstance(samples, list) else []
    medians = _all_process_medians(samples[: len(combos)], samples_per_process(version))
    processes = np.full((len(combos), medians.shape[1]), np.nan)
    processes[: len(medians)] = medians
    # Samples were kept and none is a number: the value beside them is not to be trusted either.
    for i in np.flatnonzero((state == OK) & ~np.isfinite(processes).any(axis=1)).tolist():
        if i < len(samples) and isinstance(samples[i], list):
            values[i] = np.nan
    still = frozenset(i for i, s in enumerate(samples[: len(combos)]) if _stands_still(s))
    return Row(combos, values, state, processes, version, still)


def _stands_still(samples: Any) -> bool:
    if not isinstance(samples, list) or len(samples) < LEAST_STILL or samples[0] != samples[-1]:
        return False
    return samples.count(samples[0]) == len(samples)


def _values(result: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and states; null is a failure, NaN is asv's word for not applicable."""
    kinds = set(map(type, result))
    plain = kinds <= {float, int, type(None)}
    try:
        values = np.array(result if plain else [as_number(v) for v in result], dtype=float)
    except OverflowError:  # an integer of hundreds of digits
        values = np.array([as_number(v) for v in result], dtype=float)
    state = np.where(np.isfinite(values), OK, FAILED).astype(np.int8)
    if state.any():
        nan = [isinstance(v, float) and math.isnan(v) for v in result]
        state[np.array(nan)] = SKIPPED
        values[state != OK] = np.nan
    return values, state


def _all_process_medians(samples: list[Any], group: int) -> np.ndarray:
    lists = [s if isinstance(s, list) else [] for s in samples]
    full = [i for i, s in enumerate(lists) if s]
    lengths = {len(lists[i]) for i in full}
    if len(lengths) == 1 and (n := lengths.pop()) % group == 0:
        # The usual case, a thousand times faster than one combination after another.
        try:
            array: np.ndarray = np.array([lists[i] for i in full])
        except (ValueError, OverflowError):
            array = np.empty(0)
        # numpy takes JSON's true for 1 and false for 0 among numbers.
        plain = array.dtype.kind in "fi" and array.ndim == 2 and np.isfinite(array).all()
        if plain and ((array == 0) | (array == 1)).any():
            plain = not any(isinstance(x, bool) for i in full for x in lists[i])
        if plain:
            out = np.full((len(lists), n // group), np.nan)
            out[full] = _median(array.reshape(len(full), -1, group))
            return out
    medians = [process_medians(s, group) for s in lists]
    out = np.full((len(medians), max((len(m) for m in medians), default=0)), np.nan)
    for row, m in zip(out, medians, strict=True):
        row[: len(m)] = m
    return out


def _median(x: np.ndarray) -> np.ndarray:
    """Over the last axis, nan left out; without any, by the shortest way numpy knows."""
    s = np.sort(x, axis=-1)  # nan goes last
    n = s.shape[-1]
    if np.isnan(s[..., -1]).any():
        return nan_median(x)
    return (s[..., (n - 1) // 2] + s[..., n // 2]) / 2


def as_number(value: Any) -> float:
    """The value as a float; nan for anything that is not a plain number (bool included)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def as_text(value: Any) -> str:
    try:
        return str(value)[:300]
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return type(value).__name__
