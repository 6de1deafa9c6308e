"""The suite as asv sees it, and as a person runs it without asv."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.suite import __main__ as command
from benchmarks.suite.harness import metrics, shapes

ROOT = Path(__file__).parents[2]
_DISCOVER = """
import io, json, sys
from asv_runner.discovery import list_benchmarks
out = io.StringIO()
list_benchmarks(sys.argv[1], out)
heavy = sorted({"torch", "triton", "fused_mlp"} & set(sys.modules))
print(json.dumps({"benchmarks": json.loads(out.getvalue()), "heavy": heavy}))
"""


@pytest.fixture(scope="module")
def discovered():
    done = subprocess.run(
        [sys.executable, "-c", _DISCOVER, str(ROOT / "benchmarks" / "suite")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return json.loads(done.stdout)


def test_asv_imports_nothing_heavy(discovered):
    assert discovered["heavy"] == []


def test_asv_finds_each_benchmark_once_and_no_other(discovered):
    names = [benchmark["name"] for benchmark in discovered["benchmarks"]]
    assert len(names) == len(set(names))
    rooms = ("latency", "memory", "launches", "accuracy", "kernels", "quantization", "inference")
    assert {name.split(".")[0] for name in names} <= set(rooms), names
    assert {"latency.Inference.track_latency", "memory.Training.track_saved_bytes"} <= set(names)


def test_units_are_those_of_the_one_table(discovered):
    for benchmark in discovered["benchmarks"]:
        if benchmark["name"].split(".")[0] in ("latency", "memory", "launches", "accuracy"):
            assert benchmark["unit"] == metrics.metric_of(benchmark["name"]).unit


def test_versions_say_how_many_samples_come_together(discovered):
    versions = {b["name"]: b["version"] for b in discovered["benchmarks"]}
    assert versions["latency.Inference.track_latency"].endswith("; 5 samples/process")
    assert versions["latency.Inference.track_cold_start"].endswith("; 1 samples/process")


def test_all_measured_classes_share_one_run(discovered):
    keys = {
        b["setup_cache_key"]
        for b in discovered["benchmarks"]
        if b["name"].split(".")[0] in ("latency", "memory", "launches", "accuracy")
    }
    assert len(keys) == 1


def test_parameters_are_the_whole_table(discovered):
    for benchmark in discovered["benchmarks"]:
        mode = benchmark["name"].split(".")[1]
        if benchmark["param_names"] == shapes.PARAM_NAMES and mode in shapes.MODES:
            expected = [[repr(v) for v in axis] for axis in shapes.params_of(mode)]
            assert benchmark["params"] == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "llama9"], "unknown shape 'llama9'"),
        (["--provider", "eager,eagre"], "unknown provider 'eagre'"),
        (["--metric", "speed"], "unknown metric 'speed'"),
        (["--size", "huge"], "unknown suite size 'huge'"),
        (["--processes", "0"], "must be at least 1"),
        (["--cuda-graph", "--shape", "tiny"], "needs a GPU"),
        (["--device", "cpu", "--shape", "llama3_8b", "--size", "quick"], "nothing is left"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, said, capsys, monkeypatch):
    monkeypatch.setenv("FUSED_MLP_DEVICE", "cpu")
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_two_runs_in_fresh_processes_agree_to_the_digit():
    def run():
        arguments = ["--shape", "tiny", "--tokens", "prompt", "--provider", "eager,fused"]
        arguments += ["--dtype", "fp32", "--device", "cpu", "--processes", "1", "--json"]
        arguments += ["--metric", "launches,peak_memory,saved_bytes"]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.suite", *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        entries = [json.loads(line) for line in done.stdout.splitlines()]
        return {tuple(e["combination"]): (e["numbers"], e["notes"]) for e in entries}

    first, second = run(), run()
    assert first == second
    assert len(first) == 4
    assert first["Inference", "tiny", "prompt", "fp32", "eager"][0]["launches"] == 5
