"""The table of examples: what it says of one of them is so."""

import torch

from . import __main__ as examples
from .test_vision import ConvNeXtBlock


def test_a_row_says_what_was_counted():
    torch.manual_seed(0)
    block = ConvNeXtBlock(64).to(memory_format=torch.channels_last)
    image = torch.randn(1, 64, 8, 8).to(memory_format=torch.channels_last)
    case = examples.Case("ConvNeXt", block, (image,))
    found = examples.compare(case, rounds=1)
    assert found.fused == ["mlp"]
    before, after = found.operators
    assert after == before - 1, "gelu is in the first GEMM's epilogue"
    assert found.errors[0] < 1e-5 < found.errors[1] < 0.05
    assert min(found.seconds) > 0
    cells = examples.row(case, found)
    assert len(cells) == len(examples.HEADER)
    assert cells[:3] == ["ConvNeXt", "1", f"{before} → {after}"]
    assert type(block.mlp) is torch.nn.Sequential, "the model that was given is not fused"
