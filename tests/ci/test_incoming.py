"""What a hostile or broken run hands over is refused in one line; what is sound merges exactly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.tracking import incoming, merge
from benchmarks.tracking.incoming import Refused, check_measured, read_tree

from . import samples

LATENCY = "latency.Inference.track_latency"
NAME = samples.name(1)


def refused(folder: Path, match: str) -> None:
    with pytest.raises(Refused, match=match) as caught:
        read_tree(folder)
    text = str(caught.value)
    assert len(text) < 400
    assert not set(text) & set("<>`\n\x1b&@|"), text


@pytest.mark.parametrize(
    "name",
    [
        "box/../../escape.json",
        "README.md",
        "box/evil.py",
        "box/nested/0000000a-overlay.json",
        ".github/workflows/own.yml",
        "box/<img src=x onerror=alert(1)>.json",
        "box/0000000a-$(touch owned).json",
        "box/0000000A-overlay.json",
        ".asv/machine.json",
    ],
)
def test_a_name_that_results_do_not_have_is_refused(tmp_path: Path, name: str) -> None:
    assert not incoming.known(name)
    folder = samples.write(tmp_path / "in", [1])
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    if ".." not in name:
        refused(folder, "no file of that name")


@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "hard link", "pipe"])
def test_nothing_but_plain_files_is_read(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = samples.write(tmp_path / "in", [1])
    path = folder / "box" / f"0000000b-{samples.ENVIRONMENT}.json"
    if kind == "link to a file":
        path.symlink_to(secret)
    elif kind == "link to a folder":
        (folder / "other").symlink_to(tmp_path)
    elif kind == "hard link":
        os.link(secret, path)
    else:
        os.mkfifo(path)
    refused(folder, "not a plain file|no file of that name")


def test_too_much_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = samples.write(tmp_path / "in", [1])
    with (folder / NAME).open("r+b") as file:
        file.truncate(incoming.LARGEST_FILE + 1)  # sparse: takes no disk
    refused(folder, "more than the 16 MB")
    folder = samples.write(tmp_path / "many", list(range(1, 8)))
    monkeypatch.setattr(incoming, "MOST_FILES", 10)
    refused(folder, "more than 10 files")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not an object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"results": {', "not valid JSON"),
        (b"[" * 200_000, "nested deeper"),
        (b'{"a":' * 100_000 + b"1", "nested deeper"),
        (b'{"version": 2}', "commit_hash is missing"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: bytes, match: str) -> None:
    folder = samples.write(tmp_path / "in", [1])
    (folder / NAME).write_bytes(content)
    refused(folder, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"commit_hash": samples.commit(2)}, "not the one in its name"),
        ({"commit_hash": "00000001; rm -rf /"}, "not the one in its name"),
        ({"env_name": "other"}, "env_name is other"),
        ({"params": {**samples.MACHINE, "machine": "the-other"}}, "filed elsewhere"),
        ({"params": {**samples.MACHINE, "x": ["a"]}}, "not a short text"),
        ({"params": {**samples.MACHINE, "gpu": "x" * 5000}}, "not a short text"),
        (
            {"rows": {"<script>alert(1)</script>": samples.row([1.0], [None])}},
            "no benchmark's name",
        ),
        ({"rows": {"a.b @everyone": samples.row([1.0], [None])}}, "no benchmark's name"),
        ({"rows": {"a.b": [["1.0"]]}}, "no number"),
        ({"rows": {"a.b": [[True]]}}, "no number"),
        ({"rows": {"a.b": [[float("inf")]]}}, "no number"),
        ({"rows": {"a.b": [1.0]}}, "not a list"),
        ({"rows": {"a.b": {"result": [1.0]}}}, "not a row"),
        ({"rows": {"a.b": [[1.0], [["![x](http://evil)"]]]}}, "has the parameter"),
        ({"result_columns": ["samples"]}, "not asv's"),
    ],
)
def test_a_result_that_says_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    folder = samples.write(tmp_path / "in", [1])
    (folder / NAME).write_bytes(samples.encode(samples.result(1, **changes)))
    refused(folder, match)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([float("nan"), None], "missing or NaN"),
        ([0.0, 0.0], "every result is zero"),
        (None, "missing or NaN"),
    ],
)
def test_a_run_that_measured_nothing_is_broken_not_fast(
    tmp_path: Path, values: list[float] | None, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = samples.write(tmp_path / "in", [1])
    rows = {LATENCY: [values]}
    (folder / NAME).write_bytes(samples.encode(samples.result(1, rows)))
    with pytest.raises(Refused, match=match):
        check_measured(read_tree(folder))
    assert main(["history", "append", "--check", str(folder)]) == 2
    assert "the measurement broke" in capsys.readouterr().err


def test_a_run_without_results_is_broken(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="left no result"):
        check_measured(read_tree(samples.write(tmp_path / "in", [])))
    with pytest.raises(Refused, match="not a folder"):
        read_tree(tmp_path / "nowhere")


def test_a_commit_that_does_not_build_is_kept_beside_others(tmp_path: Path) -> None:
    folder = samples.write(tmp_path / "in", [1, 2])
    (folder / NAME).write_bytes(samples.encode(samples.result(1, {LATENCY: [None]})))
    assert check_measured(read_tree(folder)) == 1


def test_a_sound_run_is_taken(tmp_path: Path) -> None:
    assert check_measured(read_tree(samples.write(tmp_path / "in", [1, 2]))) == 2


def joined(*measurements: dict[str, Any]) -> dict[str, Any]:
    content = samples.encode(measurements[0])
    for each in measurements[1:]:
        content = merge.merge(NAME, content, samples.encode(each))
    incoming.check(NAME, content)
    return json.loads(content)


def run_of(values: list[float], started: int = 1) -> dict[str, Any]:
    middle = sorted(values)[len(values) // 2]
    return samples.result(1, {LATENCY: samples.row([middle], [values], started)})


def samples_of(data: dict[str, Any]) -> list[float]:
    cells = dict(zip(data["result_columns"], data["results"][LATENCY], strict=False))
    assert cells["stats_repeat"] == [len(cells["samples"][0])]
    return cells["samples"][0]


def test_two_runs_of_one_point_join_their_samples_once() -> None:
    one, two = run_of([1.0, 2.0]), run_of([3.0, 4.0], started=5)
    both = joined(one, two)
    assert samples_of(both) == [1.0, 2.0, 3.0, 4.0]
    assert both["results"][LATENCY][0] == [2.5]
    for again in (one, two, both):
        assert joined(both, again) == both


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(4)), st.lists(st.integers(0, 3), max_size=4))
def test_any_order_and_any_repetition_give_the_same_samples(
    order: list[int], repeated: list[int]
) -> None:
    runs = [run_of([n + 0.25, n + 0.5], started=10 * n) for n in range(4)]
    merged = joined(*(runs[n] for n in [*order, *repeated]))
    assert sorted(samples_of(merged)) == sorted(s for n in range(4) for s in (n + 0.25, n + 0.5))


def test_benchmarks_and_combinations_missing_on_one_side_are_kept() -> None:
    left = samples.result(1, {LATENCY: samples.row([1.0, None], [[1.0], None], 1)})
    right = samples.result(
        1, {LATENCY: samples.row([None, 2.0], [None, [2.0]], 2), "b.c": samples.row([7.0], [None])}
    )
    merged = joined(left, right)
    assert merged["results"][LATENCY][0] == [1.0, 2.0]
    assert merged["results"]["b.c"][0] == [7.0]


def test_a_later_exact_number_wins_and_a_failure_does_not() -> None:
    exact = "memory.Inference.track_peak_memory"
    early = samples.result(1, {exact: samples.row([10.0], [None], 1)})
    later = samples.result(1, {exact: samples.row([12.0], [None], 2)})
    failed = samples.result(1, {exact: samples.row([None], [None], 3)})
    for order in ((early, later), (later, early), (early, later, failed)):
        assert joined(*order)["results"][exact][0] == [12.0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"params": {**samples.MACHINE, "ram": "24 GiB", "python": "3.12"}},
            "not the same machine",
        ),
        ({"requirements": {"torch": "2.14"}}, "not the same point"),
    ],
)
def test_another_identity_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(Refused, match=match):
        joined(samples.result(1), samples.result(1, **changes))
    # The memory a kernel leaves over moves from boot to boot: that is the same machine.
    moved = {**samples.MACHINE, "ram": "23 GiB", "python": "3.11"}
    assert joined(samples.result(1), samples.result(1, params=moved))["params"]["ram"] == "24 GiB"


def test_asv_itself_reads_what_was_merged(tmp_path: Path) -> None:
    results = pytest.importorskip("asv.results")
    (tmp_path / "box").mkdir()
    path = tmp_path / NAME
    merged = joined(run_of([1.0, 2.0]), run_of([3.0, 4.0], started=5))
    path.write_bytes(merge.dump(merged))
    loaded = results.Results.load(str(path))
    assert loaded.get_result_samples(LATENCY, [["'p0'"]]) == [[1.0, 2.0, 3.0, 4.0]]
