"""The clock against devices with known durations: the same must come out."""

import itertools

import pytest

from benchmarks.suite.harness.clock import Clock, Settings
from benchmarks.suite.harness.slowdown import recover
from tests.suite.timelines import FakeDevice, FakeHost

SETTINGS = Settings(samples=5, sample_seconds=200e-6, warm_seconds=1e-3, warm_limit=0.02)


@pytest.mark.parametrize("launch", [1e-6, 5e-6, 20e-6])
@pytest.mark.parametrize("work", [3e-6, 40e-6, 900e-6])
def test_device_time_comes_out_without_launch_gaps(work, launch):
    device = FakeDevice(launch)
    reading = Clock(device, SETTINGS).measure([device.work(work)])
    assert reading.latency == pytest.approx([work] * 5, rel=1e-9)
    assert reading.host == pytest.approx([launch] * 5, rel=1e-9)
    assert not reading.launch_bound


def test_a_sample_holds_at_least_the_work_asked_for():
    device = FakeDevice()
    reading = Clock(device, SETTINGS).measure([device.work(7e-6)])
    assert reading.calls * 7e-6 >= 0.9 * SETTINGS.sample_seconds
    long = Clock(device, SETTINGS).measure([device.work(5e-3)])
    assert long.calls == 1


@pytest.mark.parametrize("launch", [5e-6, 40e-6])
def test_launch_gaps_in_the_warm_up_make_no_sample_short(launch):
    device = FakeDevice(launch)
    reading = Clock(device, SETTINGS).measure([device.work(7e-6)])
    assert reading.calls * 7e-6 >= 0.5 * SETTINGS.sample_seconds
    assert reading.latency == pytest.approx([7e-6] * 5, rel=1e-9)


def test_a_device_that_cannot_be_held_is_said_to_be_launch_bound():
    device = FakeDevice(launch=20e-6, holds=False)
    reading = Clock(device, SETTINGS).measure([device.work(3e-6)])
    assert reading.launch_bound


def test_a_host_clock_times_the_calls_themselves():
    host = FakeHost()
    reading = Clock(host, SETTINGS).measure([host.work(30e-6)])
    assert reading.latency == pytest.approx([30e-6] * 5, rel=1e-3)


def test_slow_first_calls_are_warmed_away():
    host = FakeHost()
    durations = itertools.chain((1e-3 * 0.7**i + 50e-6 for i in range(40)), itertools.repeat(50e-6))
    reading = Clock(host, SETTINGS).measure([host.work(lambda: next(durations))])
    assert reading.stable
    assert reading.latency == pytest.approx([50e-6] * 5, rel=0.03)


def test_warm_up_of_work_that_never_settles_ends_and_says_so():
    host = FakeHost()
    steps = itertools.count()
    reading = Clock(host, SETTINGS).measure([host.work(lambda: 3e-4 * 1.1 ** (next(steps) % 30))])
    assert not reading.stable
    assert reading.warm_seconds >= SETTINGS.warm_limit


def test_buffers_take_turns():
    device = FakeDevice()
    calls = [device.work(30e-6, name) for name in "abc"]
    Clock(device, SETTINGS).measure(calls)
    turns = "".join(device.log)
    assert turns in "abc" * len(turns)


def test_the_cache_is_flushed_before_each_sample_and_not_timed():
    device = FakeDevice()
    reading = Clock(device, SETTINGS).measure([device.work(30e-6)])
    assert device.flushed >= 5
    assert reading.latency == pytest.approx([30e-6] * 5, rel=1e-9)


def test_a_first_call_is_timed_to_its_end():
    device = FakeDevice(launch=1e-3)
    assert Clock(device, SETTINGS).first(device.work(5e-3)) == pytest.approx(6e-3)


@pytest.mark.parametrize("fraction", [0.05, 0.10, 0.20])
def test_a_known_slowdown_is_recovered(fraction):
    host = FakeHost()
    clock = Clock(host, SETTINGS)
    assert recover(clock, [host.work(80e-6)], fraction, host.now) == pytest.approx(
        fraction, rel=0.01
    )


def test_a_known_slowdown_is_recovered_on_a_drifting_machine():
    host = FakeHost()
    calls = itertools.count()
    clock = Clock(host, Settings(samples=5, sample_seconds=200e-6, warm_seconds=1e-4))
    drifting = host.work(lambda: 80e-6 * (1 + 1e-5 * next(calls)))
    assert recover(clock, [drifting], 0.10, host.now) == pytest.approx(0.10, abs=0.01)


def test_a_graph_of_many_calls_is_read_as_one_call_each():
    device = FakeDevice()
    graph = device.work(20 * 3e-6)
    reading = Clock(device, SETTINGS).measure([graph]).per_call(20)
    assert reading.latency == pytest.approx([3e-6] * 5, rel=1e-9)
    assert reading.calls % 20 == 0
