"""Reading asv's result files: whatever lies in the folder, only sound numbers come out.

A file that cannot be used is named with its reason and skipped; it never stops the others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .cells import Row, as_number, as_text, row_of

# A result file of 300 series with samples takes about 0.2 MB; a thousand times that is no result.
LARGEST_FILE = 64 * 2**20

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
            if isinstance(process, int) and not isinstance(process, bool):
                key = str(note.get("benchmark")), tuple(as_text(p) for p in params)
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
    date = as_number(data.get("date"))
    columns = [as_text(c) for c in data["result_columns"]]
    rows = {}
    for name, cells in data["results"].items():
        row = row_of(dict(zip(columns, cells, strict=False)) if isinstance(cells, list) else {})
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
    try:
        usable = path is not None and path.is_file() and path.stat().st_size <= LARGEST_FILE
        lines = path.read_bytes().splitlines() if path is not None and usable else []
    except OSError:
        return []
    records = []
    for line in lines:
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


def _name(value: Any) -> str:
    return value[:300] if isinstance(value, str) else ""


def _words(fields: Any) -> dict[str, str]:
    """The plain fields of an object as text; an integer too long to print is left out."""
    found = {}
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63):
            found[str(name)[:100]] = str(value)[:300]
    return found
