"""The whole MLP for 1 to 16 tokens, where the time is the time to read the weights: each is read once."""

from __future__ import annotations

from torch import Tensor

from .glu_gemm import gemm_act

MAX_TOKENS = 16


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
    """The MLP of at most `MAX_TOKENS` tokens: x (tokens, hidden_size) to (tokens, hidden_size)."""
    hidden = gemm_act(x, up_weight, gate_weight, up_bias, gate_bias, activation).hidden
    return gemm_act(hidden, down_weight, None, down_bias, None, "identity").hidden
