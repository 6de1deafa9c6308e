"""Recorded histories (CSV) as comparisons: what the gate would have seen, commit by commit."""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from ..judging.noise import nan_median
from ..judging.rule import DEFAULT, Rule
from ..judging.steps import residuals

# Layouts, told apart by their header.
_LAYOUTS = {
    "commits": {"run", "commit", "benchmark", "value"},
    "labelled": {"series", "kind", "change_point", "run", "build", "value"},
    "repeats": {"series", "run", "build", "value"},
}
# Labelled series are short, and the change of one lies 54 runs in.
LEAST_PAST = 20


class BadHistory(ValueError):
    """A file that is no recorded history; the message says why."""


@dataclass(frozen=True)
class Comparisons:
    """One row a comparison; logarithms, nan where there is no value."""

    history: np.ndarray  # (n, window) oldest first
    head: np.ndarray  # (n,)
    reruns: np.ndarray  # (n, reruns) the values that stand in for runs made again
    base: np.ndarray  # (n, reruns) runs of the same build before head; all nan where unknown
    shift: np.ndarray  # (n,) what the whole suite moved by
    series: np.ndarray  # (n,) number of the series
    label: np.ndarray  # (n,) number of the known change that this row straddles; -1: no change

    def __len__(self) -> int:
        return len(self.head)

    def rows(self, which: np.ndarray) -> Comparisons:
        return Comparisons(*(getattr(self, f.name)[which] for f in fields(self)))


@dataclass(frozen=True)
class Recorded:
    """A recorded history, ready to be replayed."""

    layout: str
    comparisons: Comparisons
    labels: int
    series: int
    dropped: int  # values that no clock can have read


def read(path: Path, rule: Rule = DEFAULT) -> Recorded:
    """Read a history in any of the three layouts; BadHistory in one line where it is none."""
    try:
        layout, table, dropped = _table(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise BadHistory(f"{path.name} cannot be read as CSV ({error})") from None
    if not table:
        raise BadHistory(f"{path.name} holds no usable value")
    build = {"commits": _commits, "repeats": _repeats, "labelled": _labelled}[layout]
    # Full windows are what the gate has after fifty commits; a young history is compared from the
    # shortest one on that has a noise of its own, as labelled series always are.
    parts = list(build(table, rule, rule.window)) or list(build(table, rule, LEAST_PAST))
    if not parts:
        raise BadHistory(f"{path.name}: no series is long enough to compare anything")
    joined = Comparisons(
        *(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Comparisons))
    )
    labels = len({key for key in table if layout == "labelled" and _change_point(key) > 0})
    return Recorded(layout, joined, labels, len(table), dropped)


_Key = tuple[str, ...]
_Table = dict[_Key, list[tuple[int, str, float]]]


def _table(path: Path) -> tuple[str, _Table, int]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        layout = next((n for n, need in _LAYOUTS.items() if need <= set(header)), None)
        if layout is None:
            raise BadHistory(
                f"{path.name} has columns {', '.join(header)[:100] or 'none'}; expected one of: "
                + "; ".join(",".join(sorted(need)) for need in _LAYOUTS.values())
            )
        names = {
            "commits": ("benchmark",),
            "repeats": ("series",),
            "labelled": ("series", "kind", "change_point"),
        }[layout]
        keys = [header.index(n) for n in names]
        run, value = header.index("run"), header.index("value")
        build = header.index("commit" if layout == "commits" else "build")
        table: _Table = defaultdict(list)
        dropped = 0
        for row in rows:
            try:
                number, order = float(row[value]), _whole(row[run])
                good = math.isfinite(number) and number > 0
                key = tuple(row[k] for k in keys)
            except (ValueError, IndexError, OverflowError):
                good = False
            if good:
                table[key].append((order, row[build], math.log(number)))
            else:
                dropped += 1
    for values in table.values():
        values.sort(key=lambda t: t[0])
    return layout, dict(table), dropped


