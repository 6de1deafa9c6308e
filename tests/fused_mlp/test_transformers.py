"""`fuse` in the architectures of transformers, built small from their configs; nothing is downloaded."""

import copy
import re

import pytest
import torch
from torch import nn

from fused_mlp import FusedMLP, explain, fuse, unfuse, use_path

transformers = pytest.importorskip("transformers", reason="install the extra hf")

ENCODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = DECODER | {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
GPT = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2, "d_kv": 16}

LLAMA, OWN, ENCODERS = (
    "model.layers.{}.mlp",
    "transformer.h.{}.mlp",
    "encoder.layer.{}.intermediate",
)
T5_BLOCK = "encoder.block.{}.layer.1.DenseReluDense"
LIKE_LLAMA = [
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "Olmo", "Olmo2",
    "Olmo3", "StableLm", "Starcoder2", "Cohere", "Cohere2", "Granite", "Nemotron", "Persimmon",
    "Glm", "Glm4", "Helium", "SmolLM3", "Exaone4", "Arcee", "SeedOss", "Ministral",
    "HunYuanDenseV1", "Ernie4_5", "DiffLlama", "Jais2", "NanoChat", "VaultGemma", "Cwm",
]  # fmt: skip
# Name of config and model, the config's arguments, the pattern of the names of what is fused.
FUSED = {
    name: (f"{name}Config", f"{name}ForCausalLM", DECODER, LLAMA)
    for name in LIKE_LLAMA
} | {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", DECODER, LLAMA),
    "Lfm2": ("Lfm2Config", "Lfm2ForCausalLM", DECODER, "model.layers.{}.feed_forward"),
    "RecurrentGemma": (
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", DECODER | {"lru_width": 32, "num_hidden_layers": 3},
        "model.layers.{}.mlp_block",
    ),
    "GPTNeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER, "gpt_neox.layers.{}.mlp"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", GPT, OWN),
    "GPTJ": ("GPTJConfig", "GPTJForCausalLM", GPT | {"rotary_dim": 4}, OWN),
    "CodeGen": ("CodeGenConfig", "CodeGenForCausalLM", GPT | {"rotary_dim": 4, "n_head": 4}, OWN),
    "GPTBigCode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT, OWN),
    "OpenAIGPT": (
        "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", {k: GPT[k] for k in list(GPT)[:4]}, OWN,
    ),
    "GPTNeo": (
        "GPTNeoConfig", "GPTNeoForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "bos_token_id": 1,
         "eos_token_id": 2, "attention_types": [[["global"], 2]]}, OWN,
    ),
    "Bert": ("BertConfig", "BertModel", ENCODER, ENCODERS),
    "Roberta": ("RobertaConfig", "RobertaModel", ENCODER, ENCODERS),
    "XLMRoberta": ("XLMRobertaConfig", "XLMRobertaModel", ENCODER, ENCODERS),
    "Camembert": ("CamembertConfig", "CamembertModel", ENCODER, ENCODERS),
    "Electra": ("ElectraConfig", "ElectraModel", ENCODER | {"embedding_size": 32}, ENCODERS),
    "Esm": ("EsmConfig", "EsmModel", ENCODER | {"mask_token_id": 3}, ENCODERS),
    "DebertaV2": ("DebertaV2Config", "DebertaV2Model", ENCODER, ENCODERS),
    "MPNet": ("MPNetConfig", "MPNetModel", ENCODER, ENCODERS),
    "DistilBert": (
        "DistilBertConfig", "DistilBertModel",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 2},
        "transformer.layer.{}.ffn",
    ),
    "ModernBert": (
        "ModernBertConfig", "ModernBertModel", ENCODER | {"cls_token_id": 1, "sep_token_id": 2},
        "layers.{}.mlp",
    ),
    "NomicBert": ("NomicBertConfig", "NomicBertModel", DECODER, "layers.{}.mlp"),
    "EuroBert": ("EuroBertConfig", "EuroBertModel", DECODER, "layers.{}.mlp"),
    "ViT": ("ViTConfig", "ViTModel", IMAGE, "layers.{}.mlp"),
    "DeiT": ("DeiTConfig", "DeiTModel", IMAGE, "layers.{}.mlp"),
    "Beit": ("BeitConfig", "BeitModel", IMAGE, "layers.{}.mlp"),
    "IJepa": ("IJepaConfig", "IJepaModel", IMAGE, "layers.{}.mlp"),
    "Dinov2": ("Dinov2Config", "Dinov2Model", IMAGE, "encoder.layer.{}.mlp"),
    "Dinov3": ("DINOv3ViTConfig", "DINOv3ViTModel", IMAGE, "model.layer.{}.mlp"),
    "Yolos": ("YolosConfig", "YolosModel", IMAGE | {"image_size": [16, 16]}, ENCODERS),
    "CLIPVision": ("CLIPVisionConfig", "CLIPVisionModel", IMAGE, "encoder.layers.{}.mlp"),
    "CLIPText": ("CLIPTextConfig", "CLIPTextModel", ENCODER, "encoder.layers.{}.mlp"),
    "Swin": (
        "SwinConfig", "SwinModel",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2],
         "window_size": 2}, "encoder.layers.{}.blocks.0.mlp",
    ),
    "T5": ("T5Config", "T5EncoderModel", T5, T5_BLOCK),
    "T5Gated": ("T5Config", "T5EncoderModel", T5 | {"feed_forward_proj": "gated-gelu"}, T5_BLOCK),
    "UMT5": ("UMT5Config", "UMT5EncoderModel", T5, T5_BLOCK),
}  # fmt: skip


