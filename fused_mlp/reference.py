"""The MLP in plain PyTorch: the specification that every path is held to, and the path that is
always right.

It is made of aten operators alone, so whatever understands those understands it: tensor
subclasses, `torch.func` transforms, forward-mode and double backward, dispatch modes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from . import activations


def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_weight: Tensor | None = None,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
) -> Tensor:
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate.

    Shapes as in `fused_mlp.fused_mlp`. Nothing is checked beyond what PyTorch's own operators
    check.

    >>> import torch
    >>> x, up, down = torch.ones(2, 3), torch.ones(4, 3), torch.ones(3, 4)
    >>> mlp(x, up, down, activation="relu")
    tensor([[12., 12., 12.],
            [12., 12., 12.]])
    """
    act = activations.get(activation).eager
    up = linear(x, up_weight, up_bias)
    hidden = act(up) if gate_weight is None else act(linear(x, gate_weight, gate_bias)) * up
    return linear(hidden, down_weight, down_bias)
