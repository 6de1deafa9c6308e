"""Quantization-aware training: what is trained is what is converted, and gradients flow."""

import pytest
import torch

import fused_mlp

pytest.importorskip("torchao")

from fused_mlp import quantization as Q

D, H = 64, 128
TRAINABLE = [m.name for m in Q.MODES.values() if m.trainable]


def prepared(mode: str) -> fused_mlp.FusedMLP:
    torch.manual_seed(0)
    return Q.prepare_qat(fused_mlp.FusedMLP(D, H, bias=True), mode, group_size=32)


# Training imitates the rounding; converting does it. They differ by how scales are rounded (bf16 in
# int4), by the sums in int32 or bf16, and for int8_dynamic by a zero point: a fraction of what the
# rounding itself does, which is 0.13 of the result for int4 and 0.02 for int8.
@pytest.mark.parametrize(
    ("mode", "bound"), [("int4_weight", 0.05), ("int8_weight", 0.01), ("int8_dynamic", 0.03)]
)
def test_training_sees_what_converting_gives(mode, bound):
    module, x = prepared(mode), torch.randn(200, D)
    with torch.no_grad():
        before = module(x)
        after = fused_mlp.quantize(module, mode, group_size=32)(x)
    assert (before - after).norm() / before.norm() < bound


@pytest.mark.parametrize("mode", TRAINABLE)
def test_gradients_flow_and_training_helps(mode):
    module = prepared(mode)
    x = torch.randn(64, D)
    target = torch.randn(64, D)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in module.parameters())
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
    fused_mlp.quantize(module, mode, group_size=32)
    assert all(not p.requires_grad for p in module.parameters())
    with torch.no_grad():
        assert float((module(x) - target).square().mean()) < losses[0]


def test_parameters_stay_the_optimizers():
    torch.manual_seed(0)
    module = fused_mlp.FusedMLP(D, H)
    before = dict(module.named_parameters())
    Q.prepare_qat(module, "int4_weight", group_size=32)
    assert all(before[name] is p for name, p in module.named_parameters())


def test_refusals():
    module = prepared("int4_weight")
    with pytest.raises(ValueError, match="already prepared for int4_weight"):
        Q.prepare_qat(module, "int4_weight", group_size=32)
    with pytest.raises(ValueError, match="was trained for int4_weight with group size 32"):
        fused_mlp.quantize(module, "int8_weight")
    with pytest.raises(ValueError, match="was trained for int4_weight with group size 32"):
        fused_mlp.quantize(module, "int4_weight", group_size=64)
    with pytest.raises(ValueError, match="int8_static cannot be trained for"):
        Q.prepare_qat(fused_mlp.FusedMLP(D, H), "int8_static")
