"""What was measured, for people (a table, a difference, a picture) and for programs (JSON)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

import torch

from ..plan import comparison
from .measure import Measured
from .rung import Setting


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"


def _mb(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:.1f}"


def table(results: Sequence[Measured], setting: Setting) -> str:
    """One line a rung: expectation beside what was seen; a mismatch is marked with ✗ and
    explained below."""
    s = setting
    unit = s.unit
    header = [
        "rung",
        f"{unit}",
        "expected",
        "",
        "GEMMs",
        "time ms",
        "against eager",
        "host ms",
        "device ms",
        "launches",
        "moved MB",
        "least MB",
        "peak MB",
        "saved MB",
        "energy J",
    ]
    base = next((r for r in results if r.rung.name in ("eager", "matmul + add")), None)
    rows, notes = [], []
    for r in results:
        rung = r.rung
        if rung.missing:
            rows.append([rung.name, "–", _expected(rung.expected), "", "–", "–", rung.missing])
            continue
        wrong = r.mismatches(s)
        if wrong:
            reason = f"Expected because {rung.why}; seen: {_names(r)}"
            notes.append(f"✗ {rung.name}: {'; '.join(wrong)}. {reason}")
        computed = "" if callable(rung.traffic) or rung.traffic is None else "*"
        single = rung.name in ("linear", "compiled linear")
        rows.append(
            [
                rung.name,
                str(r.count),
                _expected(rung.expected),
                "✗" if wrong else "✓",
                str(r.gemms),
                _ms(r.latency),
                "–" if single else _versus(r, base),
                _ms(r.host),
                _ms(r.device),
                "–" if r.launches is None else str(r.launches),
                _mb(r.moved) + computed,
                _mb(rung.least_bytes),
                _mb(r.peak),
                _mb(r.saved),
                "–" if r.energy is None else f"{r.energy:.3f}",
            ]
        )
    lines = [
        f"{s.tokens} tokens, {s.hidden}/{s.intermediate}, {s.activation}, {str(s.dtype)[6:]}, "
        f"{_where(s)}, {'forward and backward' if s.training else 'inference'}; "
        "times are medians, 'same' is within their noise",
        "",
        *_aligned([header, *rows]),
        "",
        "What each rung is, and why so many were expected before it ran:",
        *(line for r in results for line in _legend(r)),
    ]
    if s.device == "cpu":
        lines += [
            "",
            "On a CPU nothing is launched: operators that compute are counted in the place of "
            "kernels.",
        ]
    if s.training:
        lines += ["Bytes moved are those of forward alone."]
    if any(not callable(r.rung.traffic) and r.moved for r in results):
        lines += ["* computed: a dispatch mode cannot look inside this rung."]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _where(s: Setting) -> str:
    """The device, and where it matters its threads."""
    threads = torch.get_num_threads()
    return s.device if s.device == "cuda" else f"cpu, {threads} thread{'s' * (threads > 1)}"


def _legend(r: Measured) -> list[str]:
    text = f"{r.rung.name}: {r.rung.text}. {r.rung.why[0].upper()}{r.rung.why[1:]}."
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ")


def _versus(r: Measured, base: Measured | None) -> str:
    """In words; "same" where the calls of one took as long as those of the other."""
    if base is None or r is base or not (r.latency and base.latency):
        return "–"
    if base.low <= r.latency <= base.high or r.low <= base.latency <= r.high:
        return "same"
    return comparison(base.latency / r.latency)


def _expected(number: int | None) -> str:
    return "any" if number is None else str(number)


def _names(r: Measured) -> str:
    return ", ".join(f"{k.count}× {k.name}" for k in r.kernels)


def _aligned(rows: list[list[str]]) -> list[str]:
    columns = max(map(len, rows))
    short = [row for row in rows if len(row) == columns]
    empty = {i for i in range(7, columns) if all(row[i] == "–" for row in short[1:])}
    rows = [
        [c for i, c in enumerate(row) if i not in empty] if len(row) == columns else row
        for row in rows
    ]
    columns -= len(empty)
    short = [row for row in rows if len(row) == columns]
    widths = [max(len(row[i]) for row in short) for i in range(columns)]
    widths[0] = max(len(row[0]) for row in rows)
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i in (0, 3) else c.rjust(w)
            for i, (c, w) in enumerate(zip(row[:6], widths, strict=False))
        ]
        if len(row) < columns:
            lines.append("  ".join(cells) + "  " + " ".join(row[6:]))
            continue
        cells += [c.rjust(w) for c, w in zip(row[6:], widths[6:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def diff(a: Measured, b: Measured, setting: Setting) -> str:
    """What changed from one rung to another: kernels gone, kernels new, and the totals."""
    left, right = ({k.name: k for k in r.kernels} for r in (a, b))
    rows = [["", a.rung.name, b.rung.name, ""]]
    for name in dict.fromkeys([*left, *right]):
        x, y = left.get(name), right.get(name)
        word = (
            "gone" if y is None else "new" if x is None else "" if x.count == y.count else "changed"
        )
        rows.append(
            [
                name[:60],
                *(f"{k.count}× {k.microseconds:.0f} µs" if k else "–" for k in (x, y)),
                word,
            ]
        )
    rows.append([f"all {setting.unit}", str(a.count), str(b.count), ""])
    if a.latency and b.latency:
        rows.append(
            [
                "time of one call, ms",
                _ms(a.latency),
                _ms(b.latency),
                _versus(b, a),
            ]
        )
    for text, key in (("moved, MB", "moved"), ("peak, MB", "peak"), ("saved, MB", "saved")):
        rows.append([text, _mb(getattr(a, key)), _mb(getattr(b, key)), ""])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]}".rstrip()
        for r in rows
    )


_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")


def picture(results: Sequence[Measured], setting: Setting) -> str:
    """An SVG: a bar a rung, as long as its kernels' time, each kernel a piece; no library
    needed."""
    shown = [r for r in results if r.rung.missing is None]
    longest = max((sum(k.microseconds for k in r.kernels) for r in shown), default=1) or 1
    width, left, step = 1000, 170, 44
    height = 60 + step * len(shown)
    colours: dict[str, str] = {}
    body = []
    for i, r in enumerate(shown):
        y, at = 40 + i * step, float(left)
        body.append(
            f'<text x="{left - 8}" y="{y + 19}" text-anchor="end">{escape(r.rung.name)}</text>'
        )
        for k in r.kernels:
            w = (width - left - 120) * k.microseconds / longest
            colour = colours.setdefault(k.name, _COLOURS[len(colours) % len(_COLOURS)])
            label = escape(f"{k.count}× {k.name}: {k.microseconds / 1e3:.3f} ms")
            body.append(
                f'<rect x="{at:.1f}" y="{y}" width="{w:.1f}" height="28" fill="{colour}" '
                f'stroke="white">'
                f"<title>{label}</title></rect>"
            )
            at += w
        total = sum(k.microseconds for k in r.kernels) / 1e3
        body.append(
            f'<text x="{at + 6:.1f}" y="{y + 19}">{total:.2f} ms, {r.count} {setting.unit}</text>'
        )
    s = setting
    title = f"{s.tokens} tokens, {s.hidden}/{s.intermediate}, {str(s.dtype)[6:]}, {s.device}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="13"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="12" y="24">{escape(title)}: '
        f"time of each of the {setting.unit}</text>{''.join(body)}</svg>\n"
    )


def to_json(results: Sequence[Measured], setting: Setting) -> dict[str, Any]:
    """All numbers; times in seconds, sizes in bytes."""
    return {
        "setting": {**vars(setting), "dtype": str(setting.dtype)[6:]},
        "unit": setting.unit,
        "rungs": [
            {
                "name": r.rung.name,
                "expected": r.rung.expected,
                "expected_gemms": r.rung.gemms,
                "why": r.rung.why,
                "missing": r.rung.missing,
                "mismatches": r.mismatches(setting),
                "kernels": [vars(k) for k in r.kernels],
                "count": r.count,
                "latency": r.latency,
                "fastest": r.low,
                "slowest": r.high,
                "host": r.host,
                "device": r.device,
                "launches": r.launches,
                "moved": r.moved,
                "least": r.rung.least_bytes,
                "peak": r.peak,
                "saved": r.saved,
                "energy": r.energy,
            }
            for r in results
        ],
    }
