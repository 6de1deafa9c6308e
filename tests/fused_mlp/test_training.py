"""What backward keeps, recomputes and refuses."""

import contextlib
import contextvars
import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fused_mlp import FusedMLP, backward, explain, fused_mlp, paths, reference, use_path
from fused_mlp.kernels import activation, dact_gemm, glu_gemm
from fused_mlp.plan import AUTOGRAD_BELOW
from fused_mlp.profiling.measure import peak_bytes

from .problems import assert_path_is_exact, problem

TOKENS, HIDDEN, WIDTH = 6, 8, 32


def kept(function) -> tuple[int, list[torch.Tensor]]:
    """How many elements of width ``WIDTH`` a forward saves, each storage once, and what was saved."""
    saved: dict[int, torch.Tensor] = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function()
    del y
    mids = [t for t in saved.values() if t.shape[0] == TOKENS and t.shape[-1] % WIDTH == 0]
    return sum(t.untyped_storage().nbytes() for t in mids), list(saved.values())


@pytest.mark.parametrize("path", ["eager", "onednn", "packed", "epilogue"])
@pytest.mark.parametrize(
    ("gated", "mids"), [(True, (3, 2, 0)), (False, (2, 1, 0))], ids=["gated", "plain"]
)
def test_bytes_kept_are_exactly_as_promised_and_fewer_than_eagers(path, gated, mids):
    p = problem(TOKENS, HIDDEN, WIDTH, gated=gated, bias=False)
    one = TOKENS * WIDTH * 4
    for recompute, count in zip(("none", "activation", "all"), mids, strict=True):
        with use_path(path):
            nbytes, _ = kept(lambda recompute=recompute: p.fused(recompute=recompute))
        assert nbytes == count * one, recompute
    eager, _ = kept(p.reference)
    assert eager == (4 if gated else 2) * one
    assert mids[1] * one < eager


@pytest.mark.parametrize("path", ["eager", "onednn", "packed", "epilogue"])
@pytest.mark.parametrize("activation", ["silu", "identity", "relu"])
@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
def test_a_second_backward_gives_the_same_gradients(path, activation, recompute):
    for gated in (True, False):
        p = problem(TOKENS, HIDDEN, WIDTH, gated=gated, activation=activation)
        with use_path(path):
            y = p.fused(recompute=recompute)
            first = torch.autograd.grad(y.sum(), p.tensors, retain_graph=True)
            second = torch.autograd.grad(y.sum(), p.tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_backward_writes_to_nothing_that_was_saved_or_given():
    p = problem(TOKENS, HIDDEN, WIDTH)
    dy = torch.randn(TOKENS, HIDDEN)
    given = dy.clone()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append((t, t.clone())) or t, lambda t: t
    ):
        y = p.fused(recompute="none")
    torch.autograd.grad(y, p.tensors, dy)
    assert torch.equal(dy, given)
    assert all(torch.equal(t, copy) for t, copy in saved)


