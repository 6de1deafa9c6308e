"""A report for people in a terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .verdict import Outcome, Report, Verdict

_STEPS = {
    "seconds": [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")],
    "bytes": [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")],
}


def amount(value: float, unit: str) -> str:
    """A number people can read, with its unit.

    >>> amount(0.0000894, "seconds"), amount(3 * 2**20, "bytes"), amount(4, "launches")
    ('89.4 µs', '3.00 MiB', '4 launches')
    """
    if not math.isfinite(value):
        return "–"
    for size, name in _STEPS.get(unit, []):
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    return f"{_digits(value)} {unit}".strip()


def _digits(x: float) -> str:
    if x == int(x) and abs(x) < 1e6 and abs(x) != 0 and abs(x) < 10:
        return f"{x:.0f}" if abs(x) < 1000 and x == int(x) else f"{x:.2f}"
    if x == int(x) and abs(x) < 1e15:
        return f"{x:.0f}"
    return f"{x:#.3g}" if abs(x) < 1000 else f"{x:.5g}"


def change(verdict: Verdict) -> str:
    """`8.2 % slower`, `2 launches more`; never a bare ratio."""
    if not math.isfinite(verdict.slower):
        difference = verdict.new - verdict.old
        if not math.isfinite(difference):
            return "–"
        return f"{_digits(abs(difference))} {'more' if difference > 0 else 'less'}"
    if verdict.slower == 0:
        return "same"
    size = abs(verdict.percent)
    number = f"{size:.1f} %" if size < 100 else f"{1 + size / 100:.3g}×"
    worse, better = ("slower", "faster") if verdict.unit == "seconds" else ("worse", "better")
    if verdict.kind == "exact":
        worse, better = ("more", "less")
    return f"{number} {worse if verdict.slower > 0 else better}"


def terminal(report: Report, everything: bool = False, console: Console | None = None) -> None:
    """Print the report: worst first, then what could not be judged, then one line of counts."""
    out = console or Console()
    if not out.is_terminal:
        out = console or Console(width=140)
    shown = [Outcome.REGRESSED, Outcome.INCONCLUSIVE, Outcome.IMPROVED, Outcome.NOT_MEASURED]
    if everything:
        shown.append(Outcome.PASS)
    table = Table(title=f"{report.base[:8]} → {report.head[:8]}", show_edge=False, pad_edge=False)
    for name, justify in (
        ("verdict", "left"),
        ("benchmark", "left"),
        ("old", "right"),
        ("new", "right"),
        ("change", "right"),
        ("can see", "right"),
        ("why", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for outcome in shown:
        for v in report.of(outcome):
            see = f"{100 * math.expm1(v.detectable):.1f} %" if math.isfinite(v.detectable) else "–"
            table.add_row(
                v.outcome.value,
                escape(v.series.name),
                amount(v.old, v.unit),
                amount(v.new, v.unit),
                change(v),
                see,
                escape(v.reason),
            )
    if table.row_count:
        out.print(table)
    for note in report.notes:
        out.print(escape(note), highlight=False)
    counts = {o: len(report.of(o)) for o in Outcome}
    out.print(
        f"{report.outcome.value}: " + ", ".join(f"{n} {o.value}" for o, n in counts.items() if n),
        highlight=False,
    )
