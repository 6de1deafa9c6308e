"""hidden = act(x·Wgᵀ + bg) * (x·Wuᵀ + bu), or act(x·Wuᵀ + bu), in one pass over x: the activation is the epilogue."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import forward
from ..activations import get as get_activation
from ..tiles import Tile
from .common import cast, dot, grouped, input_precision


class GemmAct(NamedTuple):
    """hidden, and the pre-activations (biases included) if they were to be kept; gate is None in a plain MLP."""

    hidden: Tensor
    gate: Tensor | None
    up: Tensor | None


@triton.jit
def _kernel(
    x_ptr, up_weight_ptr, gate_weight_ptr, up_bias_ptr, gate_bias_ptr, hidden_ptr, up_ptr, gate_ptr,
    M, N, K, x_stride_m, x_stride_k, up_stride_n, up_stride_k, gate_stride_n, gate_stride_k,
    out_stride, saved_stride,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block_m, block_n = grouped(
        tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP
    )
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Rows past the end read row 0: cheaper than a mask, and never stored.
    safe_rows = tl.where(rows < M, rows, 0).to(tl.int64)
    safe_cols = tl.where(cols < N, cols, 0).to(tl.int64)
    x = x_ptr + safe_rows[:, None] * x_stride_m + ks[None, :] * x_stride_k
    wu = up_weight_ptr + safe_cols[None, :] * up_stride_n + ks[:, None] * up_stride_k
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if gate_weight_ptr is not None:
        wg = gate_weight_ptr + safe_cols[None, :] * gate_stride_n + ks[:, None] * gate_stride_k
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = ks < K - k
        a = tl.load(x, inside[None, :], 0.0)
        up = dot(a, tl.load(wu, inside[:, None], 0.0), up, PRECISION)
        x += BLOCK_K * x_stride_k
        wu += BLOCK_K * up_stride_k
        if gate_weight_ptr is not None:
            gate = dot(a, tl.load(wg, inside[:, None], 0.0), gate, PRECISION)
            wg += BLOCK_K * gate_stride_k

    mask = (rows < M)[:, None] & (cols < N)[None, :]
    dtype = hidden_ptr.dtype.element_ty
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + cols, cols < N).to(tl.float32)[None, :]
    offsets = rows.to(tl.int64)[:, None] * saved_stride + cols[None, :]
    if up_ptr is not None:
        tl.store(up_ptr + offsets, cast(up, dtype), mask)
    if gate_weight_ptr is not None:
        if gate_bias_ptr is not None:
            gate += tl.load(gate_bias_ptr + cols, cols < N).to(tl.float32)[None, :]
        if gate_ptr is not None:
            tl.store(gate_ptr + offsets, cast(gate, dtype), mask)
        hidden = forward(gate, ACTIVATION) * up
    else:
        hidden = forward(up, ACTIVATION)
    tl.store(
        hidden_ptr + rows.to(tl.int64)[:, None] * out_stride + cols[None, :],
        cast(hidden, dtype),
        mask,
    )


def gemm_act(
    x: Tensor,
    up_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    activation: str,
    *,
    tile: Tile | None = None,
    save: bool = False,
) -> GemmAct:
    """The first half of an MLP in one kernel.

    Shapes: x (tokens, hidden_size); weights (intermediate, hidden_size), any strides; biases (intermediate,).
    With ``save`` the pre-activations are stored too, rounded once, for the backward pass.
    """
    tile = tile or Tile()
    tokens, hidden_size = x.shape
    intermediate = up_weight.shape[0]
    hidden = x.new_empty(tokens, intermediate)
    parts = 1 if gate_weight is None else 2
    saved = x.new_empty(tokens, parts * intermediate) if save else None
    up = saved[:, (parts - 1) * intermediate :] if save else None
    gate = saved[:, :intermediate] if save and parts == 2 else None
    if hidden.numel():
        grid = (triton.cdiv(tokens, tile.m) * triton.cdiv(intermediate, tile.n),)
        wg_strides = (0, 0) if gate_weight is None else gate_weight.stride()
        _kernel[grid](
            x, up_weight, gate_weight, up_bias, gate_bias, hidden, up, gate,
            tokens, intermediate, hidden_size, *x.stride(), *up_weight.stride(), *wg_strides,
            hidden.stride(0), 0 if saved is None else saved.stride(0),
            ACTIVATION=get_activation(activation).name, PRECISION=input_precision(x.dtype),
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=tile.group,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return GemmAct(hidden, gate, up)
