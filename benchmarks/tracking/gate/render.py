"""A report for people in a terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..judging.verdict import Outcome, Report, Verdict, percent

# Nobody reads more, and rich takes seconds to fold thousands of long names.
_MOST_ROWS = 500

_STEPS: dict[str, list[tuple[float, str]]] = {
    "seconds": [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")],
    "bytes": [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")],
}


_SINGULAR = {
    "launches": "launch",
    "copies": "copy",
    "registers": "register",
    "instructions": "instruction",
}


def amount(value: float, unit: str) -> str:
    """A number people can read, with its unit.

    >>> amount(0.0000894, "seconds"), amount(3 * 2**20, "bytes"), amount(4, "launches")
    ('89.4 µs', '3 MiB', '4 launches')
    """
    if not math.isfinite(value):
        return "–"
    if unit == "fraction":
        return f"{100 * value:.2f} %"
    for size, name in _STEPS.get(unit, []):
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    if value == 1:
        unit = _SINGULAR.get(unit, unit)
    return f"{_digits(value)} {unit}".strip()


def _digits(x: float) -> str:
    if x == int(x) and abs(x) < 1000:
        return f"{x:.0f}"
    if x == int(x) and abs(x) >= 1000:
        return f"{x:,.0f}" if abs(x) < 1e15 else f"{x:.3g}"
    return f"{x:#.3g}".rstrip(".") if abs(x) < 1000 else f"{x:,.0f}"


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
        return f"{number} {'more' if verdict.new > verdict.old else 'less'}"
    return f"{number} {worse if verdict.slower > 0 else better}"


def detectable(verdict: Verdict) -> str:
    """The smallest change this benchmark can see, in percent."""
    if not math.isfinite(verdict.detectable):
        return "–"
    return f"{percent(verdict.detectable):.1f} %" if verdict.detectable else "any"


def why(verdict: Verdict) -> str:
    """The reason with what the reader should know of the benchmark."""
    names = [f for f in verdict.flags if not f.startswith("noise from")]
    parts = [verdict.reason, *names]
    if verdict.accepted:
        parts.append(verdict.accepted)
    elif not verdict.gating:
        parts.append("reported, not gating")
    return "; ".join(parts)


def summary(report: Report) -> str:
    """One line of counts."""
    counts = {o: len(report.of(o)) for o in Outcome}
    for outcome in (Outcome.REGRESSED, Outcome.INCONCLUSIVE):
        silent = len(report.of(outcome, gating=False))
        if silent:
            counts[outcome] -= silent
    text = ", ".join(f"{n} {o.value}" for o, n in counts.items() if n)
    quiet = [v for v in report.verdicts if not v.gating and v.outcome is not Outcome.PASS]
    if quiet:
        text += f", {len(quiet)} reported but not gating"
    return f"{report.outcome.value}: {text or 'nothing was compared'}"


def shown(report: Report, everything: bool = False) -> list[Verdict]:
    """What people should see, worst first; what applies on neither side is only counted."""
    order = [Outcome.REGRESSED, Outcome.INCONCLUSIVE, Outcome.IMPROVED, Outcome.NOT_MEASURED]
    found = [v for outcome in order for v in report.of(outcome)]
    if not everything:
        quiet = {n for names in report.apart.values() for n in names}
        found = [
            v for v in found if v.outcome is not Outcome.NOT_MEASURED or v.series.name not in quiet
        ]
    found.sort(key=lambda v: v.outcome is Outcome.REGRESSED and not v.gating)
    return found + (report.of(Outcome.PASS) if everything else [])


_COLOURS = {
    Outcome.REGRESSED: "bold red",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.IMPROVED: "green",
    Outcome.NOT_MEASURED: "dim",
    Outcome.PASS: "",
}


def terminal(report: Report, everything: bool = False, console: Console | None = None) -> None:
    """Print the report: worst first, why, then what stands apart, then one line of counts."""
    out = console or Console()
    if console is None and not out.is_terminal:
        out = Console(width=120)
    table = Table(title=f"{report.base[:8]} → {report.head[:8]}", show_edge=False, pad_edge=False)
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    rows = shown(report, everything)
    homes = {(v.series.machine, v.series.env) for v in rows}
    for v in rows[:_MOST_ROWS]:
        name = v.series.name if len(homes) < 2 else f"{v.series.machine} {v.series.name}"
        table.add_row(
            Text(v.outcome.value, style=_COLOURS[v.outcome]),
            Text.assemble(printable(name), "\n", (printable(why(v)), "dim")),
            f"{amount(v.old, v.unit)} → {amount(v.new, v.unit)}",
            change(v),
            detectable(v),
        )
    if rows:
        out.print(table)
    if len(rows) > _MOST_ROWS:
        out.print(Text(f"{len(rows) - _MOST_ROWS} more rows; --json has them all"))
    for v in [v for v in rows if v.explanation][:10]:
        out.print(Text(printable(v.series.name), style="bold"))
        for line in v.explanation:
            out.print(Text("  " + printable(line)), soft_wrap=line.startswith("repeat:"))
    for kind, names in report.apart.items():
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        out.print(Text(f"{kind}: {printable(listed)}"))
    for note in report.notes:
        out.print(Text(printable(note)))
    if report.invalid:
        out.print(Text(printable(report.invalid), style="bold yellow"))
    out.print(Text(summary(report), style="bold"))


_COLUMNS = (
    ("verdict", "left"),
    ("benchmark, and why", "left"),
    ("old → new", "right"),
    ("change", "right"),
    ("can see", "right"),
)


def printable(text: str, most: int = 500) -> str:
    """One line without control characters: names come from files that anyone may have written."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return line if len(line) <= most else line[: most - 1] + "…"
