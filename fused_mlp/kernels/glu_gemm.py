"""hidden = act(x·Wgᵀ + bg) · (x·Wuᵀ + bu), or act(x·Wuᵀ + bu), in one pass over x.

Both products of a GLU share each block of x, stay in registers in fp32, and meet in the epilogue:
gate and up are neither rounded nor written (unless backward wants them), which saves 6 of eager's 7
passes over a (tokens, intermediate) activation. Blocks of rows are visited in groups so that the
weights they share stay in L2.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..activations import forward
from ..activations import get as get_activation
from ..tiles import Tile, default_tile, problem_of
from .common import (
    UNSPECIALIZED,
    aligned,
    architecture,
    cast,
    corner,
    dense,
    dot,
    grouped,
    input_precision,
    launch,
    split_columns,
    tame,
)


class GemmAct(NamedTuple):
    """hidden, and the pre-activations (biases included) if kept; gate is None in a plain MLP.

    With gate, both are views of one (tokens, 2 * intermediate) buffer, laid out [gate | up].
    """

    hidden: Tensor
    gate: Tensor | None
    up: Tensor | None


@triton.jit
def _epilogue(
    up, gate, block_m, first, tokens, N, up_bias_ptr, gate_bias_ptr, hidden_ptr, up_ptr, gate_ptr,
    hidden_stride, saved_stride, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = first + tl.arange(0, BLOCK_N)[None, :]
    mask = (block_m * BLOCK_M + rows < tokens) & (cols < N)
    dtype = hidden_ptr.dtype.element_ty
    saved = rows * saved_stride + cols
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + cols, cols < N, 0.0).to(tl.float32)
    if up_ptr is not None:
        tl.store(corner(up_ptr, block_m, BLOCK_M, saved_stride) + saved, cast(up, dtype), mask)
    if GATED:
        if gate_bias_ptr is not None:
            gate += tl.load(gate_bias_ptr + cols, cols < N, 0.0).to(tl.float32)
        if gate_ptr is not None:
            kept = corner(gate_ptr, block_m, BLOCK_M, saved_stride) + saved
            tl.store(kept, cast(gate, dtype), mask)
        hidden = forward(gate, ACTIVATION) * up
    else:
        hidden = forward(up, ACTIVATION)
    out = corner(hidden_ptr, block_m, BLOCK_M, hidden_stride) + rows * hidden_stride + cols
    tl.store(out, cast(hidden, dtype), mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def glu_gemm_kernel(
    x_ptr, up_weight_ptr, gate_weight_ptr, up_bias_ptr, gate_bias_ptr, hidden_ptr, up_ptr, gate_ptr,
    tokens, N, K, x_stride_m, x_stride_k, up_stride_n, up_stride_k, gate_stride_n, gate_stride_k,
    hidden_stride, saved_stride,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STRIPS: tl.constexpr,
):  # fmt: skip
    block_m, block_n = grouped(
        tl.program_id(0), tl.cdiv(tokens, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP
    )
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    row_inside = block_m * BLOCK_M + rows < tokens
    col_inside = block_n * BLOCK_N + cols < N
    # Rows past the end read the block's first row and are never stored: a clamp costs less than a
    # mask in the loop.
    x = corner(x_ptr, block_m, BLOCK_M, x_stride_m)
    x += tl.where(row_inside, rows, 0)[:, None] * x_stride_m + ks[None, :] * x_stride_k
    wu = corner(up_weight_ptr, block_n, BLOCK_N, up_stride_n)
    wu += cols[None, :] * up_stride_n + ks[:, None] * up_stride_k
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if gate_weight_ptr is not None:
        wg = corner(gate_weight_ptr, block_n, BLOCK_N, gate_stride_n)
        wg += cols[None, :] * gate_stride_n + ks[:, None] * gate_stride_k
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(x) if EVEN_K else tl.load(x, (ks < K - k)[None, :], 0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(wu)
        else:
            b = tl.load(wu, (ks < K - k)[:, None] & col_inside[None, :], 0.0)
        up = dot(a, b, up, PRECISION)
        if gate_weight_ptr is not None:
            if EVEN_K and EVEN_N:
                b = tl.load(wg)
            else:
                b = tl.load(wg, (ks < K - k)[:, None] & col_inside[None, :], 0.0)
            gate = dot(a, b, gate, PRECISION)
            wg += BLOCK_K * gate_stride_k
        x += BLOCK_K * x_stride_k
        wu += BLOCK_K * up_stride_k

    # In strips of columns, as sums, results and biases of the whole block at once would spill.
    ups = split_columns(up, BLOCK_M, BLOCK_N, STRIPS)
    gates = split_columns(gate, BLOCK_M, BLOCK_N, STRIPS) if gate_weight_ptr is not None else ups
    for strip in tl.static_range(STRIPS):
        _epilogue(
            ups[strip], gates[strip], block_m, block_n * BLOCK_N + strip * (BLOCK_N // STRIPS),
            tokens, N, up_bias_ptr, gate_bias_ptr, hidden_ptr, up_ptr, gate_ptr,
            hidden_stride, saved_stride, gate_weight_ptr is not None,
            ACTIVATION, BLOCK_M, BLOCK_N // STRIPS,
        )  # fmt: skip


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

    Shapes: x (tokens, hidden_size); weights (intermediate, hidden_size), any strides; biases
    (intermediate,). With ``save`` the pre-activations are stored too, rounded once, for the
    backward pass.
    """
    tokens, hidden_size = x.shape
    intermediate = up_weight.shape[0]
    gated = gate_weight is not None
    arch = architecture(x.device)
    precision = input_precision(x.dtype, arch)
    problem = problem_of(gated)
    x, up_weight = tame(x), tame(up_weight)
    gate_weight = None if gate_weight is None else tame(gate_weight)
    operands = (x, up_weight) if gate_weight is None else (x, up_weight, gate_weight)
    tile = tile or default_tile(
        arch, x.dtype, problem, tokens, intermediate, precision, aligned(*operands)
    )
    hidden = x.new_empty(tokens, intermediate)
    saved = x.new_empty(tokens, (1 + gated) * intermediate) if save else None
    up = None if saved is None else saved[:, gated * intermediate :]
    gate = saved[:, :intermediate] if saved is not None and gated else None
    if hidden.numel():
        launch(
            glu_gemm_kernel, (triton.cdiv(tokens, tile.m) * triton.cdiv(intermediate, tile.n),),
            x, up_weight, gate_weight, dense(up_bias), dense(gate_bias), hidden, up, gate,
            tokens, intermediate, hidden_size, *x.stride(), *up_weight.stride(),
            *((0, 0) if gate_weight is None else gate_weight.stride()),
            hidden.stride(0), 0 if saved is None else saved.stride(0),
            ACTIVATION=get_activation(activation).name, PRECISION=precision,
            EVEN_N=intermediate % tile.n == 0, EVEN_K=hidden_size % tile.k == 0,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=tile.group,
            STRIPS=tile.strips(arch, x.element_size()),
            warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
    return GemmAct(hidden, gate, up)
