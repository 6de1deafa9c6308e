"""PyTorch's switches: autocast judged by what it computes in, images by copies, packages by use."""

import gc
import shutil

import pytest
import torch

from benchmarks.suite.harness import built, exact, providers, selection, shapes, switches, verify
from benchmarks.suite.harness.inputs import make_inputs
from benchmarks.suite.harness.shapes import PROVIDERS, SIZES, Combination
from benchmarks.suite.harness.worker import Worker

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def inputs_of(provider, mode="Inference", shape="tiny", tokens="prompt"):
    return make_inputs(Combination(mode, shape, tokens, "fp32", provider), "cpu")


@pytest.mark.parametrize("provider", ["autocast", "fused_autocast"])
@pytest.mark.parametrize("mode", ["Inference", "Training"])
def test_bf16_arithmetic_on_fp32_weights_is_held_to_bf16(provider, mode):
    inputs = inputs_of(provider, mode)
    made = providers.build(inputs)
    with made.context():
        result = made.call()
    output, *gradients = result if isinstance(result, tuple) else (result,)
    assert output.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in gradients} <= {torch.float32}, "as the weights are"
    reference, names = verify.Reference(inputs), list(made.parameters)
    assert 0.3 < reference.check(result, names, "bf16") < 2
    with pytest.raises(verify.WrongResult):
        reference.check(result if gradients else output.float(), names)
    wrong = (output * 1.05, *gradients) if gradients else output * 1.05
    with pytest.raises(verify.WrongResult):
        reference.check(wrong, names, "bf16")


def test_each_call_under_autocast_casts_the_weights_anew():
    made = providers.build(inputs_of("autocast", "Training"))
    with made.context():
        made.call()
        with torch.no_grad():
            made.parameters["down_weight"].zero_()
        assert made.call()[0].abs().max() == 0


def test_an_image_is_a_view_in_channels_last_memory():
    inputs = inputs_of("eager", "ChannelsLast", "convnext_t")
    assert inputs.image.shape == (1, 384, 14, 14)
    assert inputs.image.is_contiguous(memory_format=torch.channels_last)
    assert inputs.image.data_ptr() == inputs.x.data_ptr()


@pytest.mark.parametrize("provider", ["eager", "fused", "conv1x1"])
def test_an_mlp_over_channels_copies_nothing(provider):
    made = providers.build(inputs_of(provider, "ChannelsLast", "convnext_t"))
    with made.context():
        result = made.call()
        made.call()
        launches, _ = exact.launches_and_peak(made, "cpu")
    assert launches.copies == 0, launches.names
    assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("layout", "copies"), [("contiguous", 1), ("permute", 0)])
def test_a_copy_from_one_layout_to_another_is_counted(layout, copies):
    image = inputs_of("eager", "ChannelsLast", "convnext_t").image
    call = image.contiguous if layout == "contiguous" else lambda: image.permute(0, 2, 3, 1)
    launches, _ = exact.launches_and_peak(built.Built(call, {}), "cpu")
    assert launches.copies == copies


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("Memcpy DtoD (Device -> Device)", 1),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", 1),
        ("void cudnn::nchwToNhwcKernel<float>", 1),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", 0),
        ("triton_glu_gemm", 0),
    ],
)
def test_copies_among_kernels(name, copies):
    assert exact.Launches([name], "kernels").copies == copies


