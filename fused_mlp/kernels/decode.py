"""The whole MLP for 1 to 16 tokens, where time is reading the weights: each is read once.

The first half is `glu_gemm` with all tokens in one block of 16 rows and narrow columns, so that
every processor streams its own rows of the weights. The second half has few columns (hidden_size)
and a long sum (intermediate), so the sum is cut into pieces as well; each piece stores fp32 partial
sums, which a second kernel adds in a fixed order together with the bias. No atomics: the same bits
every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tiles import Tile, decode_tile, describe
from .common import (
    UNSPECIALIZED,
    aligned,
    architecture,
    cast,
    corner,
    dense,
    dot,
    input_precision,
    launch,
    tame,
)
from .glu_gemm import gemm_act

MAX_TOKENS = 16


@triton.jit(do_not_specialize=UNSPECIALIZED)
def split_gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, tokens, N, K, piece,
    x_stride_m, x_stride_k, weight_stride_n, weight_stride_k, out_stride_piece, out_stride_m,
    PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One piece, ``piece`` long, of the sum over K of x·weightᵀ."""
    block_n = tl.program_id(0)
    start = tl.program_id(1) * piece
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    row_inside = rows < tokens
    col_inside = block_n * BLOCK_N + cols < N
    x = x_ptr + start.to(tl.int64) * x_stride_k
    x += tl.where(row_inside, rows, 0)[:, None] * x_stride_m + ks[None, :] * x_stride_k
    weight = corner(weight_ptr, block_n, BLOCK_N, weight_stride_n)
    weight += start.to(tl.int64) * weight_stride_k
    weight += cols[None, :] * weight_stride_n + ks[:, None] * weight_stride_k
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, tl.minimum(start + piece, K), BLOCK_K):
        a = tl.load(x) if EVEN_K else tl.load(x, (ks < K - k)[None, :], 0.0)
        # Each weight is read by this program alone, once.
        if EVEN_K and EVEN_N:
            b = tl.load(weight, eviction_policy="evict_first")
        else:
            inside = (ks < K - k)[:, None] & col_inside[None, :]
            b = tl.load(weight, inside, 0.0, eviction_policy="evict_first")
        total = dot(a, b, total, PRECISION)
        x += BLOCK_K * x_stride_k
        weight += BLOCK_K * weight_stride_k
    cols += block_n * BLOCK_N
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols, col_inside, 0.0).to(tl.float32)[None, :]
    out = out_ptr + tl.program_id(1).to(tl.int64) * out_stride_piece
    out += rows[:, None] * out_stride_m + cols[None, :]
    mask = row_inside[:, None] & col_inside[None, :]
    tl.store(out, cast(total, out_ptr.dtype.element_ty), mask)


@triton.jit
def add_pieces_kernel(
    partial_ptr, bias_ptr, out_ptr, size, N, pieces, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum over pieces of (pieces, tokens, N), and the bias; ``size`` is tokens * N."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        total += tl.load(partial_ptr + piece * size + at, mask, 0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % N, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + at, cast(total, out_ptr.dtype.element_ty), mask)


def pieces_of(arch: str, columns: int, depth: int, tile: Tile) -> tuple[int, int]:
    """(pieces, length of one) of a sum ``depth`` long, so that two blocks reach each processor.

    A function of the shape and the architecture alone, so results are the same from call to call.
    """
    blocks = triton.cdiv(columns, tile.n)
    steps = triton.cdiv(depth, tile.k)
    wanted = triton.cdiv(2 * describe(arch).processors, blocks)
    # Fewer than 4 steps never fill the pipeline; more than 16 pieces cost more to add than they
    # save.
    pieces = max(1, min(wanted, steps // 4, 16))
    length = max(1, triton.cdiv(steps, pieces)) * tile.k
    return max(1, triton.cdiv(depth, length)), length


def split_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, tile: Tile | None = None
) -> Tensor:
    """x·weightᵀ + bias for at most `MAX_TOKENS` tokens.

    Shapes: x (tokens, in_features); weight (out_features, in_features), any strides; bias
    (out_features,).
    """
    tokens, depth = x.shape
    columns = weight.shape[0]
    arch = architecture(x.device)
    x, weight = tame(x), tame(weight)
    precision = input_precision(x.dtype, arch)
    tile = tile or decode_tile(arch, x.dtype, precision, aligned(x, weight))
    out = x.new_empty(tokens, columns)
    if out.numel() == 0:
        return out
    pieces, length = pieces_of(arch, columns, depth, tile)
    split = pieces > 1
    partial = x.new_empty(pieces, tokens, columns, dtype=torch.float32) if split else out[None]
    launch(
        split_gemm_kernel, (triton.cdiv(columns, tile.n), pieces),
        x, weight, None if split else dense(bias), partial, tokens, columns, depth, length,
        *x.stride(), *weight.stride(), partial.stride(0), partial.stride(1),
        PRECISION=precision, EVEN_N=columns % tile.n == 0, EVEN_K=depth % tile.k == 0,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    if split:
        launch(
            add_pieces_kernel, (triton.cdiv(out.numel(), 512),),
            partial, dense(bias), out, out.numel(), columns, pieces, BLOCK=512, warps=4, stages=1,
        )  # fmt: skip
    return out


def decode_mlp(
    x: Tensor,
    up_weight: Tensor,
    gate_weight: Tensor | None,
    down_weight: Tensor,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """The MLP of at most `MAX_TOKENS` tokens, each weight read once, with the same bits every time.

    Shapes: x and the result (tokens, hidden_size); gate and up (intermediate, hidden_size), down
    (hidden_size, intermediate), of any strides.

    Raises:
        ValueError: more than `MAX_TOKENS` tokens.
    """
    if x.shape[0] > MAX_TOKENS:
        raise ValueError(f"{x.shape[0]} tokens; the decode kernels take at most {MAX_TOKENS}")
    arch = architecture(x.device)
    operands = (x, up_weight) if gate_weight is None else (x, up_weight, gate_weight)
    tile = decode_tile(
        arch,
        x.dtype,
        input_precision(x.dtype, arch),
        aligned(*operands),
    )
    hidden = gemm_act(x, up_weight, gate_weight, up_bias, gate_bias, activation, tile=tile).hidden
    return split_gemm(hidden, down_weight, down_bias)
