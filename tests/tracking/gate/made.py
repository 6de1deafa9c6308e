"""Made-up results in asv's format, and the judge's cases, for the gate's tests."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tracking.judging.case import Case, Side
from benchmarks.tracking.judging.verdict import Series

LATENCY = "latency.Inference.track_latency"
VERSION = "1; 5 samples/process"


def case(
    history: Sequence[float] = (),
    base: float = 1.0,
    head: float = 1.0,
    *,
    name: str = LATENCY,
    kind: str = "sampled",
    better: str = "lower",
    base_reruns: Sequence[float] = (),
    head_reruns: Sequence[float] = (),
    spread: float = 0.002,
    **more: Any,
) -> Case:
    """One case; base and head have three processes `spread` apart."""
    metric = name.rsplit("track_", 1)[-1]

    def side(value: float) -> Side:
        moved = [value * math.exp(d * spread) for d in (-1, 0, 1)]
        return Side(value, np.array(moved) if kind == "sampled" else np.empty(0), "ok", "1")

    return Case(
        series=Series("box", "env", name, more.pop("params", ())),
        metric=metric,
        unit="seconds" if kind == "sampled" else metric,
        kind=kind,
        better=better,
        base=more.pop("base_side", side(base)),
        head=more.pop("head_side", side(head)),
        history=np.array([*history, base]),
        base_reruns=np.array(base_reruns, dtype=float),
        head_reruns=np.array(head_reruns, dtype=float),
        **more,
    )


def noisy(n: int, sigma: float = 0.01, level: float = 1.0, seed: int = 0) -> np.ndarray:
    """`n` values around `level` with relative noise."""
    return level * np.exp(sigma * np.random.default_rng(seed).normal(size=n))


def repository(folder: Path, commits: int) -> list[str]:
    """An empty repository with that many commits; full hashes, oldest first."""
    folder.mkdir(parents=True, exist_ok=True)

    def git(*args: str) -> str:
        named = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        done = subprocess.run(
            ["git", *named, *args], cwd=folder, check=True, capture_output=True, text=True
        )
        return done.stdout

    git("init", "-q", "-b", "main")
    # One process for all commits: a git process each would take most of the tests' time.
    stream = "".join(
        f"commit refs/heads/main\ncommitter n <e@example.org> {1_700_000_000 + i} +0000\n"
        f"data 2\nc\n\n"
        for i in range(commits)
    )
    subprocess.run(["git", "fast-import", "--quiet"], cwd=folder, input=stream.encode(), check=True)
    return git("rev-list", "--reverse", "main").split()


def result(
    commit: str,
    rows: dict[str, Any],
    *,
    machine: str = "box",
    env: str = "env",
    date: int = 0,
    **params: str,
) -> dict[str, Any]:
    """A result file; `rows` maps a benchmark to asv's (result, params, version, samples)."""
    return {
        "commit_hash": commit,
        "env_name": env,
        "date": date,
        "params": {"machine": machine, "cpu": "x", **params},
        "python": "3.11",
        "requirements": {},
        "env_vars": {},
        "result_columns": ["result", "params", "version", "samples"],
        "results": rows,
        "durations": {},
        "version": 2,
    }


def latencies(values: Sequence[float], random: np.random.Generator) -> list[Any]:
    """A latency row of one parameter axis: three processes of five samples each."""
    samples = [(v * np.exp(0.003 * random.normal(size=15))).tolist() for v in values]
    names = [repr(f"p{i}") for i in range(len(values))]
    return [[float(np.median(s)) for s in samples], [names], VERSION, samples]


def write(folder: Path, data: dict[str, Any]) -> Path:
    """Lay a result where asv would."""
    home = folder / data["params"]["machine"]
    home.mkdir(parents=True, exist_ok=True)
    home.joinpath("machine.json").write_text(json.dumps({"machine": home.name, "version": 1}))
    path = home / f"{data['commit_hash'][:8]}-{data['env_name']}.json"
    path.write_text(json.dumps(data))
    return path


def history(
    folder: Path, hashes: Sequence[str], level: Callable[[int, int], float], series: int = 4
) -> None:
    """Results of every commit: `level(commit's index, series)` seconds, and three launches."""
    random = np.random.default_rng(1)
    for at, commit in enumerate(hashes):
        values = [level(at, s) * math.exp(0.005 * random.normal()) for s in range(series)]
        rows = {
            LATENCY: latencies(values, random),
            "launches.Inference.track_launches": [
                [3.0] * series,
                latencies(values, random)[1],
                "1",
            ],
        }
        write(folder, result(commit, rows, date=at))
