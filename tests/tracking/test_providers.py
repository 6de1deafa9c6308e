"""The table of providers: ratios within one run, in words, and nothing invented."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.tracking.providers import Line, blocks, columns, lines, samples, table, words
from benchmarks.tracking.results import parse

from .gate.made import repository, result, write


def line(**latency: float) -> Line:
    return Line("box", "Inference", "gpt2", "16", "fp32", latency)


def test_words_say_which_way() -> None:
    assert words(line(eager=2.0, fused=1.0).against_eager("fused")) == "2.00× faster"
    assert words(line(eager=1.0, fused=2.0).against_eager("fused")) == "2.00× slower"


def test_a_provider_that_was_not_measured_has_no_ratio() -> None:
    assert words(line(eager=1.0).against_eager("fused")) == "–"


def test_mean_is_geometric() -> None:
    rows = table([line(eager=4.0, fused=1.0), line(eager=1.0, fused=4.0)], ["fused"])
    assert rows[-1][-1] == "same", "4 times faster and 4 times slower are even"


def test_lines_take_the_median_of_process_medians() -> None:
    columns = ["result", "params", "version", "samples"]
    axes = [["'gpt2'"], ["'16'"], ["'fp32'"], ["'eager'", "'fused'"]]
    samples = [[1.0, 1.0, 9.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0], None]
    row = [[2.0, math.nan], axes, "1; 3 samples/process", samples]
    run = parse(
        {
            "commit_hash": "a" * 40,
            "params": {"machine": "box"},
            "result_columns": columns,
            "results": {"latency.Inference.track_latency": row},
        }
    )
    (found,) = lines(run)
    assert found.latency == {"eager": 2.0}


def test_a_provider_measured_once_is_a_line_and_not_a_column() -> None:
    found = [line(eager=1.0, fused=0.5) for _ in range(9)]
    found.append(line(eager=1.0, fused=0.5, autocast=2.0))
    assert columns(found) == (["fused"], ["autocast"])
    header, only = samples(found, ["autocast"])
    assert header[-1] == "against eager"
    assert only == ["inference", "gpt2", "16", "fp32", "autocast", "2 s", "2.00× slower"]


def test_a_table_too_wide_is_parted_and_loses_no_column() -> None:
    names = [f"provider_{n}" for n in range(12)]
    rows = table([line(eager=1.0, **dict.fromkeys(names, 0.5))], names)
    parts = blocks(rows, 120)
    assert len(parts) > 1
    assert [name for part in parts for name in part[0][5:]] == names
    for part in parts:
        assert part[0][:5] == rows[0][:5]
        widths = [max(len(row[at]) for row in part) + 3 for at in range(len(part[0]))]
        assert sum(widths) <= 120
    assert blocks(rows, 10_000) == [rows]


def test_images_are_shown_beside_tokens() -> None:
    columns = ["result", "params", "version"]
    axes = [["'convnext_t'"], ["'prompt'"], ["'fp32'"], ["'eager'", "'conv1x1'"]]
    run = parse(
        {
            "commit_hash": "a" * 40,
            "params": {"machine": "box"},
            "result_columns": columns,
            "results": {"latency.ChannelsLast.track_latency": [[2.0, 1.0], axes, "1; x"]},
        }
    )
    (found,) = lines(run)
    assert (found.mode, found.latency) == ("ChannelsLast", {"eager": 2.0, "conv1x1": 1.0})
    (_, row) = table([found], ["conv1x1"])
    assert row[0] == "channels-last"


def test_a_mean_over_fewer_rows_than_there_are_says_so() -> None:
    found = [line(eager=2.0, fused=1.0, compile=4.0), line(eager=1.0, fused=0.5)]
    assert table(found, ["compile", "fused"])[-1][5:] == ["2.00× slower (1 of 2)", "2.00× faster"]


def measured(folder: Path) -> Path:
    """One commit with tokens and an image; one switch that failed there, and one that is absent."""
    (commit,) = repository(folder, 1)
    names = [["'eager'", "'fused'", "'fused_aoti'", "'liger'"]]
    token, image = [["'tiny'"], ["'16'"], ["'fp32'"]], [["'convnext_t'"], ["'prompt'"], ["'fp32'"]]
    rows = {
        "latency.Inference.track_latency": [[2.0, 1.0, None, math.nan], token + names, "1"],
        "latency.ChannelsLast.track_latency": [[2.0, 1.0, math.nan, math.nan], image + names, "1"],
    }
    path = write(folder / "results", result(commit, rows))
    params = ["tiny", "16", "fp32", "fused_aoti"]
    text = "RuntimeError: no [bold]symbol[/bold] | mlp"
    note = {"kind": "failure", "benchmark": "latency.Inference", "params": params, "text": text}
    path.with_suffix(".jsonl").write_text(json.dumps(note))
    return folder / "results"


@pytest.mark.parametrize("markdown", [False, True])
def test_images_have_a_table_and_what_failed_its_reason(
    tmp_path: Path, monkeypatch, capsys, markdown: bool
) -> None:
    results = measured(tmp_path)
    monkeypatch.chdir(tmp_path)
    form = ["--markdown"] if markdown else []
    assert main(["providers", "--results", str(results), *form]) == 0
    said = capsys.readouterr().out
    bar = "\\|" if markdown else "|"
    assert f"RuntimeError: no [bold]symbol[/bold] {bar} mlp" in said, "as text, not as markup"
    failed = said[said.index("failed") :]
    assert "fused_aoti" in failed
    assert "liger" not in said, "not applicable: neither measured nor failed"
    assert said.index("tiny") < said.index("convnext_t") < said.index("failed")


def test_nothing_to_show_says_what_there_is_or_what_measures_it(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    results = str(measured(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["providers", "--results", results, "--dtype", "int8"]) == 4
    assert "nothing was measured in int8; there is fp32" in capsys.readouterr().out
    assert main(["providers", "--results", results, "--machine", "none"]) == 4
    assert "no latency of machine none at HEAD; asv run HEAD^!" in capsys.readouterr().out
