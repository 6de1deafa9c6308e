"""Compilers, exporters, transforms and modes."""

import pytest
import torch
import torch._dynamo.testing
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from fused_mlp import FusedMLP, fused_mlp, ops, reference, use_path

from .problems import problem


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_opcheck(keep, gated):
    for bias in (True, False):
        p = problem(5, 6, 7, gated=gated, bias=bias)
        args = (p.x, *p.weights.values(), "silu", keep, True)
        assert set(opcheck(ops.mlp_op, args).values()) == {"SUCCESS"}
    no_grad = [t if t is None else t.detach() for t in (p.x, *p.weights.values())]
    opcheck(ops.mlp_op, (*no_grad, "gelu", 0, False))


def test_opcheck_of_backward():
    p = problem(5, 6, 7)
    values = [t.detach() for t in (p.x, *p.weights.values())]
    _, *kept = ops.mlp_op(*values, "silu", 2, True)
    dy = torch.randn(5, 6)
    needs = [True, False, True, True, False, True, True]
    opcheck(ops.mlp_backward_op, (dy, *values, *kept, "silu", needs))


def _compiled(function, dynamic=None):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter), counter


@pytest.mark.parametrize("training", [True, False])
def test_fullgraph_compile_recompiles_no_more_than_eager(training):
    module = FusedMLP(6, 10).requires_grad_(training)

    def plain(x):
        m = module
        return reference.mlp(
            x,
            m.up_proj.weight,
            m.down_proj.weight,
            gate_weight=m.gate_proj.weight,
            activation="silu",
        )

    counts = []
    for function in (module, plain):
        compiled, counter = _compiled(function)
        for tokens in (3, 5, 8, 13):
            x = torch.randn(2, tokens, 6, requires_grad=training)
            y = compiled(x)
            torch.testing.assert_close(y, plain(x))
            if training:
                (got,) = torch.autograd.grad(y.sum(), x)
                (want,) = torch.autograd.grad(plain(x).sum(), x)
                torch.testing.assert_close(got, want)
        counts.append(counter.frame_count)
    assert counts[0] <= counts[1]


def test_compiled_graph_holds_one_operator():
    compiled, counter = _compiled(FusedMLP(6, 10))
    compiled(torch.randn(4, 6))
    called = [n.target for g in counter.graphs for n in g.graph.nodes if n.op == "call_function"]
    assert torch.ops.fused_mlp.mlp.default in called
    assert torch.ops.aten.linear.default not in called


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_dynamic_tokens(strict):
    module = FusedMLP(6, 10).eval()
    tokens = torch.export.Dim("tokens", min=1)
    with torch.no_grad():
        program = torch.export.export(
            module, (torch.randn(4, 6),), dynamic_shapes=({0: tokens},), strict=strict
        )
        for n in (1, 9):
            x = torch.randn(n, 6)
            torch.testing.assert_close(program.module()(x), module(x))
    assert any("fused_mlp.mlp" in str(n.target) for n in program.graph.nodes)


def test_autocast_casts_as_linear_does():
    module, x = FusedMLP(16, 32), torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        want = torch.nn.functional.linear(x, module.up_proj.weight)
        y.sum().backward()  # within autocast, as careless training loops do
    assert y.dtype == want.dtype == torch.bfloat16
    assert x.grad.dtype == module.up_proj.weight.grad.dtype == torch.float32
    compiled, _ = _compiled(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        assert module.double()(x.double()).dtype == torch.float64


def test_autocast_accepts_parameters_of_another_dtype():
    p = problem(4, 8, 16)
    x = p.x.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert fused_mlp(x, **p.weights, activation="silu").dtype == torch.bfloat16


def test_function_transforms_take_the_reference():
    p = problem(3, 4, 5)
    w = {n: t.detach() for n, t in p.weights.items()}

    def call(x):
        return fused_mlp(x, **w, activation="silu")

    xs = torch.randn(2, 3, 4)
    torch.testing.assert_close(torch.vmap(call)(xs), call(xs))
    jacobian = torch.func.jacrev(call)(xs[0])
    torch.testing.assert_close(jacobian, torch.func.jacfwd(call)(xs[0]))
    torch.func.hessian(lambda x: call(x).sum())(xs[0])
    per_sample = torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(xs)
    assert per_sample.shape == xs.shape
    with use_path("onednn"), pytest.raises(RuntimeError, match=r"onednn.*torch\.func"):
        torch.vmap(call)(xs)


def test_dispatch_modes_see_every_operator():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder(), torch.no_grad():
        FusedMLP(4, 8)(torch.randn(2, 4))
    assert len([f for f in seen if "mm" in str(f) or "linear" in str(f)]) == 3


def test_fake_tensors_pass_with_their_shapes():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        module = FusedMLP(4, 8)
        assert module(torch.randn(2, 3, 4)).shape == (2, 3, 4)
    assert FusedMLP(4, 8, device="meta")(torch.empty(5, 4, device="meta")).shape == (5, 4)
