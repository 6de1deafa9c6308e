"""The GEMMs with an activation, or its derivative, as their epilogue; and decode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_mlp import activations
from fused_mlp.kernels import decode
from fused_mlp.kernels.dact_gemm import gemm_dact
from fused_mlp.kernels.decode import decode_mlp, split_gemm
from fused_mlp.kernels.glu_gemm import gemm_act
from fused_mlp.tiles import Tile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = Tile(32, 32, 32, 4, 1)


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def first_half(x, wu, wg, bu, bg, name):
    """Eager's order of operations, in the dtype of its inputs."""
    up = torch.nn.functional.linear(x, wu, bu)
    act = activations.get(name).eager
    if wg is None:
        return act(up), None, up
    gate = torch.nn.functional.linear(x, wg, bg)
    return act(gate) * up, gate, up


def doubles(*tensors):
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_forward_is_as_exact_as_eager(name, dtype, gated, as_exact) -> None:
    tokens, hidden_size, intermediate = 37, 70, 45
    x = randn(tokens, hidden_size, dtype=dtype)
    wu, wg = randn(2, intermediate, hidden_size, dtype=dtype, scale=hidden_size**-0.5).unbind()
    bu, bg = randn(2, intermediate, dtype=dtype).unbind()
    wg, bg = (wg, bg) if gated else (None, None)
    result = gemm_act(x, wu, wg, bu, bg, name, save=True)
    near = first_half(x, wu, wg, bu, bg, name)
    exact = first_half(*doubles(x, wu, wg, bu, bg), name)
    as_exact("hidden", result.hidden, near[0], exact[0])
    as_exact("up", result.up, near[2], exact[2])
    if gated:
        as_exact("gate", result.gate, near[1], exact[1])
    assert gated or result.gate is None


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_backward_is_as_exact_as_eager(name, dtype, gated, as_exact) -> None:
    tokens, hidden_size, intermediate = 37, 70, 45
    d_out = randn(tokens, hidden_size, dtype=dtype)
    down = randn(hidden_size, intermediate, dtype=dtype, scale=intermediate**-0.5)
    packed = randn(tokens, 2 * intermediate, dtype=dtype)
    gate = packed[:, :intermediate]
    up = packed[:, intermediate:] if gated else None

    def eager(d_out, down, gate, up):
        inputs = [t.detach().clone().requires_grad_() for t in (gate, up) if t is not None]
        hidden = activations.get(name).eager(inputs[0])
        hidden = hidden * inputs[1] if up is not None else hidden
        grads = torch.autograd.grad(hidden, inputs, d_out @ down)
        return hidden.detach(), *grads

    result = gemm_dact(d_out, down, gate, up, name, recompute_hidden=True, bias_grads=True)
    near, exact = eager(d_out, down, gate, up), eager(*doubles(d_out, down, gate, up))
    as_exact("hidden", result.hidden, near[0], exact[0])
    as_exact("d_gate", result.d_gate, near[1], exact[1])
    if gated:
        as_exact("d_up", result.d_up, near[2], exact[2])
    near_terms, terms = (torch.cat(grads[1:], 1) for grads in (near, exact))
    as_exact("bias gradients", result.bias_grads, near_terms.sum(0), terms.sum(0), terms)


SIZES = [(1, 3, 431), (130, 431, 3), (64, 64, 64), (65, 33, 17), (130, 16, 129)]


@pytest.mark.parametrize("tile", [SMALL, Tile(64, 128, 64, 4, 1), Tile(64, 128, 16, 2, 1, 1)])
@pytest.mark.parametrize(("tokens", "hidden_size", "intermediate"), SIZES)
def test_ragged_sizes_and_tiles(tokens, hidden_size, intermediate, tile, as_exact) -> None:
    dtype = torch.float32
    x = randn(tokens, hidden_size, dtype=dtype)
    wu, wg = randn(2, intermediate, hidden_size, dtype=dtype).unbind()
    result = gemm_act(x, wu, wg, None, None, "silu", tile=tile)
    near = first_half(x, wu, wg, None, None, "silu")
    as_exact(
        "hidden", result.hidden, near[0], first_half(*doubles(x, wu, wg, None, None), "silu")[0]
    )
    assert result.gate is None
    assert result.up is None

    gate, up = near[1], near[2]
    grads = gemm_dact(x, wu.T.contiguous(), gate, up, "identity", tile=tile, bias_grads=True)
    exact = (x.double() @ wu.double().T) * up.double()
    as_exact("d_gate", grads.d_gate, (x @ wu.T) * up, exact)
    as_exact("bias", grads.bias_grads[:intermediate], ((x @ wu.T) * up).sum(0), exact.sum(0), exact)