def build(config: str, model: str, arguments: dict) -> tuple[nn.Module, torch.Tensor]:
    """A model in eval mode, with weights large enough that its MLPs matter, and an input."""
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    torch.manual_seed(0)
    module = getattr(transformers, model)(getattr(transformers, config)(**arguments)).eval()
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5)
    if "image_size" in arguments:
        return module, torch.randn(2, 3, 16, 16)
    return module, torch.randint(3, 64, (2, 7))


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    y = model(x)[0]
    # A loss that a norm at the end does not make constant.
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype))
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None and p.numel()]
    return [y.detach(), *grads]


def seeded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output with the same masks of dropout at every call."""
    torch.manual_seed(0)
    return model(x)[0]


def assert_as_exact(got, eager, exact) -> None:
    """Errors at most twice eager's over all of a result, at most four times at its worst, and four
    roundings: the worst of a result is one draw from its tail, and there are thousands of results.

    A gradient whose terms cancel, as that of a key's bias, is nothing but rounding errors of the
    others: it is measured by a hundredth of the largest one.
    """
    largest = max(c.abs().max().item() for c in exact[1:]) if len(exact) > 1 else 0.0
    roundings = 4 * torch.finfo(torch.float32).eps
    for a, b, c in zip(got, eager, exact, strict=True):
        scale = max(c.abs().max().item(), largest / 100)
        error, own = ((t.double() - c).abs() / scale for t in (a, b))
        assert error.square().mean().sqrt() <= 2 * own.square().mean().sqrt() + roundings
        assert error.max() <= 4 * own.max() + roundings


@pytest.mark.parametrize("name", FUSED)
def test_fused_inside_a_model_and_back(name):
    *names, pattern = FUSED[name]
    model, x = build(*names)
    twin = copy.deepcopy(model).double()
    want = run(model, x)
    exact = run(twin, x.double() if x.is_floating_point() else x)
    keys, modules, classes = (
        list(model.state_dict()), dict(model.named_modules()), [type(m) for m in model.modules()],
    )  # fmt: skip
    layers = len({m for m in modules if re.fullmatch(pattern.format(r"\d+"), m)})

    fused = [pattern.format(i) for i in range(layers)]
    assert layers >= 2
    assert fuse(twin.to(torch.bfloat16)) == fused  # where rounding hides most
    with torch.no_grad():
        dropped = seeded(model.train(), x)
    model.eval()
    assert fuse(model) == fused
    with torch.no_grad():
        torch.testing.assert_close(seeded(model.train(), x), dropped, rtol=1e-3, atol=1e-4)
    model.eval()
    assert explain(model).count("  fused ") == layers
    assert list(model.state_dict()) == keys
    assert_as_exact(run(model, x), want, exact)
    with use_path("onednn"):  # so small, by itself everything is left to PyTorch
        assert_as_exact(run(model, x), want, exact)
        with torch.no_grad():
            assert_as_exact([model(x)[0]], want[:1], exact[:1])

    assert unfuse(model) == fused
    assert [type(m) for m in model.modules()] == classes
    assert all(a is b for a, b in zip(model.modules(), modules.values(), strict=True))
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(run(model, x), want, strict=True))


EXPERTS_WHY = r"stack the weights of 4 experts, of which every token chooses its own"
KEPT = {
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS, EXPERTS_WHY),
    "Qwen3Moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS, EXPERTS_WHY),
    "Olmoe": ("OlmoeConfig", "OlmoeForCausalLM", EXPERTS, EXPERTS_WHY),
    "JetMoe": (
        "JetMoeConfig", "JetMoeForCausalLM",
        EXPERTS | {"kv_channels": 16, "num_key_value_heads": 1}, EXPERTS_WHY,
    ),
    "Bloom": (
        "BloomConfig", "BloomForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2},
        r"its forward\(hidden_states, residual\) does not take one tensor",
    ),
    "Mpt": (
        "MptConfig", "MptForCausalLM",
        {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2},
        r"its forward\(hidden_states, residual\) does not take one tensor",
    ),
    "OPT": (
        "OPTConfig", "OPTForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
        r"fc1 and fc2 have an MLP's sizes, but .* parameters of self_attn,.* a module of those",
    ),
    "Albert": (
        "AlbertConfig", "AlbertModel", ENCODER | {"embedding_size": 16},
        r"ffn and ffn_output have an MLP's sizes, but .* full_layer_layer_norm, attention",
    ),
    # A linear layer in all but type: what a subclass multiplies by is its own affair, and may
    # differ in training from what a trial in eval mode shows.
    "Falcon": (
        "FalconConfig", "FalconForCausalLM", ENCODER,
        r"dense_h_to_4h is a transformers FalconLinear, not a plain linear layer: its own forward",
    ),
    "Apertus": ("ApertusConfig", "ApertusForCausalLM", DECODER, r"parameters of act_fn"),
    "BitNet": ("BitNetConfig", "BitNetForCausalLM", DECODER, r"parameters of ffn_sub_norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_kept_for_a_reason_that_its_author_understands(name):
    *names, reason = KEPT[name]
    model, x = build(*names)
    classes = [type(m) for m in model.modules()]
    with torch.no_grad():
        want = model(x)[0]
        assert fuse(model) == []
        assert torch.equal(model(x)[0], want)
    assert [type(m) for m in model.modules()] == classes
    assert re.search(rf"^\S+ +original +.*{reason}", explain(model), re.MULTILINE)


def test_an_author_who_follows_the_advice_is_fused():
    model, _ = build(*KEPT["OPT"][:3])
    layer = model.model.decoder.layers[0]
    alone = nn.Sequential(layer.fc1, nn.ReLU(), layer.fc2)
    assert isinstance(FusedMLP.from_module(alone), FusedMLP)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "Mistral", "GPT2"])
def test_from_module_takes_an_mlp_out_of_its_model(name, tmp_path):
    """The state_dict of either loads into the other, also through a file."""
    import safetensors.torch

    model, _ = build(f"{name}Config", f"{name}Model", GPT if name == "GPT2" else DECODER)
    mlp = model.h[0].mlp if name == "GPT2" else model.layers[0].mlp
    fused = FusedMLP.from_module(mlp)
    assert list(fused.state_dict()) == list(mlp.state_dict())
    assert all(a is b for a, b in zip(fused.parameters(), mlp.parameters(), strict=True))
    alone = copy.deepcopy(fused)
    safetensors.torch.save_file(
        {k: torch.randn_like(v) / 8 for k, v in mlp.state_dict().items()}, tmp_path / "mlp"
    )
    for module in (mlp, alone):
        module.load_state_dict(safetensors.torch.load_file(tmp_path / "mlp"))
    x = torch.randn(9, 32)
    exact = run_mlp(copy.deepcopy(mlp).double(), x.double())
    with use_path("onednn"):
        for module in (fused, alone):
            assert_as_exact(run_mlp(module, x), run_mlp(mlp, x), exact)


def run_mlp(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), *(p.grad.clone() for p in module.parameters())]
