"""Whatever is done to an MLP or around it, before or after `fuse`: it gives what it gave unfused,
or its original code runs and `explain` says why.
"""

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize, prune

from fused_mlp import FusedMLP, PathError, explain, functional, fuse, unfuse, use_path

from .models import HIDDEN, WIDTH, Llama, Twofold, scaled
from .problems import assert_as_exact_as_eager

FUSED = "tokens"  # `explain` lists paths by tokens


class WithFunction(Llama):
    """As a config's string makes it in some models."""

    def __init__(self) -> None:
        super().__init__()
        del self.act_fn
        self.act_fn = F.silu


class Converting(Llama):
    """As T5, whose last weight stays in fp32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        return self.down_proj(hidden.to(self.down_proj.weight.dtype))


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN))


def outcome(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    x = x.detach().requires_grad_()
    y = module(x)
    module.zero_grad()
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *grads]


def assert_as_unfused(module: nn.Module, tokens: int = 9) -> None:
    """By itself and where a path is forced, as exact as what `unfuse` gives."""
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(0))
    x = x.to(next(module.parameters()).dtype)
    twin = copy.deepcopy(module)
    unfuse(twin)
    assert not any(isinstance(m, FusedMLP) for m in twin.modules())
    eager, exact = outcome(twin, x), outcome(copy.deepcopy(twin).double(), x.double())
    assert_as_exact_as_eager(outcome(module, x), eager, exact, exact)
    with use_path("onednn"):
        assert_as_exact_as_eager(outcome(module, x), eager, exact, exact)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)


def activation_hooked(m):
    m.act_fn.register_forward_hook(scaled)


def activation_pre_hooked(m):
    m.act_fn.register_forward_pre_hook(lambda _, args: (args[0] - 1,))


def activation_backward_hooked(m):
    m.act_fn.register_full_backward_hook(lambda _, given, __: (3 * given[0],))


def activation_replaced(m):
    m.act_fn = nn.ReLU()


def activations_forward_replaced(m):
    m.act_fn.forward = F.relu


def linear_hooked(m):
    m.up_proj.register_forward_hook(scaled)


def linear_backward_hooked(m):
    m.down_proj.register_full_backward_pre_hook(lambda _, given: (3 * given[0],))


def linear_replaced(m):
    m.up_proj = Twofold(HIDDEN, WIDTH, bias=False)


def linears_forward_replaced(m):
    forward = nn.Linear.forward
    m.up_proj.forward = lambda x: 2 * forward(m.up_proj, x)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def weight_parametrized(m):
    parametrize.register_parametrization(m.gate_proj, "weight", Doubled())


def weight_orthogonal(m):
    parametrizations.orthogonal(m.gate_proj)


def weight_pruned(m):
    prune.l1_unstructured(m.down_proj, "weight", 0.4)


def bias_pruned(m):
    m.down_proj.bias = nn.Parameter(torch.ones(HIDDEN))
    prune.l1_unstructured(m.down_proj, "bias", 0.4)


REPLACED = "is another module than when it was fused"
HOOKED = "has hooks or a forward of its own"
CHANGES = {
    activation_hooked: f"act_fn {HOOKED}",
    activation_pre_hooked: f"act_fn {HOOKED}",
    activation_backward_hooked: f"act_fn {HOOKED}",
    activation_replaced: f"act_fn {REPLACED}",
    activations_forward_replaced: f"act_fn {HOOKED}",
    linear_hooked: "up_proj has hooks",
    linear_backward_hooked: "down_proj has hooks",
    linear_replaced: "up_proj is a tests Twofold",
    linears_forward_replaced: "up_proj has a forward of its own",
    weight_parametrized: "gate_proj is a torch ParametrizedLinear",
    weight_orthogonal: "gate_proj is a torch ParametrizedLinear",
    weight_pruned: "down_proj has hooks",
    bias_pruned: "down_proj has hooks",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_after_fuse(change):
    module = Llama()
    fuse(module)
    assert FUSED in explain(module)
    assert_as_unfused(module)
    before = module(torch.ones(2, HIDDEN))
    change(module)
    assert CHANGES[change] in explain(module)
    if "backward" not in change.__name__:
        assert not torch.equal(module(torch.ones(2, HIDDEN)), before), "the change changed nothing"
    if "pruned" in change.__name__ or "forward_replaced" in change.__name__:  # cannot be copied
        got = module(x := torch.randn(3, HIDDEN))
        unfuse(module)
        assert torch.equal(got, module(x))
    else:
        assert_as_unfused(module)


def test_a_backward_hook_of_the_activation_is_run():
    module = Llama()
    fuse(module)
    x = torch.randn(3, HIDDEN)
    before = outcome(module, x)
    activation_backward_hooked(module)
    after = outcome(module, x)
    gate, up = 2, 3
    torch.testing.assert_close(after[gate], 3 * before[gate])
    torch.testing.assert_close(after[up], before[up])


def test_an_activation_that_is_a_function_and_is_replaced():
    module = WithFunction()
    fuse(module)
    assert_as_unfused(module)
    module.act_fn = F.relu
    assert "act_fn is not what it was when it was fused" in explain(module)
    assert_as_unfused(module)
    module.act_fn = F.silu
    assert FUSED in explain(module)


class Scaled(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.factor * super().forward(hidden_states)


def test_a_number_that_its_forward_uses_is_changed():
    module = Scaled()
    assert fuse(module) == [""]
    assert FUSED in explain(copy.deepcopy(module))
    before = module(torch.ones(2, HIDDEN))
    module.factor = 2.0
    assert "factor is not what it was" in explain(module)
    torch.testing.assert_close(module(torch.ones(2, HIDDEN)), 2 * before)


@pytest.mark.parametrize("context", ["meta", "default"])
def test_fuse_whatever_the_default_device_is(context):
    """A generator of the CPU fills no tensors of another device."""
    layer = nn.TransformerDecoderLayer(HIDDEN, 2, WIDTH)
    model = nn.ModuleList([Llama(), layer, Bert()])
    with torch.device("meta" if context == "meta" else "cpu"):
        assert fuse(model) == ["0", "1", "2.intermediate"]


def test_a_decoders_layer_as_it_drops():
    layer = nn.TransformerDecoderLayer(HIDDEN, 2, WIDTH, dropout=0.3)
    twin = copy.deepcopy(layer)
    assert fuse(layer) == [""]
    x, memory = torch.randn(5, 2, HIDDEN), torch.randn(4, 2, HIDDEN)
    for mode in (True, False):
        results = []
        for m in (layer.train(mode), twin.train(mode)):
            torch.manual_seed(0)
            results.append(m(x, memory))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.append(nn.Tanh()),
        lambda m: m.insert(1, nn.Tanh()),
        lambda m: m.__delitem__(1),
        lambda m: m.__setitem__(1, nn.Tanh()),
    ],
    ids=["append", "insert", "delete", "set"],
)
def test_a_sequence_that_is_made_another(change):
    module = sequential()
    fuse(module)
    change(module)
    assert re.search("when it was fused|no longer there|not a plain linear layer", explain(module))
    assert_as_unfused(module)


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda m: m.to(torch.float64)])
@pytest.mark.parametrize("make", [Llama, WithFunction, sequential])
def test_a_copy_is_as_fused_as_the_original(make, remake):
    module = make()
    fuse(module)
    again = remake(module)
    assert FUSED in explain(again)


def test_a_module_shared_with_from_module_goes_its_own_way():
    original = Llama()
    module = FusedMLP.from_module(original)
    assert FUSED in explain(module)
    original.act_fn = nn.ReLU()  # the original's alone
    assert FUSED in explain(module)
    original.up_proj.register_forward_hook(scaled)  # both have this child
    assert "up_proj has hooks" in explain(module)


@pytest.mark.parametrize("make", [Llama, lambda: FusedMLP(HIDDEN, WIDTH)], ids=["adopted", "own"])
@pytest.mark.parametrize("tokens", [3, 7000])
@pytest.mark.parametrize(
    "register",
    [
        global_hooks.register_module_forward_hook,
        global_hooks.register_module_forward_pre_hook,
        global_hooks.register_module_full_backward_hook,
        global_hooks.register_module_full_backward_pre_hook,
    ],
    ids=lambda f: f.__name__,
)
def test_hooks_of_all_modules_see_every_child(make, tokens, register):
    module = make()
    fuse(module)
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    module(x)
    seen = []
    handle = register(lambda m, *_: seen.append(m))
    try:
        module(x).sum().backward()
        assert "hooks on all modules" in explain(module)
    finally:
        handle.remove()
    assert [m for m in seen if isinstance(m, nn.Linear)] in (
        [module.gate_proj, module.up_proj, module.down_proj],
        [module.down_proj, module.up_proj, module.gate_proj],
    )


def test_hooks_of_a_fused_module_itself():
    module, twin, seen = Llama(), Llama(), []
    twin.load_state_dict(module.state_dict())
    fuse(module)
    x = torch.randn(9, HIDDEN)
    for m in (module, twin):
        m.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        m.register_forward_hook(lambda _, __, out: out + 1)
        m.register_full_backward_pre_hook(lambda _, given: (3 * given[0],))
        m.register_full_backward_hook(lambda _, got, given: seen.append((got[0], given[0])))
    assert FUSED in explain(module)
    for path in ("eager", "onednn"):
        with use_path(path):
            for a, b in zip(outcome(module, x), outcome(twin, x), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        seen.clear()


class Clamped(Llama):
    """As gpt-oss, which clamps beyond 7."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(hidden_states).clamp(max=7))
        return self.down_proj(gate * self.up_proj(hidden_states).clamp(-7, 7))


