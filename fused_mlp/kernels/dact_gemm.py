"""The backward of hidden = act(gate) · up, fused into the product dH = dY·Wd that feeds it.

    d_gate = dH · up · act'(gate)        d_up = dH · act(gate)        hidden = act(gate) · up, again

d_gate and d_up land in one (tokens, 2 * intermediate) buffer, so that one GEMM with the packed
weights gives dX; hidden is what the down weight's gradient needs. Eager moves dH and two products
between kernels, 10 passes over a (tokens, intermediate) activation; here they are 5. Bias gradients
are summed over each block of rows while its values are in registers, then over blocks in a fixed
order: no atomics, the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..activations import forward_backward
from ..activations import get as get_activation
from ..tiles import Tile, default_tile, math_of, problem_of
from .activation import ActGrads, new_grads, sum_partials
from .common import (
    UNSPECIALIZED,
    aligned,
    architecture,
    cast,
    corner,
    dot,
    grouped,
    input_precision,
    launch,
    rows_of,
    split_columns,
    tame,
)


@triton.jit
def _epilogue(
    grad, block_m, first, tokens, N, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, hidden_ptr,
    partial_ptr, gate_stride, up_stride, out_stride,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)
    cols = first + tl.arange(0, BLOCK_N)
    col_inside = cols < N
    mask = (block_m * BLOCK_M + rows < tokens)[:, None] & col_inside[None, :]
    dtype = d_gate_ptr.dtype.element_ty
    rows = rows[:, None]
    cols = cols[None, :]
    out = rows * out_stride + cols
    # Read once, never again: leave L2 to the weights.
    gate = corner(gate_ptr, block_m, BLOCK_M, gate_stride) + rows * gate_stride + cols
    gate = tl.load(gate, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
    if up_ptr is not None:
        up = corner(up_ptr, block_m, BLOCK_M, up_stride) + rows * up_stride + cols
        up = tl.load(up, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        act, d_gate = forward_backward(gate, grad * up, ACTIVATION)
        d_up = grad * act
        hidden = act * up
        tl.store(corner(d_up_ptr, block_m, BLOCK_M, out_stride) + out, cast(d_up, dtype), mask)
        if partial_ptr is not None:
            total = tl.sum(tl.where(mask, d_up, 0.0), 0)[None, :]
            tl.store(partial_ptr + block_m * out_stride + N + cols, total, col_inside[None, :])
    else:
        hidden, d_gate = forward_backward(gate, grad, ACTIVATION)
    tl.store(corner(d_gate_ptr, block_m, BLOCK_M, out_stride) + out, cast(d_gate, dtype), mask)
    if hidden_ptr is not None:
        again = corner(hidden_ptr, block_m, BLOCK_M, N) + rows * N + cols
        tl.store(again, cast(hidden, dtype), mask)
    if partial_ptr is not None:
        total = tl.sum(tl.where(mask, d_gate, 0.0), 0)[None, :]
        tl.store(partial_ptr + block_m * out_stride + cols, total, col_inside[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dact_gemm_kernel(
    dy_ptr, weight_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, hidden_ptr, partial_ptr,
    tokens, N, K, dy_stride_m, dy_stride_k, weight_stride_k, weight_stride_n,
    gate_stride, up_stride, out_stride,
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
    # Rows past the end read the block's first row: a clamp costs less than a mask in the loop.
    dy = corner(dy_ptr, block_m, BLOCK_M, dy_stride_m)
    dy += tl.where(row_inside, rows, 0)[:, None] * dy_stride_m + ks[None, :] * dy_stride_k
    weight = corner(weight_ptr, block_n, BLOCK_N, weight_stride_n)
    weight += cols[None, :] * weight_stride_n + ks[:, None] * weight_stride_k
    grad = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(dy) if EVEN_K else tl.load(dy, (ks < K - k)[None, :], 0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(weight)
        else:
            b = tl.load(weight, (ks < K - k)[:, None] & col_inside[None, :], 0.0)
        grad = dot(a, b, grad, PRECISION)
        dy += BLOCK_K * dy_stride_k
        weight += BLOCK_K * weight_stride_k

    # In strips of columns: gate, up and three results beside the whole block would spill.
    strips = split_columns(grad, BLOCK_M, BLOCK_N, STRIPS)
    for strip in tl.static_range(STRIPS):
        _epilogue(
            strips[strip], block_m, block_n * BLOCK_N + strip * (BLOCK_N // STRIPS), tokens, N,
            gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, hidden_ptr, partial_ptr,
            gate_stride, up_stride, out_stride, ACTIVATION, BLOCK_M, BLOCK_N // STRIPS,
        )  # fmt: skip


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

    Shapes: d_out (tokens, hidden_size); down_weight (hidden_size, intermediate), any strides; gate,
    up (tokens, intermediate) with biases included. In a plain MLP ``gate`` is the one
    pre-activation and ``up`` is None.
    """
    tokens, hidden_size = d_out.shape
    intermediate = down_weight.shape[1]
    arch = architecture(d_out.device)
    problem = problem_of(up is not None, backward=True)
    precision = input_precision(d_out.dtype, arch)
    d_out, down_weight, gate = tame(d_out), tame(down_weight), rows_of(gate)
    up = None if up is None else rows_of(up)
    tile = tile or default_tile(
        arch, d_out.dtype, problem, tokens, intermediate, precision, aligned(d_out, down_weight)
    )
    blocks = triton.cdiv(tokens, tile.m)
    grads, partial = new_grads(gate, up, blocks, recompute_hidden, bias_grads)
    if gate.numel():
        # With sums over rows the compiler needs a few registers more than two blocks leave it.
        math = math_of(d_out.dtype, precision, arch)
        registers = None if bias_grads else tile.registers(arch, math, problem)
        launch(
            dact_gemm_kernel, (blocks * triton.cdiv(intermediate, tile.n),),
            d_out, down_weight, gate, up, grads.d_gate, grads.d_up, grads.hidden, partial,
            tokens, intermediate, hidden_size, *d_out.stride(), *down_weight.stride(),
            gate.stride(0), 0 if up is None else up.stride(0), grads.packed.stride(0),
            ACTIVATION=get_activation(activation).name, PRECISION=precision,
            EVEN_N=intermediate % tile.n == 0, EVEN_K=hidden_size % tile.k == 0,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=tile.group,
            STRIPS=tile.strips(arch, d_out.element_size()),
            warps=tile.warps, stages=tile.stages, registers=registers,
        )  # fmt: skip
    return sum_partials(grads, partial)
