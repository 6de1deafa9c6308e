"""`fuse` and `unfuse` inside real models, built small from their configs; nothing is downloaded."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fused_mlp import FusedMLP, explain, fuse, unfuse

IDS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def language_model(name, **extra):
    def make():
        t = pytest.importorskip("transformers", reason="install the extra hf")
        config = getattr(t, f"{name}Config")(**SIZES | {"num_key_value_heads": 2} | extra)
        return getattr(t, f"{name}ForCausalLM")(config), IDS

    return make


def gpt2():
    t = pytest.importorskip("transformers", reason="install the extra hf")
    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    ), IDS


def vit():
    t = pytest.importorskip("transformers", reason="install the extra hf")
    sizes = {
        k: SIZES[k]
        for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    model = t.ViTModel(t.ViTConfig(**sizes, image_size=16, patch_size=8), add_pooling_layer=False)
    return model, torch.randn(2, 3, 16, 16)


def bert():
    t = pytest.importorskip("transformers", reason="install the extra hf")
    return t.BertModel(t.BertConfig(**SIZES), add_pooling_layer=False), IDS


def t5():
    t = pytest.importorskip("transformers", reason="install the extra hf")
    return t.T5EncoderModel(
        t.T5Config(
            vocab_size=64,
            d_model=32,
            d_ff=48,
            num_layers=2,
            num_heads=2,
            d_kv=16,
            feed_forward_proj="gated-gelu",
        )
    ), IDS


def encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 32)


def sequential():
    return nn.ModuleList(
        [nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))]
    ), torch.randn(3, 8)


MODELS = {
    "llama": (language_model("Llama"), "model.layers.{}.mlp"),
    "gemma": (language_model("Gemma", head_dim=16), "model.layers.{}.mlp"),
    "mistral": (language_model("Mistral"), "model.layers.{}.mlp"),
    "phi3": (language_model("Phi3"), "model.layers.{}.mlp"),
    "gpt2": (gpt2, "transformer.h.{}.mlp"),
    "vit": (vit, "layers.{}.mlp"),
    "bert": (bert, "encoder.layer.{}.intermediate"),
    "t5": (t5, "encoder.block.{}.layer.1.DenseReluDense"),
    "encoder": (encoder, "layers.{}"),
}


def run(model, x) -> list[torch.Tensor]:
    """The output and all gradients."""
    torch.manual_seed(1)  # dropout draws the same masks
    model.zero_grad()
    y = model(x)
    y = y if isinstance(y, torch.Tensor) else y[0]
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_as_exact_as_the_original(name, training):
    make, pattern = MODELS[name]
    torch.manual_seed(0)
    model, x = make()
    model.train(training)
    keys, modules = list(model.state_dict()), dict(model.named_modules())
    want = run(model, x)
    assert fuse(model) == [pattern.format(i) for i in range(2)]
    assert fuse(model) == []
    assert list(model.state_dict()) == keys
    got = run(model, x)
    if training:  # float64 would draw other masks
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    else:
        exact = run(copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x)
        for a, b, c in zip(got, want, exact, strict=True):
            scale = c.abs().max().item() + 1e-12
            error, eager = ((t.double() - c).abs().max().item() / scale for t in (a, b))
            assert error <= 2 * eager + 4 * torch.finfo(torch.float32).eps
        assert torch.equal(run(pickle.loads(pickle.dumps(model)), x)[0], got[0])
    assert unfuse(model) == [pattern.format(i) for i in range(2)]
    after = dict(model.named_modules())
    assert all(after[n] is m for n, m in modules.items())
    assert not any(isinstance(m, FusedMLP) for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(run(model, x), want, strict=True))


def test_sequential_of_unequal_ends_stays_a_sequential():
    model, x = sequential()
    want = model[0](x)
    assert fuse(model) == ["0"]
    assert isinstance(model[0], nn.Sequential)
    assert isinstance(model[0], FusedMLP)
    torch.testing.assert_close(model[0](x), want)
    assert model[0][2].out_features == 4
    assert len(model[0]) == 3


def test_from_module_takes_a_transformer_layer_and_both_halves_of_a_pair():
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0)
    x = torch.randn(5, 16)
    fused = FusedMLP.from_module(layer)
    assert fused.linear1 is layer.linear1
    torch.testing.assert_close(fused(x), layer._ff_block(x))
    model, _ = bert()
    block = model.encoder.layer[0].eval()
    fused = FusedMLP.from_module(block.intermediate, block.output)
    x = torch.randn(5, 32)
    torch.testing.assert_close(fused(x), block.output.dense(block.intermediate(x)))


class Halves(nn.Module):
    """As BERT's layer, but for what is made of the halves."""

    def __init__(self, use):
        super().__init__()
        self.intermediate = nn.Sequential(nn.Linear(8, 12), nn.GELU())
        self.output = Second()
        self.use = use

    def forward(self, x):
        return self.use(self.intermediate, self.output, x)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(12, 8)

    def forward(self, hidden, residual):
        return self.dense(hidden) + residual


def _chained(first, second, x):
    return second(first(x), x)


