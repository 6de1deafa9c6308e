"""Compilers, transforms, modes and kinds of tensors, each with the others, with hooks and in fused
modules of other libraries.
"""

import contextlib
import io

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn import functional as F

from fused_mlp import FusedMLP, explain, fuse, fused_mlp, plan, reference, use_path

from .models import HIDDEN, WIDTH, Twofold, adopted, own, scaled
from .problems import problem

BOTH = pytest.mark.parametrize("make", [own, adopted])


def plain(module: nn.Module, x: Tensor) -> Tensor:
    """What it should give, by its children."""
    return module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))


def compiled(function, **how):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **how), counter


@pytest.mark.parametrize("make", [own, pytest.param(adopted, marks=pytest.mark.full)])
def test_modes_and_shapes_recompile_no_more_than_eager(make):
    module = make()
    modes = (
        contextlib.nullcontext, torch.no_grad, torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    )  # fmt: skip
    inputs = [torch.randn(n, HIDDEN) for n in (3, 7)]
    inputs += [torch.randn(2, 3, HIDDEN), torch.randn(5, HIDDEN, requires_grad=True)]
    counts = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for function in (module, lambda x: plain(module, x)):
            call, counter = compiled(function)
            for mode in modes:
                with mode():
                    for x in inputs:
                        y, want = call(x), plain(module, x)
                        exact = want.dtype == torch.float32
                        close = (
                            {"rtol": 1e-4, "atol": 1e-5} if exact else {"rtol": 2e-2, "atol": 2e-2}
                        )
                        torch.testing.assert_close(y, want, **close)
            counts.append(counter.frame_count)
    assert counts[0] <= counts[1]


def _hook(m):
    m.up_proj.register_forward_hook(scaled)


def _activation_hook(m):
    m.act_fn.register_forward_hook(scaled)


def _subclass(m):
    m.up_proj = Twofold(HIDDEN, WIDTH, bias=False)


@pytest.mark.parametrize("change", [lambda m: None, _hook, _activation_hook, _subclass])
def test_a_compiled_model_with_a_fused_mlp_in_it(change):
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = adopted()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)

    model = Residual()
    unchanged = model(torch.ones(1, HIDDEN))
    change(model.mlp)
    call, counter = compiled(model)
    for tokens in (3, 5, 9):
        x = torch.randn(tokens, HIDDEN, requires_grad=True)
        got, want = call(x), model(x)
        torch.testing.assert_close(got, want)
        (a,), (b,) = (torch.autograd.grad(y.sum(), x) for y in (got, want))
        torch.testing.assert_close(a, b)
    assert counter.frame_count <= 2
    changed = not torch.equal(model(torch.ones(1, HIDDEN)), unchanged)
    held = any(
        n.target is torch.ops.fused_mlp.mlp.default for g in counter.graphs for n in g.graph.nodes
    )
    assert held != changed


@BOTH
def test_transforms_within_a_compiled_function(make):
    module = make().requires_grad_(False)
    x = torch.randn(2, 3, HIDDEN)
    call, _ = compiled(lambda x: torch.vmap(module)(x))
    torch.testing.assert_close(call(x), module(x))

    def gradient(x):
        return torch.func.grad(lambda x: module(x).sum())(x)

    call, _ = compiled(gradient)
    torch.testing.assert_close(call(x[0]), gradient(x[0]))


@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
def test_compiled_training_of_a_part(recompute):
    module = FusedMLP(HIDDEN, WIDTH, bias=True, recompute=recompute)
    module.up_proj.requires_grad_(False)
    module.down_proj.bias.requires_grad_(False)
    call, _ = compiled(module)
    x = torch.randn(3, HIDDEN)
    asked = [p for p in module.parameters() if p.requires_grad]
    y = call(x)
    first = torch.autograd.grad(y.sum(), asked, retain_graph=True)
    second = torch.autograd.grad(y.sum(), asked)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(first, torch.autograd.grad(plain(module, x).sum(), asked))
    call(x).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in module.parameters())