def test_copies_are_a_metric_of_images_alone():
    image = Combination("ChannelsLast", "convnext_t", "prompt", "fp32", "eager")
    assert selection.absent(image, "copies", "cpu") is None
    tokens = Combination("Inference", "tiny", "prompt", "fp32", "eager")
    assert "layout" in selection.absent(tokens, "copies", "cpu")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_default_run_looks_at_every_mode_and_a_quick_one_at_none_more(kind):
    def measured(size):
        return [c for mode in shapes.MODES for c in shapes.chosen(mode, kind, SIZES[size])]

    default = {(c.mode, c.provider) for c in measured("default")}
    modes = ("inference_mode", "autocast", "fused_autocast", "aoti", "torchscript")
    assert {("Inference", name) for name in modes} <= default
    assert {("Training", "autocast"), ("Training", "fused_autocast")} <= default
    assert {("ChannelsLast", name) for name in ("eager", "fused", "conv1x1")} <= default
    assert {c.provider for c in measured("quick")} == {"eager", "fused"}
    assert {c.mode for c in measured("quick")} == {"Inference", "Training"}
    # What a sample is compared with is measured beside it.
    for c in measured("default"):
        eager = Combination(c.mode, c.shape, c.tokens, c.dtype, "eager")
        assert eager in measured("default"), c


def test_autocast_is_for_weights_in_fp32():
    combination = Combination("Inference", "article", "16", "bf16", "autocast")
    assert "weights in fp32" in shapes.left_out(combination, "cuda", SIZES["full"])
    assert Combination("Inference", "article", "16", "fp32", "autocast").computes == "bf16"


def test_a_package_is_another_for_other_code_sizes_and_dtypes(monkeypatch, tmp_path):
    inputs = inputs_of("aoti")
    module = built.plain_module(inputs)
    key = switches._key(module, inputs)
    assert switches._key(built.plain_module(inputs.copy()), inputs) == key
    assert switches._key(module, inputs_of("aoti", tokens="16")) == key, "any number of tokens"
    assert switches._key(module, inputs.rounded(torch.bfloat16)) != key
    assert switches._key(module, inputs_of("aoti", shape="gpt2")) != key
    source = tmp_path / "module.py"
    source.write_text("changed")
    monkeypatch.setattr(switches.inspect, "getfile", lambda _: str(source))
    assert switches._key(module, inputs) != key


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("provider", ["aoti", "fused_aoti"])
def test_one_package_serves_every_number_of_tokens_and_all_weights(provider, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    providers.build(inputs_of(provider))
    monkeypatch.delattr(torch._inductor, "aoti_compile_and_package")
    for tokens in shapes.TOKENS:
        inputs = inputs_of(provider, tokens=tokens)
        for factor in (1, 2):
            inputs.down_weight.mul_(factor)
            made = providers.build(inputs)
            with made.context():
                result = made.call()
            assert verify.Reference(inputs).check(result, []) < verify.FACTOR


def test_torchscript_of_a_torch_without_it_is_not_applicable(monkeypatch):
    monkeypatch.delattr(torch.jit, "freeze")
    with pytest.raises(built.NotApplicable, match=r"has no torch\.jit\.freeze"):
        providers.build(inputs_of("torchscript"))


@pytest.mark.parametrize(
    ("raised", "event", "said"),
    [
        (RuntimeError("no symbol"), "failure", "RuntimeError: no symbol"),
        (built.NotApplicable("no compiler"), "absent", "no compiler"),
    ],
)
def test_a_switch_that_does_not_build_leaves_a_line_and_the_others(
    monkeypatch, raised, event, said
):
    def fail(inputs):
        raise raised

    monkeypatch.setitem(providers._BUILDERS, "torchscript", fail)
    job = {"device": "cpu", "exact": True, "threads": 1, "prepare": True, "combinations": []}
    worker = Worker(job)
    gc.unfreeze()  # a worker process keeps what it imported for good; a test's does not
    lines = [
        worker.line(Combination("Inference", "tiny", "16", "fp32", name), {"latency"})
        for name in ("torchscript", "inference_mode")
    ]
    assert lines[0]["event"] == event
    assert said in (lines[0].get("text"), lines[0].get("reason"))
    assert lines[1]["event"] == "result"


def test_every_provider_has_one_builder():
    paths = {name for name, provider in PROVIDERS.items() if provider.path}
    assert set(providers._BUILDERS) | paths == set(PROVIDERS)
    assert not set(providers._BUILDERS) & paths
