"""Autograd, autocast, fake and vmap rules of the MLP, for eager calls and for traced ones.

One forward, one backward and one rule for what is saved serve two front doors:

- an eager call goes through `MLP`, a `torch.autograd.Function`;
- a traced one (`torch.compile`, `torch.export`) through ``torch.ops.fused_mlp.mlp``, which a graph can hold. In an eager
  call that operator would cost several times the arithmetic of a small MLP.

``keep`` says what is saved for backward: 0 nothing, 1 the pre-activations, 2 the hidden activation as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import activations, paths
from .paths import Kept, Params
from .plan import Plan, Query, decide

TWICE = (
    "fused_mlp: differentiating twice is not supported by the fused backward; "
    "use fused_mlp.reference.mlp, which can be differentiated any number of times"
)


def plan_for(x: Tensor, p: Params, activation: str, training: bool) -> Plan:
    """The plan of a call whose ``x`` is ``(tokens, hidden_size)``."""
    return decide(
        Query(
            x.device, x.dtype, x.shape[0], x.shape[1], p.up_weight.shape[0],
            p.gate_weight is not None, activation, training,
        )
    )  # fmt: skip


def _forward(x: Tensor, p: Params, activation: str, keep: int, training: bool) -> tuple[Tensor, Kept]:
    act = activations.get(activation)
    plan = plan_for(x, p, act.name, training)
    if not training:
        return paths.inference(plan, x, p, act), Kept()
    return paths.forward(plan, x, p, act, keep)


def _backward(
    dy: Tensor, x: Tensor, p: Params, kept: Kept, activation: str, needs: Sequence[bool]
) -> paths.Grads:
    act = activations.get(activation)
    plan = plan_for(x, p, act.name, True)
    return paths.backward(plan, dy.contiguous(), x, p, kept, act, needs)


class _Refuse(torch.autograd.Function):
    """Passes gradients on; being differentiated itself, says what to do instead."""

    @staticmethod
    def forward(ctx, *grads):
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(TWICE)


def _once(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """In a backward that is itself recorded, the gradients with a node that refuses to be differentiated."""
    if not torch.is_grad_enabled():
        return list(grads)
    there = [i for i, g in enumerate(grads) if g is not None]
    refusing = _Refuse.apply(*(grads[i].detach().requires_grad_() for i in there))
    out: list[Tensor | None] = [None] * len(grads)
    for i, g in zip(there, refusing, strict=True):
        out[i] = g
    return out


class MLP(torch.autograd.Function):
    """The MLP for eager calls: ``apply(x, *Params, activation, keep) -> y``."""

    @staticmethod
    def forward(ctx, x, up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias, activation, keep):
        p = Params(up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
        y, kept = _forward(x, p, activation, keep, True)
        ctx.save_for_backward(x, *p, *kept)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx, dy):
        x, *rest = ctx.saved_tensors
        p, kept = Params(*rest[:6]), Kept(*rest[6:])
        with torch.no_grad():
            grads = _backward(dy, x, p, kept, ctx.activation, ctx.needs_input_grad[:7])
        return *_once(grads), None, None
