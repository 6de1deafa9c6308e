"""What each path of the plan runs, forward and backward, on plain tensors with no autograd.

A forward returns the output and what was asked to be kept for backward:

- ``keep=0``: nothing. ``keep=1``: the pre-activations. ``keep=2``: the pre-activations and the
  hidden activation.
- On a CPU the pre-activations are two tensors, gate and up; elsewhere one buffer ``(tokens, 2 *
  intermediate)`` laid out [gate | up], written by one GEMM or one kernel. `layout` says which;
  without a gate there is only up.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Grads(NamedTuple):
    """Gradients in the order x, then `Params`; None where none was asked for."""

    x: Tensor | None
    up_weight: Tensor | None
    down_weight: Tensor | None
    gate_weight: Tensor | None
    up_bias: Tensor | None
    gate_bias: Tensor | None
    down_bias: Tensor | None


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
        lin = _linear(plan)
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
    y = _linear(plan)(hidden, p.down_weight, p.down_bias)
    kept = Kept(
        first if keep else None,
        second if keep else None,
        hidden if keeps_hidden(keep, p.gate_weight is not None, act) else None,
    )
    return y, kept


def _linear(plan: Plan):
    return onednn.linear if plan.path == "onednn" else linear


def _triton_first_half(
    plan: Plan, x: Tensor, p: Params, act: Activation, keep: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    two = buffers(x.device, p.gate_weight is not None) == 2
    if plan.path == "packed":
        from .kernels.activation import act_forward

        pre = _packed_projection(x, p)
        gate, up = pre.chunk(2, 1) if p.gate_weight is not None else (pre, None)
        hidden = act_forward(gate, up, act.name)
        return (hidden, gate.contiguous(), up.contiguous()) if two and keep else (hidden, pre, None)
    from .kernels.glu_gemm import gemm_act

    hidden, gate, up = gemm_act(
        x, p.up_weight, p.gate_weight, p.up_bias, p.gate_bias, act.name,
        tile=plan.tile, save=keep > 0,
    )  # fmt: skip
    if not keep:
        return hidden, None, None
    if gate is None:
        return hidden, up, None
    if two:
        return hidden, gate.contiguous(), up.contiguous()
    # gemm_act writes both into one buffer, gate first.
    return hidden, gate.as_strided((gate.shape[0], 2 * gate.shape[1]), gate.stride()), None


def _packed_projection(x: Tensor, p: Params) -> Tensor:
    """[gate | up] with biases, from one GEMM where the weights lie side by side, else from two into
    one buffer.
    """
    if p.gate_weight is None:
        return linear(x, p.up_weight, p.up_bias)
    weight = packed_weight(p.gate_weight, p.up_weight)
    if weight is not None and p.up_bias is None and p.gate_bias is None:
        return linear(x, weight)
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


# ---------------------------------------------------------------- backward


def backward(
    plan: Plan, dy: Tensor, x: Tensor, p: Params, kept: Kept, act: Activation, needs: Sequence[bool]
) -> Grads:
    """Gradients of `forward`; ``needs`` says which, in the order of `Grads`. Nothing in ``kept`` is
    written to.
    """
    if kept.first is None:
        kept = _pre_activations(plan, x, p, act)
    gated = p.gate_weight is not None
    gate, up = kept.first, kept.second
    if gated and up is None:
        gate, up = kept.first.chunk(2, 1)
    need_x, need_up, need_down, need_gate, need_up_bias, need_gate_bias, need_down_bias = needs

    first_half = need_x or need_up or need_gate or need_up_bias or need_gate_bias
    hidden, d_gate, d_up, packed, bias_grads = kept.hidden, None, None, None, None
    if first_half:
        recompute = need_down and hidden is None
        if plan.path in ("packed", "epilogue", "interpreted"):
            d_gate, d_up, again, bias_grads, packed = _triton_d_pre(
                plan, dy, p, gate, up, act, recompute, need_up_bias or need_gate_bias
            )
        else:
            d_gate, d_up, again = _d_pre(plan, dy, p, gate, up, act, recompute)
        hidden = again if hidden is None else hidden
    elif need_down and hidden is None:
        hidden = act.eager(gate) if up is None else act.eager(gate) * up

    d_down = dy.t().mm(hidden) if need_down else None
    if not gated:
        d_up, d_gate = d_gate, None
        width = p.up_weight.shape[0]
    width = p.up_weight.shape[0]
    if bias_grads is not None:
        # Copies, as a gradient may not share its memory; one bias may be there without the other.
        halves = (bias_grads[:width], bias_grads[width:]) if gated else (None, bias_grads)
        gate_sum = halves[0].clone() if need_gate_bias else None
        up_sum = halves[1].clone() if need_up_bias else None
    else:
        gate_sum = d_gate.sum(0) if need_gate_bias else None
        up_sum = d_up.sum(0) if need_up_bias else None
    return Grads(
        _d_x(plan, d_gate, d_up, packed, p) if need_x else None,
        d_up.t().mm(x) if need_up else None,
        d_down,
        d_gate.t().mm(x) if need_gate else None,
        up_sum,
        gate_sum,
        dy.sum(0) if need_down_bias else None,
    )


def _pre_activations(plan: Plan, x: Tensor, p: Params, act: Activation) -> Kept:
    """``recompute="all"``: the first GEMM again."""
    if plan.path in ("packed", "epilogue", "interpreted"):
        pre = _packed_projection(x, p)
        return Kept(pre)
    lin = _linear(plan)
    if p.gate_weight is None:
        return Kept(lin(x, p.up_weight, p.up_bias))
    return Kept(lin(x, p.gate_weight, p.gate_bias), lin(x, p.up_weight, p.up_bias))


def _product(plan: Plan, a: Tensor, b: Tensor) -> Tensor:
    return onednn.linear(a, b.t(), None) if plan.path == "onednn" else a.mm(b)


def _d_pre(
    plan: Plan,
    dy: Tensor,
    p: Params,
    gate: Tensor,
    up: Tensor | None,
    act: Activation,
    recompute: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the pre-activations from plain operators: d_gate, d_up, and the hidden activation
    if asked.
    """
    d_hidden = _product(plan, dy, p.down_weight)
    if up is None:
        return act.backward(d_hidden, gate), None, act.eager(gate) if recompute else None
    activated = act.eager(gate)
    hidden = activated * up if recompute else None
    # act(gate) and dH are this function's own; nothing kept for another backward is written to.
    d_up = d_hidden * activated if activated is gate else activated.mul_(d_hidden)
    return act.backward(d_hidden.mul_(up), gate), d_up, hidden


