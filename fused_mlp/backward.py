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
    plan: Plan,
    dy: Tensor,
    x: Tensor,
    p: Params,
    held: list[Kept],
    act: Activation,
    needs: Sequence[bool],
) -> Grads:
    """Gradients of `paths.forward`; ``needs`` says which, in the order of `Grads`. Nothing that was
    kept is written to.

    ``held`` has what was kept, and is emptied: where nothing else holds a tensor of it, its memory
    is free once it is used up. Beside what was kept, two tensors of an activation's size exist at
    once on a CPU, three on a GPU.
    """
    run = _by_kernels if plan.path in _TRITON else _by_operators
    return run(plan, dy, x, p, [_whole(plan, x, p, held.pop(), act)], act, _Needs(*needs))


def _whole(plan: Plan, x: Tensor, p: Params, kept: Kept, act: Activation) -> Kept:
    """``kept`` with gate and up apart."""
    if kept.first is None:
        kept = _pre_activations(plan, x, p, act)
    if p.gate_weight is None or kept.second is not None or kept.first is None:
        return kept
    gate, up = kept.first.chunk(2, 1)
    return Kept(gate, up, kept.hidden)


_TRITON = ("packed", "epilogue", "interpreted")


class _Needs(NamedTuple):
    """Which of `Grads` are asked for."""

    x: bool
    up_weight: bool
    down_weight: bool
    gate_weight: bool
    up_bias: bool
    gate_bias: bool
    down_bias: bool

    @property
    def up(self) -> bool:
        return self.x or self.up_weight or self.up_bias

    @property
    def gate(self) -> bool:
        return self.x or self.gate_weight or self.gate_bias


def _by_operators(
    plan: Plan, dy: Tensor, x: Tensor, p: Params, held: list[Kept], act: Activation, needs: _Needs
) -> Grads:
    """PyTorch's operators; everything is dropped once it is used up."""
    gate, up, hidden = held.pop()
    assert gate is not None
    activated = d_up = d_gate = d_down = None
    if (needs.down_weight and hidden is None) or (up is not None and needs.up):
        activated = act.eager(gate)
    if needs.down_weight:
        if hidden is None and activated is not None:
            hidden = activated if up is None else activated * up
        assert hidden is not None
        d_down = dy.t().mm(hidden)
    del hidden
    if up is None:
        del activated
        if needs.up:
            d_up = act.backward(_product(plan, dy, p.down_weight), gate)
        del gate
    elif needs.up or needs.gate:
        d_hidden = _product(plan, dy, p.down_weight)
        if activated is not None and needs.up:
            # act(gate) and dH are this function's own; what was kept is not written to.
            d_up = d_hidden * activated if activated is gate else activated.mul_(d_hidden)
        del activated
        if needs.gate:
            d_hidden.mul_(up)
            del up
            d_gate = act.backward(d_hidden, gate)
        del gate, d_hidden
    d_x = None if d_up is None or not needs.x else _product(plan, d_up, p.up_weight)
    d_up_weight = None if d_up is None or not needs.up_weight else d_up.t().mm(x)
    d_up_bias = None if d_up is None or not needs.up_bias else d_up.sum(0)
    del d_up
    return Grads(
        d_x if d_gate is None else _add_product(plan, d_x, d_gate, p.gate_weight),
        d_up_weight,
        d_down,
        d_gate.t().mm(x) if needs.gate_weight and d_gate is not None else None,
        d_up_bias,
        d_gate.sum(0) if needs.gate_bias and d_gate is not None else None,
        dy.sum(0) if needs.down_bias else None,
    )


def _by_kernels(
    plan: Plan, dy: Tensor, x: Tensor, p: Params, held: list[Kept], act: Activation, needs: _Needs
) -> Grads:
    """One kernel for everything that has the size of an activation."""
    gate, up, hidden = held.pop()
    assert gate is not None
    recompute = needs.down_weight and hidden is None
    d = _DPre()
    if needs.up or needs.gate:
        d = _d_pre(plan, dy, p, gate, up, act, recompute, needs.up_bias or needs.gate_bias)
        hidden = d.hidden if hidden is None else hidden
        d = d._replace(hidden=None)
    elif recompute:
        hidden = act.eager(gate) if up is None else act.eager(gate) * up
    d_down = dy.t().mm(hidden) if needs.down_weight and hidden is not None else None
    del gate, up, hidden

    def weight_grad(d: Tensor | None, needed: bool) -> Tensor | None:
        return d.t().mm(x) if needed and d is not None else None

    def bias_grad(d: Tensor | None, summed: Tensor | None, needed: bool) -> Tensor | None:
        # A copy, as a gradient may not share its memory; one bias may be there without the other.
        if needed and summed is not None:
            return summed.clone()
        return d.sum(0) if needed and d is not None else None

    return Grads(
        _d_x(d, p) if needs.x else None,
        weight_grad(d.up, needs.up_weight),
        d_down,
        weight_grad(d.gate, needs.gate_weight),
        bias_grad(d.up, d.up_sum, needs.up_bias),
        bias_grad(d.gate, d.gate_sum, needs.gate_bias),
        dy.sum(0) if needs.down_bias else None,
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


def _add_product(plan: Plan, total: Tensor | None, a: Tensor, b: Tensor | None) -> Tensor | None:
    """``total + a·b``, written over ``total``; None if there is none to add to."""
    if total is None or b is None:
        return None
    if plan.path == "onednn":
        return onednn.linear(a, b.t(), None, plus=total)
    return total.addmm_(a, b)


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
    if plan.path == "packed":
        from .kernels.activation import act_backward

        d_first, d_up, hidden, sums, packed = act_backward(
            dy.mm(p.down_weight), gate, up, act.name, recompute_hidden=recompute, bias_grads=biases,
            reuse=True,
        )  # fmt: skip
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


def _d_x(d: _DPre, p: Params) -> Tensor:
    assert d.up is not None
    if d.gate is None or p.gate_weight is None:
        return d.up.mm(p.up_weight)
    if d.packed is not None:
        weight = packed_weight(p.gate_weight, p.up_weight)
        # The copy reads and writes 2·d·h elements once; at 1024 tokens that is under a tenth of
        # the GEMM's traffic-free time, and it spares a pass over dX and its rounding in between.
        if weight is None and d.packed.shape[0] >= 1024:
            weight = torch.cat([p.gate_weight, p.up_weight])
        if weight is not None:
            return d.packed.mm(weight)
    return d.gate.mm(p.gate_weight).addmm_(d.up, p.up_weight)
