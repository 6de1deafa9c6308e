"""What the examples measure: exact counts, which no busy machine can change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fused_mlp
from fused_mlp.profiling import counted, saved_bytes
from fused_mlp.profiling.measure import _without_chatter


def operators(call: Callable[[], Any]) -> int:
    """Operators that compute in one call, a CPU's stand-in for kernel launches.

    On one path whatever the machine: at sizes as small as a test's, a measured table may well
    prefer eager.
    """
    with torch.no_grad(), fused_mlp.use_path("onednn"):
        for _ in range(3):  # weights are packed at the second sight of them
            call()
        with _without_chatter(), profile(activities=[ProfilerActivity.CPU]) as prof:
            call()
    return len(counted(prof.events()))


def kept(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that a forward keeps for backward, parameters apart."""
    with saved_bytes(model.parameters()) as total:
        model(*args, **kwargs)
    return total[0]


def gradients(model: nn.Module, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of every parameter that has one."""
    model.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