def _triton_d_pre(
    plan: Plan,
    dy: Tensor,
    p: Params,
    gate: Tensor,
    up: Tensor | None,
    act: Activation,
    recompute: bool,
    biases: bool,
):
    if plan.path == "packed":
        from .kernels.activation import act_backward

        return act_backward(
            dy.mm(p.down_weight), gate, up, act.name, recompute_hidden=recompute, bias_grads=biases
        )
    from .kernels.dact_gemm import gemm_dact

    return gemm_dact(
        dy, p.down_weight, gate, up, act.name, recompute_hidden=recompute, bias_grads=biases
    )


def _d_x(
    plan: Plan, d_gate: Tensor | None, d_up: Tensor, packed: Tensor | None, p: Params
) -> Tensor:
    if d_gate is None:
        return _product(plan, d_up, p.up_weight)
    if plan.path == "onednn":
        return onednn.linear(
            d_up, p.up_weight.t(), None, plus=_product(plan, d_gate, p.gate_weight)
        )
    if packed is not None:
        weight = packed_weight(p.gate_weight, p.up_weight)
        # The copy reads and writes 2·d·h elements once; at 1024 tokens that is under a tenth of
        # the GEMM's traffic-free time, and it spares a pass over dX and its rounding in between.
        if weight is None and packed.shape[0] >= 1024:
            weight = torch.cat([p.gate_weight, p.up_weight])
        if weight is not None:
            return packed.mm(weight)
    return d_gate.mm(p.gate_weight).addmm_(d_up, p.up_weight)
