"""Autograd, autocast, fake and vmap rules of the MLP, for eager calls and for traced ones.

One forward, one backward and one rule for what is saved serve two front doors:

- an eager call goes through `MLP`, a `torch.autograd.Function`;
- a traced one (`torch.compile`, `torch.export`) through ``torch.ops.fused_mlp.mlp``, which a graph
  can hold. In an eager call that operator would cost several times the arithmetic of a small MLP.

``keep`` says what is saved for backward: 0 nothing, 1 the pre-activations, 2 the hidden activation
as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import activations, backward, paths, reference
from .paths import Kept, Params
from .plan import Plan, decide

TWICE = (
    "fused_mlp: differentiating twice is not supported by the fused backward; "
    "use fused_mlp.reference.mlp, which can be differentiated any number of times"
)


def plan_for(x: Tensor, p: Params, activation: str, training: bool) -> Plan:
    """The plan of a call whose ``x`` is ``(tokens, hidden_size)``."""
    gated = p[2] is not None
    return decide(x.device, x.dtype, *x.shape, p[0].shape[0], gated, activation, training)


def _forward(
    x: Tensor, p: Params, activation: str, keep: int, training: bool
) -> tuple[Tensor, Kept]:
    act = activations.get(activation)
    plan = plan_for(x, p, act.name, training)
    if not training:
        return paths.inference(plan, x, p, act), Kept()
    return paths.forward(plan, x, p, act, keep)


def _backward(
    dy: Tensor,
    x: Tensor,
    p: Params,
    held: list[Kept],
    activation: str,
    needs: Sequence[bool],
    plan: Plan | None = None,
) -> backward.Grads:
    act = activations.get(activation)
    plan = plan or plan_for(x, p, act.name, True)
    dy = dy.resolve_neg().contiguous()  # kernels read memory, whatever a view makes of it
    return backward.gradients(plan, dy, x, p, held, act, needs)


class _Refuse(torch.autograd.Function):
    """``apply(count, *grads, *inputs)`` passes the gradients on, of which there are ``count``; being
    differentiated itself, by whichever of what they were computed from, says what to do instead.
    """

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(TWICE)


def _once(grads: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """In a backward that is itself recorded, the gradients with a node that refuses to be
    differentiated by the inputs that they were computed from.
    """
    if not torch.is_grad_enabled():
        return list(grads)  # a first backward, within autocast
    there = [g for g in grads if g is not None]
    refusing = iter(_Refuse.apply(len(there), *there, *(t for t in inputs if t is not None)))
    return [None if g is None else next(refusing) for g in grads]


def _saved(ctx, x: Tensor, p: Params, kept: Sequence[Tensor | None], activation: str) -> None:
    """The one rule for what a forward saves; `_load` is its inverse."""
    ctx.save_for_backward(x, *p, *kept)
    ctx.activation = activation


def _load(ctx) -> tuple[Tensor, Params, list[Kept]]:
    """What was saved; `Kept` in a list, from which backward takes it."""
    x, *rest = ctx.saved_tensors
    return x, Params(*rest[:6]), [Kept(*rest[6:])]


class MLP(torch.autograd.Function):
    """The MLP for eager calls: ``apply(x, *Params, activation, keep) -> y``."""

    @staticmethod
    def forward(
        ctx, x, up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias, activation, keep
    ):
        p = Params(up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
        # Backward follows it: for a GPU autograd runs that in a thread of its own, which knows
        # nothing of a `use_path` around this one.
        ctx.plan = plan_for(x, p, activation, True)
        y, kept = paths.forward(ctx.plan, x, p, activations.get(activation), keep)
        _saved(ctx, x, p, kept, activation)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, p, held = _load(ctx)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        needs = ctx.needs_input_grad[:7]
        grads: Sequence[Tensor | None]
        if torch._C._functorch.is_legacy_batchedtensor(dy):  # many gradients at once
            grads = _by_reference(dy, x, p, ctx.activation, needs)
            return *_once(grads, (dy, x, *p)), None, None
        if not torch.is_grad_enabled() and autocast_dtype(x.device.type) is None:
            return *_backward(dy, x, p, held, ctx.activation, needs, ctx.plan), None, None
        with torch.no_grad(), without_autocast(x.device.type):
            grads = _backward(dy, x, p, held, ctx.activation, needs, ctx.plan)
        return *_once(grads, (dy, x, *p)), None, None


def _by_reference(
    dy: Tensor, x: Tensor, p: Params, activation: str, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients by PyTorch's own operators, which know what a batch of ``dy`` is
    (``is_grads_batched``, vectorized jacobians); nothing that was kept is used.
    """
    inputs: list[Any] = [
        t if t is None else t.detach().requires_grad_(need)
        for t, need in zip((x, *p), needs, strict=True)
    ]
    with torch.enable_grad(), without_autocast(x.device.type):
        names = dict(zip(Params._fields, inputs[1:], strict=True))
        y = reference.mlp(inputs[0], **names, activation=activation)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(y, wanted, dy))
    return [next(grads) if t is not None and t.requires_grad else None for t in inputs]


