"""Side records: what asv's result file has no column for, one JSON object a line beside each
result.

Why a combination was not applicable, a failure's text, kernel names, process ids, clock and
temperature readings. The file ends in ``.jsonl`` because asv parses every other ``.json`` in the
folder as a result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path


def beside(result: Path) -> Path:
    """The side file of a result file."""
    return result.with_suffix(".jsonl")


def read(path: Path) -> Iterator[dict]:
    """Every whole record of a side file; a torn last line, or a missing file, is passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def lay_beside(new: Path, result: Path) -> None:
    """Move a run's records beside its result, in place of what it measured before."""
    fresh = list(read(new))
    new.unlink(missing_ok=True)
    if not fresh or not result.parent.is_dir():
        return
    measured = {record.get("benchmark") for record in fresh}
    target = beside(result)
    kept = [record for record in read(target) if record.get("benchmark") not in measured]
    partial = target.with_suffix(".jsonl.part")
    lines = (json.dumps(record, sort_keys=True) + "\n" for record in kept + fresh)
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, target)
