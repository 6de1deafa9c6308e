"""What is written on GitHub. Names and texts may come from whoever wrote the pull request."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from .rights import LOGIN

LONGEST = 60_000  # GitHub takes 65,536 characters
MARK = "<!-- fused-mlp-gate "
_RECORD = re.compile(r"<!-- fused-mlp-gate (\{[^<>]*\}) -->")
_ISSUE = re.compile(r"<!-- fused-mlp-regression ([0-9a-f]{16}) -->")
_TABLE = "\n\n---\n\n"
_TAGS = frozenset({"details", "summary", "b", "i", "br", "sub", "sup", "code", "kbd"})

# outcome -> (status, what it says). Only a pass is green: an answer that nobody has is not a good
# one.
_SAYS = {
    "pass": ("success", "no regression"),
    "improved": ("success", "no regression, some improvements"),
    "regressed": ("failure", "regressed"),
    "inconclusive": ("error", "inconclusive: too noisy to tell, run it again"),
    "not measured": ("error", "nothing was measured"),
    "broken": ("error", "the measurement broke: says nothing about this change"),
}
# A person may take responsibility for a regression or a doubt, not for a measurement nobody made.
_ACCEPTABLE = frozenset({"regressed", "inconclusive"})


def plain(text: object, most: int = 120) -> str:
    """One line that no renderer makes anything of, cut to ``most`` characters.

    >>> plain("<b>@all</b>")
    '?b??all?/b?'
    """
    line = re.sub(r"[^A-Za-z0-9 _.,:;+=/()'%×→–·µ-]", "?", str(text))
    return line if len(line) <= most else line[: most - 1] + "…"


def harmless(markdown: str, most: int = LONGEST) -> str:
    """Markdown that names nobody, loads nothing, links nowhere and hides nothing; cut at a line."""
    text = markdown.replace("\r", "").replace("\x00", "")
    text = re.sub(r"<!--.*?(-->|\Z)", "", text, flags=re.DOTALL)
    text = re.sub(r"<(/?)([A-Za-z][A-Za-z0-9]*)[^>]*>", _tag, text)
    text = re.sub(r"<(?!/?(?:" + "|".join(sorted(_TAGS)) + r")>)", "&lt;", text)
    text = text.replace("](", "]\\(").replace("![", "!\\[").replace("]:", "]\\:")
    # A zero-width space: reads the same, but calls nobody and refers to no issue.
    text = re.sub(r"([@#])(?=[A-Za-z0-9])", "\\1\u200b", text)
    text = re.sub(r"(?i)\b(https?|ftp|mailto|javascript|data):(?=\S)", "\\1\u200b:", text)
    text = re.sub(r"(?i)\bwww\.", "www\u200b.", text)
    if len(text.encode()) <= most:
        return text
    cut = text.encode()[: most - 200].decode("utf-8", "ignore")
    cut = cut[: cut.rfind("\n") + 1] if "\n" in cut else cut
    if cut.count("```") % 2:
        cut += "```\n"
    cut += "</details>" * max(0, cut.count("<details>") - cut.count("</details>"))
    return cut + "\n\nCut here: the run's artifact holds all of it.\n"


def _tag(found: re.Match[str]) -> str:
    name = found[2].lower()
    return f"<{found[1]}{name}>" if name in _TAGS else ""


def state(record: dict[str, Any]) -> tuple[str, str]:
    """The commit status of a recorded verdict: (state, description)."""
    status, text = _SAYS.get(record["outcome"], _SAYS["broken"])
    if record.get("accepted_by") and record["outcome"] in _ACCEPTABLE:
        return "success", f"{record['outcome']}, accepted by {record['accepted_by']}"
    return status, text


def comment(record: dict[str, Any], table: str) -> str:
    """A pull request's comment: its record for programs, its verdict in words, the gate's table."""
    return _head(record) + _TABLE + harmless(table, LONGEST - 2_000)


def _head(record: dict[str, Any]) -> str:
    status, text = state(record)
    sign = {"success": "✅", "failure": "❌"}.get(status, "⚠️")
    lines = [
        f"{MARK}{json.dumps(record)} -->",
        f"{sign} **perf/gate: {plain(text)}** for {record['head'][:12]}",
    ]
    if record.get("accepted_by"):
        lines.append(
            f"\nThe label `perf-accepted` was set by {record['accepted_by']}"
            + ("." if record["outcome"] in _ACCEPTABLE else "; there was nothing to accept.")
        )
    if re.fullmatch(r"https://[A-Za-z0-9./_-]+", record.get("run") or ""):
        lines.append(f"\n[The run]({record['run']}) holds samples, log and machine readings.")
    return "\n".join(lines)


def record(body: str) -> dict[str, Any] | None:
    """The verdict recorded in a comment of ours; None where it is no longer whole."""
    found = _RECORD.search(body)
    try:
        data = json.loads(found[1]) if found else None
    except ValueError:
        return None
    if not isinstance(data, dict) or data.get("outcome") not in _SAYS:
        return None
    if not re.fullmatch(r"[0-9a-f]{40,64}", str(data.get("head"))):
        return None
    login = str(data.get("accepted_by") or "")
    return {**data, "accepted_by": login if LOGIN.fullmatch(login) else ""}


def with_record(body: str, changed: dict[str, Any]) -> str:
    """The comment with another record over the same table."""
    _, separator, table = body.partition(_TABLE)
    return _head(changed) + separator + table


def _series(each: dict[str, Any]) -> tuple[str, str, str, str]:
    nested = each.get("series")
    series: dict[str, Any] = nested if isinstance(nested, dict) else each
    params = series.get("params") or []
    listed = ", ".join(map(str, params)) if isinstance(params, (list, tuple)) else str(params)
    return (
        str(series.get("machine", "")),
        str(series.get("env", "")),
        str(series.get("benchmark", "")),
        listed,
    )


def key(each: dict[str, Any]) -> str:
    """What an issue is about, as a hash: machine, environment, benchmark and parameters."""
    return hashlib.sha256("\0".join(_series(each)).encode()).hexdigest()[:16]


def issue_key(body: str) -> str:
    """The key an issue carries, or nothing."""
    found = _ISSUE.search(body)
    return found[1] if found else ""


def title(each: dict[str, Any]) -> str:
    machine, _, benchmark, params = _series(each)
    named = f"{benchmark}({params})" if params else benchmark
    return plain(f"Slower or hungrier: {named} on {machine}", 200)


def _amount(each: dict[str, Any]) -> str:
    unit = plain(each.get("unit", ""), 20)
    values = [each.get(side) for side in ("old", "new")]
    if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
        return "not known"
    percent = each.get("percent")
    worse = f" ({percent:+.1f} %)" if isinstance(percent, (int, float)) else ""
    return f"{values[0]:.6g} → {values[1]:.6g} {unit}{worse}"


def issue(each: dict[str, Any], report: dict[str, Any]) -> str:
    """The body of a regression's issue; the same regression gives the same text."""
    machine, environment, benchmark, params = _series(each)
    lines = [
        f"<!-- fused-mlp-regression {key(each)} -->",
        f"**{plain(benchmark)}** {plain(params, 200)}".rstrip(),
        "",
        f"- machine: {plain(machine)}, {plain(environment)}",
        f"- {plain(each.get('metric', 'value'))}: {_amount(each)}",
        f"- between {plain(_range(each, report, 'base'), 40)} and "
        f"{plain(_range(each, report, 'head'), 40)}",
        f"- {plain(each.get('reason', ''), 300)}",
    ]
    explanation = each.get("explanation") or []
    if isinstance(explanation, (list, tuple)):
        lines += [f"- {plain(line, 300)}" for line in explanation[:10]]
    lines += ["", "Closed by itself when it recovers; close as not planned to live with it."]
    return "\n".join(lines)


def _range(each: dict[str, Any], report: dict[str, Any], side: str) -> str:
    return str(each.get(side) or report.get(side) or "")[:12]


def recovered(each: dict[str, Any], report: dict[str, Any]) -> str:
    return f"Recovered at {plain(_range(each, report, 'head'), 40)}: {_amount(each)}"
