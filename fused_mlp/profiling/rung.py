"""What a rung of the ladder is, and the setting it is climbed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..modules import FusedMLP


@dataclass(frozen=True)
class Setting:
    """What the ladder is climbed with. Sizes of the article: 8192 tokens of 768/3072, gelu,
    bf16."""

    hidden: int = 768
    intermediate: int = 3072
    tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    training: bool = False
    activation: str = "gelu"

    @property
    def unit(self) -> str:
        """What a rung's work is counted in."""
        return "kernels" if self.device == "cuda" else "operators"

    @property
    def mid(self) -> int:
        """Bytes of one (tokens, intermediate) activation."""
        return self.tokens * self.intermediate * self.dtype.itemsize

    @property
    def make(self) -> dict[str, Any]:
        """Where and as what tensors are made."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def gemm_bytes(self) -> int:
        """Bytes that the three GEMMs of a gated MLP move, each tensor once a GEMM."""
        row, weight = self.tokens * self.hidden, self.hidden * self.intermediate
        return 3 * ((row + weight) * self.dtype.itemsize + self.mid)

    def least_bytes(self, matrices: int = 3) -> int:
        """Bytes that an MLP of so many matrices must move if each tensor moves once; forward
        alone."""
        weights = matrices * self.hidden * self.intermediate
        return (weights + 2 * self.tokens * self.hidden) * self.dtype.itemsize


@dataclass
class Rung:
    """One step of the ladder.

    Attributes:
        text: what is run.
        call: one forward, or forward and backward.
        expected: kernels (operators on a CPU) of one call; None where the number follows from
            sizes.
        gemms: how many of them are GEMMs.
        why: the reason behind the expectation.
        saved: activations of (tokens, intermediate) kept for backward, in training.
        traffic: a call made of operators that a dispatch mode can see, for counting bytes; or the
            bytes, computed.
        missing: why it cannot run here.
        place: its number in the ladder, which names its trace.
    """

    name: str
    text: str
    call: Callable[[], Any] | None
    expected: int | None
    gemms: int | None
    why: str
    least_bytes: int
    saved: float | None = None
    traffic: Callable[[], Any] | int | None = None
    parameters: tuple[Tensor, ...] = ()
    missing: str | None = None
    place: int = 0


@dataclass(frozen=True)
class Case:
    """What the rungs of part 2 share: one MLP's weights, one input."""

    setting: Setting
    mlp: FusedMLP
    x: Tensor
    act: Callable[[Tensor], Tensor]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(self.mlp.parameters())

    def step(self, module: Callable, parameters: tuple[Tensor, ...] | None = None) -> Callable:
        return step(self.setting, module, self.x, parameters or self.parameters)


class Plain(nn.Module):
    """The MLP as anyone would write it, on the very parameters of a `FusedMLP`."""

    def __init__(self, mlp: FusedMLP, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def step(
    setting: Setting, module: Callable, x: Tensor, parameters: tuple[Tensor, ...]
) -> Callable[[], Any]:
    """One forward, or one forward and backward, as a call without arguments."""
    if not setting.training:
        return lambda: module(x)
    x = x.detach().requires_grad_(True)
    dy: list[Tensor] = []  # made at the first call, which nobody measures

    def both() -> Any:
        y = module(x)
        if not dy:
            dy.append(torch.randn_like(y))
        return torch.autograd.grad(y, (x, *parameters), dy)

    return both


def compiled(call: Callable) -> Callable:
    """torch.compile for one size, its kernels visible to a profiler."""
    import torch._inductor.config as settings

    # Without it a CPU profile shows nothing inside a compiled graph.
    settings.cpp.enable_kernel_profile = True
    return torch.compile(call, dynamic=False)