def test_differentiating_a_compiled_one_twice_is_refused():
    call, _ = compiled(own())
    x = torch.randn(3, HIDDEN, requires_grad=True)
    (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|double backward"):
        grad.sum().backward()


@BOTH
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_trains_infers_and_is_saved(make, strict):
    module = nn.Sequential(make())
    tokens = torch.export.Dim("tokens", min=1)
    program = torch.export.export(
        module, (torch.randn(4, HIDDEN),), dynamic_shapes=({0: tokens},), strict=strict
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(9, HIDDEN, requires_grad=True)
    want = plain(module[0], x)
    (grad,) = torch.autograd.grad(want.sum(), x)
    for exported in (program.module(), torch.export.load(file).module()):
        y = exported(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], grad)
        with torch.no_grad():
            torch.testing.assert_close(exported(x), want)


@BOTH
def test_an_ensemble(make):
    from torch.func import functional_call, grad, stack_module_state, vmap

    members, base, x = [make() for _ in range(3)], make(), torch.randn(4, HIDDEN)
    want = torch.stack([m(x) for m in members])
    parameters, buffers = stack_module_state(members)
    got = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(got, want)
    own_grads = grad(lambda p: functional_call(base, p, (x,)).sum())(
        {n: p.detach() for n, p in members[0].named_parameters()}
    )
    members[0](x).sum().backward()
    for name, parameter in members[0].named_parameters():
        torch.testing.assert_close(own_grads[name], parameter.grad)


@BOTH
@pytest.mark.parametrize("tokens", [3, plan.AUTOGRAD_BELOW // WIDTH + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_regions_within_each_other(make, tokens, dtype):
    """After any other kind of call, each is what its own region says."""
    module, x = make(), torch.randn(tokens, HIDDEN)
    for _ in range(2):
        assert module(x).dtype == torch.float32
        with torch.autocast("cpu", dtype):
            assert module(x).dtype == dtype
            with torch.autocast("cpu", enabled=False):
                torch.testing.assert_close(module(x), plain(module, x), rtol=1e-4, atol=1e-5)
                with torch.no_grad():
                    assert module(x).dtype == torch.float32
            with torch.no_grad():
                assert module(x).dtype == dtype
            assert module(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("path", ["eager", "packed", "epilogue", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_as_exact_as_eagers(path, dtype):
    p = problem(33, HIDDEN, WIDTH)
    exact = p.to(torch.float64)
    dy = torch.randn(33, HIDDEN)
    want = [t := exact.reference(), *torch.autograd.grad(t, exact.tensors, dy.double())]
    with torch.autocast("cpu", dtype):
        with use_path(path) if path else contextlib.nullcontext():
            y = p.fused()
        eager = p.reference()
    assert y.dtype == eager.dtype == dtype
    results = [[t.detach(), *torch.autograd.grad(t, p.tensors, dy.to(dtype))] for t in (y, eager)]
    for a, b, c in zip(*results, want, strict=True):
        assert a.dtype == b.dtype
        error, own_error = ((t.double() - c).abs().max().item() for t in (a, b))
        assert error <= 2 * own_error + torch.finfo(dtype).eps * c.abs().max().item()


def test_explain_knows_of_autocast(monkeypatch):
    asked = []
    decide = plan._cached
    monkeypatch.setattr(plan, "_cached", lambda q, *rest: asked.append(q[1]) or decide(q, *rest))
    p = problem(3, HIDDEN, WIDTH)
    for dtype in (torch.float32, torch.float64):
        q = p.to(dtype)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            q.fused()
            explain(q.x, **q.weights)
    assert asked == [torch.bfloat16, torch.bfloat16, torch.float64, torch.float64]


@BOTH
def test_nested_tensors(make):
    module = make()
    parts = [torch.randn(n, HIDDEN) for n in (2, 5)]
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        y = module(x)
        for got, part in zip(y.unbind(), parts, strict=True):
            torch.testing.assert_close(got, plain(module, part))
        module.zero_grad()
        y.unbind()[0].sum().backward()
        assert module.up_proj.weight.grad is not None


@pytest.mark.parametrize("tokens", [3, 64])
def test_views_that_are_negated_or_sparse(tokens):
    module = own()
    z = torch.randn(tokens, HIDDEN, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain(module, -z.imag), rtol=1e-4, atol=1e-5)
        with use_path("epilogue"), pytest.raises(plan.PathError, match="lazily negated"):
            module(x)
        dense = torch.randn(tokens, HIDDEN).relu()
        torch.testing.assert_close(
            module(dense.to_sparse()), plain(module, dense), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("negated", ["up_weight", "down_weight", "gate_weight", "down_bias"])
def test_parameters_that_are_negated(negated):
    x, p = torch.randn(3, HIDDEN), {
        "up_weight": torch.randn(48, HIDDEN), "down_weight": torch.randn(HIDDEN, 48),
        "gate_weight": torch.randn(48, HIDDEN), "down_bias": torch.randn(HIDDEN),
    }  # fmt: skip
    views = p | {negated: torch._neg_view(p[negated])}
    want = reference.mlp(x, **(p | {negated: -p[negated]}))
    torch.testing.assert_close(fused_mlp(x, **views), want)
    for path in ("onednn", "epilogue"):
        with use_path(path), pytest.raises(plan.PathError, match="lazily negated"):
            fused_mlp(x, **views)


@pytest.mark.parametrize("path", ["onednn", "interpreted"])
def test_a_gradient_that_is_negated(path):
    if path == "interpreted" and not plan.machine.interpreted():
        pytest.skip("needs Triton's interpreter")
    x, module = torch.randn(3, HIDDEN), own()
    dy = torch.randn(3, HIDDEN)
    want = torch.autograd.grad(plain(module, x), list(module.parameters()), -dy)
    with use_path(path):
        y = module(x)
    got = torch.autograd.grad(y, list(module.parameters()), torch._neg_view(dy))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@BOTH
def test_a_trace_holds_no_packed_weights(make, monkeypatch):
    monkeypatch.setattr(plan, "_cached", lambda *_: plan.Plan("onednn", "as if it were measured"))
    module, x = make(), torch.randn(64, HIDDEN)
    with torch.no_grad():
        module(x)
        module(x)
        trace = torch.jit.trace(module, (x,))
        for _ in range(2):
            torch.testing.assert_close(trace(x), plain(module, x), rtol=1e-4, atol=1e-5)
            module.up_proj.weight.mul_(2)


@BOTH
def test_symbolic_tracing(make):
    module = make()
    graph = torch.fx.symbolic_trace(nn.Sequential(module))
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(graph(x), module(x))
    assert {"0.gate_proj", "0.up_proj", "0.down_proj"} <= {str(n.target) for n in graph.graph.nodes}


def test_what_is_no_tensor():
    for x in ([1.0, 2.0], None, (torch.randn(2, HIDDEN),)):
        with pytest.raises(TypeError, match=type(x).__name__):
            own()(x)
        with pytest.raises(TypeError, match=f"x is a {type(x).__name__}; it must be a tensor"):
            fused_mlp(x, torch.ones(3, 2), torch.ones(2, 3))


def test_parts_of_a_fused_sequence():
    module = nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN))
    x = torch.randn(3, HIDDEN)
    want, half = module(x), module[1](module[0](x))
    fuse(module)
    assert type(module[:2]) is nn.Sequential
    assert torch.equal(module[:2](x), half)
    assert module[:2][0] is module[0]
    torch.testing.assert_close((module + nn.Sequential(nn.Tanh()))(x), want.tanh())
    torch.testing.assert_close((module * 2)(x), module(want))
    assert isinstance(module[:], nn.Sequential)


def test_counters_of_flop_count_as_in_eager():
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    for module in (own(), adopted()):
        for call in (module, lambda x, m=module: plain(m, x)):
            with FlopCounterMode(display=False) as counter:
                call(torch.randn(300, HIDDEN)).sum().backward()
            totals.append(counter.get_total_flops())
    assert len(set(totals)) == 1


def test_debugging_modes_of_autograd():
    module = own()
    x = torch.randn(plan.AUTOGRAD_BELOW // WIDTH + 1, HIDDEN, requires_grad=True)
    want = torch.autograd.grad(plain(module, x).sum(), x)
    torch.use_deterministic_algorithms(True)
    try:
        for mode in (torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu()):
            with mode:
                y = module(x)
                got = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    finally:
        torch.use_deterministic_algorithms(False)


def test_parameters_that_are_swapped_on_conversion():
    module = adopted().requires_grad_(False)
    x = torch.randn(3, HIDDEN)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with use_path("onednn"):
            want = module(x)
        exact = module.double()(x.double())
        torch.testing.assert_close(want.double(), exact, rtol=1e-4, atol=1e-5)
        with use_path("onednn"):
            torch.testing.assert_close(module.float()(x), want)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
