"""Replay: the three layouts, the interval, and the error rates on recorded histories."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.tracking.judging.noise import measure, nan_quantile
from benchmarks.tracking.judging.steps import pieces, settled
from benchmarks.tracking.replay.command import (
    Gate,
    at_detectable,
    by_spread,
    poisson_interval,
    replay,
)
from benchmarks.tracking.replay.recorded import BadHistory, Recorded, read

from .made import noisy

HISTORIES = Path(__file__).parents[2] / "histories"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Recorded]:
    return {n: read(HISTORIES / f"{n}.csv.gz") for n in ("cuda_jl", "sap_labelled")}


def test_cuda_history_keeps_its_error_rates(recorded) -> None:
    out = replay(recorded["cuda_jl"], Gate(), [5])
    assert out["comparisons"] > 15_000
    assert out["fa_per_300"] <= 0.5
    assert out["fa_ci95"][1] < 1
    assert out["power"]["5"] >= 0.55
    assert out["rerun_share"] < 0.2
    quiet = by_spread(recorded["cuda_jl"], Gate(), 5.0)[0]
    assert quiet[2] >= 0.90


def test_labelled_histories_are_all_found_and_the_others_silent(recorded) -> None:
    out = replay(recorded["sap_labelled"], Gate(), [])
    assert (out["hits"], out["labels"], out["false_alarms"]) == (5, 5, 0)


@pytest.mark.full
def test_repeated_builds_keep_their_error_rates() -> None:
    out = replay(read(HISTORIES / "sap_repeats.csv.gz"), Gate(), [5])
    assert out["fa_ci95"][1] < 0.3
    assert out["power"]["5"] >= 0.50


@pytest.mark.full
def test_the_stated_detectable_change_is_found_nine_times_in_ten(recorded) -> None:
    assert 0.80 < at_detectable(recorded["cuda_jl"], Gate()) < 0.97


def test_no_step_is_no_alarm_and_a_huge_one_is_found(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lines = ["run,commit,benchmark,value,unit"]
    lines += [
        f"{r},c{r},b{b},{math.exp(0.01 * random.normal())},ns" for r in range(120) for b in range(9)
    ]
    path = tmp_path / "made.csv"
    path.write_text("\n".join(lines))
    out = tmp_path / "out.json"
    assert main(["replay", str(path), "--inject", "5,20", "--seed", "3", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["kind"] == "commits"
    assert data["comparisons"] == 9 * (120 - 50 - 5)
    assert data["false_alarms"] == 0
    assert data["power"]["20"] > 0.99
    assert 0 < data["power"]["5"] <= data["power"]["20"]


def test_the_same_seed_gives_the_same_figures(recorded) -> None:
    c = recorded["sap_labelled"]
    a, b = replay(c, Gate(), [], seed=4), replay(c, Gate(), [], seed=4)
    assert a | {"seconds": 0} == b | {"seconds": 0}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"x,y\n1,2\n", "expected one of"),
        ("a.csv", b"", "expected one of"),
        ("a.csv.gz", b"not gzip", "cannot be read"),
        ("a.csv.gz", gzip.compress(b"run,commit,benchmark,value\n")[:20], "cannot be read"),
        ("a.csv", b"\xff\xfe", "cannot be read"),
        (
            "a.csv",
            b"run,commit,benchmark,value\n1,c,b,nan\n2,c,b,-1\n3,c,b,0\nx,c,b,1\n4\n",
            "no usable",
        ),
        ("a.csv", b"run,commit,benchmark,value\n1,c,b,1\n", "long enough"),
    ],
)
def test_a_bad_history_is_one_line(tmp_path: Path, name, content, said, capsys) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadHistory, match=said):
        read(path)
    assert main(["replay", str(path)]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("mark", "run"), [("", "{}"), ("\ufeff", "{}"), ("", "{}.0")], ids=["plain", "mark", "float"]
)
def test_tables_that_other_programs_wrote_are_read_too(tmp_path: Path, mark, run) -> None:
    values = noisy(80, 0.01)
    rows = [f"{run.format(i)},c{i},b,{v}" for i, v in enumerate(values)]
    path = tmp_path / "made.csv"
    path.write_text("\n".join([mark + "run,commit,benchmark,value", *rows]), encoding="utf-8")
    assert len(read(path).comparisons) == 80 - 50 - 5


def test_a_young_history_is_compared_from_its_twentieth_commit_on(tmp_path: Path) -> None:
    rows = [f"{i},c{i},b,{v}" for i, v in enumerate(noisy(40, 0.005))]
    path = tmp_path / "made.csv"
    path.write_text("\n".join(["run,commit,benchmark,value", *rows]))
    out = replay(read(path), Gate(), [20])
    assert out["comparisons"] == 40 - 20 - 5
    assert out["false_alarms"] == 0
    assert out["power"]["20"] > 0.6


@pytest.mark.parametrize("inject", ["a", "-5", "nan", "1e9"])
def test_a_bad_injection_is_refused(inject, capsys) -> None:
    assert main(["replay", "nowhere.csv", f"--inject={inject}"]) == 2
    assert "percentages" in capsys.readouterr().out


def test_poisson_interval_is_the_tabulated_one() -> None:
    low, high = poisson_interval(10)
    assert (round(low, 2), round(high, 2)) == (4.80, 18.39)


def test_pieces_cut_at_a_step_and_not_at_outliers() -> None:
    x = 0.01 * np.random.default_rng(0).normal(size=100)
    x[50] += 1.0
    assert len(pieces(x)) == 1
    x[60:] += 0.08
    (first, second) = pieces(x)
    assert abs(first.stop - 60) <= 1
    assert math.isclose(second.level - first.level, 0.08, abs_tol=0.01)


def test_settled_keeps_only_what_follows_a_clear_step() -> None:
    x = 0.005 * np.random.default_rng(0).normal(size=(2, 50))
    x[0, :25] += 0.1
    x[1] += 0.1 * (np.arange(50) // 5 % 2)
    kept = np.isfinite(settled(x)).sum(axis=1)
    assert kept.tolist() == [25, 50]


def test_noise_counts_heavy_tails() -> None:
    random = np.random.default_rng(0)
    normal, heavy = random.normal(size=(200, 50)), random.standard_t(2, size=(200, 50))
    sigma = measure(0.01 * np.concatenate([normal, heavy])).sigma
    assert 0.009 < np.median(sigma[:200]) < 0.014
    assert np.median(sigma[200:]) > 1.5 * np.median(sigma[:200])


def test_quantiles_leave_nan_out() -> None:
    x = np.array([[1.0, np.nan, 3.0], [np.nan] * 3])
    np.testing.assert_array_equal(nan_quantile(x, 0.5), [2.0, np.nan])
