"""Reading asv's result files: whatever lies in the folder, only sound numbers come out.

A file that cannot be used is named with its reason and skipped; it never stops the others.
Samples become one location (median) per process, as samples of one process are not independent.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .judging.noise import nan_median

# A result file of 300 series with samples takes about 0.2 MB; a thousand times that is no result.
LARGEST_FILE = 64 * 2**20
# Parameter products beyond this are no benchmark of anyone's; they only use up memory.
LARGEST_PRODUCT = 100_000

# As many equal samples are no luck: every clock the suite reads varies in its last digits.
LEAST_STILL = 5

OK, FAILED, SKIPPED = 0, 1, 2

# What makes two results unlike. Memory size and kernel version are left out on purpose: they change
# with a reboot or an update and would split a history for nothing.
IDENTITY = (
    "machine",
    "arch",
    "cpu",
    "gpu",
    "driver",
    "cuda",
    "clocks",
    "torch",
    "triton",
    "python",
)

_GROUPS = re.compile(r"(\d{1,6})\s*samples/process")


class BadResult(ValueError):
    """A result file that cannot be used; the message says why, without the path."""


@dataclass(frozen=True)
class Problem:
    """A file that was skipped, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}; skipped"


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


@dataclass(frozen=True)
class Run:
    """One result file: one commit in one environment on one machine."""

    path: str
    machine: str
    env: str
    commit: str
    date: int
    params: dict[str, str]
    rows: dict[str, Row] = field(repr=False)
    notes_path: Path | None = None

    @cached_property
    def disturbed(self) -> dict[tuple[str, tuple[str, ...]], set[int]]:
        """Processes that the suite itself calls invalid: (class, parameters) → their numbers."""
        found: dict[tuple[str, tuple[str, ...]], set[int]] = {}
        for note in read_notes(self):
            process, params = note.get("process"), note.get("params")
            if note.get("kind") != "invalid" or not isinstance(params, list):
                continue
            if isinstance(process, int):
                key = str(note.get("benchmark")), tuple(_text(p) for p in params)
                found.setdefault(key, set()).add(process)
        return found

    def sound(self, name: str) -> Row | None:
        """A benchmark's row without disturbed processes; nan where none is left."""
        row = self.rows.get(name)
        if row is None or not self.disturbed or not row.processes.size:
            return row
        processes, values = row.processes.copy(), row.values.copy()
        for at, combo in enumerate(row.params):
            bad = self.disturbed.get((name.rsplit(".", 1)[0], combo), set())
            here = [n for n in bad if 0 <= n < processes.shape[1]]
            processes[at, here] = np.nan
            if here and not np.isfinite(processes[at]).any():
                values[at] = np.nan
        return replace(row, processes=processes, values=values)

    @cached_property
    def identity(self) -> dict[str, str]:
        return {name: self.params[name] for name in IDENTITY if name in self.params}


