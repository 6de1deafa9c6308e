"""The table of shapes, and the rule that says what a machine leaves out."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.suite.harness import selection, shapes
from benchmarks.suite.harness.inputs import make_inputs
from benchmarks.suite.harness.providers import build
from benchmarks.suite.harness.shapes import SIZES, Combination

CASES = list(itertools.product(shapes.MODES, ("cpu", "cuda")))


@pytest.mark.parametrize(("mode", "kind"), CASES)
def test_each_size_holds_the_smaller_one(mode, kind):
    quick, default, full = (set(shapes.chosen(mode, kind, SIZES[name])) for name in SIZES)
    assert quick < default < full


@pytest.mark.parametrize(("mode", "kind"), CASES)
def test_each_combination_is_measured_or_left_out_with_a_reason(mode, kind):
    measured = set(shapes.chosen(mode, kind, SIZES["default"]))
    for combination in shapes.combinations(mode):
        reason = shapes.left_out(combination, kind, SIZES["default"])
        assert (reason is None) == (combination in measured)
        assert reason is None or len(reason) > 10


def test_eager_and_fused_are_compared_at_every_size_on_every_device():
    for kind, size in itertools.product(("cpu", "cuda"), SIZES.values()):
        providers = {c.provider for c in shapes.chosen("Inference", kind, size)}
        assert {"eager", "fused"} <= providers


def test_asv_starts_no_more_processes_than_a_default_run_can_afford():
    # One value costs asv some 15 ms on the machine that this was written on.
    names = ("latency", "cold_start", "throughput", "roofline", "peak_memory", "launches", "error")
    values = sum(
        len(selection.selected(f"latency.{mode}.track_{name}", "cpu", "default", ""))
        for mode in shapes.MODES
        for name in names
    )
    assert values < 1300


@pytest.mark.parametrize(
    ("mode", "shape", "provider"),
    [
        ("Inference", "dlrm_bottom", "eager"),
        ("Inference", "tiny", "eager"),
        # No module in it: torch's counter cannot follow autograd.grad through one.
        ("Training", "tiny", "packed_vendor"),
    ],
)
def test_flop_is_what_torch_counts(mode, shape, provider):
    combination = Combination(mode, shape, "prompt", "fp32", provider)
    built = build(make_inputs(combination, "cpu"))
    with built.context(), FlopCounterMode(display=False) as counter:
        built.call()
    assert counter.get_total_flops() == combination.flop


def test_least_bytes_is_what_the_tensors_hold():
    combination = Combination("Inference", "tiny", "16", "bf16", "eager")
    inputs = make_inputs(combination, "cpu")
    tensors = [inputs.x, inputs.x, inputs.up_weight, inputs.gate_weight, inputs.down_weight]
    assert combination.least_bytes == sum(t.nbytes for t in tensors)


def test_inputs_are_the_same_numbers_every_time():
    combination = Combination("Training", "tiny", "prompt", "fp32", "eager")
    first, second = make_inputs(combination, "cpu"), make_inputs(combination, "cpu")
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.d_output, second.d_output)
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name])
        assert tensor.abs().min() > 0, "zeros would run faster than real data"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("shape=llama9", "unknown shape 'llama9'"),
        ("provider=eagre", "unknown provider 'eagre'"),
        ("metric=speed", "unknown metric 'speed'"),
        ("tokens=17", "unknown tokens '17'"),
        ("mode=Backward", "unknown mode 'Backward'"),
        ("shape=", "unknown shape ''"),
        ("colour=red", "unknown filter 'colour=red'"),
        ("tiny", "unknown filter 'tiny'"),
    ],
)
def test_an_unknown_name_in_a_filter_is_named_in_one_line(text, named):
    with pytest.raises(ValueError, match="unknown") as error:
        selection.parse_filter(text)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_filter_that_selects_nothing_says_which_rule_left_it_out():
    assert not selection.wanted("cpu", SIZES["quick"], "shape=llama3_8b")
    assert "MB a call" in selection.why_nothing("cpu", SIZES["quick"], "shape=llama3_8b")


def test_a_filter_leaves_out_what_is_not_of_its_tables():
    name = "quantization.Digits.track_accuracy"
    assert selection.selected(name, "cpu", "quick", "shape=tiny") == []
    with pytest.raises(KeyError):
        selection.selected(name, "cpu", "quick", "")


def test_unknown_sizes_and_devices_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="known: quick, default, full"):
        shapes.size_of("huge")
    monkeypatch.setenv("FUSED_MLP_DEVICE", "tpu")
    with pytest.raises(ValueError, match="known: cpu, cuda"):
        shapes.device_kind()


@pytest.mark.parametrize(("node", "usable", "kind"), [(1, 1, "cuda"), (1, 0, "cpu"), (0, 1, "cpu")])
def test_a_gpu_is_one_that_has_a_node_and_that_torch_can_use(monkeypatch, node, usable, kind):
    monkeypatch.delenv("FUSED_MLP_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shapes.os.path, "exists", lambda path: bool(node) and "nvidiactl" in path)
    monkeypatch.setattr(shapes, "_torch_sees_gpu", lambda: bool(usable))
    assert shapes.device_kind() == kind


def test_workers_measure_what_asv_will_ask_for_and_no_more(tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    params = ("tiny", "1", "fp32", "eager")
    selection.write_plan(
        plan,
        {
            "latency.Inference.track_latency": [params],
            "launches.Inference.track_launches": [params],
            "latency.Training.track_latency": [],
        },
    )
    monkeypatch.setenv("FUSED_MLP_PLAN", str(plan))
    wanted = selection.wanted("cpu", SIZES["default"])
    assert wanted == {Combination("Inference", *params): {"latency", "launches"}}


def test_a_metric_that_a_device_lacks_starts_no_process():
    for name in ("energy", "reserved_memory"):
        assert selection.selected(f"latency.Inference.track_{name}", "cpu", "default", "") == []
        assert selection.selected(f"latency.Inference.track_{name}", "cuda", "default", "")
