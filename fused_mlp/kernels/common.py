"""What every kernel needs: exact dots and stores under the interpreter, program order, precision."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _probe():
    pass


# Under TRITON_INTERPRET=1 `triton.jit` returns another class. Two of its faults are worked around below:
# `tl.dot` multiplies the bit patterns of bf16, and the cast from fp32 to bf16 truncates.
INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 to ``dtype``, to nearest even, on a GPU and under the interpreter."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            up = bits + 0x7FFF + ((bits >> 16) & 1)
            x = tl.where(x == x, up.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def grouped(pid, blocks_m, blocks_n, GROUP: tl.constexpr):
    """Program number to (block row, block column): GROUP rows at a time share their columns in L2."""
    width = GROUP * blocks_n
    first = (pid // width) * GROUP
    rows = tl.minimum(blocks_m - first, GROUP)
    return first + (pid % width) % rows, (pid % width) // rows


def input_precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: as `torch.set_float32_matmul_precision` says."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"
