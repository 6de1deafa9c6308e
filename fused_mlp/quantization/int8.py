"""The int8 MLP on a CPU: three int8 GEMMs and, between them, blocks of rows that never leave the
cache.

Numbers are torchao's (`Int8Tensor`): symmetric, ``scale = max|x| / 127.5``, ``q = clamp(round(x /
scale))``, products summed exactly in int32. Two things torchao's layers cannot do, one by one: x is
quantized once for gate and up, and the passes from int32 to the next int8 (two scales, activation,
product, the hidden's own scale, rounding) run over a block that fits in L2 instead of over a whole
(tokens, intermediate) activation each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import Activation
from ..paths import Params

_BLOCK = 1 << 17  # elements of one block of rows: 512 KiB in fp32
_FEW_TOKENS = 64
_EPS = torch.finfo(torch.float32).eps


def int8_mlp(x: Tensor, p: Params, act: Activation) -> Tensor:
    """The MLP of ``x`` ``(tokens, hidden_size)`` in fp32; weights are torchao's `Int8Tensor` with
    quantized input."""
    first = p.up_weight if p.gate_weight is None else p.gate_weight
    x_q, x_scale = quantize_rows(x, first)
    up = _Layer(x_q, x_scale, p.up_weight, p.up_bias)
    gate = None if p.gate_weight is None else _Layer(x_q, x_scale, p.gate_weight, p.gate_bias)

    tokens, width = up.sums.shape
    hidden_q = torch.empty(tokens, width, dtype=torch.int8)
    static = p.down_weight.act_quant_scale
    # A fixed scale would round NaN to a number: what is not finite spoils its row's scale instead.
    hidden_scale = static + 0 * x_scale if static is not None else torch.empty(tokens, 1)
    for rows in _blocks(tokens, width):
        hidden = act.eager((gate or up)(rows))
        if gate is not None:
            hidden = hidden.mul_(up(rows))
        scale = static if static is not None else _scale(hidden, p.down_weight)
        _round(hidden, scale, p.down_weight, hidden_q[rows])
        if static is None:
            hidden_scale[rows] = scale

    down = _Layer(hidden_q, hidden_scale, p.down_weight, p.down_bias)
    y = torch.empty(tokens, p.down_weight.shape[0])
    for rows in _blocks(tokens, y.shape[1]):
        y[rows] = down(rows)
    return y


def quantize_rows(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(q, scale)`` of x as ``weight`` wants its input: int8 ``(tokens, hidden_size)``, scale
    ``(tokens, 1)``, NaN where a fixed scale met NaN or infinity."""
    x = x.float()
    scale = weight.act_quant_scale
    if scale is None:
        scale = _scale(x, weight)
    q = torch.empty(x.shape, dtype=torch.int8)
    _round(x.clone(), scale, weight, q)
    if weight.act_quant_scale is not None and x.numel():
        scale = scale + 0 * x.abs().amax(-1, keepdim=True)
    return q, scale


def _products(q: Tensor, weight: Tensor) -> Tensor:
    """``q · weightᵀ`` in int32. oneDNN reorders its second operand at each call: the small one, then.

    The other way round is 2.4 times as fast at 4 to 32 tokens of 4096/14336, and no faster from 128.
    """
    if q.shape[0] > _FEW_TOKENS:
        return torch._int_mm(q, weight.t())
    return torch._int_mm(weight, q.t()).t().contiguous()


class _Layer:
    """An int8 GEMM, done; its result is given out in fp32 a block of rows at a time."""

    def __init__(self, q: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.sums = _products(q, weight.qdata)
        self.scale = scale.expand(q.shape[0], 1)
        self.weight_scale = weight.scale.flatten()
        self.bias = bias

    def __call__(self, rows: slice) -> Tensor:
        y = self.sums[rows].to(torch.float32).mul_(self.scale[rows]).mul_(self.weight_scale)
        return y if self.bias is None else y.add_(self.bias)


def _blocks(tokens: int, width: int) -> list[slice]:
    step = max(1, _BLOCK // width)
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]


def _limits(weight: Tensor) -> tuple[int, int]:
    return (-64, 63) if weight.act_quant_kwargs.reduce_range else (-128, 127)


def _scale(x: Tensor, weight: Tensor) -> Tensor:
    low, high = _limits(weight)
    return x.abs().amax(-1, keepdim=True).div_((high - low) / 2).clamp_(min=_EPS)


def _round(x: Tensor, scale: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes the int8 of ``x`` to ``out``; ``x`` is used up."""
    out.copy_(x.mul_(1.0 / scale).round_().clamp_(*_limits(weight)))
