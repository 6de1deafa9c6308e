"""Re-runs as data: measured on one machine, judged on another by the very same rule.

Where a pull request's code has run, nothing that is said about it can be trusted. So the machine
that measures keeps each re-run's result files, and a machine that never ran that code asks the gate
again, with a runner that measures nothing and hands out those files in the order in which they were
made.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .gate.rerun import Asv
from .incoming import Refused, read_tree
from .results import Run, load

# Five looks at each side, and five more: of a few machines and environments at most.
MOST = 200


class Recording(Asv):
    """Measures again like the gate's own runner, and keeps what came back below ``keep``."""

    def __init__(self, repo: Path, keep: Path) -> None:
        super().__init__(repo)
        self.keep, self.count = keep, 0

    @contextmanager
    def _configured(self, results: Path, html: Path) -> Iterator[Path]:
        with super()._configured(results, html) as config:
            yield config
        self.count += 1
        if results.is_dir():
            shutil.copytree(results, self.keep / f"{self.count:03d}")


class Recorded:
    """A runner over such a folder. Refused where it holds anything but results."""

    def __init__(self, folder: Path) -> None:
        self.left: list[Run] = []
        if not folder.is_dir():
            return
        rounds = sorted(folder.iterdir())
        if len(rounds) > MOST:
            raise Refused(f"{len(rounds)} re-runs: more than the gate ever asks for")
        for each in rounds:
            read_tree(each)
            self.left += load(each)[0]

    def __call__(self, commit: str, patterns: Sequence[str]) -> Run | None:
        for index, run in enumerate(self.left):
            if run.commit == commit:
                return self.left.pop(index)
        return None
