"""hidden = act(gate) · up, or act(up) with no gate, and its backward, around the vendor's GEMMs.

One pass each way, bound by memory: forward reads 2 and writes 1 (tokens, intermediate) activation,
where eager's two kernels move 5; backward reads 3 and writes up to 3, where eager moves 9.
Backward sums the biases' gradients from the values it has in registers: over a strip of rows first,
then over strips in a fixed order, so the same bits every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import forward, forward_backward
from ..activations import get as get_activation
from .common import INTERPRETED, UNSPECIALIZED, cast, corner, dense, launch, rows_of

# Rows and columns of a program. On a GPU 8 or 16 elements a thread are two 16-byte loads of each
# operand in flight and at most 56 registers; the interpreter pays by the program.
FORWARD_BLOCK = (32, 512) if INTERPRETED else (4, 512)
BACKWARD_BLOCK = (32, 256) if INTERPRETED else (4, 256)


class ActGrads(NamedTuple):
    """What `act_backward` and `gemm_dact` return.

    ``packed`` is (tokens, 2 * intermediate), laid out [d_gate | d_up], or (tokens, intermediate)
    with no gate; ``d_gate`` and ``d_up`` are views of it. With no gate, ``d_gate`` is the gradient
    of the one pre-activation and ``d_up`` is None. ``bias_grads`` is (2 * intermediate,) in the
    same order, or None unless asked for.
    """

    d_gate: Tensor
    d_up: Tensor | None
    hidden: Tensor | None
    bias_grads: Tensor | None
    packed: Tensor


@triton.jit(do_not_specialize=UNSPECIALIZED)
def act_forward_kernel(
    gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, hidden_ptr, tokens, N,
    gate_stride, up_stride, hidden_stride,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block_m = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (block_m * BLOCK_M + rows < tokens) & (cols < N)
    gate = corner(gate_ptr, block_m, BLOCK_M, gate_stride) + rows * gate_stride + cols
    gate = tl.load(gate, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + cols, cols < N, 0.0).to(tl.float32)
    hidden = forward(gate, ACTIVATION)
    if up_ptr is not None:
        up = corner(up_ptr, block_m, BLOCK_M, up_stride) + rows * up_stride + cols
        up = tl.load(up, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        if up_bias_ptr is not None:
            up += tl.load(up_bias_ptr + cols, cols < N, 0.0).to(tl.float32)
        hidden *= up
    out = corner(hidden_ptr, block_m, BLOCK_M, hidden_stride) + rows * hidden_stride + cols
    tl.store(out, cast(hidden, hidden_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def act_backward_kernel(
    d_hidden_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, d_gate_ptr, d_up_ptr, hidden_ptr,
    partial_ptr, tokens, N,
    d_hidden_stride, gate_stride, up_stride, out_stride, hidden_stride, partial_stride,
    ACTIVATION: tl.constexpr, STRIP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks a strip of STRIP blocks of rows, so that one partial sum covers many rows."""
    strip = tl.program_id(0)
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    rows = tl.arange(0, BLOCK_M)[:, None]
    dtype = d_gate_ptr.dtype.element_ty
    gate_bias = tl.zeros((1, BLOCK_N), tl.float32)
    up_bias = tl.zeros((1, BLOCK_N), tl.float32)
    if gate_bias_ptr is not None:
        gate_bias += tl.load(gate_bias_ptr + cols, cols < N, 0.0).to(tl.float32)
    if up_bias_ptr is not None:
        up_bias += tl.load(up_bias_ptr + cols, cols < N, 0.0).to(tl.float32)
    gate_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(STRIP):
        block = strip * STRIP + step
        mask = (block * BLOCK_M + rows < tokens) & (cols < N)
        grad = corner(d_hidden_ptr, block, BLOCK_M, d_hidden_stride) + rows * d_hidden_stride + cols
        grad = tl.load(grad, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        gate = corner(gate_ptr, block, BLOCK_M, gate_stride) + rows * gate_stride + cols
        gate = tl.load(gate, mask, 0.0, eviction_policy="evict_first").to(tl.float32) + gate_bias
        out = rows * out_stride + cols
        if up_ptr is not None:
            up = corner(up_ptr, block, BLOCK_M, up_stride) + rows * up_stride + cols
            up = tl.load(up, mask, 0.0, eviction_policy="evict_first").to(tl.float32) + up_bias
            act, d_gate = forward_backward(gate, grad * up, ACTIVATION)
            d_up = grad * act
            hidden = act * up
            tl.store(corner(d_up_ptr, block, BLOCK_M, out_stride) + out, cast(d_up, dtype), mask)
            if partial_ptr is not None:
                up_total += tl.where(mask, d_up, 0.0)
        else:
            hidden, d_gate = forward_backward(gate, grad, ACTIVATION)
        tl.store(corner(d_gate_ptr, block, BLOCK_M, out_stride) + out, cast(d_gate, dtype), mask)
        if hidden_ptr is not None:
            again = corner(hidden_ptr, block, BLOCK_M, hidden_stride) + rows * hidden_stride + cols
            tl.store(again, cast(hidden, dtype), mask)
        if partial_ptr is not None:
            gate_total += tl.where(mask, d_gate, 0.0)
    if partial_ptr is not None:
        partial = partial_ptr + strip * partial_stride + cols
        tl.store(partial, tl.sum(gate_total, 0)[None, :], cols < N)
        if up_ptr is not None:
            tl.store(partial + N, tl.sum(up_total, 0)[None, :], cols < N)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def column_sum_kernel(partial_ptr, out_ptr, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sum of each column, always in the same order."""
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, rows, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)[:, None]
        total += tl.load(partial_ptr + row.to(tl.int64) * N + cols, (row < rows) & (cols < N), 0.0)
    out = tl.sum(total, 0)[None, :]
    tl.store(out_ptr + cols, cast(out, out_ptr.dtype.element_ty), cols < N)


def new_grads(
    gate: Tensor, up: Tensor | None, blocks: int, recompute_hidden: bool, bias_grads: bool
) -> tuple[ActGrads, Tensor | None]:
    """Empty results of a backward pass over ``blocks`` blocks of rows, and its partial sums."""
    tokens, N = gate.shape
    packed = gate.new_empty(tokens, N if up is None else 2 * N)
    hidden = gate.new_empty(tokens, N) if recompute_hidden else None
    partial = gate.new_empty(blocks, packed.shape[1], dtype=torch.float32) if bias_grads else None
    d_up = None if up is None else packed[:, N:]
    return ActGrads(packed[:, :N], d_up, hidden, None, packed), partial


def sum_partials(grads: ActGrads, partial: Tensor | None) -> ActGrads:
    """``grads`` with the biases' gradients, summed over blocks and rounded once."""
    if partial is None:
        return grads
    rows, N = partial.shape
    if rows == 0:
        return grads._replace(bias_grads=grads.packed.new_zeros(N))
    sums = grads.packed.new_empty(N)
    if N:
        launch(
            column_sum_kernel, (triton.cdiv(N, 64),),
            partial, sums, rows, N, BLOCK_M=32, BLOCK_N=64, warps=4, stages=1,
        )  # fmt: skip
    return grads._replace(bias_grads=sums)


def act_forward(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """act(gate + gate_bias) * (up + up_bias), or act(gate + gate_bias) where ``up`` is None.

    Shapes: gate, up and the result (tokens, intermediate); biases (intermediate,) or None if the
    GEMM added them. Rows may have any stride, so both halves of one packed projection go in as
    views.
    """
    gate = rows_of(gate)
    up = None if up is None else rows_of(up)
    tokens, N = gate.shape
    hidden = gate.new_empty(tokens, N)
    if hidden.numel():
        block_m, block_n = FORWARD_BLOCK
        launch(
            act_forward_kernel, (triton.cdiv(tokens, block_m), triton.cdiv(N, block_n)),
            gate, up, dense(gate_bias), dense(up_bias), hidden, tokens, N,
            gate.stride(0), 0 if up is None else up.stride(0), hidden.stride(0),
            ACTIVATION=get_activation(activation).name, BLOCK_M=block_m, BLOCK_N=block_n,
            warps=4, stages=1,
        )  # fmt: skip
    return hidden


def act_backward(
    d_hidden: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    recompute_hidden: bool = False,
    bias_grads: bool = False,
    reuse: bool = False,
) -> ActGrads:
    """Gradients of `act_forward` in one pass: d_gate, d_up and, if asked, hidden again and the
    biases' gradients.

    Shapes: d_hidden, gate, up (tokens, intermediate), rows of any stride; biases (intermediate,) or
    None if gate and up include them. Nothing is overwritten, but d_hidden by hidden with ``reuse``.
    """
    d_hidden, gate = rows_of(d_hidden), rows_of(gate)
    up = None if up is None else rows_of(up)
    tokens, N = gate.shape
    block_m, block_n = BACKWARD_BLOCK
    # With sums, 64 rows to a program: the partial sums then cost 2 % of the traffic.
    strip = 64 // block_m if bias_grads else 1
    strips = triton.cdiv(tokens, block_m * strip)
    over = recompute_hidden and reuse  # each element is read before it is written, by one program
    grads, partial = new_grads(gate, up, strips, recompute_hidden and not over, bias_grads)
    if over:
        grads = grads._replace(hidden=d_hidden)
    if gate.numel():
        hidden = grads.hidden
        launch(
            act_backward_kernel, (strips, triton.cdiv(N, block_n)),
            d_hidden, gate, up, dense(gate_bias), dense(up_bias), grads.d_gate, grads.d_up,
            hidden, partial,
            tokens, N, d_hidden.stride(0), gate.stride(0), 0 if up is None else up.stride(0),
            grads.packed.stride(0), 0 if hidden is None else hidden.stride(0),
            grads.packed.shape[1], ACTIVATION=get_activation(activation).name, STRIP=strip,
            BLOCK_M=block_m, BLOCK_N=block_n, warps=4, stages=1,
        )  # fmt: skip
    return sum_partials(grads, partial)
