"""What a quantized MLP runs: per weight type and device, the whole MLP on plain tensors taken out
of torchao's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import machine
from ..activations import Activation
from ..paths import Params
from ..plan import DECODE_TOKENS
from .int8 import int8_mlp
from .weights import (
    Float8Tensor,
    Int4OpaqueTensor,
    Int4Tensor,
    Int8Tensor,
    dequantize,
    is_quantized,
)

# PyTorch's int8 weight GEMM beats converting the weights up to here: 1.4× at 16 tokens, 0.4× at
# 128.
_INT8_WEIGHT_TOKENS = 16
_INT8_WEIGHT_WIDTH = 16  # it reads rows of other widths past their end, and crashes


def run(x: Tensor, p: Params, act: Activation) -> Tensor:
    """The MLP of ``x`` ``(..., hidden_size)`` with quantized weights, in the dtype of ``x``; what
    `check` refuses, it refuses.
    """
    check(x, p)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], p.down_weight.shape[0])
    return _rows(rows, p, act).to(x.dtype).view(*x.shape[:-1], p.down_weight.shape[0])


def check(x: Tensor, p: Params) -> None:
    """Raise the one clear exception for a call with quantized weights that cannot work.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: ``x`` has another last size.
        RuntimeError: ``x`` or a bias requires a gradient.
    """
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; quantized weights take floating point")
    if x.dim() == 0 or x.shape[-1] != p.up_weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)}; its last size must be hidden_size, {p.up_weight.shape[1]}"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "x requires a gradient, but quantized weights pass none on; use torch.no_grad() or "
            "x.detach(), or train with "
            "fused_mlp.quantization.prepare_qat before converting"
        )
    if torch.is_grad_enabled() and any(b is not None and b.requires_grad for b in p[3:]):
        raise RuntimeError(
            "a bias requires a gradient, but quantized weights pass none on; use torch.no_grad() "
            "or module.requires_grad_(False)"
        )


def _rows(x: Tensor, p: Params, act: Activation) -> Tensor:
    up = p.up_weight
    one_type = all(type(w) is type(up) for w in (p.down_weight, p.gate_weight) if w is not None)
    if (
        one_type
        and isinstance(up, Int8Tensor)
        and up.act_quant_kwargs is not None
        and x.device.type == "cpu"
    ):
        return int8_mlp(x, p, act)
    if one_type and x.shape[0] <= DECODE_TOKENS and _reads_as_it_goes(x, up):
        from ..kernels.int_gemm import quant_mlp

        return quant_mlp(x, *(plain(w) for w in p[:3]), *p[3:], act.name)
    hidden = act.eager(_linear(x, up if p.gate_weight is None else p.gate_weight,
                               p.up_bias if p.gate_weight is None else p.gate_bias))  # fmt: skip
    if p.gate_weight is not None:
        hidden = hidden * _linear(x, up, p.up_bias)
    return _linear(hidden, p.down_weight, p.down_bias)


def _reads_as_it_goes(x: Tensor, weight: Tensor) -> bool:
    """Whether the Triton GEMMs that dequantize as they read take these."""
    if x.device.type != "cuda" or not machine.has_triton():
        return False
    return isinstance(weight, Int4Tensor) or (
        isinstance(weight, Int8Tensor) and weight.act_quant_kwargs is None
    )


def plain(weight: Tensor | None):
    """The plain tensors that the Triton kernels read, out of torchao's."""
    from ..kernels.int_gemm import QuantWeight

    if weight is None:
        return None
    if isinstance(weight, Int4Tensor):
        return QuantWeight(weight.qdata, weight.scale, weight.zero_point, weight.block_size[1])
    return QuantWeight(weight.qdata, weight.scale.view(1, -1), None, weight.shape[1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One layer; the result may be wider than x's dtype, so that the MLP rounds once, at its
    end."""
    if not is_quantized(weight):
        return linear(x.to(weight.dtype), weight, bias)
    if isinstance(weight, Int4OpaqueTensor):
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16().contiguous(), weight.qdata, weight.block_size[1], weight.scale_and_zero
        ).to(x.dtype)
    elif isinstance(weight, Int4Tensor):
        y = linear(x, dequantize(weight, x.dtype))
    elif x.device.type == "cpu" and isinstance(weight, Float8Tensor):
        y = linear(_round_fp8(x), dequantize(weight))
    elif (
        x.device.type == "cpu"
        and weight.act_quant_kwargs is None
        and machine.onednn_native(torch.bfloat16)
    ):
        y = _int8_weight(x.bfloat16(), weight).to(x.dtype)
    else:
        return linear(x, weight, bias)
    return y if bias is None else y + bias


def _int8_weight(x: Tensor, weight: Int8Tensor) -> Tensor:
    scale = weight.scale.flatten().bfloat16()
    if x.shape[0] <= _INT8_WEIGHT_TOKENS and weight.shape[1] % _INT8_WEIGHT_WIDTH == 0:
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight.qdata, scale)
    return (x @ weight.qdata.t().to(torch.bfloat16)).mul_(scale)


def _round_fp8(x: Tensor) -> Tensor:
    """x rounded to float8_e4m3fn with a scale a row, as torchao's dynamic quantization does, in
    fp32."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).float() * scale
