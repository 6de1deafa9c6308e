"""What this machine is and can do, asked once: architecture names, oneDNN's and Triton's abilities."""

from __future__ import annotations

import importlib.util
import os
import platform
from functools import cache

import torch

from . import activations

_ONEDNN = torch.backends.mkldnn.is_available()


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def interpreted() -> bool:
    """Whether Triton's kernels run through its interpreter; the flag is read when triton is
    imported.
    """
    return has_triton() and os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def architecture(device: torch.device) -> str:
    """The name of a device's table: ``sm90``, ``gfx942``, ``cpu-avx512-authenticamd-25-17``."""
    if device.type == "cuda":
        if torch.version.hip:
            name = torch.cuda.get_device_properties(device).gcnArchName
            return name.split(":")[0]
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm{major}{minor}"
    if device.type == "cpu":
        isa = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")
        return "-".join(["cpu", isa, *_cpu_identity()])
    return device.type


def _cpu_identity() -> tuple[str, ...]:
    """Vendor, family and model: what decides which BLAS code runs. A marketing name is not the same
    everywhere.
    """
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if not line.strip():
                    break
                key, _, value = line.partition(":")
                fields[key.strip()] = value.strip()
    except OSError:
        pass
    parts = [fields[k] for k in ("vendor_id", "cpu family", "model") if k in fields]
    return tuple(p.lower().replace(" ", "") for p in parts) or (platform.machine().lower(),)


def has_tf32(architecture: str) -> bool:
    """Whether a GPU's tensor cores take fp32 rounded to tf32: NVIDIA's from sm80."""
    return architecture.startswith("sm") and int(architecture[2:]) >= 80


def fp32_setting() -> str:
    """How torch is set to multiply fp32 on GPUs, ``"tf32"`` or another: the one place that both of
    its interfaces write. `torch.get_float32_matmul_precision` raises once
    ``torch.backends.cuda.matmul.fp32_precision`` was assigned, which asks the same in eight times as
    long.
    """
    return torch._C._get_fp32_precision_getter("cuda", "matmul")


def onednn_enabled() -> bool:
    """Whether torch has oneDNN and the user left it on (`torch.backends.mkldnn.flags`)."""
    return _ONEDNN and torch._C._get_mkldnn_enabled()


@cache
def onednn_native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies ``dtype`` natively through oneDNN."""
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return False


def onednn_obstacle(
    device: torch.device, dtype: torch.dtype, activation: str, training: bool
) -> str | None:
    """Why the `onednn` path cannot run, or None."""
    if device.type != "cpu":
        return f"onednn serves CPUs, not {device.type} devices"
    if not onednn_enabled():
        return "onednn is off or missing in this build of torch"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"onednn has no {str(dtype).removeprefix('torch.')} kernels"
    if training and not onednn_native(dtype):
        return f"onednn does not train in {str(dtype).removeprefix('torch.')} on this CPU"
    if activations.get(activation).onednn is None and not training:
        return None  # the activation runs as a pass of its own
    return None
