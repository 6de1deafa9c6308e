"""Whatever lies in the results folder: sound numbers come out, and the reason for the rest."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.tracking.cells import FAILED, OK, SKIPPED, process_medians
from benchmarks.tracking.gate.explain import records
from benchmarks.tracking.results import LARGEST_FILE, BadResult, Run, load, parse, read_notes

from .made import LATENCY, latencies, result, write

COMMIT = "a" * 40


def test_samples_become_one_median_a_process() -> None:
    samples = [1.0, 2.0, 9.0, 4.0, 5.0, 6.0]
    row = parse(result(COMMIT, {LATENCY: [[4.5], [["'p'"]], "1; 3 samples/process", [samples]]}))
    np.testing.assert_array_equal(row.rows[LATENCY].processes, [[2.0, 5.0]])
    assert row.rows[LATENCY].locations[0] == 3.5
    assert row.rows[LATENCY].params == (("p",),)


def test_without_a_version_each_sample_is_a_process() -> None:
    run = parse(result(COMMIT, {LATENCY: [[2.0], [["'p'"]], "abc", [[1.0, 2.0, 3.0]]]}))
    assert run.rows[LATENCY].processes.shape == (1, 3)


def test_null_is_failed_and_nan_is_not_applicable() -> None:
    run = parse(result(COMMIT, {LATENCY: [[1.0, None, math.nan], [["'a'", "'b'", "'c'"]], "1"]}))
    assert run.rows[LATENCY].state.tolist() == [OK, FAILED, SKIPPED]


def test_a_benchmark_that_failed_as_a_whole_fails_in_each_combination() -> None:
    run = parse(result(COMMIT, {LATENCY: [None, [["'a'", "'b'"]], "1"]}))
    assert run.rows[LATENCY].state.tolist() == [FAILED, FAILED]


def test_combinations_come_in_the_order_of_the_product() -> None:
    run = parse(result(COMMIT, {LATENCY: [[1, 2, 3, 4], [["'a'", "'b'"], ["1", "2"]], "1"]}))
    row = run.rows[LATENCY]
    assert dict(zip(row.params, row.values, strict=True))[("b", "1")] == 3


def test_samples_with_a_failed_combination_between() -> None:
    run = parse(
        result(
            COMMIT, {LATENCY: [[1.0, None], [["'a'", "'b'"]], "2 samples/process", [[1, 1], None]]}
        )
    )
    np.testing.assert_array_equal(run.rows[LATENCY].processes, [[1.0], [math.nan]])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"commit_hash": "abc', "not valid JSON"),
        ("[" * 100_000, "nested too deep"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("[]", "is an object"),
        ('{"results": {}, "result_columns": [], "commit_hash": 7}', "commit_hash"),
        ('{"results": {}, "result_columns": [], "commit_hash": "zz"}', "not a commit hash"),
        ("9" * 5000, "unreadable"),
    ],
)
def test_a_bad_file_is_named_and_the_others_are_read(
    tmp_path: Path, text: str | bytes, reason: str
) -> None:
    write(tmp_path, result(COMMIT, {}))
    bad = tmp_path / "box" / "bbbbbbbb-env.json"
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    runs, problems = load(tmp_path)
    assert [r.commit for r in runs] == [COMMIT]
    assert len(problems) == 1
    assert "bbbbbbbb-env.json" in str(problems[0])
    assert reason in str(problems[0])


def test_a_huge_file_is_not_opened(tmp_path: Path) -> None:
    path = write(tmp_path, result(COMMIT, {}))
    with path.open("r+b") as file:
        file.truncate(LARGEST_FILE + 1)
    runs, problems = load(tmp_path)
    assert not runs
    assert "MB" in str(problems[0])


def test_a_result_in_another_machines_folder_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, result(COMMIT, {}))
    data = result(COMMIT, {}, machine="other")
    path.write_text(json.dumps(data))
    runs, problems = load(tmp_path)
    assert not runs
    assert "lies in the folder of" in str(problems[0])


def test_a_product_of_parameters_beyond_memory_is_left_out() -> None:
    axis = [str(i) for i in range(1000)]
    assert parse(result(COMMIT, {LATENCY: [[1.0], [axis] * 5, "1"]})).rows == {}


def test_processes_that_the_suite_calls_invalid_do_not_count(tmp_path: Path) -> None:
    samples = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    rows = {LATENCY: [[2.0, 5.0], [["'a'", "'b'"]], "1 samples/process", samples]}
    write(tmp_path, result(COMMIT, rows))
    where = {"kind": "invalid", "benchmark": "latency.Inference", "reason": "throttled"}
    notes = [{**where, "params": ["a"], "process": 2}, {**where, "params": ["a"], "process": 99}]
    notes += [{**where, "params": ["b"], "process": n} for n in range(3)]
    text = "".join(json.dumps(n) + "\n" for n in notes)
    (tmp_path / "box" / f"{COMMIT[:8]}-env.jsonl").write_text(text)
    (run,), _ = load(tmp_path)
    np.testing.assert_array_equal(run.sound(LATENCY).locations, [1.5, np.nan])


def test_a_process_called_true_is_none(tmp_path: Path) -> None:
    write(tmp_path, result(COMMIT, {LATENCY: latencies([1.0], np.random.default_rng(0))}))
    note = {"kind": "invalid", "benchmark": "latency.Inference", "params": ["p0"], "process": True}
    (tmp_path / "box" / f"{COMMIT[:8]}-env.jsonl").write_text(json.dumps(note))
    (run,), _ = load(tmp_path)
    assert np.isfinite(run.sound(LATENCY).processes).all()


def test_unreadable_side_records_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, result(COMMIT, {LATENCY: latencies([1.0], np.random.default_rng(0))}))
    (run,), _ = load(tmp_path)
    (tmp_path / "box" / f"{COMMIT[:8]}-env.jsonl").write_text('{"kind": "x"}\nnot json\n[1]\n')
    assert read_notes(run) == [{"kind": "x"}]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(anything, anything, anything, anything, anything)
def test_any_json_gives_a_run_or_a_reason(a, b, c, d, e) -> None:
    data = result(COMMIT, {LATENCY: [a, b, c, d], "x": e})
    run = parse(data)
    for row in run.rows.values():
        assert len(row.params) == len(row.values) == len(row.state) == len(row.locations)
        # NaN is for samples of which none counts; the next tests say which those are.
        assert not np.isinf(row.locations).any()
        assert np.isnan(row.locations[row.state != OK]).all()
    for key in list(data):
        with contextlib.suppress(BadResult):
            assert isinstance(parse({**data, key: a}), Run)


@settings(max_examples=40, deadline=None)
@given(st.lists(anything, max_size=12), st.integers(1, 20))
def test_process_medians_are_numbers_and_keep_their_places(samples, group) -> None:
    medians = process_medians(samples, group)
    assert not np.isinf(medians).any()
    assert len(medians) == math.ceil(len(samples) / group)


@pytest.mark.parametrize(
    "samples",
    [[True] * 5, [1e-3, 1e-3, True, True, True], [math.nan] * 5, ["1"] * 5, [], [10**400] * 5],
)
def test_samples_of_which_none_counts_leave_no_value(samples) -> None:
    row = parse(result(COMMIT, {LATENCY: [[1e-3], [["'p'"]], "5 samples/process", [samples]]}))
    (found,) = row.rows[LATENCY].locations
    assert found == 1e-3 if 1e-3 in samples else math.isnan(found)


def test_a_clock_that_stood_still_is_noticed() -> None:
    samples = [[0.5] * 10, [0.5] * 9 + [0.51], [0.5] * 4, None]
    values = [0.5, 0.5, 0.5, 0.5]
    axis = [["1", "2", "3", "4"]]
    row = parse(result(COMMIT, {LATENCY: [values, axis, "5 samples/process", samples]}))
    assert row.rows[LATENCY].still == {0}


@settings(max_examples=60, deadline=None)
@given(anything, anything, anything)
def test_any_side_record_is_read_or_left_out(process, params, more) -> None:
    record = {"kind": "invalid", "benchmark": "latency.Inference", "params": params}
    kinds = ["invalid", "launches", "measured", "kernel", "failure"]
    said = [{**record, "process": process}, {**record, "params": ["p0"], "process": process}]
    said += [{**record, "kind": k, "names": more, "sass_sha256": more, "text": more} for k in kinds]
    run = parse(result(COMMIT, {LATENCY: latencies([1.0], np.random.default_rng(0))}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        path.write_text("".join(json.dumps(n) + "\n" for n in said))
        run = replace(run, notes_path=path)
        assert run.sound(LATENCY).processes.shape == (1, 3)
        records(read_notes(run))