class Hard(Llama):
    """An activation that is seen nowhere but in what is computed."""

    def __init__(self) -> None:
        super().__init__()
        del self.act_fn

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = F.hardswish(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.ReLU6(), nn.Linear(WIDTH, HIDDEN)),
        lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.Hardtanh(), nn.Linear(WIDTH, HIDDEN)),
        lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.Hardswish(), nn.Linear(WIDTH, HIDDEN)),
        lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, HIDDEN)),
        Clamped,
        Hard,
    ],
    ids=["relu6", "hardtanh", "hardswish", "leaky", "clamped", "hard"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_activation_is_taken_for_none_that_is_like_it(make, dtype):
    module = make().to(dtype)
    assert fuse(nn.ModuleList([module])) == []
    assert "0  original  it computes something else" in explain(nn.ModuleList([module]))


class DroppingItself(Llama):
    """As SeedOss."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.dropout(super().forward(hidden_states), 0.5, self.training)


class Straight(Llama):
    """Another function while training, with nothing random in it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = super().forward(hidden_states)
        return 2 * y if self.training else y


def nested_dropout() -> nn.Sequential:
    middle = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), middle, nn.Linear(WIDTH, HIDDEN))


def channels_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Dropout1d(0.5), nn.Linear(WIDTH, HIDDEN)
    )


