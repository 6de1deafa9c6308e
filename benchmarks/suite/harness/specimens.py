"""The kernels whose machine code is tracked, and how many of them a suite size compiles.

Names alone, since asv reads this without triton; a test holds them to what the package ships.
"""

from __future__ import annotations

import itertools

from .shapes import Size

# Compiling one takes 1.5 to 3 s where it is not cached: the first ones tell most.
CORE = (
    "glu/silu/bf16",
    "glu_saved/silu/bf16",
    "glu_backward/silu/bf16",
    "plain/gelu_tanh/bf16",
    "plain_saved/gelu_tanh/bf16",
    "plain_backward_bias/gelu_tanh/bf16",
    "act_forward/silu/bf16",
    "act_backward/silu/bf16",
    "decode/glu/silu/bf16",
    "decode/plain/gelu_tanh/bf16",
    "int8/glu/silu/bf16",
    "int4/glu/silu/bf16",
)
KERNELS = (
    *CORE,
    "glu/gelu_tanh/bf16",
    "glu_saved/gelu_tanh/bf16",
    "glu_backward/gelu_tanh/bf16",
    "glu_backward_bias/gelu_tanh/bf16",
    "glu_backward_bias/silu/bf16",
    "plain/silu/bf16",
    "plain_saved/silu/bf16",
    "plain_backward/gelu_tanh/bf16",
    "plain_backward/silu/bf16",
    "plain_backward_bias/silu/bf16",
    "column_sum/bf16",
    "act_forward/gelu_tanh/bf16",
    "act_backward/gelu_tanh/bf16",
    "act_backward_bias/gelu_tanh/bf16",
    "act_backward_bias/silu/bf16",
    "decode/glu/silu/bf16/split_gemm",
    "decode/glu/silu/bf16/add_pieces",
    "decode/plain/gelu_tanh/bf16/split_gemm",
    "decode/plain/gelu_tanh/bf16/add_pieces",
    "int8/plain/gelu_tanh/bf16",
    "int8/down/bf16",
    "int4/plain/gelu_tanh/bf16",
    "int4/down/bf16",
    "act_backward/silu/fp32",
    "glu/silu/fp32",
    "glu_backward/silu/fp32",
)
ARCHITECTURES = ("sm80", "sm90", "sm100", "gfx942")


def chosen(size: Size) -> list[tuple[str, str]]:
    """The (kernel, architecture) pairs a suite size compiles."""
    kernels = KERNELS if size.name == "full" else CORE
    architectures = ("sm90", "sm100") if size.name == "quick" else ARCHITECTURES
    return list(itertools.product(kernels, architectures))
