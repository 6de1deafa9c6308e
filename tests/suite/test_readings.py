"""Foreign load, throttling and progress: judged from numbers given, never from this machine's."""

import itertools

import pytest

from benchmarks.suite.harness import energy, progress, readings
from benchmarks.suite.harness.readings import CpuTimes

BEFORE = CpuTimes(wall=100.0, busy=50.0, stolen=1.0, own=5.0)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (CpuTimes(101.0, 51.0, 1.0, 6.0), None),
        (CpuTimes(101.0, 51.2, 1.0, 6.0), None),
        (CpuTimes(101.0, 51.9, 1.0, 6.0), "other processes used 0.9 of 2 cores"),
        (CpuTimes(101.0, 51.0, 1.3, 6.0), "the host took 0.30 of 2 cores away"),
    ],
)
def test_foreign_load_is_what_others_used(after, said):
    assert readings.foreign_load(BEFORE, after, cores=2) == said


def test_the_watch_judges_no_window_too_short_for_the_counter(monkeypatch):
    times = iter([BEFORE, CpuTimes(100.1, 50.2, 1.0, 5.0), CpuTimes(101.0, 52.0, 1.0, 6.0)])
    monkeypatch.setattr(readings, "cpu_times", lambda: next(times))
    monkeypatch.setattr(readings.os, "cpu_count", lambda: 2)
    watch = readings.Watch()
    assert watch.look() is None
    assert watch.look() == "other processes used 1.0 of 2 cores"


@pytest.mark.parametrize(
    ("reading", "found"),
    [
        (None, False),
        ({"throttle": 0.0, "celsius": 40.0}, False),
        ({"throttle": float(0x1), "celsius": 40.0}, False),  # idle
        ({"throttle": float(0x20), "celsius": 88.0}, True),  # software thermal slowdown
        ({"throttle": "[N/A]", "celsius": 40.0}, False),
    ],
)
def test_throttling_is_told_from_the_reasons(reading, found):
    assert bool(readings.throttled(reading)) is found


def test_nvidia_smi_is_read_as_it_prints(monkeypatch):
    line = "1980, 2619, 41, 121.53, 0x0000000000000020, 0, Enabled"
    monkeypatch.setattr(readings, "_nvidia_smi", lambda query: [line])
    reading = readings.gpu_reading()
    assert (reading["sm_mhz"], reading["watts"], reading["throttle"]) == (1980.0, 121.53, 32.0)
    assert "throttles" in readings.throttled(reading)


def test_an_older_driver_is_asked_in_its_own_words(monkeypatch):
    def smi(query):
        return None if "event_reasons" in query else ["1980, 2619, 41, 121.53, 0x8, 0, Enabled"]

    monkeypatch.setattr(readings, "_nvidia_smi", smi)
    assert readings.gpu_reading()["throttle"] == 8.0


def test_the_power_cap_spoils_locked_clocks_alone(monkeypatch):
    capped = {"throttle": float(0x4), "celsius": 60.0}
    monkeypatch.delenv(readings.CLOCKS_VARIABLE, raising=False)
    assert readings.throttled(capped) is None
    monkeypatch.setenv(readings.CLOCKS_VARIABLE, "locked 1500 MHz")
    assert "throttles" in readings.throttled(capped)


def test_a_remark_of_the_tool_is_no_user_of_the_gpu(monkeypatch):
    said = ["[Insufficient Permissions], [N/A]", "4242, python"]
    monkeypatch.setattr(readings, "_nvidia_smi", lambda query: said)
    assert readings.gpu_users() == ["4242, python"]


@pytest.mark.parametrize(("visible", "found"), [("", "0"), ("3,1", "3"), ("GPU-ab", "GPU-ab")])
def test_the_gpu_read_is_the_one_torch_measures(monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert readings.gpu_id() == found


def test_energy_is_the_counter_over_the_calls():
    clock = {"now": 0.0, "calls": 0}

    def call():
        clock["calls"] += 1
        clock["now"] += 1e-3

    joules = energy.joules_a_call(
        [call], lambda: None, lambda: 0.25 * clock["calls"], lambda: clock["now"]
    )
    assert joules == pytest.approx(0.25)


def test_progress_tells_how_long_is_left(tmp_path, monkeypatch):
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "said"))
    shown = progress.Progress(total=4)
    shown.step("first", finished=1)
    shown.step("second", finished=1)
    shown.close()
    lines = (tmp_path / "said").read_text().splitlines()
    # Begun at 0 and first said at 10 s, after one of four: 30 s are left.
    assert lines == ["1 of 4, 30 s left: first", "2 of 4, 30 s left: second"]


def test_progress_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "no" / "such" / "folder"))
    progress.Progress(1).step("on", finished=1)
