"""Each provider is right against float64, or says why it does not apply; a wrong one is caught."""

import contextlib
import sys
import types

import pytest
import torch

import fused_mlp
from benchmarks.suite.harness import providers, switches, verify
from benchmarks.suite.harness.inputs import make_inputs
from benchmarks.suite.harness.providers import NotApplicable
from benchmarks.suite.harness.shapes import PROVIDERS, Combination

# torch.compile takes seconds and a compiler; it is covered by the suite itself.
QUICK = [name for name, provider in PROVIDERS.items() if not provider.compiles]


def inputs_of(provider, mode="Inference", shape="tiny", dtype="fp32"):
    return make_inputs(Combination(mode, shape, "prompt", dtype, provider), "cpu")


MODELS = {"Inference": ["tiny", "dlrm_bottom"], "Training": ["tiny", "dlrm_bottom"]}
MODELS["ChannelsLast"] = ["convnext_t"]
TABLE = [
    (provider, mode, shape)
    for provider in QUICK
    for mode in PROVIDERS[provider].modes
    for shape in MODELS[mode]
]


@pytest.mark.parametrize(("provider", "mode", "shape"), TABLE)
def test_right_against_float64_or_not_applicable(provider, mode, shape):
    inputs = inputs_of(provider, mode, shape)
    try:
        built = providers.build(inputs)
    except NotApplicable as reason:
        pytest.skip(str(reason))
    with built.context():
        result = built.call()
    computes = PROVIDERS[provider].computes
    error = verify.Reference(inputs).check(result, list(built.parameters), computes)
    assert error < verify.FACTOR


def test_eager_is_as_far_from_float64_as_eager():
    inputs = inputs_of("eager", "Training")
    built = providers.build(inputs)
    ratio = verify.Reference(inputs).check(built.call(), list(built.parameters))
    assert ratio == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("spoil", ["scaled", "nan", "transposed"])
def test_a_wrong_result_is_caught(spoil, which, dtype):
    inputs = inputs_of("eager", "Training", dtype=dtype)
    built = providers.build(inputs)
    result = list(built.call())
    wrong = {
        "scaled": lambda t: t * 1.1,
        "nan": lambda t: torch.where(t == t.max(), torch.nan, t),
        "transposed": lambda t: t.t(),
    }
    result[which] = wrong[spoil](result[which])
    with pytest.raises(verify.WrongResult):
        verify.Reference(inputs).check(tuple(result), list(built.parameters))


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name.startswith("fused")])
def test_a_commit_without_the_api_is_not_applicable(monkeypatch, provider):
    old = types.ModuleType("fused_mlp")
    monkeypatch.setitem(sys.modules, "fused_mlp", old)
    with pytest.raises(NotApplicable, match="no FusedMLP"):
        providers.build(inputs_of(provider))


@pytest.mark.parametrize(
    ("provider", "said"), [("liger", "liger-kernel"), ("quack", "QuACK|quack")]
)
def test_what_is_not_installed_is_not_applicable(provider, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(NotApplicable, match=said):
        providers.build(inputs_of(provider, dtype="bf16"))


@pytest.mark.parametrize("provider", [name for name, p in PROVIDERS.items() if p.compiles])
def test_compiling_without_a_compiler_is_not_applicable(monkeypatch, provider):
    monkeypatch.setattr(switches.shutil, "which", lambda name: None)
    with pytest.raises(NotApplicable, match=r"C\+\+ compiler"):
        providers.build(inputs_of(provider))


def test_addmm_activation_says_what_it_lacks():
    with pytest.raises(NotApplicable, match="no gated form"):
        providers.build(inputs_of("addmm_activation"))
    with pytest.raises(NotApplicable, match="not gelu_tanh"):
        providers.build(inputs_of("addmm_activation", shape="gpt2"))


def test_a_forced_path_that_cannot_run_is_not_applicable(monkeypatch):
    class PathError(RuntimeError):
        pass

    @contextlib.contextmanager
    def use_path(path):
        raise PathError(f"{path} cannot run here")
        yield

    package = types.ModuleType("fused_mlp")
    package.FusedMLP, package.PathError, package.use_path = fused_mlp.FusedMLP, PathError, use_path
    monkeypatch.setitem(sys.modules, "fused_mlp", package)
    with pytest.raises(NotApplicable, match="epilogue cannot run here"):
        providers.build(inputs_of("fused_epilogue"))
