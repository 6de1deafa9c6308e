"""A quick local number, ``pytest --benchmark-only``: one gated MLP of the article's sizes, eager
beside fused. It judges nothing; what is tracked is the suite's to measure."""

import pytest
import torch

import fused_mlp
from fused_mlp import machine, reference

pytest.importorskip("pytest_benchmark")

HIDDEN, INTERMEDIATE = 768, 3072


@pytest.mark.parametrize("provider", ["eager", "fused"])
@pytest.mark.parametrize("tokens", [1, 16, 128])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_latency(benchmark, mode, tokens, provider):
    device = "cuda" if torch.cuda.is_available() and not machine.interpreted() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    made = {"device": device, "dtype": dtype}
    mlp = fused_mlp.FusedMLP(HIDDEN, INTERMEDIATE, activation="gelu", **made)
    x, train = torch.randn(tokens, HIDDEN, **made), mode == "training"
    benchmark.group = f"{mode}, {tokens} tokens, {HIDDEN}/{INTERMEDIATE}, {dtype}, {device}"
    benchmark.name = provider
    weights = {name: getattr(mlp, f"{name}_proj").weight for name in ("up", "down", "gate")}
    weights = {f"{name}_weight": weight for name, weight in weights.items()}

    def call() -> torch.Tensor:
        y = reference.mlp(x, activation="gelu", **weights) if provider == "eager" else mlp(x)
        if train:
            torch.autograd.grad(y.sum(), list(mlp.parameters()))
        if device == "cuda":
            torch.cuda.synchronize()
        return y

    with torch.set_grad_enabled(train):
        for _ in range(3):  # compiled, tuned, and packed at the second sight of the weights
            call()
        benchmark(call)
