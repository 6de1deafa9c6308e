"""Recommendation: DLRM's towers (https://arxiv.org/abs/1906.00091), fused, trained and
quantized."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fused_mlp

from .measuring import gradients, operators


def tower(*widths: int) -> nn.Sequential:
    """Linear and relu in turn, in pairs of layers, which is what an MLP is."""
    layers: list[nn.Module] = []
    for a, b, c in zip(widths[0::2], widths[1::2], widths[2::2], strict=False):
        layers += [nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c)), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Dense features through a bottom tower, embeddings, all pairs' products, a top tower, one
    score."""

    def __init__(self, tables: int = 6, rows: int = 50, width: int = 32, inner: int = 256) -> None:
        super().__init__()
        self.bottom = tower(16, inner, width)
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = tower(width + pairs, inner, 128)
        self.score = nn.Linear(128, 1)
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack(
            [bottom, *(t(i) for t, i in zip(self.tables, sparse.t(), strict=True))], 1
        )
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.score(self.top(torch.cat([bottom, products], 1))).squeeze(1)


@pytest.fixture
def case():
    torch.manual_seed(0)
    return DLRM(), torch.randn(128, 16), torch.randint(0, 50, (128, 6))


def test_fused_towers_score_the_same_with_no_more_operators(case):
    model, *features = case
    with torch.no_grad():
        before = model(*features)
    eager = operators(lambda: model(*features))
    assert fused_mlp.fuse(model) == ["bottom.0", "top.0"]
    with torch.no_grad():
        torch.testing.assert_close(model(*features), before, rtol=1e-4, atol=1e-5)
    # On a CPU relu stays an operator of its own: oneDNN's would turn NaN into 0.
    assert operators(lambda: model(*features)) <= eager


def test_fused_towers_train_the_same(case):
    model, *features = case
    clicks = torch.rand(128).round()

    def loss() -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(*features), clicks)

    want = gradients(model, loss)
    fused_mlp.fuse(model)
    got = gradients(model, loss)
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_quantized_towers_rank_alike(case):
    pytest.importorskip("torchao")
    model, *features = case
    want = model(*features)
    fused_mlp.fuse(model)
    static = fused_mlp.quantize(copy.deepcopy(model), "int8_static", calibration=[tuple(features)])
    for quantized in (fused_mlp.quantize(copy.deepcopy(model), "int8_dynamic"), static):
        got = quantized(*features)
        assert torch.corrcoef(torch.stack([got, want]))[0, 1] > 0.995
