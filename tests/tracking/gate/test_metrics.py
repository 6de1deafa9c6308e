"""The suite's own metrics through the gate, from made-up result files to verdicts: copies of a
layout, right answers of a quantizer, and a switch that does not run."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.harness import quantized, quantized_jobs
from benchmarks.suite.harness.metrics import METRICS
from benchmarks.tracking.gate import command as gate
from benchmarks.tracking.gate.compare import compare
from benchmarks.tracking.gate.render import amount, change, why
from benchmarks.tracking.judging.verdict import Outcome, Report, Verdict

from .made import latencies, repository, result, write

COPIES = "launches.ChannelsLast.track_copies"
LATENCY = "latency.ChannelsLast.track_latency"
ACCURACY = "quantization.Digits.track_accuracy"
ANSWERS = 360 * quantized.SUITE_SEEDS

IMAGE = [["'convnext_t'"], ["'prompt'"], ["'fp32'"], ["'eager'", "'fused'", "'conv1x1'"]]
SWITCHES = [["'tiny'"], ["'16'"], ["'fp32'"], ["'eager'", "'fused'", "'aoti'"]]


def compared(folder: Path, *rows: dict[str, Any], words: tuple[str, ...] = ()) -> Report:
    """One commit for each of ``rows``; the last against the one before."""
    for at, (commit, row) in enumerate(zip(repository(folder, len(rows)), rows, strict=True)):
        write(folder / "results", result(commit, row, date=at))
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    given = [*(words or ("HEAD~1", "HEAD")), "--repo", str(folder)]
    return compare(parser.parse_args([*given, "--results", str(folder / "results")]))


def copies(*counts: float | None) -> dict[str, Any]:
    return {COPIES: [list(counts), IMAGE, "1"]}


def answers(wrong: int, mode: str = "int8_dynamic") -> dict[str, Any]:
    return {ACCURACY: [[1 - wrong / ANSWERS], [[repr(mode)]], "2"]}


def only(report: Report) -> Verdict:
    (verdict,) = [v for v in report.verdicts if v.outcome is not Outcome.PASS]
    return verdict


def test_a_first_copy_is_a_regression_and_a_fact(tmp_path: Path) -> None:
    report = compared(tmp_path, copies(0, 0, 0), copies(0, 0, 0), copies(0, 1, 0))
    verdict = only(report)
    assert report.exit_code == 1
    assert (verdict.outcome, verdict.kind, verdict.gating) == (Outcome.REGRESSED, "exact", True)
    assert verdict.series.params == ("convnext_t", "prompt", "fp32", "fused")
    assert why(verdict) == "copies is exact: a change is a fact"
    assert (amount(verdict.old, verdict.unit), amount(verdict.new, verdict.unit)) == (
        "0 copies",
        "1 copy",
    )
    assert change(verdict) == "1 more"


def test_a_copy_that_is_gone_is_an_improvement(tmp_path: Path) -> None:
    report = compared(tmp_path, copies(0, 1, 0), copies(0, 0, 0))
    assert only(report).outcome is Outcome.IMPROVED
    assert report.exit_code == 0


def test_history_names_the_commit_of_a_first_copy(tmp_path: Path) -> None:
    rows = [copies(0, 0, 0)] * 4 + [copies(0, 1, 0)] * 3
    verdict = only(compared(tmp_path, *rows, words=("--history",)))
    assert (verdict.outcome, verdict.old, verdict.new) == (Outcome.REGRESSED, 0, 1)


def test_a_switch_that_no_longer_builds_fails_and_one_not_applicable_does_not(
    tmp_path: Path,
) -> None:
    good = {COPIES: [[3.0, 3.0, 3.0], SWITCHES, "1"]}
    # asv's null is a failure, its NaN a combination that does not apply.
    broken = {COPIES: [[3.0, math.nan, None], SWITCHES, "1"]}
    report = compared(tmp_path, good, broken)
    found = {v.series.params[-1]: v for v in report.verdicts}
    assert found["eager"].outcome is Outcome.PASS
    assert found["fused"].outcome is Outcome.NOT_MEASURED
    assert why(found["fused"]) == "head is not applicable"
    assert found["aoti"].outcome is Outcome.REGRESSED
    assert why(found["aoti"]) == "worked before, fails now"
    assert report.exit_code == 1


def test_a_switch_that_never_built_is_no_regression(tmp_path: Path) -> None:
    row = {COPIES: [[3.0, 3.0, None], SWITCHES, "1"]}
    report = compared(tmp_path, row, row)
    assert report.exit_code == 0
    assert {v.series.params[-1]: v.outcome for v in report.verdicts}["aoti"] is Outcome.NOT_MEASURED


@pytest.mark.parametrize(
    ("before", "after", "outcome", "words"),
    [
        (34, 34, Outcome.PASS, "same"),
        (34, 39, Outcome.PASS, "0.5 % less"),  # 5 of 1080, as another order of rounding may turn
        (34, 29, Outcome.PASS, "0.5 % more"),
        (34, 40, Outcome.REGRESSED, "0.6 % less"),
        (34, 67, Outcome.REGRESSED, "3.3 % less"),
        (67, 34, Outcome.IMPROVED, "3.2 % more"),
    ],
)
def test_a_quantizer_that_loses_right_answers_is_a_regression(
    tmp_path: Path, before: int, after: int, outcome: Outcome, words: str
) -> None:
    report = compared(tmp_path, answers(before), answers(after))
    (verdict,) = report.verdicts
    assert verdict.outcome is outcome
    assert report.exit_code == (1 if outcome is Outcome.REGRESSED else 0)
    assert verdict.gating
    assert change(verdict) == words, "the way the number went, not the verdict"


def test_right_answers_are_shown_in_percent(tmp_path: Path) -> None:
    verdict = only(compared(tmp_path, answers(34), answers(67)))
    shown = [amount(value, verdict.unit) for value in (verdict.old, verdict.new)]
    assert shown == ["96.85 %", "93.80 %"]


def test_small_losses_add_up_in_the_history(tmp_path: Path) -> None:
    """Each of three commits loses what one may; together they are named."""
    rows = [answers(wrong) for wrong in (34, 34, 38, 42, 46)]
    verdict = only(compared(tmp_path, *rows, words=("--history",)))
    assert verdict.outcome is Outcome.REGRESSED


def test_an_answer_lost_at_one_seed_of_all_is_not_hidden(monkeypatch) -> None:
    """The tracked number is a mean: a median of seeds would not see one that is far off."""

    def job(accuracies: list[float], trouble: str | None = None) -> Any:
        lines = [{"what": "accuracy", "mode": "m", "accuracy": a} for a in accuracies]
        monkeypatch.setattr(quantized_jobs, "_run", lambda _: (lines, trouble))
        return quantized_jobs.measure(["accuracy"], ["m"])["m"]

    good = job([0.97] * quantized.SUITE_SEEDS)["accuracy"]
    bad = job([0.88] + [0.97] * (quantized.SUITE_SEEDS - 1))["accuracy"]
    assert good - bad > METRICS["accuracy"].tolerance
    # A mean over fewer seeds would be another number: there is none.
    short = job([0.97] * (quantized.SUITE_SEEDS - 1), "exit code -9: Killed")
    assert "accuracy" not in short
    assert "Killed" in short["failure"]


@pytest.mark.parametrize(
    ("name", "axes", "noted"),
    [
        ("launches.Inference.track_launches", SWITCHES, "latency.Inference"),
        ("quantization.Llama.track_launches", [["'a'", "'b'", "'int4_weight'"]],
         "quantization.Llama"),
    ],
)  # fmt: skip
def test_what_fails_now_says_why(tmp_path: Path, name: str, axes: list, noted: str) -> None:
    for at, commit in enumerate(repository(tmp_path, 2)):
        row = {name: [[1.0, 1.0, None if at else 1.0], axes, "1"]}
        path = write(tmp_path / "results", result(commit, row, date=at))
    params = [axis[-1].strip("'") for axis in axes]
    note = {"kind": "failure", "benchmark": noted, "params": params, "text": "no compiler"}
    path.with_suffix(".jsonl").write_text(json.dumps(note))
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    words = ["HEAD~1", "HEAD", "--repo", str(tmp_path), "--results", str(tmp_path / "results")]
    verdict = only(compare(parser.parse_args(words)))
    assert "it said: no compiler" in verdict.explanation


def test_images_are_judged_by_their_latency_as_well(tmp_path: Path) -> None:
    import numpy as np

    random = np.random.default_rng(0)

    def row(*seconds: float) -> dict[str, Any]:
        value, _, version, samples = latencies(seconds, random)
        return {LATENCY: [value, IMAGE, version, samples]}

    quiet = [row(5e-3, 2e-3, 5e-3) for _ in range(12)]
    verdict = only(compared(tmp_path, *quiet, row(5e-3, 3e-3, 5e-3)))
    assert (verdict.outcome, verdict.series.params[-1]) == (Outcome.REGRESSED, "fused")
    assert verdict.kind == "sampled"
