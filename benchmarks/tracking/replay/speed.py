"""python -m benchmarks.tracking.replay.speed: time and memory the gate takes on a long history.

Writes 300 series × 500 commits × 2 machines with samples into a temporary folder, then loads and
judges the newest commit in a fresh process, as the gate does. Invented numbers: only time counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SERIES, COMMITS, MACHINES = 300, 500, 2
_PER_BENCHMARK = 30
_PROCESSES, _SAMPLES = 3, 5


def write(folder: Path, commits: int = COMMITS, machines: int = MACHINES) -> list[str]:
    """A results folder in asv's format; the commits' hashes, oldest first."""
    random = np.random.default_rng(0)
    hashes = [f"{i:040x}" for i in range(1, commits + 1)]
    combos = [repr(f"shape{i}") for i in range(_PER_BENCHMARK)]
    for m in range(machines):
        home = folder / f"machine{m}"
        home.mkdir(parents=True)
        home.joinpath("machine.json").write_text(json.dumps({"machine": home.name, "version": 1}))
        for at, commit in enumerate(hashes):
            results = {}
            for b in range(SERIES // _PER_BENCHMARK):
                noise = random.normal(size=(_PER_BENCHMARK, _PROCESSES * _SAMPLES))
                samples = 1e-3 * np.exp(0.01 * noise)
                row = [np.median(samples, axis=1).tolist(), [combos], "1; 5 samples/process"]
                results[f"latency.Case{b}.track_latency"] = [*row, samples.tolist()]
            data = {
                "commit_hash": commit,
                "env_name": "env",
                "date": at,
                "params": {"machine": home.name},
                "python": "3.11",
                "requirements": {},
                "env_vars": {},
                "result_columns": ["result", "params", "version", "samples"],
                "results": results,
                "durations": {},
                "version": 2,
            }
            home.joinpath(f"{commit[-8:]}-env.json").write_text(json.dumps(data))
    return hashes


def judged(folder: Path, hashes: list[str]) -> tuple[int, float]:
    """Verdicts and seconds for the newest commit against the one before."""
    from ..gate.cases import cases, pairs
    from ..judging.judge import judge
    from ..results import load

    judge([])  # importing is not what is timed
    started = time.perf_counter()
    runs, _ = load(folder)
    verdicts = [
        v for pair in pairs(runs, hashes[-2], hashes[-1], hashes[:-1]) for v in judge(cases(pair))
    ]
    return len(verdicts), time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tracking.replay.speed", description=__doc__
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch))
            size = sum(f.stat().st_size for f in Path(scratch).rglob("*.json")) / 2**20
            print(
                f"{SERIES} series × {COMMITS} commits × {MACHINES} machines, {size:.0f} MB of JSON"
            )
            command = [
                sys.executable,
                "-m",
                "benchmarks.tracking.replay.speed",
                "--folder",
                scratch,
            ]
            return subprocess.run(command, check=False).returncode
    hashes = [f"{i:040x}" for i in range(1, COMMITS + 1)]
    before = time.process_time()
    verdicts, seconds = judged(args.folder, hashes)
    cpu = time.process_time() - before
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{verdicts} verdicts: loaded and judged in {seconds:.2f} s, {cpu:.2f} s of it computing, "
        f"{memory:.0f} MB at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
