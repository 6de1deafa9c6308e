"""Small results in asv's own format, made up for tests of the plumbing alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLUMNS = [
    "result",
    "params",
    "version",
    "started_at",
    "duration",
    "stats_ci_99_a",
    "stats_ci_99_b",
    "stats_q_25",
    "stats_q_75",
    "stats_number",
    "stats_repeat",
    "samples",
]
MACHINE = {"machine": "box", "gpu": "none", "cpu": "Some CPU", "num_cpu": "2", "arch": "x86_64"}
ENVIRONMENT = "overlay-py3.11"


def commit(number: int) -> str:
    return f"{number:08x}" + "0" * 32


def row(
    values: list[float | None], samples: list[list[float] | None], started: int = 1
) -> list[Any]:
    nothing = [None] * len(values)
    number = [1 if each else None for each in samples]
    stats = [nothing] * 4 + [number, [len(s) if s else None for s in samples]]
    params = [[f"'p{index}'" for index in range(len(values))]]
    return [values, params, "1; 2 samples/process", started, 1.0, *stats, samples]


def result(number: int, rows: dict[str, list[Any]] | None = None, **changes: Any) -> dict[str, Any]:
    data = {
        "commit_hash": commit(number),
        "env_name": ENVIRONMENT,
        "date": 1_700_000_000_000,
        "params": {**MACHINE, "ram": "24 GiB", "python": "3.11"},
        "python": "3.11",
        "requirements": {},
        "env_vars": {},
        "result_columns": COLUMNS,
        "results": rows or {"latency.Inference.track_latency": row([0.5], [[0.4, 0.6]])},
        "durations": {},
        "version": 2,
    }
    return {**data, **changes}


def name(number: int, machine: str = "box") -> str:
    return f"{machine}/{commit(number)[:8]}-{ENVIRONMENT}.json"


def encode(data: object) -> bytes:
    return json.dumps(data).encode()


def write(folder: Path, numbers: list[int], **changes: Any) -> Path:
    """A folder as a run leaves it: a machine, its points, their side files."""
    (folder / "box").mkdir(parents=True, exist_ok=True)
    (folder / "box" / "machine.json").write_bytes(encode({**MACHINE, "version": 1}))
    for number in numbers:
        (folder / name(number)).write_bytes(encode(result(number, **changes)))
        side = {"kind": "note", "benchmark": "b", "params": [], "commit": commit(number)}
        (folder / (name(number) + "l")).write_bytes(encode(side) + b"\n")
    return folder
