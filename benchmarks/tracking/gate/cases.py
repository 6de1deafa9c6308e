"""From runs on disk to the judge's cases: which result is base, which is head, what came before."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..cells import FAILED, OK, SKIPPED, Row
from ..judging.case import Case, Side
from ..judging.verdict import Series
from ..results import BadResult, Run, read_json
from .metric import Kind, kind_of

_STATE = {OK: "ok", FAILED: "failed", SKIPPED: "skipped"}


@dataclass(frozen=True)
class Pair:
    """Base and head measured on the same machine in the same environment, and the runs before."""

    base: Run | None
    head: Run | None
    before: tuple[Run, ...] = ()  # alike runs up to and with base, oldest first
    base_reruns: tuple[Run, ...] = ()
    head_reruns: tuple[Run, ...] = ()

    @property
    def machine(self) -> str:
        return (self.head or self.base).machine  # type: ignore[union-attr]


def unlike(a: Run, b: Run, ignore: Iterable[str] = ()) -> list[str]:
    """What makes two runs incomparable, in words: `driver 550 -> 560`."""
    names = sorted((a.identity.keys() | b.identity.keys()) - set(ignore))
    pairs = [(n, a.identity.get(n, "unknown"), b.identity.get(n, "unknown")) for n in names]
    return [f"{n} {x} → {y}" for n, x, y in pairs if x != y]


def pairs(runs: Sequence[Run], base: str, head: str, line: Sequence[str]) -> list[Pair]:
    """One pair for each machine × environment that has base or head; `line` is base's ancestry."""
    place = {commit: i for i, commit in enumerate(line)}
    by_home: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        by_home[run.machine, run.env].append(run)
    found = []
    for _, home in sorted(by_home.items()):
        base_run = _newest(r for r in home if r.commit == base)
        head_run = _newest(r for r in home if r.commit == head)
        if base_run is None and head_run is None:
            continue
        alike = base_run or head_run
        before = [
            r
            for r in home
            if r.commit in place and r.commit != head and not unlike(r, alike)  # type: ignore[arg-type]
        ]
        before.sort(key=lambda r: place[r.commit])
        found.append(Pair(base_run, head_run, tuple(before)))
    return found


def units(folder: Path) -> dict[str, str]:
    """Benchmark name to unit, from asv's benchmarks.json; empty where that file is of no use."""
    try:
        data = read_json(folder / "benchmarks.json")
    except BadResult:
        return {}
    if not isinstance(data, dict):
        return {}
    return {n: str(b.get("unit", ""))[:40] for n, b in data.items() if isinstance(b, dict)}


def cases(pair: Pair, known_units: Mapping[str, str] | None = None) -> list[Case]:
    """One case for each benchmark × parameters that base or head has."""
    known_units = known_units or {}
    runs = (pair.base, pair.head)
    env = (pair.head or pair.base).env  # type: ignore[union-attr]
    found = []
    for name in sorted({n for run in runs if run for n in run.rows}):
        rows = [run.sound(name) if run else None for run in runs]
        whole = [run.rows.get(name) if run else None for run in runs]
        kind = kind_of(
            name, known_units.get(name, ""), any(r is not None and r.processes.size for r in rows)
        )
        combos = dict.fromkeys(c for row in rows if row is not None for c in row.params)
        index = [{c: i for i, c in enumerate(row.params)} if row else {} for row in rows]
        version = next((r.version for r in reversed(rows) if r is not None), "")
        past = _Past(pair.before, name, version)
        again = [_Past(r, name, version, sound=True) for r in (pair.base_reruns, pair.head_reruns)]
        for combo in combos:
            base, head = (
                _side(row, at.get(combo), kind, raw)
                for row, at, raw in zip(rows, index, whole, strict=True)
            )
            found.append(
                Case(
                    series=Series(pair.machine, env, name, combo),
                    metric=kind.metric,
                    unit=kind.unit,
                    kind=kind.kind,
                    better=kind.better,
                    tolerance=kind.tolerance,
                    base=base,
                    head=head,
                    history=past.values(combo),
                    base_reruns=again[0].values(combo),
                    head_reruns=again[1].values(combo),
                )
            )
    return found


class _Past:
    """Locations of one benchmark over several runs, all combinations at once."""

    def __init__(self, runs: Sequence[Run], name: str, version: str, sound: bool = False) -> None:
        # What disturbs a history is part of its noise; a thousand side files stay closed.
        every = (r.sound(name) if sound else r.rows.get(name) for r in runs)
        rows = [row for row in every if row is not None and row.version == version]
        self._same = len({row.params for row in rows}) <= 1
        self._rows = rows
        self._at = {c: i for i, c in enumerate(rows[0].params)} if rows else {}
        self._table = (
            np.array([row.locations for row in rows]) if rows and self._same else np.empty((0, 0))
        )

    def values(self, combo: tuple[str, ...]) -> np.ndarray:
        if self._same:
            at = self._at.get(combo)
            column = self._table[:, at] if at is not None else np.empty(0)
        else:
            column = np.array(
                [
                    row.locations[row.params.index(combo)]
                    for row in self._rows
                    if combo in row.params
                ]
            )
        return column[np.isfinite(column)]


def _side(row: Row | None, at: int | None, kind: Kind, whole: Row | None) -> Side:
    if row is None or at is None:
        return Side(state="absent")
    untouched = float(whole.locations[at]) if whole is not None else math.nan
    processes = row.processes[at]
    processes = processes[np.isfinite(processes)]
    value = float(row.locations[at])
    state = _STATE[int(row.state[at])]
    if state == "ok" and kind.kind == "sampled" and not math.isfinite(value):
        state = "disturbed" if math.isfinite(untouched) else "hollow"
    return Side(value, processes, state, row.version, at in row.still)


def _newest(runs: Iterable[Run]) -> Run | None:
    return max(runs, key=lambda r: (r.date, r.path), default=None)


def results_folder(config: Path) -> Path:
    """Where asv.conf.json says results lie; `results` where it says nothing."""
    try:
        text = config.read_text(encoding="utf-8")
        data = json.loads(text)
        name = data.get("results_dir", "results") if isinstance(data, dict) else "results"
    except (OSError, ValueError, RecursionError):
        name = "results"
    return config.parent / str(name)
