"""The activation·product kernels, forward and backward, through the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_mlp import activations
from fused_mlp.kernels.activation import act_backward, act_forward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def eager(gate: Tensor, up: Tensor | None, name: str) -> Tensor:
    hidden = activations.get(name).eager(gate)
    return hidden if up is None else hidden * up


def eager_gradients(
    d_hidden: Tensor, gate: Tensor, up: Tensor | None, name: str
) -> tuple[Tensor, Tensor | None]:
    inputs = [t.detach().clone().requires_grad_() for t in (gate, up) if t is not None]
    hidden = eager(inputs[0], inputs[1] if up is not None else None, name)
    grads = torch.autograd.grad(hidden, inputs, d_hidden)
    return grads[0], grads[1] if up is not None else None


def double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_both_ways_are_as_exact_as_eager(name, dtype, gated, as_exact) -> None:
    tokens, intermediate = 21, 131
    packed = torch.randn(tokens, 2 * intermediate).mul(2).to(dtype)
    gate = packed[:, :intermediate]
    up = packed[:, intermediate:] if gated else None
    d_hidden = torch.randn(tokens, intermediate).to(dtype)

    reference = eager(gate.double(), double(up), name)
    rounded = eager(gate, up, name)
    as_exact("hidden", act_forward(gate, up, name), rounded, reference)

    grads = act_backward(d_hidden, gate, up, name, recompute_hidden=True, bias_grads=True)
    exact = eager_gradients(d_hidden.double(), gate.double(), double(up), name)
    near = eager_gradients(d_hidden, gate, up, name)
    as_exact("hidden again", grads.hidden, rounded, reference)
    as_exact("d_gate", grads.d_gate, near[0], exact[0])
    if gated:
        as_exact("d_up", grads.d_up, near[1], exact[1])
    terms, near_terms = (torch.cat(g[: 1 + gated], 1) for g in (exact, near))
    as_exact("bias gradients", grads.bias_grads, near_terms.sum(0), terms.sum(0), terms)
    assert grads.packed.shape == (tokens, (1 + gated) * intermediate)
    assert grads.d_gate.data_ptr() == grads.packed.data_ptr()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_biases_added_here(gated, as_exact) -> None:
    gate, up, d_hidden = torch.randn(3, 70, 45).bfloat16().unbind()
    gate_bias, up_bias = torch.randn(2, 45).bfloat16().unbind()
    up, up_bias = (up, up_bias) if gated else (None, None)
    full_gate = gate.double() + gate_bias.double()
    full_up = up.double() + up_bias.double() if gated else None
    near_gate, near_up = gate + gate_bias, up + up_bias if gated else None
    hidden = act_forward(gate, up, "silu", gate_bias=gate_bias, up_bias=up_bias)
    as_exact("hidden", hidden, eager(near_gate, near_up, "silu"), eager(full_gate, full_up, "silu"))
    grads = act_backward(d_hidden, gate, up, "silu", gate_bias=gate_bias, up_bias=up_bias)
    exact = eager_gradients(d_hidden.double(), full_gate, full_up, "silu")
    near = eager_gradients(d_hidden, near_gate, near_up, "silu")
    as_exact("d_gate", grads.d_gate, near[0], exact[0])
    if gated:
        as_exact("d_up", grads.d_up, near[1], exact[1])


@settings(deadline=None, max_examples=10)
@given(
    tokens=st.integers(0, 70),
    intermediate=st.integers(1, 300),
    gap=st.integers(0, 5),
    transposed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_and_stride(tokens, intermediate, gap, transposed, dtype) -> None:
    def tensor() -> Tensor:
        if transposed:
            return torch.randn(intermediate, tokens).to(dtype).T
        return torch.randn(tokens, intermediate + gap).to(dtype)[:, :intermediate]

    gate, up, d_hidden = tensor(), tensor(), tensor()
    hidden = act_forward(gate, up, "relu")
    # relu and a product need no more than one rounding in fp32, and one more on the store.
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        hidden.double(), gate.double().relu() * up.double(), rtol=tolerance, atol=1e-6
    )
    grads = act_backward(d_hidden, gate, up, "relu", bias_grads=True)
    wanted = torch.where(gate > 0, d_hidden.double() * up.double(), 0.0)
    torch.testing.assert_close(grads.d_gate.double(), wanted, rtol=tolerance, atol=1e-6)
    sums = torch.cat([wanted, d_hidden.double() * gate.double().relu()], 1).sum(0)
    torch.testing.assert_close(
        grads.bias_grads.double(), sums, rtol=tolerance, atol=1e-4 + tolerance
    )


def test_nothing_is_overwritten_and_the_bits_repeat() -> None:
    gate, up, d_hidden = torch.randn(3, 130, 70).unbind()
    before = [t.clone() for t in (gate, up, d_hidden)]
    first, second = (
        act_backward(d_hidden, gate, up, "gelu", recompute_hidden=True, bias_grads=True)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (gate, up, d_hidden), strict=True))


def test_no_tokens() -> None:
    gate = torch.empty(0, 8)
    assert act_forward(gate, gate, "silu").shape == (0, 8)
    grads = act_backward(gate, gate, gate, "silu", bias_grads=True)
    assert grads.packed.shape == (0, 16)
    assert torch.equal(grads.bias_grads, torch.zeros(16))
