"""dH = dY·Wd, with the activation's derivative as the epilogue: dH itself is never stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import forward_backward
from ..activations import get as get_activation
from ..tiles import Tile
from .activation import ActGrads
from .common import cast, dot, grouped, input_precision


@triton.jit
def _kernel(
    dy_ptr, weight_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, hidden_ptr, partial_ptr,
    M, N, K, dy_stride_m, dy_stride_k, weight_stride_k, weight_stride_n,
    gate_stride, up_stride, out_stride, hidden_stride, partial_stride,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block_m, block_n = grouped(
        tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP
    )
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    safe_rows = tl.where(rows < M, rows, 0).to(tl.int64)
    safe_cols = tl.where(cols < N, cols, 0).to(tl.int64)
    dy = dy_ptr + safe_rows[:, None] * dy_stride_m + ks[None, :] * dy_stride_k
    weight = weight_ptr + ks[:, None] * weight_stride_k + safe_cols[None, :] * weight_stride_n
    grad = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = ks < K - k
        grad = dot(
            tl.load(dy, inside[None, :], 0.0),
            tl.load(weight, inside[:, None], 0.0),
            grad,
            PRECISION,
        )
        dy += BLOCK_K * dy_stride_k
        weight += BLOCK_K * weight_stride_k

    mask = (rows < M)[:, None] & (cols < N)[None, :]
    rows = rows.to(tl.int64)[:, None]
    dtype = d_gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + rows * gate_stride + cols[None, :], mask, 0.0).to(tl.float32)
    if up_ptr is not None:
        up = tl.load(up_ptr + rows * up_stride + cols[None, :], mask, 0.0).to(tl.float32)
        act, d_gate = forward_backward(gate, grad * up, ACTIVATION)
        d_up = grad * act
        hidden = act * up
        tl.store(d_up_ptr + rows * out_stride + cols[None, :], cast(d_up, dtype), mask)
        if partial_ptr is not None:
            total = tl.sum(tl.where(mask, d_up, 0.0), 0)
            tl.store(partial_ptr + block_m * partial_stride + N + cols, total, cols < N)
    else:
        hidden, d_gate = forward_backward(gate, grad, ACTIVATION)
    tl.store(d_gate_ptr + rows * out_stride + cols[None, :], cast(d_gate, dtype), mask)
    if hidden_ptr is not None:
        tl.store(hidden_ptr + rows * hidden_stride + cols[None, :], cast(hidden, dtype), mask)
    if partial_ptr is not None:
        total = tl.sum(tl.where(mask, d_gate, 0.0), 0)
        tl.store(partial_ptr + block_m * partial_stride + cols, total, cols < N)


def gemm_dact(
    d_out: Tensor,
    down_weight: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    *,
    tile: Tile | None = None,
    recompute_hidden: bool = False,
    bias_grads: bool = False,
) -> ActGrads:
    """`act_backward` of dH = d_out @ down_weight, which stays in registers.

    Shapes: d_out (tokens, hidden_size); down_weight (hidden_size, intermediate), any strides; gate, up (tokens,
    intermediate) with biases included. In a plain MLP ``gate`` is the one pre-activation and ``up`` is None.
    """
    tile = tile or Tile()
    tokens, hidden_size = d_out.shape
    intermediate = down_weight.shape[1]
    parts = 1 if up is None else 2
    packed = d_out.new_empty(tokens, parts * intermediate)
    d_gate = packed[:, :intermediate]
    d_up = None if up is None else packed[:, intermediate:]
    hidden = d_out.new_empty(tokens, intermediate) if recompute_hidden else None
    rows = triton.cdiv(tokens, tile.m)
    partial = (
        torch.empty(rows, packed.shape[1], device=d_out.device, dtype=torch.float32)
        if bias_grads
        else None
    )
    if packed.numel():
        grid = (rows * triton.cdiv(intermediate, tile.n),)
        _kernel[grid](
            d_out, down_weight, gate, up, d_gate, d_up, hidden, partial,
            tokens, intermediate, hidden_size, *d_out.stride(), *down_weight.stride(),
            gate.stride(0), 0 if up is None else up.stride(0), packed.stride(0),
            0 if hidden is None else hidden.stride(0), packed.shape[1],
            ACTIVATION=get_activation(activation).name, PRECISION=input_precision(d_out.dtype),
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=tile.group,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    sums = None if partial is None else partial.sum(0).to(d_out.dtype)
    return ActGrads(d_gate, d_up, hidden, sums, packed)
