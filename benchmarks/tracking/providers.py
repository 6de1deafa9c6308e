"""Show providers side by side from one measured commit: how fused compares with eager.

Example:
  python -m benchmarks providers                     the checked-out line's newest measured commit
  python -m benchmarks providers v1.0 --markdown     as a table for a README
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import commits
from .cells import FAILED
from .gate.cases import results_folder
from .gate.explain import records
from .gate.render import amount, printable
from .judging.verdict import USAGE
from .results import Run, load, read_notes

_BASE = "eager"
# A table for token rows and one for images: other providers serve these.
_TABLES = ({"Inference": "inference", "Training": "training"}, {"ChannelsLast": "channels-last"})
_MODES = {mode: label for group in _TABLES for mode, label in group.items()}
# A provider measured in fewer of a machine's lines than this has no column of its own.
_SPARSE = 0.2
_WIDTH = 160


@dataclass(frozen=True)
class Line:
    """One call's latency (seconds, median of process medians) by provider, in one run."""

    machine: str
    mode: str
    shape: str
    tokens: str
    dtype: str
    latency: dict[str, float]

    def against_eager(self, provider: str) -> float:
        """Eager's latency over the provider's; more than 1 is faster. NaN where one is missing."""
        return self.latency.get(_BASE, math.nan) / self.latency.get(provider, math.nan)


def lines(run: Run) -> Iterator[Line]:
    """Every combination with a latency, in the suite's order."""
    for mode in _MODES:
        row = run.rows.get(f"latency.{mode}.track_latency")
        if row is None:
            continue
        found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
        for params, value in zip(row.params, row.locations, strict=True):
            if len(params) == 4 and math.isfinite(value) and value > 0:
                found[params[:3]][params[3]] = float(value)
        for (shape, tokens, dtype), latency in found.items():
            yield Line(run.machine, mode, shape, tokens, dtype, latency)


def failed(run: Run, dtype: str | None = None) -> list[list[str]]:
    """Mode, parameters and what it said of each combination whose latency failed."""
    said = records(read_notes(run)).failures
    return [
        [label, *params, said.get((mode, params), "nothing was recorded")]
        for mode, label in _MODES.items()
        if (row := run.rows.get(f"latency.{mode}.track_latency")) is not None
        for params, state in zip(row.params, row.state, strict=True)
        if state == FAILED and dtype in (None, params[2])
    ]


def words(ratio: float) -> str:
    """
    >>> words(1.312), words(0.9), words(1.004), words(float("nan"))
    ('1.31× faster', '1.11× slower', 'same', '–')
    """
    if not math.isfinite(ratio):
        return "–"
    if abs(math.log(ratio)) < 0.01:
        return "same"
    return f"{ratio:.2f}× faster" if ratio > 1 else f"{1 / ratio:.2f}× slower"


def table(found: list[Line], compared: list[str]) -> list[list[str]]:
    """Header and rows as text."""
    header = ["mode", "shape", "tokens", "dtype", _BASE, *compared]
    rows = [
        [
            *(_MODES[line.mode], line.shape, line.tokens, line.dtype),
            amount(line.latency.get(_BASE, math.nan), "seconds"),
            *(words(line.against_eager(name)) for name in compared),
        ]
        for line in found
    ]
    if len(rows) < 2:
        return [header, *rows]
    means = [_mean([line.against_eager(name) for line in found]) for name in compared]
    return [header, *rows, ["geometric mean", "", "", "", "", *means]]


def columns(found: list[Line]) -> tuple[list[str], list[str]]:
    """The providers that have a column, and those measured in too few lines for one."""
    counts = Counter(name for line in found for name in line.latency if name != _BASE)
    wide = {name for name, count in counts.items() if count >= _SPARSE * len(found)}
    return sorted(wide), sorted(set(counts) - wide)


def samples(found: list[Line], sparse: list[str]) -> list[list[str]]:
    """Header and one row a measurement, for the providers without a column."""
    rows = [
        [
            *(_MODES[line.mode], line.shape, line.tokens, line.dtype, name),
            amount(line.latency[name], "seconds"),
            words(line.against_eager(name)),
        ]
        for line in found
        for name in sparse
        if name in line.latency
    ]
    return [["mode", "shape", "tokens", "dtype", "provider", "latency", "against eager"], *rows]


