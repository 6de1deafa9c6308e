"""What was measured, for people (a table, a difference, a picture) and for programs (JSON)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from ..plan import comparison
from .measure import Kernel, Measured
from .rung import Setting


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"


def _mb(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:.1f}"


@dataclass(frozen=True)
class _Column:
    """Two lines of heading over a rung's cells; ``absent``: why a whole column may be empty."""

    top: str
    bottom: str
    cell: Callable[[Measured], str]
    left: bool = False
    absent: str = ""


def _columns(s: Setting, base: Measured | None) -> list[_Column]:
    no_device = (
        f"device time, launches ({'a CPU has neither' if s.device == 'cpu' else 'no CUPTI'})"
    )
    energy = "no energy counter is read on a CPU" if s.device == "cpu" else "NVML gives none"
    return [
        _Column("", "rung", lambda r: r.rung.name, left=True),
        _Column(s.unit, "seen", lambda r: str(r.count) if r.kernels else "–"),
        _Column("", "expected", lambda r: _expected(r.rung.expected)),
        _Column("GEMMs", "seen", lambda r: str(r.gemms) if r.kernels else "–"),
        _Column("", "expected", lambda r: _expected(r.rung.gemms)),
        _Column("", "", lambda r: "✗" if r.mismatches(s) else "✓", left=True),
        _Column("time", "ms", lambda r: _ms(r.latency)),
        _Column("against", base.rung.name if base else "eager", lambda r: "–" if _single(r) else _versus(r, base)),
        _Column("host", "ms", lambda r: _ms(None if s.device == "cpu" else r.host)),
        _Column("device", "ms", lambda r: _ms(r.device), absent=no_device),
        _Column("", "launches", lambda r: "–" if r.launches is None else str(r.launches)),
        _Column("moved", "MB", lambda r: _mb(r.moved) + ("*" if _computed(r) else "")),
        _Column("least", "MB", lambda r: _mb(r.rung.least_bytes)),
        _Column("peak", "MB", lambda r: _mb(r.peak)),
        _Column(
            "saved", "MB", lambda r: _mb(r.saved), absent="saved bytes (inference keeps nothing)"
        ),
        _Column(
            "energy", "J", lambda r: "–" if r.energy is None else f"{r.energy:.3f}",
            absent=f"energy ({energy})",
        ),
    ]  # fmt: skip


_IN_PLACE = (
    "On a CPU nothing is launched: operators that compute are counted in the place of kernels."
)
# Every rung has these, or says that it did not run.
_ALWAYS = 6


def table(results: Sequence[Measured], setting: Setting) -> str:
    """One line a rung: expectation beside what was seen; a mismatch is marked with ✗ and
    explained below."""
    s = setting
    base = next((r for r in results if r.rung.name in ("eager", "matmul + add")), None)
    ran = [r for r in results if not r.rung.missing]
    shown, absent = [], []
    for at, column in enumerate(_columns(s, base)):
        if at < _ALWAYS or any(column.cell(r) != "–" for r in ran):
            shown.append(column)
        elif column.absent and ran:
            absent.append(column.absent)
    mode = "forward and backward" if s.training else "inference"
    act = "" if base and base.rung.name == "matmul + add" else f"{s.activation}, "
    lines = [
        f"{s.tokens} tokens, {s.hidden}/{s.intermediate}, {act}{str(s.dtype)[6:]}, {_where(s)}, {mode}",
        "",
        *_aligned(results, shown),
        "",
        *([_IN_PLACE] if s.device == "cpu" else []),
        *_wrapped("time: median of calls without a profiler; 'same' is within their noise.", ""),
        *_wrapped(
            "moved: bytes that the operators read and write"
            + (", of forward alone" if s.training else "")
            + ", as if no cache helped; least: if each tensor moved once; peak: the most allocated "
            "at once beyond weights and input"
            + ("; saved: kept for backward, parameters apart." if s.training else "."),
            "",
        ),
    ]
    if any(_computed(r) for r in ran):
        lines += ["* computed: a dispatch mode cannot look inside this rung."]
    if absent:
        lines += _wrapped(f"Not measured: {', '.join(absent)}.", "")
    lines += ["", "What each rung is, and why so many were expected before it ran:"]
    lines += [line for r in results for line in _legend(r)]
    notes = [_note(r, s) for r in ran if r.mismatches(s)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _single(r: Measured) -> bool:
    """One layer, not an MLP: not to be compared with one."""
    return r.rung.name in ("linear", "compiled linear")


def _computed(r: Measured) -> bool:
    return r.moved is not None and not callable(r.rung.traffic)


def _note(r: Measured, s: Setting) -> str:
    wrong = "; ".join(r.mismatches(s))
    return "\n".join(
        _wrapped(
            f"✗ {r.rung.name}: {wrong}. Expected: {r.rung.why}. Seen: {_names(r) or 'none'}", "  "
        )
    )


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent=indent)


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


def _aligned(results: Sequence[Measured], columns: Sequence[_Column]) -> list[str]:
    rows = [[c.top for c in columns], [c.bottom for c in columns]]
    rows += [[c.cell(r) for c in columns] for r in results if not r.rung.missing]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    widths[0] = max(widths[0], *(len(r.rung.name) for r in results))

    def line(cells: Sequence[str]) -> str:
        both = zip(cells, widths, columns, strict=False)
        return "  ".join(x.ljust(w) if c.left else x.rjust(w) for x, w, c in both).rstrip()

    lines = [line(row) for row in rows[:2]]
    for r in results:
        reason = r.rung.missing
        if reason is None:
            lines.append(line([c.cell(r) for c in columns]))
            continue
        expected = _expected(r.rung.expected), "–", _expected(r.rung.gemms)
        failed = reason.startswith("failed: ")
        text = reason if failed else f"not run: {reason}"
        lines.append(f"{line([r.rung.name, '–', *expected])}     {text}")
    return lines


