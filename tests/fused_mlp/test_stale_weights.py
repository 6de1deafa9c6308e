"""Whatever changes weights between two calls, the next call computes with the new ones."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from fused_mlp import FusedMLP, fuse, machine, onednn, plan, use_path

from . import weight_changes
from .weight_changes import (
    HIDDEN,
    PROJECTIONS,
    WIDTH,
    Original,
    X,
    assert_fresh,
    make,
    other,
    reference_of,
)  # fmt: skip

pytestmark = pytest.mark.skipif(not machine.onednn_enabled(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def empty_cache():
    onednn.clear()
    yield
    onednn.clear()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", weight_changes.IN_PLACE, ids=lambda f: f.__name__)
def test_a_tensor_written_to(change, mode):
    for name in PROJECTIONS:
        for attribute in ("weight", "bias"):
            module = make()
            assert_fresh(module, mode)
            before = assert_fresh(module, mode)
            assert onednn.packed_bytes() > 0
            change(module, name, attribute)
            assert not torch.equal(assert_fresh(module, mode), before), "it changed nothing"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("adopted", [False, True], ids=["own", "adopted"])
@pytest.mark.parametrize("change", weight_changes.CHANGES, ids=lambda f: f.__name__)
def test_a_module_changed(change, mode, adopted):
    module = Original() if adopted else make()
    assert fuse(module) == ([""] if adopted else [])
    before = assert_fresh(module, mode)
    assert_fresh(module, mode)
    assert onednn.packed_bytes() > 0
    with torch.enable_grad():
        changed = change(module) or module
    for path in ("onednn", None):
        got = assert_fresh(changed, mode, path)
        assert not torch.equal(got.double(), before.double()), "it changed nothing"


def test_other_parameters_for_one_call_and_the_own_ones_after_it():
    module, given = make(), dict(other().named_parameters())
    before = assert_fresh(module)
    with torch.no_grad(), use_path("onednn"):
        for _ in range(3):
            got = torch.func.functional_call(module, given, (X,))
    torch.testing.assert_close(got, assert_fresh(other()))
    assert torch.equal(assert_fresh(module), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_order_of_changes_and_calls(dtype, monkeypatch):
    """As the plan packs by itself, at the second call; what was packed before is never in the way."""
    monkeypatch.setattr(plan, "_cached", lambda *_: plan.Plan("onednn", "as if it were measured"))
    module = make().to(dtype)
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return int(torch.randint(n, (), generator=generator))

    # NumPy has no bfloat16; PyTorch crashes where shared memory is resized.
    unfit = ("resized", "by_numpy", "by_numpy_last", "shared_then_written")
    writes = [f for f in weight_changes.IN_PLACE if f.__name__ not in unfit]
    for _ in range(150):
        if draw(2):
            writes[draw(len(writes))](module, PROJECTIONS[draw(3)], "weight")
            with torch.no_grad():
                for p in module.parameters():
                    p.clamp_(-2, 2)  # growth without end would overflow
        assert_fresh(module, (torch.no_grad, torch.inference_mode)[draw(2)], None)
    assert onednn.packed_bytes() > 0


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 9), (9, 1), (12, 20), (20, 12), (7, 7), (48, 6), (6, 36)]
)
@pytest.mark.parametrize("how", ["data", "numpy"])
def test_uncounted_writes_to_a_whole_row_or_column_are_seen(shape, how):
    """What the docstring promises of writes that PyTorch does not count."""
    weight = nn.Parameter(torch.randn(shape))
    for index in [*range(shape[0]), *((slice(None), i) for i in range(shape[1]))]:
        packed = onednn.cache.get(weight, at_once=True)
        assert onednn.cache.get(weight) is packed
        if how == "data":
            weight.data[index] += 1
        else:
            weight.detach().numpy()[index] += 1
        assert onednn.cache.get(weight, at_once=True) is not packed, index


def test_uncounted_writes_to_single_elements_need_clear():
    """The one gap, as the docstrings say: nothing but reading the whole weight could see it."""
    module = make()
    before = assert_fresh(module)
    watched = onednn._sample(module.up_proj.weight).numel()
    assert watched < 2 * max(HIDDEN, WIDTH)
    module.up_proj.weight.detach().numpy().reshape(-1)[1] += 5
    with torch.no_grad(), use_path("onednn"):
        assert torch.equal(module(X), before)
    onednn.clear()
    assert not torch.equal(assert_fresh(module), before)
    for page in (onednn.clear.__doc__, FusedMLP.__doc__):
        assert "NumPy" in page
    assert "onednn.clear" in FusedMLP.__doc__


def test_what_is_watched_crosses_every_row_and_column():
    for rows in range(1, 25):
        for columns in range(1, 25):
            step = onednn._step(rows, columns)
            at = range(0, rows * columns, step)
            assert {i // columns for i in at} == set(range(rows))
            assert {i % columns for i in at} == set(range(columns))
    for rows, columns in ((3072, 768), (768, 3072), (11008, 4096), (14336, 4096), (4096, 14336)):
        assert math.ceil(rows * columns / onednn._step(rows, columns)) < 1.01 * max(rows, columns)


def test_the_same_bytes_in_another_shape_are_packed_again():
    weight = nn.Parameter(torch.randn(HIDDEN, WIDTH))
    packed = onednn.cache.get(weight, at_once=True)
    weight.data = weight.data.view(WIDTH, HIDDEN)
    assert onednn.cache.get(weight, at_once=True) is not packed
    x = torch.randn(4, HIDDEN)
    got = onednn.linear(x, onednn.cache.get(weight), None)
    torch.testing.assert_close(got, nn.functional.linear(x, weight).detach())


def test_threads_share_the_packed_weights():
    """Whatever their order, results are right and the bytes are counted once."""
    modules = [make(), other()]
    want = [reference_of(m, X, torch.float32) for m in modules]

    def work(i):
        with torch.no_grad(), use_path("onednn"):
            for _ in range(30):
                torch.testing.assert_close(modules[i % 2](X), want[i % 2], rtol=1e-4, atol=1e-5)
                if i == 0:
                    onednn.clear()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    entries = onednn.cache.entries.values()
    assert onednn.packed_bytes() == sum(e.size for e in entries if e.packed is not None)