def dropout_at_the_end() -> nn.Sequential:
    return sequential().append(nn.Dropout(0.5))


@pytest.mark.parametrize("train_first", [True, False])
@pytest.mark.parametrize(
    "make", [DroppingItself, Straight, nested_dropout, channels_dropout, dropout_at_the_end]
)
def test_what_happens_while_training_alone_happens(make, train_first):
    torch.manual_seed(0)
    module = make().train(train_first)
    assert fuse(module) == [""]
    twin = copy.deepcopy(module)
    unfuse(twin)
    x = torch.randn(5, 4, HIDDEN)
    for mode in (True, False, True):
        module.train(mode)
        twin.train(mode)
        results = []
        for m in (module, twin):
            torch.manual_seed(1)  # the same masks
            results.append(m(x))
        torch.testing.assert_close(*results)
    trained = results[0]
    torch.manual_seed(2)
    assert make is Straight or not torch.equal(module(x), trained), "nothing was dropped"
    assert (FUSED in explain(module)) == (make is dropout_at_the_end)
    assert FUSED in explain(module.eval())


def test_arguments_by_name():
    module = Llama()
    x = torch.randn(3, HIDDEN)
    want = module(x)
    fuse(module)
    with use_path("onednn"):
        torch.testing.assert_close(module(hidden_states=x), want)
        assert not torch.equal(module(hidden_states=x), module(hidden_states=x + 1))
    # Fused as well: this path takes no more than 16 tokens.
    with torch.no_grad(), use_path("decode"), pytest.raises(PathError, match="at most 16"):
        module(hidden_states=torch.randn(17, HIDDEN))
    for wrong in ({"states": x}, {"hidden_states": x, "more": 1}, {}):
        with pytest.raises(TypeError, match="argument"):
            module(**wrong)
    with pytest.raises(TypeError, match="argument"):
        module(x, 1)


@pytest.mark.parametrize("name", [n for n in vars(FusedMLP) if not n.startswith("__")])
def test_methods_of_the_original_are_not_shadowed(name):
    """A fused class inherits from `FusedMLP` first."""
    if name in ("forward", "extra_repr", "_apply", "from_module"):
        return  # the class's own are called in turn, or it is meant
    assert name.startswith(("_fused_", "_abc"))


