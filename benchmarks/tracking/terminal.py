"""What ``asv run`` shows while it measures: only what was measured, and how long is left."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asv import util
from asv.console import log

# In a log, a line now and then; a terminal gets the suite's own lines at once.
_EVERY_SECONDS = 10.0
_FAILURES_SHOWN = 5
# Printed with a unit of their own in each cell; the others' stands beside the status.
_SCALED = ("seconds", "bytes")


def measured_table(results, benchmark) -> tuple[str, str | None]:
    """asv's (status, details) of one benchmark: its last parameter as columns, empty rows left out.

    asv's own table has a row for every combination of the parameters, a thousand of them "n/a".
    """
    name, axes = benchmark["name"], benchmark["params"]
    values = results.get_result_value(name, axes)
    failed = sum(value is None for value in values)
    status = f"{failed} failed" if failed else "ok"
    unit = "" if benchmark["unit"] in _SCALED else f" ({benchmark['unit']})"
    if not axes:
        shown = "failed" if failed else util.human_value(values[0], benchmark["unit"])
        return shown, None
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for combination, value in zip(itertools.product(*axes), values, strict=True):
        if not (isinstance(value, float) and math.isnan(value)):
            *row, column = (text.strip("'") for text in combination)
            text = "failed" if value is None else _amount(value, benchmark["unit"])
            cells.setdefault(tuple(row), {})[column] = text
    if not cells:
        return "n/a", None
    columns = [c for axis in axes[-1:] for c in (text.strip("'") for text in axis)]
    used = [column for column in columns if any(column in row for row in cells.values())]
    rows = [[*benchmark["param_names"][:-1], *used]]
    rows += [[*key, *(row.get(column, "") for column in used)] for key, row in cells.items()]
    table = util.format_text_table(rows, num_headers=1)
    reasons = _reasons(results.stderr.get(name) or "") if failed else []
    return status + unit, "\n".join([table, *reasons])


def _amount(value: float, unit: str) -> str:
    if isinstance(value, float) and unit not in _SCALED:
        return f"{value:.4g}"
    return util.human_value(value, unit)


def _reasons(stderr: str) -> list[str]:
    """The last line of each traceback, each once."""
    blocks = [block.strip().splitlines() for block in stderr.split("For parameters: ")]
    lines = [f"{block[0]}: {block[-1]}" for block in blocks if block]
    hidden = len(lines) - _FAILURES_SHOWN
    return lines[:_FAILURES_SHOWN] + ([f"... and {hidden} more"] if hidden > 0 else [])


@contextmanager
def following(path: Path) -> Iterator[None]:
    """Show the suite's progress lines where there is no terminal for it to write to."""
    path.write_text("")
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(path, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def _follow(path: Path, ended: threading.Event) -> None:
    seen = 0
    while not ended.wait(_EVERY_SECONDS):
        lines = path.read_text(errors="replace").splitlines()
        if len(lines) > seen:
            seen = len(lines)
            # Only the newest: the lines between are of interest to nobody any more.
            print(f"    {lines[-1]}", file=sys.stderr, flush=True)


def has_terminal() -> bool:
    """Whether the suite can write to a terminal itself."""
    return sys.stderr.isatty() and Path("/dev/tty").exists()


def say(text: str) -> None:
    """One line of the run's own among asv's."""
    log.flush()
    print(f"\n    {text}", file=sys.stderr, flush=True)