def diff(a: Measured, b: Measured, setting: Setting) -> str:
    """What changed from one rung to another: kernels gone, kernels new, and the totals."""
    left, right = ({k.name: k for k in r.kernels} for r in (a, b))
    rows = [[f"{setting.unit}, and their time in one profiled call", a.rung.name, b.rung.name, ""]]
    for name in dict.fromkeys([*left, *right]):
        x, y = left.get(name), right.get(name)
        word = (
            "gone" if y is None else "new" if x is None else "" if x.count == y.count else "changed"
        )
        cells = (f"{k.count}× {k.microseconds:.0f} µs" if k else "–" for k in (x, y))
        rows.append([name[:60], *cells, word])
    rows.append([f"all {setting.unit}", str(a.count), str(b.count), ""])
    totals: list[tuple[str, str, Callable[[Any], str]]] = [
        ("time of one call, ms", "latency", _ms),
        ("device time, ms", "device", _ms),
        ("launches", "launches", str),
        ("moved, MB", "moved", _mb),
        ("peak, MB", "peak", _mb),
        ("saved for backward, MB", "saved", _mb),
        ("energy, J", "energy", lambda joules: f"{joules:.3f}"),
    ]
    for text, key, words in totals:
        x, y = getattr(a, key), getattr(b, key)
        if x is not None or y is not None:
            cells = ("–" if v is None else words(v) for v in (x, y))
            rows.append([text, *cells, _versus(b, a) if key == "latency" else ""])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]}".rstrip()
        for r in rows
    )


# GEMMs in blues, all else in other colours; what is beyond them is grey.
_BLUES = ("#1f4e79", "#2e75b6", "#6fa8dc", "#a9cce3")
_OTHERS = (
    "#f58518", "#54a24b", "#e45756", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6", "#72b7b2",
    "#7f3c8d", "#a5aa99",
)  # fmt: skip
_GREY = "#bab0ac"


def picture(results: Sequence[Measured], setting: Setting) -> str:
    """An SVG: a bar a rung, as long as its kernels' time, each kernel a piece; no library
    needed."""
    longest = max((sum(k.microseconds for k in r.kernels) for r in results), default=0) or 1
    width, left, words, step = 1000, 170, 190, 40
    colours = _colours([k for r in results for k in r.kernels])
    body = []
    for i, r in enumerate(results):
        y, at = 64 + i * step, float(left)
        name = escape(r.rung.name)
        body.append(f'<text x="{left - 8}" y="{y + 18}" text-anchor="end">{name}</text>')
        if r.rung.missing:
            text = escape(f"not run: {r.rung.missing}"[:110])
            body.append(f'<text x="{left}" y="{y + 18}" fill="#666">{text}</text>')
            continue
        for k in r.kernels:
            w = (width - left - words) * k.microseconds / longest
            label = escape(f"{k.count}× {k.name}: {k.microseconds / 1e3:.3f} ms")
            body.append(
                f'<rect x="{at:.1f}" y="{y}" width="{w:.1f}" height="26" '
                f'fill="{colours[k.name]}" stroke="white"><title>{label}</title></rect>'
            )
            at += w
        total = sum(k.microseconds for k in r.kernels) / 1e3
        unit = setting.unit[:-1] if r.count == 1 else setting.unit
        text = f"{total:.2f} ms, {r.count} {unit}"
        body.append(f'<text x="{at + 6:.1f}" y="{y + 18}">{text}</text>')
    top = 64 + step * len(results) + 18
    for i, (name, colour) in enumerate(colours.items()):
        x, y = 12 + i % 2 * width // 2, top + i // 2 * 20
        body.append(
            f'<path d="M{x} {y - 10}h12v12h-12z" fill="{colour}"/>'
            f'<text x="{x + 18}" y="{y}">{escape(name[:64])}</text>'
        )
    height = top + (len(colours) + 1) // 2 * 20
    s = setting
    mode = "forward and backward" if s.training else "inference"
    title = (
        f"{s.tokens} tokens, {s.hidden}/{s.intermediate}, {s.activation}, {str(s.dtype)[6:]}, "
        f"{_where(s)}, {mode}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="13"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>'
        f'<text x="12" y="44" fill="#666">time of each of the {s.unit} in one profiled call; '
        f"GEMMs are blue</text>{''.join(body)}</svg>\n"
    )


def _colours(kernels: Sequence[Kernel]) -> dict[str, str]:
    """A colour a name, in the order of first sight."""
    found: dict[str, str] = {}
    blues, others = iter(_BLUES), iter(_OTHERS)
    for k in kernels:
        if k.name not in found:
            found[k.name] = next(blues if k.gemm else others, _GREY)
    return found


def to_json(results: Sequence[Measured], setting: Setting) -> dict[str, Any]:
    """All numbers; times in seconds, sizes in bytes."""
    return {
        "setting": {**vars(setting), "dtype": str(setting.dtype)[6:]},
        "unit": setting.unit,
        "units": {
            "times": "seconds",
            "microseconds": "of one profiled call",
            "sizes": "bytes",
            "energy": "joules",
        },
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
