"""Every path, activation and dtype against float64, through the interpreter where it is Triton's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_mlp import activations, use_path

from .problems import assert_path_is_exact, problem

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATHS = ["eager", "onednn", "packed", "epilogue", "decode"]


def skip_if_impossible(path: str, dtype: torch.dtype) -> None:
    from fused_mlp import machine

    if path == "onednn" and not machine.onednn_native(dtype):
        pytest.skip(
            "oneDNN computes this dtype in fp32 here and has no backward for it; tested on its own"
        )


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))
@pytest.mark.parametrize("path", PATHS)
def test_error_is_at_most_twice_eagers(path, activation, dtype, gated):
    skip_if_impossible(path, dtype)
    assert_path_is_exact(problem(5, 11, 21, gated=gated, activation=activation, dtype=dtype), path)


@pytest.mark.parametrize("path", ["onednn", "packed", "epilogue"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"), [(1, 3, 431), (33, 70, 65), (130, 16, 17), (2, 1, 1)]
)
def test_ragged_shapes(path, tokens, hidden, intermediate):
    assert_path_is_exact(problem(tokens, hidden, intermediate, bias=False), path)
    assert_path_is_exact(problem(tokens, hidden, intermediate, gated=False), path)


@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
@pytest.mark.parametrize("path", ["eager", "onednn", "packed", "interpreted"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_recompute_changes_no_result(path, recompute, gated):
    assert_path_is_exact(problem(9, 17, 29, gated=gated), path, recompute=recompute)


def test_half_precision_without_native_support_is_no_less_exact():
    """On a CPU whose oneDNN refuses fp16, the path computes in fp32, packed or not."""
    p = problem(8, 33, 70, dtype=torch.float16)
    exact = p.to(torch.float64).reference()
    with torch.no_grad(), use_path("onednn"):
        got = p.fused()
    assert got.dtype == torch.float16
    assert (got - exact).abs().max() <= 2 * (
        p.reference() - exact
    ).abs().max() + 1e-3 * exact.abs().max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))
def test_large_inputs_stay_finite_and_nan_propagates(path, activation):
    """Pre-activations of ±1e4 give eager's values and gradients; NaN and infinities appear where
    eager has them.
    """
    for gated in (True, False):
        p = problem(6, 1, 5, gated=gated, bias=False, activation=activation)
        for name in ("up_weight", "gate_weight"):
            if p.weights[name] is not None:
                p.weights[name].data.fill_(1)
        p.x.data = torch.tensor([[1e4], [-1e4], [100.0], [-100.0], [0.0], [-0.0]])
        _same_as_eager(p, path, backward=True, finite=True)
        p.x.data = torch.tensor(
            [[float("nan")], [float("inf")], [-float("inf")], [1.0], [0.5], [2.0]]
        )
        _same_as_eager(p, path, backward=False, finite=False)


def _same_as_eager(p, path, backward, finite):
    want = p.reference()
    with torch.no_grad(), use_path(path):
        got = p.fused()
    torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)
    if finite and torch.isfinite(want).all():
        assert torch.isfinite(got).all()
    if backward and path != "decode":
        with use_path(path):
            grads = torch.autograd.grad(p.fused().sum(), [p.x, p.weights["up_weight"]])
        for a, b in zip(
            grads, torch.autograd.grad(want.sum(), [p.x, p.weights["up_weight"]]), strict=True
        ):
            assert torch.isfinite(a).all()
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item() + 1e-30)


def test_decode_is_deterministic():
    p = problem(5, 40, 100)
    with torch.no_grad(), use_path("decode"):
        first = p.fused()
        assert all(torch.equal(first, p.fused()) for _ in range(3))


def _laid_out(t, how):
    """The same values elsewhere: transposed, with gaps, after others, amid others; or one row for
    all.
    """
    t = t.detach()
    if how == "transposed" and t.dim() == 2:
        t = t.t().contiguous().t()
    elif how == "every other":
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
        wide[..., ::2] = t
        t = wide[..., ::2]
    elif how == "offset":
        t = torch.cat([t.new_full((3,), float("nan")), t.reshape(-1)])[3:].view(t.shape)
    elif how == "amid":
        t = torch.nn.functional.pad(t, (2, 3), value=float("nan"))[..., 2:-3]
    elif how == "expanded":
        t = t[:1].expand(t.shape)
    return t.requires_grad_()


LAYOUT = st.sampled_from(["plain", "transposed", "every other", "offset", "amid", "expanded"])


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    layouts=st.lists(LAYOUT, min_size=7, max_size=7), gated=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    activation=st.sampled_from(["silu", "gelu", "relu2"]),
)  # fmt: skip
def test_every_tensor_may_lie_in_any_way(path, layouts, gated, dtype, activation):
    if path == "onednn":
        dtype = torch.float32
    p = problem(5, 11, 21, gated=gated, dtype=dtype, activation=activation)
    p.x = _laid_out(p.x, layouts[0])
    for name, how in zip(p.weights, layouts[1:], strict=True):
        if p.weights[name] is not None:
            p.weights[name] = _laid_out(p.weights[name], how)
    assert_path_is_exact(p, path)


@pytest.mark.parametrize("path", PATHS)
def test_one_token_without_a_token_dimension(path):
    p = problem(1, 11, 21)
    p.x = p.x.detach()[0].requires_grad_()
    assert_path_is_exact(p, path)


@pytest.mark.parametrize("path", ["eager", "onednn", "packed", "epilogue"])
@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
@pytest.mark.parametrize("shape", [(0, 11), (2, 0, 11), (0, 3, 11)])
def test_no_tokens_have_gradients_of_zero(path, recompute, shape):
    p = problem(1, 11, 21)
    p.x = torch.zeros(shape, requires_grad=True)
    with use_path(path):
        y = p.fused(recompute=recompute)
    assert y.shape == shape
    for t, grad in zip(p.tensors, torch.autograd.grad(y.sum(), p.tensors), strict=True):
        assert torch.equal(grad, torch.zeros_like(t))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(0, 5), (5, 0)])
def test_sizes_of_zero(path, hidden, intermediate):
    p = problem(4, max(hidden, 1), max(intermediate, 1))
    p.x = p.x.detach()[:, :hidden]
    for name, t in p.weights.items():
        if t is not None:
            rows = hidden if name.startswith("down") else intermediate
            p.weights[name] = t.detach()[
                (slice(rows), slice(hidden + intermediate - rows))[: t.dim()]
            ]
    with use_path(path):
        assert torch.equal(p.fused(), p.reference())


SIZES = st.integers(1, 40)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    hidden=SIZES, intermediate=SIZES, out=SIZES,
    path=st.sampled_from(["eager", "onednn", "packed", "epilogue"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    gated=st.booleans(), bias=st.booleans(), step=st.integers(1, 3),
    transposed=st.booleans(), data=st.data(),
)  # fmt: skip
def test_any_shape_stride_and_dtype(
    leading, hidden, intermediate, out, path, dtype, gated, bias, step, transposed, data
):  # fmt: skip
    """Any rank, zero tokens, strided inputs, transposed weights, another output size."""
    if dtype == torch.float64:
        path = "eager"
    p = problem(1, hidden, intermediate, gated=gated, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    wide = torch.randn(*leading, hidden * step, generator=generator).to(dtype)
    p.x = wide[..., ::step].requires_grad_()
    down = torch.randn(out, intermediate, generator=generator).to(dtype)
    p.weights["down_weight"] = (
        down.t().contiguous().t().requires_grad_() if transposed else down.requires_grad_()
    )
    if bias:
        p.weights["down_bias"] = torch.randn(out, generator=generator).to(dtype).requires_grad_()
    if p.x.numel() == 0 and path != "eager":
        with use_path(path):
            assert p.fused().shape == (*leading, out)
        return
    assert_path_is_exact(p, path)
