"""A report as Markdown, JSON, JUnit XML and GitHub annotations. README.md documents the JSON."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

from ..judging.verdict import Outcome, Report, Verdict, percent
from .render import amount, change, detectable, printable, shown, summary, why

SCHEMA = 1
# GitHub takes 65,536 characters in a comment; the rest is room for whoever posts it.
LARGEST = 60_000
_OPEN_ROWS = 10
# GitHub shows ten annotations of a kind for a step.
_MOST_ANNOTATIONS = 10


def as_json(report: Report) -> str:
    """The whole report for programs; numbers that are not finite become null."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "outcome": report.outcome.value,
            "exit_code": report.exit_code,
            "base": report.base,
            "head": report.head,
            "invalid": report.invalid,
            "counts": {o.value: len(report.of(o)) for o in Outcome},
            "verdicts": [_verdict(v) for v in report.verdicts],
            "apart": {why: list(names) for why, names in report.apart.items()},
            "notes": list(report.notes),
        },
        indent=1,
    )


def _verdict(v: Verdict) -> dict[str, Any]:
    return {
        "machine": v.series.machine,
        "env": v.series.env,
        "benchmark": v.series.benchmark,
        "params": list(v.series.params),
        "metric": v.metric,
        "unit": v.unit,
        "kind": v.kind,
        "outcome": v.outcome.value,
        "gating": v.gating,
        "reason": v.reason,
        "old": _finite(v.old),
        "new": _finite(v.new),
        "percent": _finite(v.percent),
        "noise_percent": _finite(percent(v.noise)),
        "detectable_percent": _finite(percent(v.detectable)),
        "rerun_wanted": v.rerun,
        "flags": list(v.flags),
        "accepted": v.accepted,
        "explanation": list(v.explanation),
        **({"base": v.base, "head": v.head} if v.base or v.head else {}),
    }


def _finite(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


def markdown(report: Report, largest: int = LARGEST) -> str:
    """For a pull request: worst first, folded after ten, never above `largest` bytes."""
    head = [f"### {md(summary(report))}", ""]
    if report.invalid:
        head += [f"**{md(report.invalid)}**", ""]
    head += [f"`{report.base[:12]}` → `{report.head[:12]}`", ""]
    tail = []
    for kind, names in report.apart.items():
        listed = ", ".join(md(n) for n in names[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        tail.append(f"- {kind}: {listed}{more}")
    tail += [f"- {md(n)}" for n in report.notes[:20]]
    verdicts = shown(report)
    told = []
    for v in [v for v in verdicts[:3] if v.explanation]:
        told += [f"**{md(v.series.name)}**", "", *(f"- {_line(e)}" for e in v.explanation), ""]
    room = largest - _size(head) - _size(tail) - _size(told) - 2_000
    kept: list[str] = []
    for block in map(_row, verdicts):
        room -= len(block.encode()) + 1
        if room < 0:
            break
        kept.append(block)
    lines = list(head)
    if kept:
        lines += [*_HEADER, *kept[:_OPEN_ROWS], ""]
    lines += told
    if len(kept) > _OPEN_ROWS:
        lines += [f"<details><summary>{len(kept) - _OPEN_ROWS} more</summary>", ""]
        lines += [*_HEADER, *kept[_OPEN_ROWS:], "", "</details>", ""]
    if len(kept) < len(verdicts):
        lines += [f"{len(verdicts) - len(kept)} more rows would not fit; the JSON has them.", ""]
    text = "\n".join(lines + tail) + "\n"
    if len(text.encode()) > largest:  # only explanations and notes can still be too long
        text = text.encode()[: largest - 40].decode("utf-8", "ignore").rsplit("\n", 1)[0]
        text += "\n</details>\n" * (text.count("<details>") - text.count("</details>")) + "\n"
    return text


_HEADER = [
    "| verdict | benchmark | old | new | change | can see | why |",
    "|---|---|--:|--:|--:|--:|---|",
]


def _line(text: str) -> str:
    """One line of an explanation; a command stays copyable, in a code span it cannot leave."""
    kind, colon, command = text.partition(": ")
    if kind == "repeat" and colon:
        return f"repeat: `` {printable(command).replace('`', '?')} ``"
    return md(text)


def _size(lines: list[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _row(v: Verdict) -> str:
    cells = [
        v.outcome.value,
        md(v.series.name),
        md(amount(v.old, v.unit)),
        md(amount(v.new, v.unit)),
        md(change(v)),
        detectable(v),
        md(why(v)),
    ]
    return f"| {' | '.join(cells)} |"


def md(text: str) -> str:
    """Text that Markdown and HTML take literally; nobody is called by name.

    >>> md("a|b <img> *x* @you")
    'a\\\\|b &lt;img&gt; \\\\*x\\\\* @\\u200byou'
    """
    line = printable(text)
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*_{}\[\]|~#!])", r"\\\1", line)
    return re.sub(r"(?i)(@|\bhttps?|\bwww)(?=[A-Za-z0-9:.])", "\\1\u200b", line)


def junit(report: Report) -> str:
    """JUnit XML: a regression is a failure, a doubt an error, what was not measured skipped."""
    suite = ElementTree.Element("testsuite", name="performance")
    counts = {"failure": 0, "error": 0, "skipped": 0}
    for v in report.verdicts:
        case = ElementTree.SubElement(
            suite, "testcase", classname=xml(v.series.machine), name=xml(v.series.name)
        )
        tag = {
            Outcome.REGRESSED: "failure",
            Outcome.INCONCLUSIVE: "error",
            Outcome.NOT_MEASURED: "skipped",
        }.get(v.outcome)
        text = f"{amount(v.old, v.unit)} → {amount(v.new, v.unit)}, {change(v)}: {why(v)}"
        if tag in ("failure", "error") and not v.gating:
            ElementTree.SubElement(case, "system-out").text = xml(text)
        elif tag:
            counts[tag] += 1
            node = ElementTree.SubElement(case, tag, message=xml(text))
            node.text = xml("\n".join(v.explanation))
    if report.invalid or not report.verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname="run", name="the run itself")
        counts["error"] += 1
        reason = report.invalid or "nothing was compared"
        ElementTree.SubElement(case, "error", message=xml(reason))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def xml(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold."""
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def github(report: Report) -> str:
    """GitHub workflow commands: errors for regressions, warnings for doubts, worst first."""
    lines = []
    for outcome, level in ((Outcome.REGRESSED, "error"), (Outcome.INCONCLUSIVE, "warning")):
        for v in report.of(outcome, gating=True)[:_MOST_ANNOTATIONS]:
            title = _property(f"{v.outcome.value}: {printable(v.series.name, 120)}")
            text = f"{amount(v.old, v.unit)} → {amount(v.new, v.unit)}, {change(v)}: {why(v)}"
            lines.append(f"::{level} title={title}::{_data(printable(text))}")
    if report.invalid:
        lines.append(f"::error title=invalid run::{_data(printable(report.invalid))}")
    return "".join(line + "\n" for line in lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