def _peeked_at(first, second, x):
    return second(hidden := first(x), x), hidden.mean()


def _scaled_between(first, second, x):
    return second(2 * first(x), x)


def _two_inputs(first, second, x):
    return second(first(x + 1), x)


@pytest.mark.parametrize(
    ("use", "fused"),
    [(_chained, True), (_two_inputs, True), (_peeked_at, False), (_scaled_between, False)],
)
def test_halves_are_fused_where_they_are_only_chained(use, fused):
    model = nn.ModuleList([Halves(use)])
    x = torch.randn(2, 3, 8)
    want = model[0](x)
    assert fuse(model) == (["0.intermediate"] if fused else [])
    torch.testing.assert_close(model[0](x), want)
    assert fused or "does more with them than chain them" in explain(model)


def test_gate_and_up_are_told_apart_by_what_they_compute():
    class Odd(nn.Module):
        """Names say nothing; the second child is the gate, the activation is hidden in forward."""

        def __init__(self):
            super().__init__()
            self.w3, self.w1, self.w2 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.w2(nn.functional.gelu(self.w1(x), approximate="tanh") * self.w3(x))

    odd = Odd()
    x = torch.randn(4, 8)
    want = odd(x)
    assert fuse(odd) == [""]
    torch.testing.assert_close(odd(x), want)
    assert "gelu_tanh" in explain(nn.ModuleList([odd]))
    assert unfuse(odd) == [""]


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(x), x


def _meta():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to("meta")


def _hooked():
    m = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    m[0].register_forward_hook(lambda *_: None)
    return m


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Residual(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), "something else"),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 4)), "something else"),
        (_meta, "meta device"),
        (_hooked, "0 has hooks"),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
            "0 and 2 have an MLP's sizes, but its forward does more than an MLP, with the parameters of 1;",
        ),
        (
            lambda: Twice(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
            "0 and 2 have an MLP's sizes, but it returns a tuple",
        ),
        (lambda: nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 6), nn.BatchNorm1d(6)), None),
    ],
)
def test_what_is_not_surely_an_mlp_is_kept_with_the_reason(make, reason):
    model = nn.ModuleDict({"block": make()})
    classes = [type(m) for m in model.modules()]
    assert fuse(model) == []
    assert [type(m) for m in model.modules()] == classes
    text = explain(model)
    assert text.startswith("block  original") and reason in text if reason else "no MLP" in text


def test_recognising_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4)).train()
    state = torch.get_rng_state()
    fuse(nn.ModuleList([model]))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model[2].training
    assert model[2].p == 0.1
    assert all(p.grad is None for p in model.parameters())


def test_dropout_inside_runs_the_original_in_training_alone():
    model = nn.ModuleList(
        [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))]
    )
    fuse(model)
    assert "2 drops 0.5 inside the MLP" in explain(model)
    assert "fused" in explain(model.eval())


def test_a_module_in_two_places_is_fused_in_both():
    mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    model = nn.ModuleDict({"a": mlp, "b": mlp})
    assert fuse(model) == ["a"]
    assert model["a"] is model["b"] is mlp
    assert isinstance(mlp, FusedMLP)


@pytest.mark.parametrize("before", [True, False], ids=["fused first", "peft first"])
def test_lora_works_before_and_after(before):
    peft = pytest.importorskip("peft", reason="install the extra hf")
    model, x = language_model("Llama")()
    config = peft.LoraConfig(target_modules=["up_proj", "down_proj"], r=2, init_lora_weights=False)
    if before:
        fuse(model)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config).eval()
    if not before:
        assert fuse(wrapped) == []
    assert "not a plain linear layer" in explain(wrapped)
    got = wrapped(x)[0]
    unfuse(wrapped)
    torch.testing.assert_close(got, wrapped(x)[0])
    fuse(merged := wrapped.merge_and_unload())
    torch.testing.assert_close(merged(x)[0], got, rtol=1e-3, atol=1e-4)
    assert isinstance(merged.model.layers[0].mlp, FusedMLP)


@pytest.mark.parametrize("before", [True, False], ids=["fused first", "quantized first"])
def test_torchao_weights_are_left_to_torchao(before):
    quantization = pytest.importorskip("torchao.quantization", reason="install the extra quant")
    model = nn.ModuleDict(
        {"mlp": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))}
    ).eval()
    x = torch.randn(3, 32)
    if before:
        fuse(model)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        if not before:
            assert fuse(model) == []
        assert (
            "torchao's Int8Tensor" if before else "which its own library must multiply"
        ) in explain(model)
        got = model["mlp"](x)
        unfuse(model)
        torch.testing.assert_close(got, model["mlp"](x), rtol=2e-2, atol=2e-2)


def test_dtensors_are_left_to_their_own_operators():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if not dist.is_available():
        pytest.skip("this torch has no distributed package")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.ModuleDict({"mlp": FusedMLP(8, 16)})
        x = torch.randn(3, 8)
        want = model["mlp"](x)
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
        torch.testing.assert_close(model["mlp"](x), want)
        assert "hooks" in explain(model) or "DTensor" in explain(model)
    finally:
        dist.destroy_process_group()
