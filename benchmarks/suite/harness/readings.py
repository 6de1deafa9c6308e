"""Volatile readings beside a measurement: load, clocks, temperature, throttling. No torch.

They decide whether a run is valid, and never enter the machine's identity.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Work of others beyond this share of all cores, or time the host stole, makes a reading invalid.
FOREIGN_SHARE = 0.15
STOLEN_SHARE = 0.02
# /proc/stat counts hundredths of a second: a shorter window would judge rounding.
LEAST_WINDOW = 0.5
_FREQUENCY = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
# nvidia-smi's bits: hardware slowdown, both thermal slowdowns, power brake.
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
# The software power cap is where a large GEMM at free clocks lives, so it is kept as a reading. It
# spoils a run only where the clocks were locked: then the lock was not sustainable.
_POWER_CAP = 0x4
CLOCKS_VARIABLE = "FUSED_MLP_CLOCKS"


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since boot, over all cores: in use by anyone, stolen; `own` is this process's."""

    wall: float
    busy: float
    stolen: float
    own: float


def cpu_times() -> CpuTimes | None:
    """The counters now; None where the system has none."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) / tick for field in fields)
    mine = os.times()
    own = mine.user + mine.system + mine.children_user + mine.children_system
    return CpuTimes(time.monotonic(), user + nice + system + irq + softirq, steal, own)


def foreign_load(before: CpuTimes, after: CpuTimes, cores: int) -> str | None:
    """What made the time between two readings invalid, in words; None if nothing did."""
    wall = after.wall - before.wall
    if wall <= 0:
        return None
    others = max(0.0, (after.busy - before.busy) - (after.own - before.own)) / wall
    stolen = (after.stolen - before.stolen) / wall
    if others > FOREIGN_SHARE * cores:
        return f"other processes used {others:.1f} of {cores} cores"
    if stolen > STOLEN_SHARE * cores:
        return f"the host took {stolen:.2f} of {cores} cores away"
    return None


class Watch:
    """Judges each combination over a window long enough to judge."""

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._start = self._last = cpu_times()

    def look(self) -> str | None:
        """What disturbed the measurements since the window began; moves the window on."""
        now = cpu_times()
        if now is None or self._start is None:
            return None
        verdict = foreign_load(self._start, now, self._cores)
        if now.wall - self._start.wall >= LEAST_WINDOW:
            self._start = now
            return verdict
        return None


def gpu_reading() -> dict[str, float | str] | None:
    """Clock, temperature, power and throttle reasons of the GPU; None without nvidia-smi."""
    # Drivers from 535 on call them event reasons, older ones know throttle reasons alone.
    for word in ("event", "throttle"):
        reading = _gpu_reading(f"clocks_{word}_reasons.active")
        if reading is not None:
            return reading
    return None


def _gpu_reading(reasons: str) -> dict[str, float | str] | None:
    names = {
        "clocks.sm": "sm_mhz",
        "clocks.mem": "memory_mhz",
        "temperature.gpu": "celsius",
        "power.draw": "watts",
        reasons: "throttle",
        "utilization.gpu": "utilization",
        "persistence_mode": "persistence",
    }
    values = _nvidia_smi(f"--query-gpu={','.join(names)}")
    if not values:
        return None
    reading: dict[str, float | str] = {}
    for name, value in zip(names.values(), values[0].split(","), strict=False):
        text = value.strip()
        try:
            reading[name] = float(int(text, 16)) if text.startswith("0x") else float(text)
        except ValueError:
            reading[name] = text
    return reading


def gpu_users() -> list[str]:
    """Other processes computing on the GPU."""
    lines = _nvidia_smi("--query-compute-apps=pid,process_name") or []
    # What is no process id is a remark of the tool's ("[Insufficient Permissions]").
    pids = (line.split(",")[0].strip() for line in lines)
    others = zip(pids, lines, strict=True)
    return [line.strip() for pid, line in others if pid.isdigit() and pid != str(os.getpid())]


def machine_reading(kind: str) -> dict[str, Any]:
    """What to keep beside a round of measurements: load, and on a GPU its state and its users."""
    reading: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        reading["load"] = round(os.getloadavg()[0], 2)
    with contextlib.suppress(OSError, ValueError):
        reading["cpu_mhz"] = int(Path(_FREQUENCY).read_text()) // 1000
    if kind == "cuda":
        reading["gpu"], reading["gpu_users"] = gpu_reading(), gpu_users()
    return reading


def unfit(reading: dict[str, Any]) -> str | None:
    """Why nothing measured around this reading is valid, in words; None if it may be."""
    users = reading.get("gpu_users")
    if users:
        return f"the GPU is busy: {'; '.join(users[:3])}"
    return throttled(reading.get("gpu"))


def throttled(reading: dict[str, float | str] | None) -> str | None:
    """Why the GPU runs slower than asked for, in words; None if it does not."""
    reasons = (reading or {}).get("throttle")
    spoiled = _THROTTLED | (_POWER_CAP if os.environ.get(CLOCKS_VARIABLE) else 0)
    if isinstance(reasons, float) and int(reasons) & spoiled:
        return f"the GPU throttles (reasons {int(reasons):#x}) at {reading['celsius']} °C"  # type: ignore[index]
    return None


def gpu_id() -> str:
    """The GPU measured, an index or a UUID: torch's first, which need not be the machine's."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def _nvidia_smi(query: str) -> list[str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, query, "--format=csv,noheader,nounits", f"--id={gpu_id()}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()
