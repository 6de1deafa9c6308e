"""`FusedMLP`: the MLP as a module with real `nn.Linear` children."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import activations, functional
from .paths import Params


class FusedMLP(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))``, or ``down_proj(act(up_proj(x)))`` with ``gated=False``.

    Args:
        hidden_size: last size of the input and the output.
        intermediate_size: width in between.
        activation: as in `fused_mlp.fused_mlp`.
        gated: whether there is a ``gate_proj``.
        bias: whether the three projections have biases.
        recompute: as in `fused_mlp.fused_mlp`.

    >>> mlp = FusedMLP(8, 16)
    >>> sorted(mlp.state_dict())
    ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight']
    >>> mlp(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        recompute: str = "activation",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kwargs = {"bias": bias, "device": device, "dtype": dtype}
        if gated:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, **kwargs)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **kwargs)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **kwargs)
        self.activation = activations.get(activation)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up_proj, self.down_proj
        gate = self._modules.get("gate_proj")
        p = Params(
            up.weight, down.weight, None if gate is None else gate.weight,
            up.bias, None if gate is None else gate.bias, down.bias,
        )  # fmt: skip
        return functional.run(x, p, self.activation, self.recompute)

    @classmethod
    def from_module(cls, mlp: nn.Module) -> FusedMLP:
        from .integrations import convert

        return convert(mlp)