def read_json(path: Path, largest: int = LARGEST_FILE) -> Any:
    """The parsed file, or BadResult: too big, truncated, nested too deep, not text, not a file."""
    try:
        if not path.is_file():
            raise BadResult("not a regular file")
        size = path.stat().st_size
        if size > largest:
            raise BadResult(f"{size / 2**20:.0f} MB is more than the {largest >> 20} MB allowed")
        return json.loads(path.read_bytes())
    except RecursionError:
        raise BadResult("nested too deep") from None
    except UnicodeDecodeError:
        raise BadResult("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise BadResult(f"not valid JSON (line {error.lineno}, {error.msg})") from None
    except (ValueError, MemoryError) as error:
        if isinstance(error, BadResult):
            raise
        raise BadResult(f"unreadable: {type(error).__name__}") from None
    except OSError as error:
        raise BadResult(f"cannot be read ({error.strerror or type(error).__name__})") from None


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
    numbers = [_number(s) for s in samples]
    groups = [numbers[i : i + group] for i in range(0, len(numbers), group)]
    finite = [[x for x in g if math.isfinite(x)] for g in groups]
    return np.array([float(np.median(g)) if g else math.nan for g in finite])


def parse(data: Any, path: str = "", folder: str = "") -> Run:
    """One run from asv's JSON, or BadResult."""
    if not isinstance(data, dict):
        raise BadResult(f"a result is an object, this is a {type(data).__name__}")
    for name, kind in (("results", dict), ("result_columns", list), ("commit_hash", str)):
        if not isinstance(data.get(name), kind):
            raise BadResult(f"{name} is missing or not a {kind.__name__}")
    commit = data["commit_hash"].lower()
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        raise BadResult("commit_hash is not a commit hash")
    # What the environment pins (torch, triton) lies apart from what the machine is.
    params = _words(data.get("requirements")) | _words(data.get("params"))
    if isinstance(data.get("python"), str):
        params["python"] = data["python"][:300]
    machine = params.get("machine", folder)
    if folder and machine != folder:
        raise BadResult(f"it says machine {machine[:60]!r} but lies in the folder of {folder!r}")
    date = _number(data.get("date"))
    columns = [_text(c) for c in data["result_columns"]]
    rows = {}
    for name, cells in data["results"].items():
        row = _row(dict(zip(columns, cells, strict=False)) if isinstance(cells, list) else {})
        if row is not None:
            rows[str(name)[:500]] = row
    return Run(
        path=path,
        machine=machine,
        env=_name(data.get("env_name")),
        commit=commit,
        date=int(date) if math.isfinite(date) else 0,
        params=params,
        rows=rows,
    )


def load(
    folder: Path, commits: Iterable[str] | None = None, machine: str | None = None
) -> tuple[list[Run], list[Problem]]:
    """All usable runs below `folder` (oldest file name first) and the files that were skipped.

    `commits` (full hashes) and `machine` narrow what is opened.
    """
    wanted = None if commits is None else {c[:8] for c in commits}
    runs: list[Run] = []
    problems: list[Problem] = []
    for path in _paths(folder, machine, problems):
        if wanted is not None and path.name[:8] not in wanted:
            continue
        try:
            run = parse(read_json(path), _shown(path, folder), path.parent.name)
        except BadResult as error:
            problems.append(Problem(_shown(path, folder), str(error)))
            continue
        object.__setattr__(run, "notes_path", path.with_name(path.name + "l"))
        runs.append(run)
    return runs, problems


def read_notes(run: Run) -> list[dict[str, Any]]:
    """The side records of a run (reasons, kernel names, readings), without unreadable lines."""
    path = run.notes_path
    records = []
    if path is not None and path.is_file() and path.stat().st_size <= LARGEST_FILE:
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


def _paths(folder: Path, machine: str | None, problems: list[Problem]) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for home in sorted(p for p in folder.iterdir() if p.is_dir()):
        if machine is not None and home.name != machine:
            continue
        found = sorted(p for p in home.glob("*.json") if p.name != "machine.json")
        if found and not (home / "machine.json").is_file():
            problems.append(Problem(home.name, "no machine.json, so nobody knows what ran there"))
            continue
        yield from found


def _shown(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder.parent)) if folder.parent != path else str(path)


def _text(value: Any) -> str:
    try:
        return str(value)[:300]
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return type(value).__name__


def _name(value: Any) -> str:
    return value[:300] if isinstance(value, str) else ""


def _words(fields: Any) -> dict[str, str]:
    """The plain fields of an object as text; an integer too long to print is left out."""
    found = {}
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63):
            found[str(name)[:100]] = str(value)[:300]
    return found


def _number(value: Any) -> float:
    """The value as a float; nan for anything that is not a plain number (bool included)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _combinations(params: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(params, list) or not all(isinstance(p, list) for p in params):
        return ((),)
    if math.prod(len(p) for p in params) > LARGEST_PRODUCT:
        return ()
    # asv stores the repr() of each value: strings arrive with their quotes.
    return _product(tuple(tuple(_text(v) for v in p) for p in params))


@lru_cache(maxsize=1024)
def _product(params: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Cached: a history repeats the same few parameter lists a thousand times."""
    return tuple(itertools.product(*([_bare(v) for v in p] for p in params)))


def _bare(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _row(cells: dict[str, Any]) -> Row | None:
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
        values = np.array(result if plain else [_number(v) for v in result], dtype=float)
    except OverflowError:  # an integer of hundreds of digits
        values = np.array([_number(v) for v in result], dtype=float)
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
