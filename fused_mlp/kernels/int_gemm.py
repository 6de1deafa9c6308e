"""hidden = act(x·Wgᵀ + bg) · (x·Wuᵀ + bu) with int8 or int4 weights, for the few tokens of decode.

At 1 to 16 tokens the time is the time to read the weights, so they are read as they are stored,
once, and become numbers in registers. A weight is ``q · scale + zero`` (zero only in int4), the
same for a group of a row's columns:

    Σ x·w = Σ over groups of  scale · Σ x·q  +  zero · Σ x

so small integers, which bf16 holds exactly, go to the tensor cores, and scales meet fp32 sums:
nothing is rounded but x, on input, and the result. No split of the reduction over programs, so no
atomics, and the same bits every time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..activations import forward
from ..activations import get as get_activation
from ..tiles import quantized_tile
from .common import (
    INTERPRETED,
    UNSPECIALIZED,
    architecture,
    cast,
    corner,
    dense,
    dot,
    input_precision,
    launch,
    rows_of,
)

MAX_TOKENS = 16


class QuantWeight(NamedTuple):
    """A quantized weight of ``(out, in)``, as plain tensors.

    Attributes:
        values: int8 ``(out, in)``, or ``(out, in / 2)`` with two int4 a byte, the even column in
            the low half.
        scale: ``(in / group, out)``; one row for int8.
        zero: as scale for int4, None for int8.
        group: columns that share a scale.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int

    @property
    def packed(self) -> bool:
        """Whether it is int4."""
        return self.zero is not None


@triton.jit
def _weights(pointer, ks, limit, cols, inside, stride, PACKED: tl.constexpr, dtype: tl.constexpr):
    """A block of integers as (depth, columns) of ``dtype``; ks is the block's depth, in bytes."""
    offsets = cols[:, None] * stride + ks[None, :]
    q = tl.load(pointer + offsets, inside[:, None] & (ks < limit)[None, :], 0)
    if PACKED:
        q = tl.join((q << 4) >> 4, q >> 4).reshape(q.shape[0], 2 * q.shape[1])
    if INTERPRETED:  # its cast from integers to bf16 keeps the bits instead of the value
        return q.to(tl.float32).trans()
    return q.to(dtype).trans()


@triton.jit
def _scaled(part, total, sums, scale_ptr, zero_ptr, offsets, inside):
    """total + scale · part + zero · sums, in fp32."""
    total += part * tl.load(scale_ptr + offsets, inside, 0.0).to(tl.float32)[None, :]
    if zero_ptr is not None:
        total += sums[:, None] * tl.load(zero_ptr + offsets, inside, 0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def int_gemm_kernel(
    x_ptr, up_ptr, up_scale_ptr, up_zero_ptr, gate_ptr, gate_scale_ptr, gate_zero_ptr,
    up_bias_ptr, gate_bias_ptr, hidden_ptr,
    tokens, N, K, x_stride, weight_stride, scale_stride, hidden_stride,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block_n = tl.program_id(0)
    PACKED: tl.constexpr = up_zero_ptr is not None
    BYTES: tl.constexpr = BLOCK_K // 2 if PACKED else BLOCK_K
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    bytes_k = tl.arange(0, BYTES)
    row_inside = rows < tokens
    col_inside = block_n * BLOCK_N + cols < N
    dtype = x_ptr.dtype.element_ty
    x = x_ptr + rows[:, None] * x_stride + ks[None, :]
    up_q = corner(up_ptr, block_n, BLOCK_N, weight_stride)
    first = block_n * BLOCK_N + cols
    row_bytes = K // 2 if PACKED else K
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if gate_ptr is not None:
        gate_q = corner(gate_ptr, block_n, BLOCK_N, weight_stride)
    for k in range(0, K, BLOCK_K):
        a = tl.load(x + k, row_inside[:, None] & (ks < K - k)[None, :], 0.0)
        at = k // 2 if PACKED else k
        b = _weights(
            up_q + at, bytes_k, row_bytes - at, cols, col_inside, weight_stride, PACKED, dtype
        )
        if PACKED:
            # Each block lies in one group, whose scale is applied here; int8's single one waits for
            # the end.
            sums = tl.sum(a.to(tl.float32), 1)
            part = dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
            offsets = (k // GROUP) * scale_stride + first
            up = _scaled(part, up, sums, up_scale_ptr, up_zero_ptr, offsets, col_inside)
        else:
            up = dot(a, b, up, PRECISION)
        if gate_ptr is not None:
            b = _weights(
                gate_q + at, bytes_k, row_bytes - at, cols, col_inside, weight_stride, PACKED, dtype
            )
            if PACKED:
                part = dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
                gate = _scaled(part, gate, sums, gate_scale_ptr, gate_zero_ptr, offsets, col_inside)
            else:
                gate = dot(a, b, gate, PRECISION)

    if not PACKED:
        up *= tl.load(up_scale_ptr + first, col_inside, 0.0).to(tl.float32)[None, :]
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + first, col_inside, 0.0).to(tl.float32)[None, :]
    if gate_ptr is not None:
        if not PACKED:
            gate *= tl.load(gate_scale_ptr + first, col_inside, 0.0).to(tl.float32)[None, :]
        if gate_bias_ptr is not None:
            gate += tl.load(gate_bias_ptr + first, col_inside, 0.0).to(tl.float32)[None, :]
        hidden = forward(gate, ACTIVATION) * up
    else:
        hidden = forward(up, ACTIVATION)
    out = hidden_ptr + rows[:, None] * hidden_stride + first[None, :]
    mask = row_inside[:, None] & col_inside[None, :]
    tl.store(out, cast(hidden, hidden_ptr.dtype.element_ty), mask)


def quant_gemm_act(
    x: Tensor,
    up: QuantWeight,
    gate: QuantWeight | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """act(x·Wgᵀ + bg) · (x·Wuᵀ + bu), or act(x·Wuᵀ + bu): ``(tokens, in)`` to ``(tokens, out)``,
    at most 16 tokens."""
    tokens, width = x.shape
    out = up.values.shape[0]
    if tokens > MAX_TOKENS:
        raise ValueError(f"x has {tokens} tokens; this kernel is for at most {MAX_TOKENS}")
    arch = architecture(x.device)
    x = rows_of(x)
    hidden = x.new_empty(tokens, out)
    tile = quantized_tile(arch, x.dtype, out, up.group if up.packed else None)
    launch(
        int_gemm_kernel, (triton.cdiv(out, tile.n),),
        x, up.values, up.scale, up.zero, *((gate.values, gate.scale, gate.zero) if gate else (None,)
        * 3), dense(up_bias), dense(gate_bias), hidden,
        tokens, out, width, x.stride(0), up.values.stride(0), up.scale.stride(0), hidden.stride(0),
        GROUP=up.group, ACTIVATION=get_activation(activation).name,
        PRECISION=input_precision(x.dtype, arch),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    return hidden


def quant_mlp(
    x: Tensor,
    up: QuantWeight,
    down: QuantWeight,
    gate: QuantWeight | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """The whole MLP of at most 16 tokens in two launches."""
    hidden = quant_gemm_act(x, up, gate, up_bias, gate_bias, activation)
    return quant_gemm_act(hidden, down, None, down_bias, None, "identity")
