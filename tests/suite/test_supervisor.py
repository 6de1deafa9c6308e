"""What a dying worker costs: its combination, and nothing else."""

import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.suite.harness import cached, readings
from benchmarks.suite.harness.shapes import SIZES, Combination
from benchmarks.suite.harness.supervisor import Supervisor

NAMES = ("gpt2", "vit_l", "tiny", "article")
ALL = [Combination("Inference", name, "1", "fp32", "eager") for name in NAMES]
VICTIM = ALL[1]


def supervise(tmp_path, monkeypatch, deed="", **options):
    if deed:
        monkeypatch.setenv(f"FAKE_INFERENCE_{VICTIM.shape.upper()}_1_FP32_EAGER", deed)
    monkeypatch.setenv("FUSED_MLP_PROGRESS", str(tmp_path / "progress"))
    wanted = dict.fromkeys(ALL, frozenset({"latency", "launches"}))
    made = Supervisor(wanted, "cpu", SIZES["quick"], tmp_path, **options)
    made.command = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
    return made


def others(table):
    return [entry for combination, entry in table.items() if combination != VICTIM]


def test_every_process_gives_its_samples_together(tmp_path, monkeypatch):
    table = supervise(tmp_path, monkeypatch).run()
    for entry in table.values():
        assert len(entry.samples["latency"]) == 3 * 5
        assert len(entry.samples["cold_start"]) == 3
        assert entry.numbers["launches"] == 3
        assert len(set(entry.processes)) == 3


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("killed", "killed by SIGKILL"),
        ("torn", "killed by SIGABRT"),
        ("exits", "it last said: cannot go on: no such thing"),
        ("raises", "ValueError: wrong"),
        ("poisons", "CUDA error"),
    ],
)
def test_a_dying_worker_costs_one_combination(tmp_path, monkeypatch, deed, said):
    table = supervise(tmp_path, monkeypatch, deed).run()
    assert said in table[VICTIM].failure
    for entry in others(table):
        assert entry.failure is None
        assert len(entry.samples["latency"]) == 3 * 5


def test_a_hung_worker_is_ended(tmp_path, monkeypatch):
    hung = supervise(tmp_path, monkeypatch, "hangs")
    hung.patience = 0.3
    table = hung.run()
    assert "no sign of life" in table[VICTIM].failure
    assert all(len(entry.samples["latency"]) == 15 for entry in others(table))


def test_not_applicable_is_no_failure_and_is_not_tried_again(tmp_path, monkeypatch):
    table = supervise(tmp_path, monkeypatch, "absent").run()
    entry = table[VICTIM]
    assert (entry.absent, entry.failure, entry.samples) == ("not installed", None, {})
    assert entry.seconds == pytest.approx(0.1)


def test_a_worker_that_cannot_start_fails_everything_once(tmp_path, monkeypatch):
    broken = supervise(tmp_path, monkeypatch)
    broken.command = [sys.executable, "-c", "import no_such_module"]
    table = broken.run()
    assert all("no_such_module" in entry.failure for entry in table.values())
    assert len(list(tmp_path.glob("job-*.json"))) == 3


def test_stopping_keeps_what_was_measured(tmp_path, monkeypatch):
    waiting, stop = tmp_path / "waiting", tmp_path / "stop"
    monkeypatch.setenv("FAKE_WAITING", str(waiting))
    monkeypatch.setenv("FUSED_MLP_STOP", str(stop))
    stopped = supervise(tmp_path, monkeypatch, "waits")

    def ask():
        while not waiting.exists():
            time.sleep(0.01)
        stop.touch()

    thread = threading.Thread(target=ask)
    thread.start()
    table = stopped.run()
    thread.join()
    assert len(table[ALL[0]].samples["latency"]) == 5
    assert [bool(entry.samples) for entry in table.values()] == [True, False, False, False]
    assert all(entry.failure is None for entry in table.values())
    assert "what was measured so far is kept" in (tmp_path / "progress").read_text()


def test_a_gpu_that_throttles_at_work_marks_what_it_was_at(tmp_path, monkeypatch):
    supervisor = supervise(tmp_path, monkeypatch)
    supervisor.kind = "cuda"
    monkeypatch.setattr(readings, "gpu_reading", lambda: {"throttle": 64.0, "celsius": 92.0})
    at = next(iter(supervisor.wanted))
    supervisor._look(at, 0)
    assert not supervisor.table[at].disturbed  # too soon after the start
    supervisor._looked -= 60
    supervisor._look(at, 0)
    assert "92.0 °C" in supervisor.table[at].disturbed[0]


def test_metrics_without_noise_take_one_process(tmp_path, monkeypatch):
    supervisor = supervise(tmp_path, monkeypatch)
    exact = Supervisor(dict.fromkeys(ALL, frozenset({"launches"})), "cpu", SIZES["full"], tmp_path)
    assert (exact.rounds, supervisor.rounds) == (1, 3)


def test_progress_names_what_runs_and_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.suite.harness.progress.EVERY_SECONDS", 0.0)
    supervise(tmp_path, monkeypatch, "killed").run()
    lines = (tmp_path / "progress").read_text().splitlines()
    assert any("process 1 of 3, Inference gpt2 1 fp32 eager" in line for line in lines)
    assert any("left:" in line for line in lines)
    assert any(line.startswith(f"failed: {VICTIM}: the worker was killed") for line in lines)


def test_asv_gets_samples_a_failure_or_nothing(tmp_path, monkeypatch):
    table = supervise(tmp_path, monkeypatch, "killed").run()
    cache = {(c.mode, *c.params): cached.values(c, e, "cpu") for c, e in table.items()}

    class Inference(cached.Measured):
        mode = "Inference"

    look_up = Inference().look_up
    assert look_up(cache, "latency", ALL[0].params)["samples"] == [1.0] * 15
    assert look_up(cache, "launches", ALL[0].params) == 3
    missing = look_up(cache, "latency", ("tiny", "16", "fp32", "eager"))
    assert missing != missing
    with pytest.raises(RuntimeError, match="SIGKILL"):
        look_up(cache, "latency", VICTIM.params)
