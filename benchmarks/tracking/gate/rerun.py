"""Measure again what was flagged: base and head in turn (A B B A), each in fresh processes, by asv.

Strict alternation (A B A B) would alias with anything periodic, and all of A before all of B with
any drift; A B B A does neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..commits import Usage
from ..judging.verdict import Series
from ..results import Run, load
from .explain import regex

# Measures the benchmarks that match any pattern at one commit, in fresh processes; the run, or None
# where asv brought back no result.
Runner = Callable[[str, Sequence[str]], "Run | None"]

# A command line holds about 128 kB for one argument and 2 MB in all; beyond this many series the
# whole suite is measured, which costs little more.
_MOST_PATTERNS = 300


def order(rounds: int) -> list[str]:
    """`rounds` looks at each side, balanced.

    >>> "".join(order(5))
    'ABBAABBAAB'
    """
    return [side for i in range(rounds) for side in ("AB" if i % 2 == 0 else "BA")]


def rerun(
    runner: Runner, base: str, head: str, series: Sequence[Series], rounds: int
) -> tuple[list[Run], list[Run]]:
    """Runs of base and of head, `rounds` each where asv succeeds."""
    patterns = [regex(s) for s in series] if len(series) <= _MOST_PATTERNS else ["."]
    found: dict[str, list[Run]] = {"A": [], "B": []}
    for side in order(rounds):
        run = runner(base if side == "A" else head, patterns)
        if run is not None:
            found[side].append(run)
    return found["A"], found["B"]


class Asv:
    """Runs plain `asv run` at one commit into a folder of its own; results/ stays as it is."""

    def __init__(
        self, repo: Path, machine: str | None = None, python: str = sys.executable
    ) -> None:
        self.repo, self.machine, self.python = repo.resolve(), machine, python
        self.log: list[str] = []
        self.config = self.repo / "asv.conf.json"
        if not self.config.is_file():
            raise Usage(f"{repo} has no asv.conf.json, so nothing can be measured again")

    def __call__(self, commit: str, patterns: Sequence[str]) -> Run | None:
        with tempfile.TemporaryDirectory(prefix="asv-rerun-") as scratch:
            folder = Path(scratch, "results")
            with self._configured(folder, Path(scratch, "html")) as config:
                command = [self.python, "-m", "asv", "--config", str(config), "run", f"{commit}^!"]
                for pattern in patterns:
                    command += ["--bench", pattern]
                done = subprocess.run(
                    command, cwd=self.repo, capture_output=True, text=True, check=False
                )
            runs, _ = load(folder, machine=self.machine)
            runs = [r for r in runs if r.commit == commit and r.disturbed is not None]  # read now
            if not runs:
                tail = (done.stdout + done.stderr).strip().splitlines()[-1:]
                self.log.append(
                    f"{commit[:8]}: asv brought back no result ({tail[0][:200] if tail else '-'})"
                )
            return runs[0] if runs else None

    @contextmanager
    def _configured(self, results: Path, html: Path) -> Iterator[Path]:
        # asv takes every path, its plugins' too, from where the configuration lies.
        settings = settings_of(self.config)
        settings |= {"results_dir": str(results), "html_dir": str(html)}
        path = self.repo / f".asv-rerun-{os.getpid()}.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def settings_of(path: Path) -> dict:
    """asv's configuration as asv reads it, comments and all."""
    from asv import util

    try:
        return dict(util.load_json(str(path), js_comments=True))
    except (util.UserError, ValueError, TypeError) as error:
        raise Usage(f"asv.conf.json cannot be read: {error}") from None
