"""Outputs: worst first, folded, never too long, and hostile names taken literally."""

from __future__ import annotations

import io
import json
import math
import xml.etree.ElementTree as ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.tracking.gate import formats
from benchmarks.tracking.gate.render import amount, change, terminal
from benchmarks.tracking.judging.verdict import Outcome, Report, Series, Verdict

HOSTILE = "<img src=x onerror=a()>|`x` [red]*b* @everyone ::error::\x1b[31m\n# head %0A"


def verdict(name: str = "a.B.track_latency", slower: float = 0.1, **more) -> Verdict:
    outcome = more.pop("outcome", Outcome.REGRESSED)
    series = Series("box", "env", name, more.pop("params", ()))
    return Verdict(
        series, "latency", "seconds", "sampled", outcome, "why", 1e-3, 1.1e-3, slower, **more
    )


def test_markdown_is_worst_first_and_folds_after_ten() -> None:
    many = [verdict(f"b{i:02}.B.track_latency", i / 100) for i in range(1, 15)]
    text = formats.markdown(Report("a" * 40, "b" * 40, tuple(many)))
    open_part, folded = text.split("<details><summary>4 more</summary>")
    assert open_part.count("| regressed |") == 10
    assert folded.count("| regressed |") == 4
    assert open_part.index("b14.B") < open_part.index("b05.B")
    assert "b04.B" in folded


def test_markdown_never_passes_60_kb_and_says_what_is_missing() -> None:
    many = [verdict(f"{i}" + "é" * 400, explanation=("y" * 500,) * 9) for i in range(2000)]
    notes = tuple("n" * 500 for _ in range(500))
    text = formats.markdown(Report("a", "b", tuple(many), notes))
    assert len(text.encode()) <= formats.LARGEST
    assert "would not fit" in text
    assert text.count("<details>") == text.count("</details>")


def test_hostile_names_are_taken_literally() -> None:
    report = Report("a", "b", (verdict(HOSTILE, explanation=(f"repeat: {HOSTILE}",)),), (HOSTILE,))
    text = formats.markdown(report)
    outside = [line for line in text.splitlines() if "repeat:" not in line]
    assert "<img" not in "\n".join(outside)
    assert "@everyone" not in "\n".join(outside)
    row = next(line for line in outside if line.startswith("| regressed"))
    assert row.replace("\\|", "").count("|") == 8
    assert not any(line.startswith("# head") for line in text.splitlines())
    tree = ElementTree.fromstring(formats.junit(report))
    assert "<img src=x" in (tree.find("testcase").get("name") or "")
    lines = formats.github(report).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("::error title=")
    out = io.StringIO()
    terminal(report, console=Console(file=out, width=200))
    assert "[red]" in out.getvalue()
    assert "\x1b[31m" not in out.getvalue()


def test_json_has_no_number_that_json_has_not() -> None:
    report = Report("a", "b", (verdict(slower=math.inf, noise=math.nan, detectable=1e6),))

    def no_constant(name: str) -> float:
        raise AssertionError(name)

    data = json.loads(formats.as_json(report), parse_constant=no_constant)
    assert data["verdicts"][0]["percent"] is None


def test_a_run_in_which_nothing_was_compared_is_a_junit_error() -> None:
    tree = ElementTree.fromstring(formats.junit(Report("a", "b", ())))
    assert tree.get("errors") == "1"


def test_only_gating_regressions_are_failures() -> None:
    report = Report("a", "b", (verdict(gating=False),))
    assert ElementTree.fromstring(formats.junit(report)).get("failures") == "0"
    assert formats.github(report) == ""
    assert "not gating" in formats.markdown(report)


def test_amounts_and_changes_speak_in_words() -> None:
    assert amount(1.5e-3, "seconds") == "1.50 ms"
    assert amount(math.nan, "bytes") == "–"
    assert change(verdict(slower=math.log(1.1))) == "10.0 % slower"
    assert change(verdict(slower=math.log(0.9))) == "10.0 % faster"
    assert change(verdict(slower=math.log(3))) == "3× slower"


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80), st.floats(), st.floats(), st.sampled_from(list(Outcome)))
def test_any_name_and_number_can_be_written(name, old, slower, outcome) -> None:
    v = Verdict(
        Series(name, name, name, (name,)), name, name, "sampled", outcome, name, old, old, slower
    )
    report = Report(name, name, (v,), (name,), {"new": (name,)}, name)
    json.loads(formats.as_json(report))
    ElementTree.fromstring(formats.junit(report))
    assert len(formats.markdown(report).encode()) <= formats.LARGEST
    assert all(line.startswith("::") for line in formats.github(report).splitlines())
    terminal(report, console=Console(file=io.StringIO(), width=120))
