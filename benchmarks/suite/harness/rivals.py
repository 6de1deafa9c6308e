"""Other ways to write or buy a fused MLP: two operators of PyTorch's, and the libraries that have one."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from .built import Built, NotApplicable, activation_of, called, linear, prepare
from .inputs import Inputs
from .shapes import SHAPES


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

    return called(forward, inputs, {"packed_weight": leaves[0], "down_weight": leaves[1]})


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

    return called(forward, inputs, {})


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
    module.gate_proj = linear(inputs.gate_weight, None)
    module.up_proj = linear(inputs.up_weight, None)
    module.down_proj = linear(inputs.down_weight, None)
    return called(prepare(module, inputs), inputs)


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
    return called(prepare(module, inputs), inputs, parameters)


def _optional(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotApplicable(f"{distribution} is not installed ({error})") from error
