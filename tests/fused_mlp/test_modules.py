"""`FusedMLP` as a module among modules."""

import copy
import pickle

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from fused_mlp import FusedMLP, explain, use_path


class LlamaLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(8, 20, bias=False)
        self.up_proj = nn.Linear(8, 20, bias=False)
        self.down_proj = nn.Linear(20, 8, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


X = torch.randn(3, 8)


def test_state_dict_is_the_usual_one(tmp_path):
    like, module = LlamaLike(), FusedMLP(8, 20)
    assert {k: v.shape for k, v in module.state_dict().items()} == {
        k: v.shape for k, v in like.state_dict().items()
    }
    safetensors.torch.save_file(like.state_dict(), tmp_path / "mlp.safetensors")
    module.load_state_dict(safetensors.torch.load_file(tmp_path / "mlp.safetensors"))
    torch.testing.assert_close(module(X), like(X))
    safetensors.torch.save_model(module, str(tmp_path / "again.safetensors"))
    safetensors.torch.load_model(like, str(tmp_path / "again.safetensors"))


def test_biases_and_no_gate():
    assert sorted(FusedMLP(8, 20, gated=False, bias=True).state_dict()) == [
        "down_proj.bias", "down_proj.weight", "up_proj.bias", "up_proj.weight",
    ]  # fmt: skip


def test_from_module_shares_the_parameters_and_leaves_the_original():
    like = LlamaLike()
    module = FusedMLP.from_module(like)
    assert isinstance(module, FusedMLP)
    assert type(like) is LlamaLike
    assert all(a is b for a, b in zip(module.parameters(), like.parameters(), strict=True))
    assert list(module.state_dict()) == list(like.state_dict())
    torch.testing.assert_close(module(X), like(X))
    module.register_forward_hook(lambda *_: pytest.fail("a hook of the twin ran in the original"))
    like(X)


def test_from_module_says_why_not():
    with pytest.raises(ValueError, match="Bilinear cannot be fused"):
        FusedMLP.from_module(nn.Bilinear(2, 3, 4))
    module = FusedMLP(8, 20)
    assert FusedMLP.from_module(module) is module


@pytest.mark.parametrize(
    "remake", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(
    "make",
    [lambda: FusedMLP(8, 20), lambda: FusedMLP.from_module(LlamaLike())],
    ids=["own", "adopted"],
)
def test_copies_work_and_are_independent(make, remake):
    module = make()
    other = remake(module)
    assert torch.equal(other(X), module(X))
    with torch.no_grad():
        other.up_proj.weight.zero_()
    assert not torch.equal(other(X), module(X))


def _forward_hook(m):
    seen = []
    m.up_proj.register_forward_hook(lambda mod, args, out: seen.append(out))
    return lambda: len(seen) == 1


def _full_backward_hook(m):
    seen = []
    m.gate_proj.register_full_backward_hook(lambda mod, gin, gout: seen.append(gout))
    return lambda: len(seen) == 1


def _replaced_child(m):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    m.up_proj = Scaled(8, 20, bias=False)
    return lambda: True


def _weight_norm(m):
    parametrizations.weight_norm(m.down_proj)
    with torch.no_grad():
        m.down_proj.parametrizations.weight.original0.mul_(2)
    return lambda: True


def _pruned(m):
    prune.random_unstructured(m.up_proj, "weight", 0.5)
    return lambda: True


@pytest.mark.parametrize(
    "change",
    [_forward_hook, _full_backward_hook, _replaced_child, _weight_norm, _pruned],
    ids=lambda f: f.__name__[1:],
)
@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "own"])
def test_children_that_are_more_than_a_weight_are_called(change, adopted):
    module = FusedMLP.from_module(LlamaLike()) if adopted else FusedMLP(8, 20)
    done = change(module)
    x = X.clone().requires_grad_()
    y = module(x)
    y.sum().backward()
    m = module
    want = m.down_proj(nn.functional.silu(m.gate_proj(X)) * m.up_proj(X))
    torch.testing.assert_close(y, want)
    assert done() or change is _forward_hook  # the comparison called the hook once more
    assert any(name in explain(module) for name in ("up_proj", "gate_proj", "down_proj"))


def test_hooks_on_the_module_itself_run():
    module, seen = FusedMLP(8, 20), []
    module.register_forward_hook(lambda mod, args, out: seen.append(out.shape))
    module(X)
    assert seen == [(3, 8)]


def test_tensor_subclasses_go_through_their_own_operators():
    class Logged(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += func is nn.functional.linear
            return super().__torch_function__(func, types, args, kwargs or {})

    module = FusedMLP(8, 20)
    x = X.as_subclass(Logged)
    torch.testing.assert_close(module(x).as_subclass(torch.Tensor), module(X))
    assert Logged.calls == 3
    assert "Logged is not a plain tensor" in explain(module, x)


def test_repr_names_activation_and_recompute():
    assert "activation=silu, recompute=activation" in repr(FusedMLP(8, 20))


@pytest.mark.parametrize("tokens", [3, 4096])
def test_the_activation_is_set_to_another(tokens):
    module, x = FusedMLP(8, 48), torch.randn(tokens, 8)
    module(x)
    module.activation = "gelu_new"
    want = FusedMLP(8, 48, activation="gelu_tanh")
    want.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), want(x))
    assert "gated gelu_tanh 8/48" in explain(nn.Sequential(module))
    assert "activation=gelu_new" in repr(module)
    module.activation = "sine"
    with pytest.raises(ValueError, match="unknown activation 'sine'"):
        module(x)


def test_what_was_settled_for_one_call_does_not_outlive_its_reasons(monkeypatch) -> None:
    """Small calls go straight to the children; whatever changes since must be seen."""
    module = FusedMLP(16, 32)
    x = torch.randn(4, 16)
    called = []
    monkeypatch.setattr(
        FusedMLP, "_fused_one_by_one", _counting(FusedMLP._fused_one_by_one, called)
    )
    with torch.no_grad():
        first = module(x)
        assert torch.equal(module(x), first)
        assert called, "nothing was settled, so this test tests nothing"
        del called[:]
        with use_path("eager"):
            module(x)
        assert not called, "a forced path goes through the plan"
        module.up_proj.weight.mul_(2)
        assert not torch.equal(module(x), first)
        hooked = []
        handle = module.up_proj.register_forward_hook(lambda *_: hooked.append(1))
        module(x)
        handle.remove()
        assert hooked
        wide = module.double()(x.double())
        assert wide.dtype == torch.float64
        with pytest.raises(TypeError, match="float64"):
            module(x)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode"):
        FusedMLP(16, 32)(torch.randn(4, 16).requires_grad_())


def _counting(method, called):
    def counted(self, x, act):
        called.append(1)
        return method(self, x, act)

    return counted


def test_checkpointing_sees_the_same_call_twice() -> None:
    module = FusedMLP(16, 32)
    x = torch.randn(4, 16, requires_grad=True)
    torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).sum().backward()
    again = x.grad.clone()
    x.grad = None
    module(x).sum().backward()
    assert torch.equal(x.grad, again)
