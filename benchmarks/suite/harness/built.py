"""What a provider is once it is built, and the plain module that most of them start from."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .inputs import Inputs, torch_dtype
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
    module.gate_proj = linear(inputs.gate_weight, None)
    module.up_proj = linear(inputs.up_weight, inputs.up_bias)
    module.down_proj = linear(inputs.down_weight, inputs.down_bias)
    return prepare(module, inputs)


def linear(weight: torch.Tensor | None, bias: torch.Tensor | None) -> nn.Module | None:
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
        act: Any
        gate_proj: Any
        up_proj: Any
        down_proj: Any

        def forward(self, x):
            if self.gate_proj is None:
                return self.down_proj(self.act(self.up_proj(x)))
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

    return EagerMLP


def prepare(module: nn.Module, inputs: Inputs) -> nn.Module:
    return module.train(inputs.combination.mode == "Training")


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """By the names of the inputs' weights."""
    return {name.replace("_proj.", "_"): tensor for name, tensor in module.named_parameters()}


def called(
    module: Any, inputs: Inputs, parameters: Mapping[str, torch.Tensor] | None = None
) -> Built:
    """A built provider around something that maps x to the output."""
    import torch

    x, combination = inputs.x, inputs.combination
    if combination.mode == "ChannelsLast":
        image = inputs.image
        return Built(lambda: _over_channels(module, image), {}, torch.no_grad)
    if combination.mode == "Inference":
        return Built(lambda: module(x), {}, torch.no_grad)
    if parameters is None:
        parameters = parameters_of(module)
    x = x.detach().requires_grad_(True)
    sources, d_output = [x, *parameters.values()], inputs.d_output
    computes = PROVIDERS[combination.provider].computes
    if computes and d_output is not None:
        d_output = d_output.to(torch_dtype(computes))

    def step() -> tuple:
        output = module(x)
        return output, *torch.autograd.grad(output, sources, d_output)

    return Built(step, dict(parameters))


def _over_channels(module: Any, image: torch.Tensor) -> torch.Tensor:
    """An MLP over the channels of an image: NHWC is another view of channels-last memory."""
    return module(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def eager(inputs: Inputs) -> Built:
    """What every other provider is compared with."""
    return called(plain_module(inputs), inputs)
