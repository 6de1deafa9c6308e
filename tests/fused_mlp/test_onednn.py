"""Packed weights are made once and are never stale."""

import gc

import pytest
import torch
from torch import Tensor

from fused_mlp import FusedMLP, fused_mlp, machine, onednn, plan, use_path

pytestmark = pytest.mark.skipif(not machine.onednn_enabled(), reason="this torch has no oneDNN")
X = torch.randn(8, 12)


@pytest.fixture(autouse=True)
def empty_cache():
    onednn.clear()
    yield
    onednn.clear()


def call(module: FusedMLP, path: str = "onednn") -> Tensor:
    with torch.no_grad(), use_path(path):
        return module(X)


def assert_fresh(module: FusedMLP) -> None:
    torch.testing.assert_close(call(module), call(module, "eager"), rtol=1e-5, atol=1e-6)


def set_by_data(m):
    m.up_proj.weight.data = torch.randn_like(m.up_proj.weight)


def back_and_forth_by_data(m):
    """The new storage may get the address of an old one."""
    shape = m.up_proj.weight.shape
    for _ in range(20):
        m.up_proj.weight.data = torch.zeros(1)
        m.up_proj.weight.data = torch.randn(shape)


def in_place_behind_autograd(m):
    m.up_proj.weight.data.mul_(2)


def one_row_through_numpy(m):
    m.up_proj.weight.detach().numpy()[3] += 1


def one_column_through_numpy(m):
    m.gate_proj.weight.detach().numpy()[:, 5] += 1


def in_place(m):
    with torch.no_grad():
        m.down_proj.weight[2, 3] += 5


def in_place_in_inference_mode(m):
    with torch.inference_mode():
        m.gate_proj.weight[2, 3] += 5


def load(m):
    m.load_state_dict(FusedMLP(12, 20).state_dict())


def load_by_assignment(m):
    m.load_state_dict(FusedMLP(12, 20).state_dict(), assign=True)


def to_and_back(m):
    m.to(torch.float64)
    with torch.no_grad():
        m.up_proj.weight.mul_(3)
    m.to(torch.float32)


def optimizer_step(m):
    m(X).sum().backward()
    torch.optim.SGD(m.parameters(), lr=0.1).step()


def new_parameter(m):
    m.up_proj.weight = torch.nn.Parameter(torch.randn(20, 12))


def swap(m):
    torch.utils.swap_tensors(m.up_proj.weight, torch.nn.Parameter(torch.randn(20, 12)))


@pytest.mark.parametrize(
    "change",
    [
        set_by_data, back_and_forth_by_data, in_place_behind_autograd, one_row_through_numpy,
        one_column_through_numpy, in_place, in_place_in_inference_mode, load, load_by_assignment, to_and_back,
        optimizer_step, new_parameter, swap,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_no_change_of_a_weight_is_missed(change):
    module = FusedMLP(12, 20)
    assert_fresh(module)
    assert onednn.packed_bytes() > 0
    before = call(module)
    change(module)
    assert not torch.equal(call(module, "eager"), before), "the change changed nothing"
    assert_fresh(module)


def test_packed_once():
    module = FusedMLP(12, 20)
    call(module)
    packed = [e.packed for e in onednn.cache.entries.values()]
    call(module)
    assert all(a is e.packed for a, e in zip(packed, onednn.cache.entries.values(), strict=True))
    assert len(packed) == 3


def test_memory_is_counted_and_freed_with_the_weights():
    module = FusedMLP(12, 20)
    call(module)
    assert onednn.packed_bytes() == sum(p.numel() * 4 for p in module.parameters())
    module.up_proj.weight = torch.nn.Parameter(torch.randn(20, 12))
    assert onednn.packed_bytes() == 2 * 12 * 20 * 4
    del module
    gc.collect()
    assert onednn.packed_bytes() == 0
    assert not onednn.cache.entries


def test_a_limit_is_kept(monkeypatch):
    monkeypatch.setattr(onednn.cache, "limit", 12 * 20 * 4)
    module = FusedMLP(12, 20)
    assert_fresh(module)
    assert onednn.packed_bytes() == 12 * 20 * 4


def test_by_itself_a_weight_is_packed_at_its_second_call(monkeypatch):
    """Weights that live for one call, or change at every call, are never packed."""
    monkeypatch.setattr(plan, "_cached", lambda *_: plan.Plan("onednn", "as if it were measured"))
    module = FusedMLP(12, 20)
    with torch.no_grad():
        module(X)
        assert onednn.packed_bytes() == 0
        for _ in range(3):
            module.up_proj.weight.add_(1)
            module(X)
        assert onednn.packed_bytes() == 2 * 12 * 20 * 4
        module(X)
        assert onednn.packed_bytes() == 3 * 12 * 20 * 4


def test_inference_tensors_have_no_version_and_are_not_packed():
    with torch.inference_mode():
        module = FusedMLP(12, 20)
        with use_path("onednn"):
            first = module(X)
            module.up_proj.weight.mul_(2)
            assert not torch.equal(module(X), first)
    assert onednn.packed_bytes() == 0


@pytest.mark.parametrize(
    "stride", [(1, 1), (5, 1), (1, 5), (2, 2), (15, 3), (1, 0), (0, 1), (40, 2)]
)
def test_weights_whose_rows_and_columns_lie_across_each_other(stride):
    """Such as a Toeplitz matrix as a view of its diagonals."""
    x, down = torch.randn(6, 12), torch.randn(12, 20)
    up = torch.randn(1000).as_strided((20, 12), stride)
    grads = []
    for path in ("onednn", "eager"):
        weight = up.detach().requires_grad_()
        with use_path(path):
            with torch.no_grad():
                y = fused_mlp(x, up, down)
            fused_mlp(x, weight, down).sum().backward()
        grads += [y, weight.grad]
    torch.testing.assert_close(grads[:2], grads[2:], rtol=1e-4, atol=1e-4)


def test_switching_onednn_off_is_respected():
    with torch.backends.mkldnn.flags(enabled=False):
        with use_path("onednn"), pytest.raises(plan.PathError, match="onednn is off"):
            FusedMLP(12, 20)(X)
        FusedMLP(12, 20)(X)
