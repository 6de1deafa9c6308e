"""The noise floor from numbers given, and a doctor that names what is missing."""

import json
import math

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.suite.harness import readings
from benchmarks.suite.harness.supervisor import Entry
from benchmarks.tracking import aa, doctor


def samples(between, inside, processes=400, seed=0):
    rng = np.random.default_rng(seed)
    means = rng.normal(0, between, (processes, 1)) + rng.normal(0, inside, (processes, 5))
    return list(np.exp(means).ravel())


def test_the_spread_between_processes_is_found_again():
    found = aa.spread("x", samples(between=0.03, inside=0.001))
    assert found.between == pytest.approx(0.03, rel=0.15)
    assert found.expected < found.between / 10


def test_where_processes_add_nothing_the_inside_explains_all():
    found = aa.spread("x", samples(between=0.0, inside=0.03))
    assert found.between / found.expected == pytest.approx(1.0, abs=0.25)


def test_noise_raises_the_smallest_change_that_can_be_seen():
    quiet = aa.spread("x", samples(0.001, 0.001, processes=10))
    loud = aa.spread("x", samples(0.2, 0.001, processes=10))
    assert quiet.detectable == aa.DEFAULT.least_effect
    assert loud.detectable > 0.1


def test_one_process_has_no_spread_to_show():
    assert aa.spread("x", [1.0, 1.1, 1.2, 1.1, 1.0]).between == 0.0


def test_the_table_fits_a_terminal_and_says_what_its_columns_are() -> None:
    name = "Inference qwen3_expert prompt fp32 inference_mode"
    text = aa.table([aa.spread(name, samples(between=0.2, inside=0.03))])
    header = text.splitlines()[0]
    for column in ("spread", "expected", "halves", "can see"):
        assert column in header
        assert f"{column}: " in text
    assert max(map(len, text.splitlines())) <= 100


def test_aa_reports_what_was_slowed_and_what_was_found(monkeypatch, capsys):
    def measure(wanted, kind, size, processes, extra):
        entry = Entry(samples={"latency": [1e-3] * 5 * processes})
        for fraction in extra["slow"]:
            entry.samples[f"slower by {fraction:g}"] = [fraction + 0.001] * processes
        return dict.fromkeys(wanted, entry)

    monkeypatch.setattr(aa, "measure", measure)
    arguments = ["aa", "--device", "cpu", "--shape", "tiny", "--tokens", "1", "--dtype", "fp32"]
    arguments += ["--provider", "eager", "--processes", "4", "--slow", "5,20"]
    monkeypatch.setenv("FUSED_MLP_DEVICE", "cpu")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 ms" in out
    assert "5.1 %" in out
    assert "20.1 %" in out
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    (found,) = record["slowed"].values()
    assert found == {"5": pytest.approx([0.051] * 4), "20": pytest.approx([0.201] * 4)}


@pytest.mark.parametrize(
    "arguments", [["--shape", "llama9"], ["--slow", "-5"], ["--slow", "x"], ["--processes", "0"]]
)
def test_bad_usage_of_aa_is_exit_code_2(arguments, capsys, monkeypatch):
    monkeypatch.setenv("FUSED_MLP_DEVICE", "cpu")
    assert main(["aa", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(doctor, "_LOAD_WINDOW", 0.0)
    monkeypatch.setenv("FUSED_MLP_DEVICE", "cpu")
    monkeypatch.setattr(
        doctor, "probe", lambda kind, processes: [aa.spread("a b c d e", [1.0] * 25)]
    )


def test_the_doctor_says_what_a_cpu_lacks_and_what_it_could_detect(quiet, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "n/a   energy" in out
    assert "smallest the gate could call" in out
    assert main(["doctor", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["device"] == "cpu"
    assert record["sizes"]["quick"] < record["sizes"]["default"] < record["sizes"]["full"]
    assert math.isclose(record["noise"][0]["latency"], 1.0)


def test_the_doctor_names_a_missing_torch_and_measures_nothing(quiet, capsys, monkeypatch):
    there = doctor.importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: None if name == "torch" else there(name)
    )
    monkeypatch.setattr(doctor, "probe", lambda *_: pytest.fail("nothing can be measured"))
    assert main(["doctor"]) == 4
    assert "torch                  not installed" in capsys.readouterr().out


def test_the_doctor_sees_a_busy_and_throttled_gpu(monkeypatch):
    line = "1200, 2619, 88, 700.0, 0x0000000000000020, 99, Enabled"
    answers = {"--query-compute": ["4242, python"], "--query-gpu": [line]}
    monkeypatch.setattr(
        readings, "_nvidia_smi", lambda query: next(v for k, v in answers.items() if k in query)
    )
    monkeypatch.setattr(doctor, "_LOAD_WINDOW", 0.0)
    found = {f.what: f for f in doctor.findings("cuda")}
    assert found["GPU idle"].state == "warn"
    assert "4242" in found["GPU idle"].why
    assert "throttles" in found["throttling"].why


def test_unknown_devices_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("FUSED_MLP_DEVICE", "cpu")
    assert main(["doctor", "--device", "tpu"]) == 2
    assert "known: cpu, cuda" in capsys.readouterr().err
