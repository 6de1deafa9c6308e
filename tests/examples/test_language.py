"""Language: a Llama whose MLPs are fused in place, trained, quantized, and compared with itself."""

import copy

import pytest
import torch

import fused_mlp

transformers = pytest.importorskip("transformers")

from .measuring import gradients, kept, operators  # noqa: E402


def llama_of(hidden: int, intermediate: int, layers: int):
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return llama_of(128, 512, layers=2)


@pytest.fixture
def tokens():
    return torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(1))


def test_fused_llama_says_the_same_with_fewer_operators(llama, tokens):
    with torch.no_grad():
        before = llama(tokens).logits
    eager = operators(lambda: llama(tokens))
    state = {name: tensor.clone() for name, tensor in llama.state_dict().items()}

    names = fused_mlp.fuse(llama)

    assert names == ["model.layers.0.mlp", "model.layers.1.mlp"]
    with torch.no_grad():
        torch.testing.assert_close(llama(tokens).logits, before, rtol=1e-4, atol=1e-5)
    # Each of two MLPs gives up its activation and its product to a GEMM's epilogue.
    assert operators(lambda: llama(tokens)) <= eager - 4
    assert all(torch.equal(llama.state_dict()[name], tensor) for name, tensor in state.items())


def test_fused_llama_trains_the_same_and_keeps_less(llama, tokens):
    llama.train()

    def loss() -> torch.Tensor:
        return llama(tokens, labels=tokens).loss

    want, eager = gradients(llama, loss), kept(llama, tokens)
    fused_mlp.fuse(llama)
    for name, gradient in gradients(llama, loss).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-3, atol=1e-5)
    mid = 2 * 32 * 512 * 4  # one (tokens, intermediate) activation; eager keeps 4 a layer, fused 2
    # Left to itself, a step as small as a test's is PyTorch's own autograd's.
    with fused_mlp.use_path("eager"):
        assert kept(llama, tokens) <= eager - 2 * 2 * mid + 4 * 2 * 32 * 128 * 4


def test_quantized_llama_is_near_and_unfused_llama_is_back(llama, tokens):
    pytest.importorskip("torchao")
    with torch.no_grad():
        want = llama(tokens).logits.log_softmax(-1)
        fused_mlp.fuse(llama)
        quantized = fused_mlp.quantize(copy.deepcopy(llama), "int8_dynamic")
        got = quantized(tokens).logits.log_softmax(-1)
        divergence = (
            torch.nn.functional.kl_div(got, want, log_target=True, reduction="batchmean") / 32
        )
        assert divergence < 1e-4
        fused_mlp.unfuse(llama)
        assert torch.equal(llama(tokens).logits.log_softmax(-1), want)