def _slices(
    x: np.ndarray, at: np.ndarray, rule: Rule, last: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """History, head and re-runs at the places `at` of one series; re-runs stay below `last`."""
    w, r = rule.window, rule.reruns
    padded = np.concatenate([np.full(w, np.nan), x, np.full(r, np.nan)])
    place = at[:, None] + w
    history = padded[place + np.arange(-w, 0)]
    after = at[:, None] + np.arange(1, r + 1)
    reruns = padded[after + w]
    if last is not None:
        reruns = np.where(after < last[:, None], reruns, np.nan)
    return history, x[at], reruns


def _commits(table: _Table, rule: Rule, least: int) -> Iterator[Comparisons]:
    """One value a commit: real steps are taken out, the next commits stand in for re-runs."""
    runs = sorted({t[0] for values in table.values() for t in values})
    column = {run: i for i, run in enumerate(runs)}
    grid = np.full((len(table), len(runs)), np.nan)
    for row, values in zip(grid, table.values(), strict=True):
        for order, _, x in values:
            row[column[order]] = x
        row[:] = residuals(row)
    shift = np.zeros(len(runs))
    if len(table) >= rule.least_suite:
        for t in range(rule.base_window, len(runs)):
            moved = grid[:, t] - nan_median(grid[:, t - rule.base_window : t])
            moved = moved[np.isfinite(moved)]
            shift[t] = np.median(moved) if len(moved) >= rule.least_suite else 0.0
    for number, row in enumerate(grid):
        there = np.flatnonzero(np.isfinite(row))
        at = np.arange(least, len(there) - rule.first_reruns)
        if len(at):
            yield _pack(_slices(row[there], at, rule), rule, number, shift[there[at]])


def _repeats(table: _Table, rule: Rule, least: int) -> Iterator[Comparisons]:
    """Many runs a build: every run with five runs of its own build before it and five after."""
    for number, values in enumerate(table.values()):
        x = np.array([t[2] for t in values])
        places: list[int] = []
        firsts: list[int] = []
        lasts: list[int] = []
        start = 0
        for _, group in itertools.groupby(values, key=lambda t: t[1]):
            stop = start + sum(1 for _ in group)
            inside = range(max(start + 5, least), stop - rule.first_reruns)
            places += inside
            firsts += [start] * len(inside)
            lasts += [stop] * len(inside)
            start = stop
        if places:
            at = np.array(places)
            before = at[:, None] - np.arange(rule.reruns, 0, -1)
            base = np.where(before >= np.array(firsts)[:, None], x[np.maximum(before, 0)], np.nan)
            yield _pack(_slices(x, at, rule, np.array(lasts)), rule, number, base=base)


def _labelled(table: _Table, rule: Rule, least: int) -> Iterator[Comparisons]:
    """Series judged by people, as they are: a row is a hit's chance, or must stay silent."""
    label = 0
    for number, (key, values) in enumerate(table.items()):
        x = np.array([t[2] for t in values])
        change = _change_point(key)
        at = np.arange(min(least, LEAST_PAST), len(x) - rule.first_reruns)
        labels = np.full(len(at), -1)
        if change > 0:
            # Runs whose re-runs would lie beyond the change are neither alarm nor silence.
            crossing = (at > change - rule.reruns) & (at <= change)
            labels[(at > change) & (at <= change + rule.first_reruns)] = label
            at, labels = at[~crossing], labels[~crossing]
            label += 1
        if len(at):
            yield _pack(_slices(x, at, rule), rule, number, label=labels)


def _pack(
    parts: tuple[np.ndarray, ...],
    rule: Rule,
    number: int,
    shift: np.ndarray | None = None,
    base: np.ndarray | None = None,
    label: np.ndarray | None = None,
) -> Comparisons:
    history, head, reruns = parts
    n = len(head)
    return Comparisons(
        history,
        head,
        reruns,
        np.full((n, rule.reruns), np.nan) if base is None else base,
        np.zeros(n) if shift is None else shift,
        np.full(n, number),
        np.full(n, -1) if label is None else label,
    )


def _change_point(key: _Key) -> int:
    try:
        return _whole(key[2])
    except (ValueError, IndexError, OverflowError):
        return 0


def _whole(text: str) -> int:
    """`12` and `12.0`: tables that held a gap once write whole numbers as floats."""
    return int(text) if text.strip().isdecimal() else int(float(text))
