"""Who measured: a machine's identity, made only of readings that survive a reboot.

A result is comparable with another only when both came from the same hardware, so the identity
names the results folder and travels in every result. Clock rates, temperatures, the kernel's
release and the host's name are left out: they move, and an identity that moves splits the
history.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..suite.harness.shapes import DEVICE_NODES

NAME_VARIABLE = "FUSED_MLP_MACHINE"
CLOCKS_VARIABLE = "FUSED_MLP_CLOCKS"

# What must agree before two results may share a folder. Driver, torch and triton may change under
# the same hardware; they travel in each result instead and are compared there.
HARDWARE = ("arch", "cpu", "num_cpu", "gpu", "gpu_count", "gpu_memory", "clocks")

_GPU_SCRIPT = """
import json, torch
found = torch.cuda.is_available()
p = torch.cuda.get_device_properties(0) if found else None
print(json.dumps({
    "gpu": p.name if found else "none",
    "gpu_count": str(torch.cuda.device_count()) if found else "0",
    "gpu_memory": f"{round(p.total_memory / 2**30)} GiB" if found else "none",
    "cuda": torch.version.cuda or torch.version.hip or "none",
}))
"""


def cpu_model() -> str:
    """Name, family and model of the processor, with the vector units that decide its speed."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")
    units = " ".join(flag for flag in wanted if flag in flags)
    name = re.sub(r"\s+", " ", fields.get("model name", platform.machine()))
    detail = "/".join(fields[key] for key in ("cpu family", "model", "stepping") if key in fields)
    return f"{name} ({detail}) {units}".replace(" ()", "").strip()


def _ram() -> str:
    # In whole GiB: the kernel's own share moves the exact figure from boot to boot.
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{round(total / 2**30)} GiB"


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = answer.stdout.strip().splitlines()
    return lines[0].strip() if answer.returncode == 0 and lines else "unknown"


def _gpu(python: str) -> dict[str, str]:
    none = {"gpu": "none", "gpu_count": "0", "gpu_memory": "none", "cuda": "none", "driver": "none"}
    # Importing torch takes seconds, so it is asked only where a device node says there is
    # something to ask.
    # A run told to measure the CPU is the CPU's, whatever else the machine has.
    if os.environ.get("FUSED_MLP_DEVICE") == "cpu" or not any(map(os.path.exists, DEVICE_NODES)):
        return none
    try:
        answer = subprocess.run(
            [python, "-c", _GPU_SCRIPT], capture_output=True, text=True, check=True, timeout=300
        )
        return {**json.loads(answer.stdout), "driver": _driver()}
    except (subprocess.SubprocessError, OSError, ValueError):
        return {**none, "driver": _driver()}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def machine_name(info: dict[str, str]) -> str:
    """The folder name: the GPU and its locked clock, or the CPU and its core count.

    >>> machine_name({"gpu": "NVIDIA H200", "gpu_count": "1", "clocks": "locked 1500 MHz"})
    'nvidia-h200-locked-1500-mhz'
    >>> machine_name({"gpu": "none", "cpu": "AMD EPYC (25/17/1) avx2", "num_cpu": "2"})
    'amd-epyc-25-17-1-2cpu'
    """
    chosen = os.environ.get(NAME_VARIABLE)
    if chosen:
        return _slug(chosen)
    if info["gpu"] != "none":
        count = "" if info["gpu_count"] == "1" else f"{info['gpu_count']}x-"
        clocks = "" if info["clocks"] == "unlocked" else f"-{info['clocks']}"
        return _slug(count + info["gpu"] + clocks)
    return _slug(info["cpu"].split(")")[0]) + f"-{info['num_cpu']}cpu"


def identify(python: str = sys.executable) -> dict[str, str]:
    """Every identity field as asv stores it: ``machine`` (the folder), its hardware, its driver.

    ``python`` is the interpreter whose torch is asked about the GPU.
    """
    info = {
        "os": platform.system(),
        "arch": platform.machine(),
        "cpu": cpu_model(),
        "num_cpu": str(os.cpu_count()),
        "ram": _ram(),
        **_gpu(python),
        # A driver does not say whether its clocks are locked; the step that locks them says so
        # here.
        "clocks": os.environ.get(CLOCKS_VARIABLE, "unlocked"),
    }
    if info["gpu"] == "none":
        info["clocks"] = "unlocked"
    return {"machine": machine_name(info), **info}


def conflicts(known: dict[str, Any], seen: dict[str, Any]) -> list[str]:
    """In words, each hardware field in which two identities of one name differ."""
    return [
        f"{key} is {seen[key]!r} here and {known[key]!r} there"
        for key in HARDWARE
        if key in known and key in seen and str(known[key]) != str(seen[key])
    ]
