"""hidden = act(gate) * up, or act(up) with no gate, and its backward. Elementwise; bound by memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import forward, forward_backward
from ..activations import get as get_activation
from .common import cast


class ActGrads(NamedTuple):
    """What `act_backward` and `gemm_dact` return.

    ``packed`` is (tokens, 2 * intermediate), laid out [d_gate | d_up], or (tokens, intermediate) with no gate;
    ``d_gate`` and ``d_up`` are views of it. With no gate, ``d_gate`` is the gradient of the one pre-activation and
    ``d_up`` is None. ``bias_grads`` is (2 * intermediate,) in the same order, or None unless asked for.
    """

    d_gate: Tensor
    d_up: Tensor | None
    hidden: Tensor | None
    bias_grads: Tensor | None
    packed: Tensor


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, hidden_ptr, tokens, intermediate,
    gate_stride, up_stride, hidden_stride,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < tokens) & (cols < intermediate)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask).to(tl.float32)
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + cols, cols < intermediate).to(tl.float32)
    hidden = forward(gate, ACTIVATION)
    if up_ptr is not None:
        up = tl.load(up_ptr + rows * up_stride + cols, mask).to(tl.float32)
        if up_bias_ptr is not None:
            up += tl.load(up_bias_ptr + cols, cols < intermediate).to(tl.float32)
        hidden *= up
    tl.store(
        hidden_ptr + rows * hidden_stride + cols, cast(hidden, hidden_ptr.dtype.element_ty), mask
    )


@triton.jit
def _backward_kernel(
    d_hidden_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, d_gate_ptr, d_up_ptr, hidden_ptr,
    partial_ptr, tokens, intermediate,
    d_hidden_stride, gate_stride, up_stride, out_stride, hidden_stride, partial_stride,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < tokens) & (cols < intermediate)
    grad = tl.load(d_hidden_ptr + rows * d_hidden_stride + cols, mask, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask, 0.0).to(tl.float32)
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + cols, cols < intermediate).to(tl.float32)
    if up_ptr is not None:
        up = tl.load(up_ptr + rows * up_stride + cols, mask, 0.0).to(tl.float32)
        if up_bias_ptr is not None:
            up += tl.load(up_bias_ptr + cols, cols < intermediate).to(tl.float32)
        act, d_gate = forward_backward(gate, grad * up, ACTIVATION)
        d_up = grad * act
        hidden = act * up
        tl.store(d_up_ptr + rows * out_stride + cols, cast(d_up, d_up_ptr.dtype.element_ty), mask)
        if partial_ptr is not None:
            tl.store(
                partial_ptr + tl.program_id(0) * partial_stride + intermediate + cols,
                tl.sum(tl.where(mask, d_up, 0.0), 0)[None, :],
                cols < intermediate,
            )
    else:
        hidden, d_gate = forward_backward(gate, grad, ACTIVATION)
    tl.store(d_gate_ptr + rows * out_stride + cols, cast(d_gate, d_gate_ptr.dtype.element_ty), mask)
    if hidden_ptr is not None:
        tl.store(
            hidden_ptr + rows * hidden_stride + cols,
            cast(hidden, hidden_ptr.dtype.element_ty),
            mask,
        )
    if partial_ptr is not None:
        tl.store(
            partial_ptr + tl.program_id(0) * partial_stride + cols,
            tl.sum(tl.where(mask, d_gate, 0.0), 0)[None, :],
            cols < intermediate,
        )


def _rows(tensor: Tensor | None) -> Tensor | None:
    """The kernels walk rows of unit stride."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def act_forward(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """act(gate + gate_bias) * (up + up_bias), or act(gate + gate_bias) where ``up`` is None.

    Shapes: gate, up and the result (tokens, intermediate); biases (intermediate,) or None if the GEMM added them.
    Rows may have any stride, so both halves of one packed projection go in as views.
    """
    gate, up = _rows(gate), _rows(up)
    tokens, intermediate = gate.shape
    hidden = torch.empty(tokens, intermediate, device=gate.device, dtype=gate.dtype)
    if hidden.numel() == 0:
        return hidden
    block_m, block_n = 4, 512
    grid = (triton.cdiv(tokens, block_m), triton.cdiv(intermediate, block_n))
    _forward_kernel[grid](
        gate, up, gate_bias, up_bias, hidden, tokens, intermediate,
        gate.stride(0), 0 if up is None else up.stride(0), hidden.stride(0),
        ACTIVATION=get_activation(activation).name, BLOCK_M=block_m, BLOCK_N=block_n,
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
) -> ActGrads:
    """Gradients of `act_forward`, in one pass: d_gate, d_up, and if asked hidden again and the biases' gradients."""
    d_hidden, gate, up = _rows(d_hidden), _rows(gate), _rows(up)
    tokens, intermediate = gate.shape
    parts = 1 if up is None else 2
    packed = torch.empty(tokens, parts * intermediate, device=gate.device, dtype=gate.dtype)
    d_gate = packed[:, :intermediate]
    d_up = None if up is None else packed[:, intermediate:]
    hidden = torch.empty_like(d_gate, memory_format=torch.contiguous_format)
    hidden = hidden if recompute_hidden else None
    block_m, block_n = 16, 256
    grid = (triton.cdiv(tokens, block_m), triton.cdiv(intermediate, block_n))
    partial = (
        torch.empty(grid[0], packed.shape[1], device=gate.device, dtype=torch.float32)
        if bias_grads
        else None
    )
    if packed.numel():
        _backward_kernel[grid](
            d_hidden, gate, up, gate_bias, up_bias, d_gate, d_up, hidden, partial,
            tokens, intermediate,
            d_hidden.stride(0), gate.stride(0), 0 if up is None else up.stride(0),
            packed.stride(0), 0 if hidden is None else hidden.stride(0), packed.shape[1],
            ACTIVATION=get_activation(activation).name, BLOCK_M=block_m, BLOCK_N=block_n,
        )  # fmt: skip
    sums = None if partial is None else partial.sum(0).to(gate.dtype)
    return ActGrads(d_gate, d_up, hidden, sums, packed)
