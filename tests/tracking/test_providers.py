"""The table of providers: ratios within one run, in words, and nothing invented."""

from __future__ import annotations

import math

from benchmarks.tracking.providers import Line, lines, table, words
from benchmarks.tracking.results import parse


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
