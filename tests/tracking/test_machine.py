"""A machine's identity: stable, telling, and never silently shared."""

from __future__ import annotations

import platform

import pytest

from benchmarks.tracking import machine


def test_identity_is_the_same_twice_and_names_no_host() -> None:
    first, second = machine.identify(), machine.identify()
    assert first == second
    host = platform.node()
    assert not host or host not in first.values()
    assert platform.release() not in "".join(first.values()), "the kernel moves at a reboot"


def test_chosen_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.NAME_VARIABLE, "Lab Box/../7")
    assert machine.identify()["machine"] == "lab-box-7"


def test_locked_clocks_are_another_machine() -> None:
    unlocked = {"gpu": "NVIDIA H200", "gpu_count": "1", "clocks": "unlocked"}
    locked = {**unlocked, "clocks": "locked 1500 MHz"}
    assert machine.machine_name(unlocked) != machine.machine_name(locked)
    assert machine.conflicts(unlocked, locked)


@pytest.mark.parametrize("field", machine.HARDWARE)
def test_each_hardware_field_is_told_apart(field: str) -> None:
    known = machine.identify()
    (sentence,) = machine.conflicts(known, {**known, field: "other"})
    assert field in sentence
    assert "other" in sentence


def test_a_new_driver_is_the_same_machine() -> None:
    known = machine.identify()
    assert not machine.conflicts(known, {**known, "driver": "999.1", "cuda": "99"})
