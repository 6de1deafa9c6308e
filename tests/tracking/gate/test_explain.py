"""Explanations: what changed with a regression, and what it cannot have been."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from benchmarks.tracking.gate import explain
from benchmarks.tracking.gate.cases import Pair
from benchmarks.tracking.judging.verdict import Outcome, Series, Verdict
from benchmarks.tracking.results import parse

from .made import LATENCY, result

COMBO = ("gpt2", "16")


def verdicts() -> list[Verdict]:
    def made(name: str, kind: str, old: float, new: float, unit: str) -> Verdict:
        series = Series("box", "env", name, COMBO)
        return Verdict(
            series, name.split("_")[-1], unit, kind, Outcome.REGRESSED, "", old, new, 0.1
        )

    return [
        made(LATENCY, "sampled", 1e-3, 1.1e-3, "seconds"),
        made("launches.Inference.track_launches", "exact", 3, 4, "launches"),
    ]


def explained(tmp_path: Path, base: list[dict], head: list[dict], **machine: str) -> str:
    import json

    runs = []
    for name, notes in (("base", base), ("head", head)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(n) + "\n" for n in notes))
        run = parse(result("a" * 40, {}, **machine))
        object.__setattr__(run, "notes_path", path)
        runs.append(run)
    found = explain.explain(verdicts(), Pair(*runs), "a" * 40, "b" * 40)
    return "\n".join(found[0].explanation)


def launched(*names: str) -> dict:
    where = {"benchmark": "launches.Inference", "params": list(COMBO)}
    return {"kind": "launches", "names": list(names), **where}


def kernel(sass: str, **classes: int) -> dict:
    where = {"benchmark": "kernels.Static", "params": ["glu", "sm90"]}
    return {"kind": "kernel", "sass_sha256": sass, "classes": classes, **where}


def test_what_changed_with_it(tmp_path: Path) -> None:
    text = explained(tmp_path, [launched("gemm")], [launched("gemm", "gelu")])
    assert "launches 3 launches → 4 launches" in text
    assert "launched in addition: 1× gelu" in text
    assert "python -m benchmarks gate aaaaaaaaaaaa bbbbbbbbbbbb --rerun" in text


@pytest.mark.parametrize(
    ("slower", "words"),
    [
        (0.001, "eager beside it: 1 ms → 1.00 ms, 0.1 % slower"),
        (0.08, "eager moved as well, which no commit changes: 1 ms → 1.08 ms, 8.3 % slower"),
        (-0.08, "eager beside it: 1 ms → 923 µs, 7.7 % faster"),
        (math.nan, None),
    ],
)
def test_what_eager_did_in_the_same_runs(slower: float, words: str | None) -> None:
    def made(provider: str, slower: float) -> Verdict:
        new = 1e-3 * math.exp(slower)
        series = Series("box", "env", LATENCY, (*COMBO, provider))
        return Verdict(
            series, "latency", "seconds", "sampled", Outcome.REGRESSED, "", 1e-3, new, slower
        )

    runs = Pair(*(parse(result(c * 40, {})) for c in "ab"))
    fused, eager = explain.explain([made("fused", 0.1), made("eager", slower)], runs, "a", "b")
    said = [line for line in fused.explanation if line.startswith("eager ")]
    assert [line.partition(";")[0] for line in said] == ([] if words is None else [words])
    assert not any(line.startswith("eager ") for line in eager.explanation)


def test_unchanged_code_and_launches_point_at_the_host(tmp_path: Path) -> None:
    notes = [launched("gemm"), kernel("x", fma=3)]
    assert "look at host code" in explained(tmp_path, notes, notes)


def test_changed_machine_code_is_named(tmp_path: Path) -> None:
    text = explained(tmp_path, [kernel("x", fma=3)], [kernel("y", fma=5)])
    assert "machine code changed in: glu sm90" in text
    assert "look at host code" not in text


def test_kernels_that_a_cpu_never_runs_explain_none_of_its_latencies(tmp_path: Path) -> None:
    text = explained(tmp_path, [kernel("x", fma=3)], [kernel("y", fma=5)], gpu="none")
    assert "machine code" not in text


def test_records_of_any_form_are_survived(tmp_path: Path) -> None:
    odd = [
        {"kind": "kernel", "params": 7},
        {"kind": "launches", "benchmark": "x", "params": [[]], "names": 3},
    ]
    assert "repeat:" in explained(tmp_path, odd, odd)


@pytest.mark.parametrize("params", [(), ("gpt2", "16"), ("a(b", "c.*")])
def test_the_pattern_matches_its_own_series_alone(params) -> None:
    pattern = explain.regex(Series("m", "e", LATENCY, params))
    listed = f"({', '.join(map(repr, params))})" if params else ""
    assert re.search(pattern, LATENCY + listed)
    assert not re.search(pattern, f"{LATENCY}2{listed}")
    assert not re.search(pattern, f"{LATENCY}('other', '1')")