def without_autocast(device_type: str) -> AbstractContextManager:
    """Casting is done once, before the operator; sums and products inside it choose their own
    precision.
    """
    if autocast_dtype(device_type) is not None:
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts operands to, or None where it is off."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


# ---------------------------------------------------------------- operators that a traced graph
# holds


@torch.library.custom_op("fused_mlp::mlp", mutates_args=())
def mlp_op(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    keep: int,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and `Kept`, with empty tensors for what was not kept. ``x`` is ``(tokens,
    hidden_size)``.
    """
    p = Params(up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
    y, kept = _forward(x, p, activation, keep, training)
    first, second, hidden = (x.new_empty(0) if t is None else t for t in kept)
    return y, first, second, hidden


@mlp_op.register_fake
def _(
    x,
    up_weight,
    down_weight,
    gate_weight,
    up_bias,
    gate_bias,
    down_bias,
    activation,
    keep,
    training,
):
    tokens, width = x.shape[0], up_weight.shape[0]
    gated, nothing = gate_weight is not None, (0,)
    two = paths.buffers(x.device, gated) == 2
    first = (tokens, width if two or not gated else 2 * width)
    hidden = paths.keeps_hidden(keep, gated, activations.get(activation))
    shapes = (
        (tokens, down_weight.shape[0]),
        first if keep else nothing,
        (tokens, width) if keep and two else nothing,
        (tokens, width) if hidden else nothing,
    )
    return tuple(x.new_empty(shape) for shape in shapes)


@torch.library.custom_op("fused_mlp::mlp_backward", mutates_args=())
def mlp_backward_op(
    dy: Tensor,
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
    first: Tensor,
    second: Tensor,
    hidden: Tensor,
    activation: str,
    needs: list[bool],
) -> list[Tensor]:
    """`Grads`, with empty tensors for those not needed."""
    p = Params(up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
    # An empty tensor stands for what was not kept. With no tokens that is ambiguous and harmless:
    # it is computed again.
    kept = Kept(*(t if t.numel() else None for t in (first, second, hidden)))
    grads = _backward(dy, x, p, [kept], activation, needs)
    return [x.new_empty(0) if g is None else g for g in grads]


@mlp_backward_op.register_fake
def _(
    dy, x, up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias,
    first, second, hidden, activation, needs,
):  # fmt: skip
    wrt = (x, up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
    return [
        x.new_empty(t.shape if t is not None and need else (0,))
        for t, need in zip(wrt, needs, strict=True)
    ]


def _setup_context(ctx, inputs, output) -> None:
    x, *rest = inputs
    _saved(ctx, x, Params(*rest[:6]), output[1:], rest[6])
    ctx.mark_non_differentiable(*output[1:])


def _traced_backward(ctx, dy, *_):
    x, p, (kept,) = _load(ctx)
    needs = list(ctx.needs_input_grad[:7])
    grads = mlp_backward_op(dy, x, *p, *kept, ctx.activation, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None


def _refuse_backward(ctx, *_):
    raise RuntimeError(TWICE)


mlp_op.register_autograd(_traced_backward, setup_context=_setup_context)
mlp_backward_op.register_autograd(_refuse_backward)


def _autocast(device_type: str) -> None:
    """Operands are cast as those of `torch.nn.functional.linear` would be: to autocast's dtype,
    float64 left alone.
    """

    def rule(x, *rest):
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return mlp_op(cast(x, dtype), *(cast(t, dtype) for t in rest[:6]), *rest[6:])

    _LIBRARY.impl("mlp", rule, f"Autocast{device_type.upper()}", with_keyset=False)


def cast(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``t`` as autocast would cast it."""
    return t if t is None or t.dtype in (dtype, torch.float64) else t.to(dtype)


_LIBRARY = torch.library.Library("fused_mlp", "FRAGMENT")
for _device_type in ("cpu", "cuda"):
    _autocast(_device_type)
