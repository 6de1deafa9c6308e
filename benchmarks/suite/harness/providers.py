"""The ways to compute an MLP. Each is built from the same weights and called the same way."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .inputs import Inputs
from .shapes import PROVIDERS, SHAPES

if TYPE_CHECKING:
    import torch
    from torch import nn


class NotApplicable(Exception):
    """A provider that cannot run a combination here; the message is the reason."""


@dataclass
class Built:
    """A provider ready to be called: `call()` is one forward, or one forward and backward.

    A forward returns the output, forward and backward a tuple: output, x's gradient, then those
    of `parameters` in order. `context` holds for as long as calls are made; entering it is not
    part of a call.
    """

    call: Callable[[], Any]
    parameters: dict[str, torch.Tensor]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def activation_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    from torch.nn import functional as F

    def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    known: dict[str, Callable[..., torch.Tensor]] = {"gelu": F.gelu, "gelu_tanh": gelu_tanh}
    known.update(silu=F.silu, relu=F.relu)
    return known[name]


def plain_module(inputs: Inputs) -> nn.Module:
    """The MLP as anyone would write it: nn.Linear children named as in Hugging Face models."""
    module: Any = _eager_class()()
    shape = SHAPES[inputs.combination.shape]
    module.act = activation_of(shape.activation)
    module.gate_proj = _linear(inputs.gate_weight, None)
    module.up_proj = _linear(inputs.up_weight, inputs.up_bias)
    module.down_proj = _linear(inputs.down_weight, inputs.down_bias)
    return _prepare(module, inputs)


def _linear(weight: torch.Tensor | None, bias: torch.Tensor | None) -> nn.Module | None:
    from torch import nn

    if weight is None:
        return None
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


# One class for all instances, so that torch.compile compiles it once for a rotation of weights.
@functools.cache
def _eager_class() -> type:
    from torch import nn

    class EagerMLP(nn.Module):
        def forward(self, x):
            if self.gate_proj is None:
                return self.down_proj(self.act(self.up_proj(x)))
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

    return EagerMLP


def _prepare(module: nn.Module, inputs: Inputs) -> nn.Module:
    return module.train(inputs.combination.mode == "Training")


def _called(
    module: Any, inputs: Inputs, parameters: Mapping[str, torch.Tensor] | None = None
) -> Built:
    """A built provider around something that maps x to the output."""
    import torch

    x = inputs.x
    if inputs.combination.mode == "Inference":
        return Built(lambda: module(x), {}, torch.no_grad)
    if parameters is None:
        named = module.named_parameters()
        parameters = {name.replace("_proj.", "_"): tensor for name, tensor in named}
    x = x.detach().requires_grad_(True)
    sources, d_output = [x, *parameters.values()], inputs.d_output

    def step() -> tuple:
        output = module(x)
        return output, *torch.autograd.grad(output, sources, d_output)

    return Built(step, dict(parameters))


# One builder a provider, found by its name in the shape table.


def eager(inputs: Inputs) -> Built:
    return _called(plain_module(inputs), inputs)


def inference_mode(inputs: Inputs) -> Built:
    import torch

    built = _called(plain_module(inputs), inputs)
    built.context = torch.inference_mode
    return built


def _compiler_missing(device: str) -> str | None:
    if device == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if not (shutil.which(compiler) or shutil.which("clang++")):
            return f"torch.compile on a CPU needs a C++ compiler, and {compiler} is not installed"
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if not os.path.exists(header):
            return "torch.compile on a CPU needs Python.h, and Python's headers are not installed"
    return None


def compile(inputs: Inputs, mode: str | None = None) -> Built:
    import torch
    import torch._inductor.config as settings

    missing = _compiler_missing(inputs.x.device.type)
    if missing:
        raise NotApplicable(missing)
    # Without it a profiler sees nothing inside a compiled graph on a CPU; costs 50 ns a kernel.
    settings.cpp.enable_kernel_profile = True
    settings.compile_threads = 1
    module = plain_module(inputs)
    parameters = {name.replace("_proj.", "_"): tensor for name, tensor in module.named_parameters()}
    return _called(torch.compile(module, mode=mode, dynamic=False), inputs, parameters)


def compile_max_autotune(inputs: Inputs) -> Built:
    # Its CUDA graphs would own the output's memory and hide the launches that are counted here.
    return compile(inputs, "max-autotune-no-cudagraphs")


def packed_vendor(inputs: Inputs) -> Built:
    import torch
    from torch.nn import functional as F

    if inputs.gate_weight is None:
        raise NotApplicable("a plain MLP has nothing to pack: it is eager")
    packed = torch.cat([inputs.gate_weight, inputs.up_weight])
    down, act = inputs.down_weight, activation_of(SHAPES[inputs.combination.shape].activation)
    training = inputs.combination.mode == "Training"
    leaves = [tensor.detach().requires_grad_(training) for tensor in (packed, down)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, leaves[0]).chunk(2, dim=-1)
        return F.linear(act(gate) * up, leaves[1])

    return _called(forward, inputs, {"packed_weight": leaves[0], "down_weight": leaves[1]})


def addmm_activation(inputs: Inputs) -> Built:
    import torch
    from torch.nn import functional as F

    shape, device = SHAPES[inputs.combination.shape], inputs.x.device.type
    gelu = "gelu_tanh" if device == "cuda" else "gelu"
    if shape.gated or inputs.up_bias is None:
        raise NotApplicable("torch._addmm_activation is one GEMM with a bias: no gated form")
    if shape.activation not in (gelu, "relu"):
        raise NotApplicable(
            f"torch._addmm_activation on {device} has relu and {gelu}, not {shape.activation}"
        )
    weight, bias = inputs.up_weight.t(), inputs.up_bias
    down, down_bias = inputs.down_weight, inputs.down_bias
    use_gelu = shape.activation != "relu"

    def forward(x: torch.Tensor) -> torch.Tensor:
        mid = torch._addmm_activation(bias, x, weight, use_gelu=use_gelu)
        return F.linear(mid, down, down_bias)

    return _called(forward, inputs, {})


def fused(inputs: Inputs, path: str | None = None) -> Built:
    import torch
    from torch import nn

    try:
        package = importlib.import_module("fused_mlp")
    except ImportError as error:
        raise NotApplicable(f"fused_mlp cannot be imported: {error}") from error
    if not hasattr(package, "FusedMLP"):
        raise NotApplicable("this commit of fused_mlp has no FusedMLP")
    shape = SHAPES[inputs.combination.shape]
    module = package.FusedMLP(
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
    built = _called(_prepare(module, inputs), inputs)
    if path is not None:
        inner = built.context
        if not hasattr(package, "use_path"):
            raise NotApplicable("this commit of fused_mlp has no use_path")

        @contextlib.contextmanager
        def forced():
            with inner(), package.use_path(path):
                yield

        built.context = forced
        _refuse_early(built, package)
    return built


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


def liger(inputs: Inputs) -> Built:
    classes = {"silu": "LigerSwiGLUMLP", "gelu_tanh": "LigerGEGLUMLP"}
    modules = {"silu": "swiglu", "gelu_tanh": "geglu"}
    shape = SHAPES[inputs.combination.shape]
    if not shape.gated or shape.activation not in classes:
        raise NotApplicable(f"Liger has no MLP with {shape.activation}, gated: {shape.gated}")
    package = _optional(f"liger_kernel.transformers.{modules[shape.activation]}", "liger-kernel")
    config = SimpleNamespace(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        hidden_act={"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[shape.activation],
        mlp_bias=False,
    )
    import torch

    with torch.device("meta"):
        module = getattr(package, classes[shape.activation])(config)
    module.gate_proj = _linear(inputs.gate_weight, None)
    module.up_proj = _linear(inputs.up_weight, None)
    module.down_proj = _linear(inputs.down_weight, None)
    return _called(_prepare(module, inputs), inputs)


def quack(inputs: Inputs) -> Built:
    import torch
    from torch import nn

    shape = SHAPES[inputs.combination.shape]
    names = {(True, "silu"): "swiglu", (False, "gelu_tanh"): "gelu_tanh_approx"}
    names[False, "relu"], names[False, "silu"] = "relu", "silu"
    name = names.get((shape.gated, shape.activation))
    if name is None:
        raise NotApplicable(f"QuACK has no MLP with {shape.activation}, gated: {shape.gated}")
    if inputs.combination.dtype == "fp32":
        raise NotApplicable("QuACK's GEMMs take bf16 and fp16")
    if inputs.combination.mode == "Training" and shape.bias:
        raise NotApplicable("QuACK trains without biases only")
    module = _optional("quack.mlp", "quack-kernels").MLP(
        shape.hidden,
        shape.intermediate,
        bias1=shape.bias,
        bias2=shape.bias,
        activation=name,
        device="meta",
        dtype=inputs.x.dtype,
    )
    first = inputs.up_weight
    if inputs.gate_weight is not None:
        # QuACK's gated layout: rows of gate and up in turn.
        first = torch.stack([inputs.gate_weight, first], dim=1).flatten(0, 1)
    module.fc1.weight, module.fc2.weight = nn.Parameter(first), nn.Parameter(inputs.down_weight)
    if inputs.up_bias is not None and inputs.down_bias is not None:
        module.fc1.bias = nn.Parameter(inputs.up_bias)
        module.fc2.bias = nn.Parameter(inputs.down_bias)
    name = "up_weight" if inputs.gate_weight is None else "interleaved_weight"
    parameters = {name: module.fc1.weight, "down_weight": module.fc2.weight}
    return _called(_prepare(module, inputs), inputs, parameters)


def _optional(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotApplicable(f"{distribution} is not installed ({error})") from error


def build(inputs: Inputs) -> Built:
    """Build the combination's provider; NotApplicable where it cannot run, any error it raises."""
    name = inputs.combination.provider
    path = PROVIDERS[name].path
    return fused(inputs, path) if path else globals()[name](inputs)