def blocks(rows: list[list[str]], width: int) -> list[list[list[str]]]:
    """The table in as many as fit the width, each with the columns that say what a row is."""
    sizes = [max(len(row[at]) for row in rows) + 3 for at in range(len(rows[0]))]
    parts: list[list[int]] = [[]]
    for at in range(5, len(sizes)):
        if parts[-1] and sum(sizes[:5]) + sum(sizes[i] for i in (*parts[-1], at)) > width:
            parts.append([])
        parts[-1].append(at)
    return [[[row[at] for at in (*range(5), *part)] for row in rows] for part in parts]


def _mean(ratios: list[float]) -> str:
    """In words; over how many of the rows, where not over all of them."""
    sound = [math.log(ratio) for ratio in ratios if math.isfinite(ratio)]
    mean = words(math.exp(float(np.mean(sound)))) if sound else "–"
    return mean if len(sound) in (0, len(ratios)) else f"{mean} ({len(sound)} of {len(ratios)})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("commit", nargs="?", help="default: the newest commit that was measured")
    parser.add_argument("--machine", help="only this machine's results")
    parser.add_argument("--dtype", help="only this dtype: fp32, bf16 or fp16")
    parser.add_argument("--results", type=Path, help="results folder (default: asv.conf.json's)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true")
    form.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    try:
        chosen = _runs(args)
    except commits.Usage as error:
        print(f"providers: {error}")
        return USAGE
    found = [line for one in chosen for line in lines(one) if args.dtype in (None, line.dtype)]
    if not found:
        print(f"providers: {_nothing(chosen, args)}")
        return 4
    if args.json:
        print(json.dumps([asdict(line) for line in found], indent=1))
        return 0
    for one in chosen:
        title = f"{one.machine}, commit {one.commit[:8]}, torch {one.params.get('torch', '?')}"
        for modes in _TABLES:
            mine = [x for x in found if x.machine == one.machine and x.mode in modes]
            if not mine:
                continue
            wide, sparse = columns(mine)
            # What only the sparse ones were measured at says nothing in the table.
            full = [line for line in mine if not line.latency.keys().isdisjoint(wide)]
            _show(title, table(full or mine, wide), 4, args.markdown)
            if sparse:
                _show("measured at a few combinations", samples(mine, sparse), 5, args.markdown)
        bad = failed(one, args.dtype)
        if bad:
            _show(
                "failed",
                [["mode", "shape", "tokens", "dtype", "provider", "it said"], *bad],
                6,
                args.markdown,
            )
    return 0


def _nothing(chosen: list[Run], args: argparse.Namespace) -> str:
    """Why there is no line to show, and what to do."""
    there = sorted({line.dtype for one in chosen for line in lines(one)})
    if there:
        return f"nothing was measured in {args.dtype}; there is {', '.join(there)}"
    commit = args.commit or "HEAD"
    where = f" of machine {args.machine}" if args.machine else ""
    return f"no latency{where} at {commit}; asv run {commit}^! measures it"


def _runs(args: argparse.Namespace) -> list[Run]:
    """The newest run of each machine at the commit asked for, else at its newest commit."""
    folder = args.results or results_folder(Path("asv.conf.json"))
    runs, problems = load(folder, machine=args.machine)
    for problem in problems:
        print(problem)
    line = commits.ancestors(Path(), commits.resolve(Path(), args.commit or "HEAD"))
    place = {commit: at for at, commit in enumerate(line)}
    runs = [r for r in runs if r.commit in place and (not args.commit or r.commit == line[-1])]
    newest: dict[str, Run] = {}
    for one in runs:
        kept = newest.get(one.machine)
        if kept is None or place[one.commit] >= place[kept.commit]:
            newest[one.machine] = one
    return list(newest.values())


def _show(title: str, rows: list[list[str]], names: int, markdown: bool) -> None:
    """One table; its first columns are names, the others numbers. Names come from result files."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if markdown:
        print(f"{title}:\n")
        header, *rest = rows
        for row in [header, ["---"] * names + ["--:"] * (len(header) - names), *rest]:
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        print()
        return
    out = Console()
    # A file or a pipe has no width of its own.
    out.width = out.width if out.is_terminal else _WIDTH
    for block in blocks(rows, out.width) if names == 4 else [rows]:
        shown = Table(title=title, show_edge=False)
        for at, name in enumerate(block[0]):
            shown.add_column(name, justify="left" if at < names else "right", no_wrap=True)
        for row in block[1:]:
            shown.add_row(*(Text(cell) for cell in row))
        out.print(shown)
