# NOTE to whoever edits this room now: the split into built/switches/rivals/providers (and Inputs.rounded,
# Reference.check(computes=), early/only in Provider) appeared at 05:08 from the lead. It is yours now: keep what helps,
# your table in shapes.py wins, delete what doubles yours (rounded/cast), and remove this note.
"""The ways to compute an MLP. Each is built from the same weights and called the same way."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import rivals, switches
from .built import Built, NotApplicable, called, eager, prepare
from .inputs import Inputs
from .shapes import PROVIDERS, SHAPES

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Built", "NotApplicable", "build", "eager"]


def _package() -> Any:
    try:
        package = importlib.import_module("fused_mlp")
    except ImportError as error:
        raise NotApplicable(f"fused_mlp cannot be imported: {error}") from error
    if not hasattr(package, "FusedMLP"):
        raise NotApplicable("this commit of fused_mlp has no FusedMLP")
    return package


def fused_module(inputs: Inputs) -> nn.Module:
    """`fused_mlp.FusedMLP` on the inputs' weights."""
    import torch
    from torch import nn

    shape = SHAPES[inputs.combination.shape]
    module = _package().FusedMLP(
        shape.hidden,
        shape.intermediate,
        activation=shape.activation,
        gated=shape.gated,
        bias=shape.bias,
        device=torch.device("meta"),
        dtype=inputs.x.dtype,
    )
    for name, tensor in inputs.weights.items():
        layer, _, kind = name.rpartition("_")
        setattr(getattr(module, f"{layer}_proj"), kind, nn.Parameter(tensor))
    if shape.bias and shape.gated:
        module.gate_proj.bias = None
    return prepare(module, inputs)


def fused(inputs: Inputs) -> Built:
    return called(fused_module(inputs), inputs)


def on_path(inputs: Inputs, path: str) -> Built:
    """`fused` on a path that its plan might not take."""
    package = _package()
    built = fused(inputs)
    if not hasattr(package, "use_path"):
        raise NotApplicable("this commit of fused_mlp has no use_path")
    inner = built.context

    @contextlib.contextmanager
    def forced():
        with inner(), package.use_path(path):
            yield

    built.context = forced
    _refuse_early(built, package)
    return built


def fused_autocast(inputs: Inputs) -> Built:
    return switches.under_autocast(fused_module(inputs), inputs)


def fused_compile(inputs: Inputs) -> Built:
    return switches.compiled(fused_module(inputs), inputs)


def fused_aoti(inputs: Inputs) -> Built:
    return called(switches.packaged(fused_module(inputs), inputs), inputs)


def _refuse_early(built: Built, package: Any) -> None:
    """A path that says it cannot run is not applicable; any other error is a failure."""
    refusal = getattr(package, "PathError", None)
    if refusal is None:
        refusal = getattr(importlib.import_module("fused_mlp.plan"), "PathError", NotApplicable)
    try:
        with built.context():
            built.call()
    except refusal as error:
        raise NotApplicable(str(error)) from error


_BUILDERS: dict[str, Callable[[Inputs], Built]] = {
    "eager": eager,
    "fused": fused,
    "compile": switches.compile,
    "inference_mode": switches.inference_mode,
    "autocast": switches.autocast,
    "aoti": switches.aoti,
    "torchscript": switches.torchscript,
    "conv1x1": switches.conv1x1,
    "conv1x1_nchw": switches.conv1x1_nchw,
    "compile_max_autotune": switches.compile_max_autotune,
    "packed_vendor": rivals.packed_vendor,
    "addmm_activation": rivals.addmm_activation,
    "fused_compile": fused_compile,
    "fused_autocast": fused_autocast,
    "fused_aoti": fused_aoti,
    "liger": rivals.liger,
    "quack": rivals.quack,
}


def build(inputs: Inputs) -> Built:
    """Build the combination's provider; NotApplicable where it cannot run, any error it raises."""
    name = inputs.combination.provider
    if path := PROVIDERS[name].path:
        return on_path(inputs, path)
    return _BUILDERS[name](inputs)
