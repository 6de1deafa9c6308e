"""Ways to change weights between two calls, and the assertion that the next call sees it."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from fused_mlp import FusedMLP, reference, use_path

from .problems import assert_as_exact_as_eager

HIDDEN, WIDTH = 12, 20
X = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(0))
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def make() -> FusedMLP:
    torch.manual_seed(1)
    return FusedMLP(HIDDEN, WIDTH, bias=True)


def other() -> FusedMLP:
    torch.manual_seed(2)
    return FusedMLP(HIDDEN, WIDTH, bias=True)


def reference_of(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The MLP on what the module's parameters are now, read afresh by their names."""
    w = {}
    for name in PROJECTIONS:
        child, short = getattr(module, name), name.removesuffix("_proj")
        w[f"{short}_weight"] = child.weight.detach().to(dtype)
        w[f"{short}_bias"] = None if child.bias is None else child.bias.detach().to(dtype)
    return reference.mlp(x.to(dtype), **w, activation="silu")


def assert_fresh(module: nn.Module, mode=torch.no_grad, path: str | None = "onednn") -> Tensor:
    """Equal to eager on the weights as they are, by the one rule of exactness; the result."""
    dtype = module.down_proj.weight.dtype
    x = X.to(dtype)
    with mode():
        if path is None:
            got = module(x)
        else:
            with use_path(path):
                got = module(x)
        eager, exact = reference_of(module, x, dtype), reference_of(module, x, torch.float64)
        assert_as_exact_as_eager([got], [eager], [exact], [exact])
    return got.clone()


def in_place(write):
    """A change of one tensor by what ``write`` does to it."""

    def change(module, name, attribute):
        with torch.no_grad():
            write(getattr(getattr(module, name), attribute))

    change.__name__ = write.__name__
    return change


@in_place
def add_(w):
    w.add_(1)


@in_place
def mul_(w):
    w.mul_(-2)


@in_place
def copy_(w):
    w.copy_(torch.randn_like(w))


@in_place
def zero_(w):
    w.zero_()


@in_place
def one_element(w):
    w.view(-1)[7] += 5


@in_place
def masked(w):
    w[w > 0] = 0.5


@in_place
def index_put_(w):
    w.index_put_((torch.tensor([2, 3]),), w.new_tensor(4.0), accumulate=True)


@in_place
def slice_assignment(w):
    w[1:4] = 3


@in_place
def through_a_view(w):
    w.view(-1)[3:9].fill_(2)


@in_place
def by_detach(w):
    w.detach().mul_(3)


@in_place
def by_out(w):
    torch.neg(w, out=w)


@in_place
def by_init(w):
    nn.init.normal_(w)


@in_place
def foreach(w):
    torch._foreach_add_([w], 2.0)


@in_place
def by_data_assignment(w):
    w.data = torch.randn_like(w)


@in_place
def by_data_add_(w):
    w.data.add_(1)


@in_place
def by_data_copy_(w):
    w.data.copy_(torch.randn_like(w))


@in_place
def by_data_row_and_column(w):
    w.data[5] += 1


@in_place
def by_numpy(w):
    w.detach().numpy()[...] *= -1


@in_place
def by_numpy_last(w):
    w.detach().numpy()[..., -1] += 3


@in_place
def set_(w):
    w.set_(torch.randn_like(w).untyped_storage(), 0, w.shape)


@in_place
def resized(w):
    shape = w.shape
    w.requires_grad_(False).resize_(0).resize_(shape).normal_()


@in_place
def storage_refilled(w):
    """A sharded weight: freed, then gathered again, uncounted."""
    size = w.untyped_storage().size()
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(size)
    w.data.normal_()


@in_place
def storage_copied(w):
    w.untyped_storage().copy_(torch.randn_like(w).untyped_storage())


@in_place
def unversioned(w):
    with torch.autograd._unsafe_preserve_version_counter(w):
        w.normal_()


@in_place
def shared_then_written(w):
    w.share_memory_()
    w.add_(1)


IN_PLACE = [
    add_, mul_, copy_, zero_, one_element, masked, index_put_, slice_assignment, through_a_view, by_detach,
    by_out, by_init, foreach, by_data_assignment, by_data_add_, by_data_copy_, by_data_row_and_column,
    by_numpy, by_numpy_last, set_, resized, storage_refilled, storage_copied, unversioned, shared_then_written,
]  # fmt: skip


def sgd(m):
    m(X).sum().backward()
    torch.optim.SGD(m.parameters(), lr=0.1).step()


def adam(**how):
    def step(m):
        optimizer = torch.optim.Adam(m.parameters(), lr=0.1, **how)
        for _ in range(2):
            optimizer.zero_grad()
            m(X).square().sum().backward()
            optimizer.step()

    step.__name__ = "_".join(["adam", *how])
    return step


def load(m):
    m.load_state_dict(other().state_dict())


def load_assigned(m):
    m.load_state_dict(other().state_dict(), assign=True)


def load_one(m):
    m.up_proj.load_state_dict(other().up_proj.state_dict(), strict=False)


def double_and_back(m):
    with torch.no_grad():
        m.to(torch.float64).up_proj.weight.mul_(3)
    m.to(torch.float32)


def rounded(m):
    m.bfloat16().float()


