"""What each path of the plan runs forward, on plain tensors with no autograd (`backward` is the
other half).

A forward returns the output and what was asked to be kept for backward:

- ``keep=0``: nothing. ``keep=1``: the pre-activations. ``keep=2``: the pre-activations and the
  hidden activation.
- On a CPU the pre-activations are two tensors, gate and up; elsewhere one buffer ``(tokens, 2 *
  intermediate)`` laid out [gate | up], written by one GEMM or one kernel. `buffers` says which;
  without a gate there is only up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import onednn
from .activations import Activation
from .plan import Plan


class Params(NamedTuple):
    """The parameters of one MLP, in the order that every operator takes them."""

    up_weight: Tensor
    down_weight: Tensor
    gate_weight: Tensor | None = None
    up_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Kept(NamedTuple):
    """What a forward kept for its backward; None where nothing was."""

    first: Tensor | None = None  # gate, or [gate | up] as one buffer, or up in a plain MLP
    second: Tensor | None = None  # up, where the layout is two tensors
    hidden: Tensor | None = None


def buffers(device: torch.device, gated: bool) -> int:
    """In how many tensors a device keeps the pre-activations."""
    return 2 if gated and device.type == "cpu" else 1


def keeps_hidden(keep: int, gated: bool, act: Activation) -> bool:
    """Whether the hidden activation is kept: where it is the pre-activation itself, once is enough."""
    return keep == 2 and (gated or act.name != "identity")


def packed_weight(gate: Tensor, up: Tensor) -> Tensor | None:
    """[gate; up] as one ``(2 * intermediate, hidden)`` view where they lie side by side in one
    storage, else None.
    """
    if (
        gate.is_contiguous()
        and up.is_contiguous()
        and gate.untyped_storage()._cdata == up.untyped_storage()._cdata
        and up.storage_offset() == gate.storage_offset() + gate.numel()
    ):
        return gate.as_strided((2 * gate.shape[0], gate.shape[1]), (gate.shape[1], 1))
    return None


# ---------------------------------------------------------------- inference


def inference(plan: Plan, x: Tensor, p: Params, act: Activation) -> Tensor:
    """The output alone. ``x`` is ``(tokens, hidden_size)``."""
    if plan.path == "eager":
        return eager(x, *p, act)
    if plan.path == "onednn":
        return onednn.mlp(x, *p, act, at_once=plan.reason.startswith("forced"))
    if plan.path == "decode":
        from .kernels import decode

        return decode.decode_mlp(
            x,
            p.up_weight,
            p.gate_weight,
            p.down_weight,
            p.up_bias,
            p.gate_bias,
            p.down_bias,
            act.name,
        )
    return forward(plan, x, p, act, 0)[0]


def eager(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
    act: Activation,
) -> Tensor:
    """`reference.mlp` for tensors of any rank that need no gradient: the product reuses the
    activation's memory.
    """
    if gate_weight is None:
        return linear(act.eager(linear(x, up_weight, up_bias)), down_weight, down_bias)
    hidden = act.eager(linear(x, gate_weight, gate_bias))
    return linear(hidden.mul_(linear(x, up_weight, up_bias)), down_weight, down_bias)


# ---------------------------------------------------------------- forward for training


def forward(plan: Plan, x: Tensor, p: Params, act: Activation, keep: int) -> tuple[Tensor, Kept]:
    """The output and what is kept. ``x`` is ``(tokens, hidden_size)``."""
    if plan.path in ("packed", "epilogue", "interpreted"):
        hidden, first, second = _triton_first_half(plan, x, p, act, keep)
    else:
        lin = linear_of(plan)
        first = lin(
            x,
            *((p.up_weight, p.up_bias) if p.gate_weight is None else (p.gate_weight, p.gate_bias)),
        )
        second = None
        hidden = act.eager(first)
        if p.gate_weight is not None:
            second = lin(x, p.up_weight, p.up_bias)
            hidden = torch.mul(hidden, second, out=None if hidden is first else hidden)
        if x.device.type != "cpu" and second is not None and keep:
            first, second = torch.cat([first, second], 1), None
    y = linear_of(plan)(hidden, p.down_weight, p.down_bias)
    kept = Kept(
        first if keep else None,
        second if keep else None,
        hidden if keeps_hidden(keep, p.gate_weight is not None, act) else None,
    )
    return y, kept


def linear_of(plan: Plan):
    return onednn.linear if plan.path == "onednn" else linear


def _triton_first_half(
    plan: Plan, x: Tensor, p: Params, act: Activation, keep: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    two = buffers(x.device, p.gate_weight is not None) == 2
    gate: Tensor | None
    up: Tensor | None
    if plan.path == "packed":
        from .kernels.activation import act_forward

        pre = packed_projection(x, p)
        gate, up = pre.chunk(2, 1) if p.gate_weight is not None else (pre, None)
        hidden = act_forward(gate, up, act.name)
        if two and keep and up is not None:
            return hidden, gate.contiguous(), up.contiguous()
        return hidden, pre, None
    from .kernels.glu_gemm import gemm_act

    hidden, gate, up = gemm_act(
        x, p.up_weight, p.gate_weight, p.up_bias, p.gate_bias, act.name,
        tile=plan.tiles.forward, save=keep > 0,
    )  # fmt: skip
    if not keep:
        return hidden, None, None
    if gate is None or up is None:
        return hidden, up, None
    if two:
        return hidden, gate.contiguous(), up.contiguous()
    # gemm_act writes both into one buffer, gate first.
    return hidden, gate.as_strided((gate.shape[0], 2 * gate.shape[1]), gate.stride()), None


def packed_projection(x: Tensor, p: Params) -> Tensor:
    """[gate | up] with biases, from one GEMM where the weights lie side by side, else from two into
    one buffer.
    """
    if p.gate_weight is None:
        return linear(x, p.up_weight, p.up_bias)
    both = packed_weight(p.gate_weight, p.up_weight)
    if both is not None and p.up_bias is None and p.gate_bias is None:
        return linear(x, both)
    width = p.up_weight.shape[0]
    out = x.new_empty(x.shape[0], 2 * width)
    for half, weight, bias in (
        (out[:, :width], p.gate_weight, p.gate_bias),
        (out[:, width:], p.up_weight, p.up_bias),
    ):
        if bias is None:
            torch.mm(x, weight.t(), out=half)
        else:
            torch.addmm(bias, x, weight.t(), out=half)
    return out
