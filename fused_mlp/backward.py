"""What each path of the plan runs backward, on plain tensors with no autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import onednn
from .activations import Activation
from .paths import Kept, Params, linear_of, packed_projection, packed_weight
from .plan import Plan


class Grads(NamedTuple):
    """Gradients in the order x, then `Params`; None where none was asked for."""

    x: Tensor | None
    up_weight: Tensor | None
    down_weight: Tensor | None
    gate_weight: Tensor | None
    up_bias: Tensor | None
    gate_bias: Tensor | None
    down_bias: Tensor | None


def gradients(
    plan: Plan, dy: Tensor, x: Tensor, p: Params, kept: Kept, act: Activation, needs: Sequence[bool]
) -> Grads:
    """Gradients of `paths.forward`; ``needs`` says which, in the order of `Grads`. Nothing in ``kept`` is
    written to.
    """
    if kept.first is None:
        kept = _pre_activations(plan, x, p, act)
    gate, up, hidden = kept.first, kept.second, kept.hidden
    assert gate is not None
    if p.gate_weight is not None and up is None:
        gate, up = gate.chunk(2, 1)
    need_x, need_up, need_down, need_gate, need_up_bias, need_gate_bias, need_down_bias = needs

    first_half = need_x or need_up or need_gate or need_up_bias or need_gate_bias
    recompute = need_down and hidden is None
    d_pre = None
    if first_half:
        biases = need_up_bias or need_gate_bias
        d_pre = _d_pre(plan, dy, p, gate, up, act, recompute, biases)
        hidden = d_pre.hidden if hidden is None else hidden
    elif recompute:
        hidden = act.eager(gate) if up is None else act.eager(gate) * up

    def weight_grad(d: Tensor | None, needed: bool) -> Tensor | None:
        return d.t().mm(x) if needed and d is not None else None

    def bias_grad(d: Tensor | None, summed: Tensor | None, needed: bool) -> Tensor | None:
        # A copy, as a gradient may not share its memory; one bias may be there without the other.
        if needed and summed is not None:
            return summed.clone()
        return d.sum(0) if needed and d is not None else None

    d = d_pre or _DPre()
    return Grads(
        _d_x(plan, d, p) if need_x else None,
        weight_grad(d.up, need_up),
        dy.t().mm(hidden) if need_down and hidden is not None else None,
        weight_grad(d.gate, need_gate),
        bias_grad(d.up, d.up_sum, need_up_bias),
        bias_grad(d.gate, d.gate_sum, need_gate_bias),
        dy.sum(0) if need_down_bias else None,
    )


def _pre_activations(plan: Plan, x: Tensor, p: Params, act: Activation) -> Kept:
    """``recompute="all"``: the first GEMM again."""
    if plan.path in ("packed", "epilogue", "interpreted"):
        pre = packed_projection(x, p)
        return Kept(pre)
    lin = linear_of(plan)
    if p.gate_weight is None:
        return Kept(lin(x, p.up_weight, p.up_bias))
    return Kept(lin(x, p.gate_weight, p.gate_bias), lin(x, p.up_weight, p.up_bias))


def _product(plan: Plan, a: Tensor, b: Tensor) -> Tensor:
    return onednn.linear(a, b.t(), None) if plan.path == "onednn" else a.mm(b)


class _DPre(NamedTuple):
    """Gradients of the pre-activations, and what the same pass gave beside them."""

    up: Tensor | None = None
    gate: Tensor | None = None
    hidden: Tensor | None = None  # the hidden activation again, where it was asked for
    packed: Tensor | None = None  # [gate | up] as one buffer
    up_sum: Tensor | None = None  # over tokens: the bias's gradient
    gate_sum: Tensor | None = None


def _d_pre(
    plan: Plan,
    dy: Tensor,
    p: Params,
    gate: Tensor,
    up: Tensor | None,
    act: Activation,
    recompute: bool,
    biases: bool,
) -> _DPre:
    if plan.path in ("packed", "epilogue", "interpreted"):
        return _triton_d_pre(plan, dy, p, gate, up, act, recompute, biases)
    d_hidden = _product(plan, dy, p.down_weight)
    if up is None:
        hidden = act.eager(gate) if recompute else None
        return _DPre(act.backward(d_hidden, gate), None, hidden)
    activated = act.eager(gate)
    hidden = activated * up if recompute else None
    # act(gate) and dH are this function's own; nothing kept for another backward is written to.
    d_up = d_hidden * activated if activated is gate else activated.mul_(d_hidden)
    return _DPre(d_up, act.backward(d_hidden.mul_(up), gate), hidden)


def _triton_d_pre(
    plan: Plan,
    dy: Tensor,
    p: Params,
    gate: Tensor,
    up: Tensor | None,
    act: Activation,
    recompute: bool,
    biases: bool,
) -> _DPre:
    if plan.path == "packed":
        from .kernels.activation import act_backward

        d_first, d_up, hidden, sums, packed = act_backward(
            dy.mm(p.down_weight), gate, up, act.name, recompute_hidden=recompute, bias_grads=biases
        )
    else:
        from .kernels.dact_gemm import gemm_dact

        d_first, d_up, hidden, sums, packed = gemm_dact(
            dy, p.down_weight, gate, up, act.name, tile=plan.tiles.backward,
            recompute_hidden=recompute, bias_grads=biases,
        )  # fmt: skip
    if up is None:  # what the kernels call gate is then the only pre-activation
        return _DPre(d_first, None, hidden, None, sums)
    gate_sum, up_sum = (None, None) if sums is None else sums.chunk(2)
    return _DPre(d_up, d_first, hidden, packed, up_sum, gate_sum)


def _d_x(plan: Plan, d: _DPre, p: Params) -> Tensor:
    assert d.up is not None
    if d.gate is None or p.gate_weight is None:
        return _product(plan, d.up, p.up_weight)
    if plan.path == "onednn":
        return onednn.linear(
            d.up, p.up_weight.t(), None, plus=_product(plan, d.gate, p.gate_weight)
        )
    if d.packed is not None:
        weight = packed_weight(p.gate_weight, p.up_weight)
        # The copy reads and writes 2·d·h elements once; at 1024 tokens that is under a tenth of
        # the GEMM's traffic-free time, and it spares a pass over dX and its rounding in between.
        if weight is None and d.packed.shape[0] >= 1024:
            weight = torch.cat([p.gate_weight, p.up_weight])
        if weight is not None:
            return d.packed.mm(weight)
    return d.gate.mm(p.gate_weight).addmm_(d.up, p.up_weight)
