"""Weights as torchao's tensors: made, taken apart again, and weighed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
from torchao.quantization import Float8Tensor, Int4Tensor, Int8Tensor, PerRow, PerTensor
from torchao.quantization.quantize_.workflows import (
    QuantizeTensorToFloat8Kwargs,
    QuantizeTensorToInt8Kwargs,
)
from torchao.utils import should_reduce_range

from .modes import GROUPS, Mode

TYPES = (Int8Tensor, Int4Tensor, Int4OpaqueTensor, Float8Tensor)


def is_quantized(weight: Tensor) -> bool:
    """Whether ``weight`` is one of torchao's tensors that this room makes."""
    return isinstance(weight, TYPES)


def obstacle(weight: Tensor, mode: Mode, group_size: int) -> str | None:
    """Why ``weight`` cannot be quantized so, or None."""
    if weight.device.type == "meta":
        return (
            "it is on the meta device and has no values; materialise it and load its values first"
        )
    if not weight.is_floating_point():
        return f"it is {weight.dtype}, not floating point"
    if not torch.isfinite(weight.detach()).all():
        return "it holds NaN or infinity"
    if mode.grouped:
        width = weight.shape[1]
        if group_size not in GROUPS:
            return f"group_size must be one of {', '.join(map(str, GROUPS))}, not {group_size}"
        if width % group_size:
            fitting = [str(g) for g in GROUPS if width % g == 0]
            advice = (
                f"use group_size {' or '.join(fitting)}" if fitting else "no group size divides it"
            )
            return f"its rows of {width} do not divide into groups of {group_size}; {advice}"
    if mode.name == "fp8_dynamic" and (weight.shape[0] % 16 or weight.shape[1] % 16):
        return "fp8 GEMMs need both sizes to be multiples of 16"
    return None


def make(weight: Tensor, mode: Mode, group_size: int, act_scale: Tensor | None = None) -> Tensor:
    """The torchao tensor of ``weight`` ``(out_features, in_features)``.

    ``act_scale`` is the ``(1, 1)`` scale of its input, for int8_static.
    """
    weight = weight.detach()
    if weight.dtype == torch.float64:  # torchao's int8 takes none, and scales are fp32
        weight = weight.float()
    if mode.name == "int8_weight":
        return Int8Tensor.from_hp(weight, PerRow())
    if mode.name in ("int8_dynamic", "int8_static"):
        reduce = should_reduce_range(weight.device)
        granularity = PerRow() if act_scale is None else PerTensor()
        return Int8Tensor.from_hp(
            weight,
            PerRow(),
            act_quant_kwargs=QuantizeTensorToInt8Kwargs(granularity, reduce_range=reduce),
            act_quant_scale=act_scale,
            reduce_range=reduce,
        )
    if mode.name == "fp8_dynamic":
        return Float8Tensor.from_hp(
            weight,
            granularity=PerRow(),
            act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=PerRow()),
        )
    return _int4(weight, group_size)


def int4_values(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(q, scale, zero)`` with ``weight ≈ q * scale + zero``, ``q`` in -8..7.

    ``q`` is int8 ``(out, in)``; scale and zero ``(out, in / group_size)`` are rounded to two bytes
    first, so that ``q`` is the best for the values that will be used. As in tinygemm and torchao's
    `Int4WeightFakeQuantizeConfig`.
    """
    dtype = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
    groups = weight.float().view(weight.shape[0], -1, group_size)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low).clamp(min=1e-6) / 15).to(dtype).float()
    zero = (low + 8 * scale).to(dtype).float()
    q = ((groups - zero) / scale).round_().clamp_(-8, 7).to(torch.int8)
    return q.view(weight.shape), scale.squeeze(-1).to(dtype), zero.squeeze(-1).to(dtype)


def _int4(weight: Tensor, group_size: int) -> Tensor:
    for_cpu = weight.device.type == "cpu" and weight.shape[0] % 16 == 0
    # The CPU's GEMM takes bf16 scales alone.
    q, scale, zero = int4_values(weight.float() if for_cpu else weight, group_size)
    if for_cpu:
        return Int4OpaqueTensor(
            pack_cpu(q),
            torch.stack([scale, zero], -1).transpose(0, 1).contiguous(),
            [1, group_size],
            weight.shape,
        )
    return Int4Tensor(
        pack(q),
        scale.t().contiguous(),
        zero.t().contiguous(),
        [1, group_size],
        weight.shape,
        activation_dtype=torch.bfloat16,
    )


def pack(q: Tensor) -> Tensor:
    """Two int4 a byte, the even column in the low half: torchao's plain layout, which the Triton
    kernels read."""
    return (q[:, ::2] & 0xF) | (q[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The int8 ``(out, in)`` that `pack` packed."""
    return torch.stack([packed << 4 >> 4, packed >> 4], -1).flatten(1)


def pack_cpu(q: Tensor) -> Tensor:
    """The layout of PyTorch's int4 GEMM for CPUs, which holds 0..15."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu((q + 8).int(), 1)


def unpack_cpu(packed: Tensor, shape: torch.Size) -> Tensor:
    """The int8 ``(out, in)`` that `pack_cpu` packed, read through the only thing that knows the
    layout: its GEMM."""
    out_features, width = shape
    group = next(g for g in GROUPS if width % g == 0)
    ones = torch.ones(width // group, out_features, 2)
    ones[..., 1] = 0
    unit = torch.eye(width)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(unit, packed, group, ones).t().to(torch.int8)


def dequantize(weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The plain ``(out_features, in_features)`` tensor that a quantized one stands for; plain
    ones are only cast."""
    if isinstance(weight, Int4Tensor | Int4OpaqueTensor):
        if isinstance(weight, Int4Tensor):
            q, scale, zero = unpack(weight.qdata), weight.scale.t(), weight.zero_point.t()
        else:
            q = unpack_cpu(weight.qdata, weight.shape)
            scale, zero = weight.scale_and_zero.transpose(0, 1).unbind(-1)
        groups = q.view(q.shape[0], scale.shape[1], -1).float()
        return (groups * scale.float()[..., None] + zero.float()[..., None]).view(q.shape).to(dtype)
    if isinstance(weight, Int8Tensor):
        return (weight.qdata.float() * weight.scale).to(dtype)
    if isinstance(weight, Float8Tensor):
        return (weight.qdata.float() * weight.scale).to(dtype)
    return weight.to(dtype)


def bytes_of(module_or_weight: nn.Module | Tensor) -> int:
    """Bytes that the parameters of a module, or one tensor, occupy, counted over the plain
    tensors inside."""
    if isinstance(module_or_weight, nn.Module):
        return sum(bytes_of(p) for p in module_or_weight.parameters())
    if not is_quantized(module_or_weight):
        return module_or_weight.numel() * module_or_weight.element_size()
    names, _ = module_or_weight.__tensor_flatten__()
    return sum(bytes_of(getattr(module_or_weight, name)) for name in names)
