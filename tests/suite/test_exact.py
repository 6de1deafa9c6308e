"""Numbers without noise: right by arithmetic, and the same to the digit every time."""

import itertools

import pytest
import torch

from benchmarks.suite.harness import exact, providers
from benchmarks.suite.harness.inputs import make_inputs
from benchmarks.suite.harness.providers import Built
from benchmarks.suite.harness.shapes import SHAPES, Combination


def built(mode, shape, provider="eager", tokens="prompt"):
    inputs = make_inputs(Combination(mode, shape, tokens, "fp32", provider), "cpu")
    return providers.build(inputs)


def counted(one):
    with one.context():
        one.call()
        launches, peak = exact.launches_and_peak(one, "cpu")
    return launches.names, peak


@pytest.mark.parametrize(("shape", "launches"), [("tiny", 5), ("dlrm_bottom", 3)])
def test_eager_launches_what_is_written_in_it(shape, launches):
    names, _ = counted(built("Inference", shape))
    assert len(names) == launches, names


def test_packing_saves_a_launch():
    assert len(counted(built("Inference", "tiny", "packed_vendor"))[0]) == 4


def test_views_and_allocations_launch_nothing():
    x = torch.randn(8, 6)

    def call():
        return torch.empty(3), x.view(2, 24).t().unsqueeze(0).expand(3, 24, 2).detach()

    assert counted(Built(call, {}))[0] == []


def test_composites_count_as_what_they_call():
    x = torch.randn(8, 6)
    assert counted(Built(lambda: torch.nn.functional.linear(x, x), {}))[0] == ["aten::mm"]


def test_kernels_are_counted_once_two_looks_agree():
    looks = iter([["a"], ["a", "b"], ["a", "b"]])
    assert exact.settled(lambda: next(looks)) == ["a", "b"]


@pytest.mark.parametrize(("looks", "said"), [([[]], "sees no kernel"), ([["a"], ["b"]], "another")])
def test_a_profiler_that_sees_nothing_or_never_the_same_counts_nothing(looks, said):
    turn = itertools.cycle(looks)
    with pytest.raises(exact.NoCount, match=said):
        exact.settled(lambda: next(turn))


def test_peak_is_the_tensors_alive_at_once():
    shape = SHAPES["tiny"]
    _, peak = counted(built("Inference", "tiny"))
    # act(gate), up and their product are alive together.
    assert peak == 3 * shape.prompt * shape.intermediate * 4


def test_freed_memory_is_not_in_the_peak():
    def call():
        for _ in range(5):
            torch.ones(1000)

    assert counted(Built(call, {}))[1] == 4000


def test_saved_bytes_are_four_mids_and_the_input():
    shape = SHAPES["tiny"]
    mid, row = shape.prompt * shape.intermediate * 4, shape.prompt * shape.hidden * 4
    assert exact.saved_bytes(built("Training", "tiny")) == 4 * mid + row


def test_packed_weights_that_stay_are_counted():
    inputs = make_inputs(Combination("Inference", "tiny", "1", "fp32", "packed_vendor"), "cpu")
    shape = SHAPES["tiny"]
    kept = exact.kept_bytes(lambda: providers.build(inputs))
    assert kept == 2 * shape.hidden * shape.intermediate * 4


@pytest.mark.parametrize("provider", ["eager", "fused"])
@pytest.mark.parametrize("mode", ["Inference", "Training"])
def test_twice_is_the_same_to_the_digit(mode, provider):
    first, second = (built(mode, "tiny", provider) for _ in range(2))
    assert counted(first) == counted(second)
    if mode == "Training":
        assert exact.saved_bytes(first) == exact.saved_bytes(second)