def test_differentiating_twice_says_what_to_use_instead():
    p = problem(3, 4, 5)
    with use_path("eager"):
        y = p.fused().sum()
    (grad,) = torch.autograd.grad(y, p.x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiating twice.*reference\.mlp"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(p.reference().sum(), p.x, create_graph=True)
    grad.sum().backward()


@pytest.mark.parametrize("by", ["x", "up_weight", "dy"])
def test_a_second_derivative_is_refused_and_not_zero(by):
    """autograd.grad takes nothing for zero where it is told that an input may be unused."""
    p = problem(3, 4, 5)
    with use_path("eager"):
        y = p.fused()
    dy = torch.ones_like(y).requires_grad_()
    (grad,) = torch.autograd.grad(y, p.x, dy, create_graph=True)
    wrt = {"x": p.x, "dy": dy, **p.weights}[by]
    with pytest.raises(RuntimeError, match=r"differentiating twice.*reference\.mlp"):
        torch.autograd.grad(grad.square().sum(), wrt, allow_unused=True)


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_hessian_is_refused_and_not_zero(vectorize):
    p = problem(3, 4, 5)

    def loss(x):
        return fused_mlp(x, **p.weights).square().sum()

    with use_path("eager"), pytest.raises(RuntimeError, match="differentiating twice"):
        torch.autograd.functional.hessian(loss, p.x.detach(), vectorize=vectorize)


@pytest.mark.parametrize("frozen", ["up_weight", "down_weight", "gate_weight", "x", "up_bias"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    p = problem(TOKENS, HIDDEN, WIDTH)
    with use_path("eager"):
        y = p.fused().sum()
    y.backward()
    want = {n: t.grad for n, t in {"x": p.x, **p.weights}.items()}
    q = problem(TOKENS, HIDDEN, WIDTH)
    tensors = {"x": q.x, **q.weights}
    tensors[frozen].requires_grad_(False)
    with use_path("eager"):
        y = q.fused().sum()
    y.backward()
    assert tensors[frozen].grad is None
    for name, t in tensors.items():
        if name != frozen:
            assert torch.equal(t.grad, want[name]), name


@pytest.mark.parametrize("path", ["eager", "onednn", "packed", "epilogue"])
@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_any_part_may_be_frozen(path, recompute, gated):
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        p = problem(TOKENS, HIDDEN, WIDTH, gated=gated)
        for t, asked in zip(p.tensors, torch.rand(7, generator=generator) < 0.4, strict=False):
            t.requires_grad_(bool(asked))
        p.weights["down_bias"].requires_grad_()
        asked = [t for t in p.tensors if t.requires_grad]
        dy = torch.randn(TOKENS, HIDDEN, generator=generator)
        want = torch.autograd.grad(p.reference(), asked, dy)
        with use_path(path):
            y = p.fused(recompute=recompute)
        (first,) = torch.autograd.grad(y, asked[0], dy, retain_graph=True)  # of many, one alone
        y.backward(dy)
        assert all((t.grad is not None) == t.requires_grad for t in p.tensors)
        torch.testing.assert_close([t.grad for t in asked], list(want), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(first, want[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("path", ["eager", "onednn", "packed", "epilogue"])
def test_a_gradient_of_stride_zero(path):
    p = problem(TOKENS, HIDDEN, WIDTH)
    dy = torch.tensor(2.0).expand(TOKENS, HIDDEN)
    with use_path(path):
        got = torch.autograd.grad(p.fused(), p.tensors, dy)
    want = torch.autograd.grad(p.reference(), p.tensors, dy)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("path", ["eager", "onednn", "packed", "epilogue"])
def test_many_gradients_at_once(path):
    """``is_grads_batched``, which vectorized jacobians use."""
    p = problem(TOKENS, HIDDEN, WIDTH)
    dy = torch.randn(3, TOKENS, HIDDEN)
    with use_path(path):
        y = p.fused()
    got = torch.autograd.grad(y, p.tensors, dy, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, p.tensors, one, retain_graph=True) for one in dy]
    for i, batch in enumerate(got):
        torch.testing.assert_close(batch, torch.stack([e[i] for e in each]), rtol=1e-3, atol=1e-4)


def test_what_is_written_to_after_forward():
    p = problem(TOKENS, HIDDEN, WIDTH)
    p.x = p.x.detach().view(2, 3, HIDDEN).requires_grad_()
    with use_path("eager"):
        y = p.fused()
        want = torch.autograd.grad(3 * y, p.tensors, torch.ones_like(y), retain_graph=True)
        y.mul_(3)  # the output is nobody's but the caller's
    got = torch.autograd.grad(y, p.tensors, torch.ones_like(y))
    torch.testing.assert_close(got, want)
    with use_path("eager"):
        y = p.fused()
    with torch.no_grad():
        p.weights["up_weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_of_parameters_run():
    module, seen = FusedMLP(HIDDEN, WIDTH), []
    module.up_proj.weight.register_hook(lambda g: seen.append("hook"))
    module.up_proj.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    with use_path("eager"):
        y = module(torch.randn(TOKENS, HIDDEN))
    y.sum().backward()
    assert seen == ["hook", "accumulated"]


def test_everything_frozen_but_one_bias():
    p = problem(TOKENS, HIDDEN, WIDTH)
    for t in p.tensors:
        t.requires_grad_(False)
    bias = p.weights["down_bias"].requires_grad_()
    with use_path("eager"):
        y = p.fused().sum()
    y.backward()
    assert torch.equal(bias.grad, torch.full((HIDDEN,), float(TOKENS)))


@pytest.mark.parametrize("path", ["eager", "onednn", "packed", "epilogue"])
@pytest.mark.parametrize("absent", ["up_bias", "gate_bias"])
def test_one_bias_without_the_other(path, absent):
    p = problem(TOKENS, HIDDEN, WIDTH)
    p.weights[absent] = None
    want = torch.autograd.grad(p.reference().sum(), p.tensors)
    with use_path(path):
        got = torch.autograd.grad(p.fused().sum(), p.tensors)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_tied_weights_add_their_gradients():
    w = torch.randn(WIDTH, HIDDEN).requires_grad_()
    x = torch.randn(TOKENS, HIDDEN)
    with use_path("eager"):
        fused_mlp(x, w, w.t(), gate_weight=w, activation="silu").sum().backward()
    got, w.grad = w.grad, None
    reference.mlp(x, w, w.t(), gate_weight=w, activation="silu").sum().backward()
    torch.testing.assert_close(got, w.grad)


def test_gradcheck_in_float64():
    for gated in (True, False):
        p = problem(3, 4, 5, gated=gated, dtype=torch.float64, activation="gelu")
        names = [n for n, t in p.weights.items() if t is not None]

        def call(x, *values, names=names):
            w = dict(zip(names, values, strict=True))
            with use_path("eager"):
                return fused_mlp(x, **w, activation="gelu")

        assert torch.autograd.gradcheck(call, tuple(p.tensors))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
@pytest.mark.parametrize("path", ["eager", "onednn", "packed", None])
def test_activation_checkpointing_and_a_step_of_an_optimizer(path, recompute, use_reentrant):
    module = FusedMLP(HIDDEN, WIDTH, recompute=recompute)
    twin = FusedMLP(HIDDEN, WIDTH, recompute=recompute)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    with use_path(path) if path else contextlib.nullcontext():
        checkpoint = torch.utils.checkpoint.checkpoint
        checkpoint(module, x, use_reentrant=use_reentrant).sum().backward()
        grad, x.grad = x.grad, None
        twin(x).sum().backward()
    assert torch.equal(grad, x.grad)
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    before = module(x)
    torch.optim.AdamW(module.parameters(), lr=0.1).step()
    assert not torch.equal(module(x), before)


def test_packed_weights_are_read_as_one():
    """Gate and up that lie side by side are one GEMM's operand without a copy."""
    from fused_mlp.paths import packed_weight

    both = nn.Parameter(torch.randn(2 * WIDTH, HIDDEN))
    gate, up = both.chunk(2)
    assert packed_weight(gate, up).data_ptr() == both.data_ptr()
    assert torch.equal(packed_weight(gate, up), both)
    assert packed_weight(up, gate) is None
    assert packed_weight(gate, up.clone()) is None


def test_backward_takes_the_path_of_its_forward(monkeypatch):
    """For a GPU autograd runs it in a thread of its own, where no `use_path` is in force."""
    taken = []
    real = backward.gradients
    monkeypatch.setattr(
        backward, "gradients", lambda plan, *rest: taken.append(plan.path) or real(plan, *rest)
    )
    p = problem(TOKENS, HIDDEN, WIDTH)
    with use_path("packed"):
        y = p.fused()
        contextvars.Context().run(y.sum().backward)
    assert taken == ["packed"]


@pytest.mark.parametrize("path", ["packed", "epilogue"])
@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
def test_a_gpus_layout_of_what_is_kept(path, recompute, monkeypatch):
    """One buffer [gate | up] rather than the two tensors of a CPU."""
    monkeypatch.setattr(paths, "buffers", lambda device, gated: 1)
    assert_path_is_exact(problem(TOKENS, HIDDEN, WIDTH), path, recompute=recompute)


def test_many_tokens_pack_the_weights(monkeypatch):
    monkeypatch.setattr(paths, "buffers", lambda device, gated: 1)
    assert_path_is_exact(problem(1025, HIDDEN, WIDTH), "packed")


def test_a_small_step_is_left_to_autograd_and_a_larger_one_keeps_less():
    small = problem(TOKENS, HIDDEN, WIDTH, bias=False)
    one = TOKENS * WIDTH * 4
    assert kept(small.fused)[0] == kept(small.reference)[0] == 4 * one
    assert kept(lambda: small.fused(recompute="all"))[0] == 0
    plan = explain(small.x, **small.weights, activation="silu")
    assert "path    eager" in plan
    assert "own autograd is quicker" in plan

    tokens = AUTOGRAD_BELOW // WIDTH
    large = problem(tokens, HIDDEN, WIDTH, bias=False)
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        large.fused()
    mids = [t for t in saved.values() if t.shape == (tokens, WIDTH)]
    assert len(mids) == 2
    assert "own autograd" not in explain(large.x, **large.weights, activation="silu")


def peak(function) -> int:
    """The most bytes held at once while it runs, from the allocator's own events."""
    function()  # what is made once
    gc.collect(1)  # what the first run left; the whole heap takes half a second
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    return peak_bytes(prof)


@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
@pytest.mark.parametrize(
    ("path", "gated", "mids"),
    [
        ("eager", True, 4), ("onednn", True, 4), ("packed", True, 5), ("interpreted", True, 5),
        ("eager", False, 3), ("onednn", False, 3), ("packed", False, 3), ("interpreted", False, 3),
    ],
)  # fmt: skip
def test_a_training_steps_peak_is_no_higher_than_eagers(path, gated, mids, recompute, monkeypatch):
    """Where activations are large beside weights: what was kept, and two of their size at once on a
    CPU, three with the kernels. Eager holds 6 (gated) or 3.
    """
    if path in ("packed", "interpreted"):  # the interpreter's own copies are no kernel's
        monkeypatch.setattr(paths, "buffers", lambda device, gated: 1)
        for module in (activation, dact_gemm, glu_gemm):
            monkeypatch.setattr(module, "launch", lambda *args, **options: None)
    p = problem(512, 16, 256, gated=gated, bias=False)
    one = 512 * 256 * 4
    dy = torch.randn_like(p.x)

    def step(forward):
        y = forward()
        torch.autograd.grad(y, p.tensors, dy)

    def fused():
        with use_path(path):
            return p.fused(recompute=recompute)

    more = recompute == "none"  # the hidden activation as well
    assert (mids + more + 0.5) * one >= peak(lambda: step(fused)) >= (mids - 1) * one
    if not more:
        assert peak(lambda: step(fused)) <= peak(lambda: step(p.reference))