def test_dtypes_that_only_the_original_converts():
    module = Converting().to(torch.bfloat16)
    fuse(module)
    assert_as_unfused(module)
    said = explain(module, torch.randn(3, HIDDEN))
    assert said.startswith(
        "path    eager, the original forward\nreason  up_weight is torch.bfloat16"
    )
    module.down_proj.float()
    x = torch.randn(3, HIDDEN).bfloat16()
    assert module(x).dtype == torch.float32
    unfused = copy.deepcopy(module)
    assert fuse(unfused) == []
    unfuse(unfused)
    assert fuse(unfused) == []
    why = r"down_proj.weight is torch.float32 on cpu, gate_proj.weight torch.bfloat16"
    assert why in explain(nn.ModuleList([unfused]))


def test_a_method_that_outlives_unfuse():
    """Libraries wrap ``module.forward`` and keep the bound method."""
    module = Llama()
    x = torch.randn(3, HIDDEN)
    want = module(x)
    fuse(module)
    forward = module.forward
    module.forward = lambda *args: forward(*args)
    torch.testing.assert_close(module(x), want)
    unfuse(module)
    assert torch.equal(module(x), want)


def test_the_bias_is_no_parameter():
    module = FusedMLP(HIDDEN, WIDTH, bias=True)
    x = torch.randn(3, HIDDEN)
    want = module(x)
    bias = module.up_proj.bias.detach()
    del module.up_proj.bias
    module.up_proj.bias = bias
    with use_path("onednn"):
        torch.testing.assert_close(module(x), want)
    assert "up_proj.weight is computed from other tensors" in explain(module)


def test_weights_tied_within_a_model():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.a, self.b = nn.Embedding(WIDTH, HIDDEN), Llama(), Llama()
            self.b.up_proj.weight = self.a.up_proj.weight
            self.a.gate_proj.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.b(self.a(self.embed(ids)))

    model = Tied()
    twin, ids = copy.deepcopy(model), torch.arange(WIDTH)
    assert fuse(model) == ["a", "b"]
    for _ in range(2):  # the second time with weights that an optimizer changed
        for m, path in ((model, "onednn"), (twin, "eager")):
            with use_path(path):
                m(ids).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)
        for m in (model, twin):
            torch.optim.SGD(m.parameters(), lr=1e-3).step()
            m.zero_grad()
        with torch.no_grad(), use_path("onednn"):
            torch.testing.assert_close(model(ids), twin(ids), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "loha", "modules_to_save"])
def test_adapters_of_every_kind(kind):
    peft = pytest.importorskip("peft", reason="install the extra hf")
    config = {
        "lora": lambda: peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False),
        "dora": lambda: peft.LoraConfig(
            target_modules=["up_proj"], use_dora=True, init_lora_weights=False
        ),
        "ia3": lambda: peft.IA3Config(
            target_modules=["up_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            init_ia3_weights=False,
        ),
        "loha": lambda: peft.LoHaConfig(target_modules=["down_proj"], init_weights=False),
        "modules_to_save": lambda: peft.LoraConfig(
            target_modules=["up_proj"], modules_to_save=["down_proj"], init_lora_weights=False
        ),
    }[kind]()
    mlp = Llama()
    model = nn.Sequential(mlp)
    fuse(model)
    wrapped = peft.get_peft_model(model, config)
    x = torch.randn(3, HIDDEN)
    want = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    with use_path("onednn"):
        got = wrapped(x)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in wrapped.named_parameters() if p.grad is not None}
    assert "_proj is a peft" in explain(wrapped)


# ---------------------------------------------------------------- halves of an MLP, and layers


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, WIDTH)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.scale = 1.0

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.norm(self.scale * self.dense(hidden_states) + input_tensor)