@settings(deadline=None, max_examples=10)
@given(
    tokens=st.integers(0, 70),
    hidden_size=st.integers(1, 70),
    intermediate=st.integers(1, 70),
    layout=st.lists(st.booleans(), min_size=4, max_size=4),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_and_stride(tokens, hidden_size, intermediate, layout, dtype) -> None:
    def tensor(rows: int, columns: int, transposed: bool) -> Tensor:
        # Small integers: every product and sum is exact in fp32, so results agree to the last bit.
        if transposed:
            return torch.randint(-2, 3, (columns, 2 * rows)).to(dtype).T[::2]
        return torch.randint(-2, 3, (rows, columns + 3)).to(dtype)[:, 1 : columns + 1]

    x = tensor(tokens, hidden_size, layout[0])
    wu = tensor(intermediate, hidden_size, layout[1])
    wg = tensor(intermediate, hidden_size, layout[2])
    down = tensor(hidden_size, intermediate, layout[3])
    result = gemm_act(x, wu, wg, None, None, "relu", tile=SMALL, save=True)
    gate, up = x.double() @ wg.double().T, x.double() @ wu.double().T
    assert torch.equal(result.gate, gate.to(dtype))
    assert torch.equal(result.up, up.to(dtype))
    assert torch.equal(result.hidden, (gate.relu() * up).float().to(dtype))
    grads = gemm_dact(x, down, result.gate, result.up, "identity", tile=SMALL)
    exact = (x.double() @ down.double()) * result.gate.double()
    assert torch.equal(grads.d_up, exact.float().to(dtype))


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_decode_is_as_exact_as_eager(gated, dtype, tokens, as_exact) -> None:
    hidden_size, intermediate = 70, 431
    x = randn(tokens, hidden_size, dtype=dtype)
    wu, wg = randn(2, intermediate, hidden_size, dtype=dtype, scale=hidden_size**-0.5).unbind()
    down = randn(intermediate, hidden_size, dtype=dtype, scale=intermediate**-0.5).T
    bu, bg = randn(2, intermediate, dtype=dtype).unbind()
    bd = randn(hidden_size, dtype=dtype)
    wg, bg = (wg, bg) if gated else (None, None)

    def eager(x, wu, wg, bu, bg, down, bd):
        hidden = first_half(x, wu, wg, bu, bg, "silu")[0]
        return torch.nn.functional.linear(hidden, down, bd)

    arguments = (x, wu, wg, bu, bg, down, bd)
    result = decode_mlp(x, wu, wg, down, bu, bg, bd, "silu")
    as_exact("decode", result, eager(*arguments), eager(*doubles(*arguments)))
    assert torch.equal(result, decode_mlp(x, wu, wg, down, bu, bg, bd, "silu"))


def test_pieces_cover_the_sum_once(as_exact) -> None:
    tile = Tile(16, 32, 16, 4, 1)
    pieces, length = decode.pieces_of("interpreter", 40, 1000, tile)
    assert pieces > 2
    assert (pieces - 1) * length < 1000 <= pieces * length
    x, weight, bias = torch.randn(5, 1000), torch.randn(40, 1000), torch.randn(40)
    result = split_gemm(x, weight, bias, tile=tile)
    exact = x.double() @ weight.double().T + bias.double()
    as_exact("pieces", result, torch.nn.functional.linear(x, weight, bias), exact)
    for columns in (1, 64, 4096, 151936):
        for depth in (1, 64, 431, 14336):
            pieces, length = decode.pieces_of("sm90", columns, depth, Tile(16, 32, 128))
            assert 1 <= pieces <= 16
            assert (pieces - 1) * length < depth <= pieces * length


def test_decode_of_no_intermediate_is_the_bias() -> None:
    x, up, bias = torch.randn(3, 8), torch.empty(0, 8), torch.randn(5)
    y = decode_mlp(x, up, up, torch.empty(5, 0), None, None, bias, "silu")
    torch.testing.assert_close(y, bias.expand(3, 5))


def test_too_many_tokens_for_decode() -> None:
    x = torch.randn(17, 8)
    with pytest.raises(ValueError, match="17 tokens; the decode kernels take at most 16"):
        decode_mlp(x, x, None, x, None, None, None, "silu")


def test_backward_repeats_to_the_bit_and_overwrites_nothing() -> None:
    d_out, gate, up = torch.randn(130, 40), torch.randn(130, 50), torch.randn(130, 50)
    down = torch.randn(40, 50)
    before = [t.clone() for t in (d_out, down, gate, up)]
    first, second = (
        gemm_dact(d_out, down, gate, up, "gelu", recompute_hidden=True, bias_grads=True)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (d_out, down, gate, up), strict=True))