def stays_half(m):
    m.half()


def stays_bfloat16(m):
    m.bfloat16()


def through_meta(m):
    m.to("meta")
    m.to_empty(device="cpu").load_state_dict(other().state_dict())


def from_a_vector(m):
    """Every parameter becomes a part of one vector, which is then written to."""
    vector = torch.randn(sum(p.numel() for p in m.parameters()))
    nn.utils.vector_to_parameters(vector, m.parameters())
    assert_fresh(m)
    assert_fresh(m)
    vector.mul_(2)


def flat_and_swapped(m):
    """As sharding libraries do: parameters are views of a buffer that is exchanged for another."""
    for seed in (3, 4):
        flat, start = torch.randn(2000, generator=torch.Generator().manual_seed(seed)), 0
        for p in m.parameters():
            p.data = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        assert_fresh(m)


def new_parameter(m):
    m.down_proj.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH))


def new_child(m):
    m.up_proj = nn.Linear(HIDDEN, WIDTH)


def exchanged_children(m):
    m.up_proj, m.gate_proj = m.gate_proj, m.up_proj


def swapped(m):
    torch.utils.swap_tensors(m.up_proj.weight, nn.Parameter(torch.randn(WIDTH, HIDDEN)))


def swapped_on_conversion(m):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m.load_state_dict(other().state_dict())
        m.half().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def tied(m):
    """Gate and up are one parameter, changed through the other's name."""
    m.up_proj.weight = m.gate_proj.weight
    assert_fresh(m)
    with torch.no_grad():
        m.gate_proj.weight[2, 3] += 9


def tied_to_another_module(m):
    embedding = nn.Embedding(WIDTH, HIDDEN, _weight=m.up_proj.weight.data)
    m.up_proj.weight = embedding.weight
    assert_fresh(m)
    embedding.weight.data.uniform_()


def moving_average(m):
    average = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=None)
    sgd(m)
    average.update_parameters(m)
    average.update_parameters(other())
    return average.module


def copied_then_changed(m):
    twin = copy.deepcopy(m)
    assert_fresh(twin)
    add_(twin, "up_proj", "weight")
    return twin


def changed_after_a_copy(m):
    twin = copy.deepcopy(m)
    add_(m, "up_proj", "weight")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(assert_fresh(twin), assert_fresh(m))


def pickled(m):
    twin = pickle.loads(pickle.dumps(m))
    by_data_add_(twin, "gate_proj", "weight")
    return twin


def saved_and_loaded(m):
    file = io.BytesIO()
    torch.save(other(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def shared(m):
    m.share_memory()
    by_data_add_(m, "up_proj", "weight")


def weight_norm(m):
    parametrizations.weight_norm(m.down_proj)
    with torch.no_grad():
        m.down_proj.parametrizations.weight.original0.mul_(2)


def parametrized(m):
    class Twice(nn.Module):
        def forward(self, w):
            return 2 * w

    parametrize.register_parametrization(m.up_proj, "weight", Twice())


def parametrized_and_back(m):
    parametrized(m)
    assert_fresh(m)
    parametrize.remove_parametrizations(m.up_proj, "weight")


def spectral_norm_by_hooks(m):
    torch.nn.utils.spectral_norm(m.up_proj)
    with torch.no_grad():
        m.up_proj(X)
    m.eval()


def pruned(m):
    prune.l1_unstructured(m.gate_proj, "weight", 0.5)


def pruned_for_good(m):
    pruned(m)
    assert_fresh(m)
    prune.remove(m.gate_proj, "weight")


def no_bias(m):
    m.up_proj.bias = None


def trained_original(m):
    """`from_module` shares the parameters: training the original is seen."""
    twin = FusedMLP.from_module(nn.Sequential(m.up_proj, nn.SiLU(), m.down_proj))
    with torch.no_grad(), use_path("onednn"):
        before = twin(X)
    sgd(m)
    with torch.no_grad(), use_path("onednn"):
        got = twin(X)
        want = m.down_proj(nn.functional.silu(m.up_proj(X)))
    assert not torch.equal(got, before)
    torch.testing.assert_close(got, want)


def distributed_average(m):
    """A broadcast writes through ``.data`` of a flattened copy."""
    flat = torch._utils._flatten_dense_tensors([p.data for p in m.parameters()]) * 1.5
    for p, new in zip(
        m.parameters(),
        torch._utils._unflatten_dense_tensors(flat, list(m.parameters())),
        strict=True,
    ):
        p.data.copy_(new)


CHANGES = [
    sgd, adam(foreach=True), adam(fused=True), adam(capturable=False, foreach=False), load, load_assigned,
    load_one, double_and_back, rounded, stays_half, stays_bfloat16, through_meta, from_a_vector, flat_and_swapped,
    new_parameter, new_child, exchanged_children, swapped, swapped_on_conversion, tied, tied_to_another_module,
    moving_average, copied_then_changed, changed_after_a_copy, pickled, saved_and_loaded, shared, weight_norm,
    parametrized, parametrized_and_back, spectral_norm_by_hooks, pruned, pruned_for_good, no_bias, trained_original,
    distributed_average,
]  # fmt: skip


class Original(nn.Module):
    """A model author's own MLP, to be fused in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.down_proj = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