class Bert(nn.Module):
    """A layer whose MLP is split over two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.intermediate, self.output = First(), Second()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.intermediate(x), x)


class DroppingFirst(First):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.dropout(super().forward(hidden_states), 0.5, self.training)


class FirstWithDropout(First):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dropout(super().forward(hidden_states))


def _first_hooked(m):
    m.intermediate.register_full_backward_pre_hook(lambda _, given: (3 * given[0],))


def _act_hooked(m):
    m.intermediate.intermediate_act_fn.register_forward_hook(scaled)


def _act_replaced(m):
    m.intermediate.intermediate_act_fn = nn.ReLU()


def _first_dense_replaced(m):
    m.intermediate.dense = Twofold(HIDDEN, WIDTH)


def _attribute_changed(m):
    m.output.scale = 3.0


def _norm_hooked(m):
    m.output.norm.register_forward_hook(scaled)


def _norm_replaced(m):
    m.output.norm = nn.Identity()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_first_hooked, "one half has hooks"),
        (_act_hooked, HOOKED),
        (_act_replaced, REPLACED),
        (_first_dense_replaced, "dense is a tests Twofold"),
        (_attribute_changed, None),
        (_norm_hooked, None),
        (_norm_replaced, None),
    ],
)
def test_a_change_in_one_half(change, why):
    model = nn.Sequential(Bert())
    assert fuse(model) == ["0.intermediate"]
    assert_as_unfused(model)
    before = outcome(model, torch.ones(2, HIDDEN))
    change(model[0])
    assert "0.intermediate  " + (f"original  {why}" if why and "half" in why else "") in explain(
        model
    )
    assert (why or "fused") in explain(model)
    after = outcome(model, torch.ones(2, HIDDEN))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert_as_unfused(model)


def test_halves_called_by_name():
    model = nn.ModuleList([Bert()])
    first, second = model[0].intermediate, model[0].output
    x = torch.randn(2, 3, HIDDEN)
    want = model[0](x)
    assert fuse(model) == ["0.intermediate"]
    got = second(hidden_states=first(hidden_states=x), input_tensor=x)
    torch.testing.assert_close(got, want)
    assert first(x).shape == x.shape, "the first half computes all of the MLP"
    with pytest.raises(TypeError, match="argument"):
        first()
    forwards = first.forward, second.forward
    unfuse(model)
    torch.testing.assert_close(forwards[1](forwards[0](x), x), want)


class ConvertingSecond(Second):
    dtype = torch.bfloat16

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        y = self.dense(hidden_states.to(self.dtype))
        return self.norm(y.to(input_tensor.dtype) + input_tensor)


def test_halves_of_two_dtypes():
    model = nn.Sequential(Bert())
    model[0].output = ConvertingSecond()
    model.to(torch.bfloat16)
    assert fuse(model) == ["0.intermediate"]
    x = torch.randn(3, HIDDEN).bfloat16()
    model(x)
    model[0].output.dense.float()
    model[0].output.dtype = torch.float32
    assert "only its own forward knows how to convert" in explain(model)
    got = model(x)
    unfuse(model)
    assert torch.equal(got, model(x))


@pytest.mark.parametrize("first", [DroppingFirst, FirstWithDropout])
def test_a_first_half_that_drops_while_training(first):
    model = nn.Sequential(Bert()).train()
    model[0].intermediate = first()
    assert fuse(model) == ["0.intermediate"]
    twin = copy.deepcopy(model)
    unfuse(twin)
    x = torch.randn(5, HIDDEN)
    for mode in (True, False):
        results = []
        for m in (model, twin):
            torch.manual_seed(1)
            results.append(m.train(mode)(x))
        torch.testing.assert_close(*results)
    assert "0.intermediate  fused" in explain(model.eval())
    assert "0.intermediate  original" in explain(model.train())


def test_hooks_of_all_modules_see_both_halves():
    model = nn.Sequential(Bert())
    fuse(model)
    seen = []
    handle = global_hooks.register_module_forward_hook(lambda m, *_: seen.append(m))
    model(torch.randn(2, HIDDEN))
    handle.remove()
    assert sum(isinstance(m, nn.Linear) for m in seen) == 2


def test_the_activation_of_a_layer_is_replaced():
    layer = nn.TransformerEncoderLayer(HIDDEN, 2, WIDTH, dropout=0.0)
    x = torch.randn(5, HIDDEN)
    fuse(layer)
    before = layer._ff_block(x)
    layer.activation = F.gelu
    want = layer.linear2(F.gelu(layer.linear1(x)))
    torch.testing.assert_close(layer._ff_block(x), want)
    assert not torch.equal(want, before)
    assert "activation is not what it was" in explain(nn.ModuleList([layer]))


def test_a_layer_that_does_more_while_training():
    class Layer(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return F.dropout(super()._ff_block(x), 0.5, self.training)

    layer = Layer(HIDDEN, 2, WIDTH, dropout=0.0)
    assert fuse(layer) == [""]
    x = torch.randn(5, HIDDEN)
    assert not torch.equal(layer._ff_block(x), layer._ff_block(x))
    assert "while training its own forward does more" in explain(nn.ModuleList([layer]))
    layer.eval()
    assert torch.equal(layer._ff_block(x), layer._ff_block(x))


def test_a_misfit_is_left_to_the_original_and_missing_values_are_not():
    module = Llama()
    fuse(module)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2"):
        module(torch.randn(3, HIDDEN + 1))
    module.to("meta")
    assert not functional.suits(
        torch.randn(3), functional.Params(torch.ones(2, 4), torch.ones(4, 2))
    )
    with pytest.raises(RuntimeError, match=r"meta device.*to_empty"):
        module(torch.randn(3, HIDDEN))
