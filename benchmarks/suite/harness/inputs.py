"""Inputs of one combination: seeded and random, since zeros run faster than real data."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .shapes import SHAPES, Combination

if TYPE_CHECKING:
    import torch


@dataclass
class Inputs:
    """Weights are as in ``nn.Linear``; absent ones are None. `x` and `d_output` are
    ``(tokens, hidden)``."""

    combination: Combination
    x: torch.Tensor
    d_output: torch.Tensor | None
    up_weight: torch.Tensor
    down_weight: torch.Tensor
    gate_weight: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        names = ("up_weight", "down_weight", "gate_weight", "up_bias", "down_bias")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def copy(self) -> Inputs:
        """The same values in other memory: the next buffer of a rotation."""
        clones = {name: tensor.clone() for name, tensor in self.weights.items()}
        fields = {name: clones.get(name) for name in _WEIGHTS}
        d_output = None if self.d_output is None else self.d_output.clone()
        return Inputs(self.combination, self.x.clone(), d_output, **fields)  # type: ignore[arg-type]

    def rounded(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype."""
        weights = {name: tensor.to(dtype) for name, tensor in self.weights.items()}
        fields = {name: weights.get(name) for name in _WEIGHTS}
        d_output = None if self.d_output is None else self.d_output.to(dtype)
        return Inputs(self.combination, self.x.to(dtype), d_output, **fields)  # type: ignore[arg-type]

    @property
    def image(self) -> torch.Tensor:
        """x as ``(images, hidden, height, width)`` in channels-last memory: a view of it."""
        size = SHAPES[self.combination.shape].image
        assert size is not None
        return self.x.view(-1, *size, self.x.shape[-1]).permute(0, 3, 1, 2)

    @property
    def nbytes(self) -> int:
        tensors = [self.x, *self.weights.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_WEIGHTS = ("up_weight", "down_weight", "gate_weight", "up_bias", "down_bias")


def torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def make_inputs(combination: Combination, device: str) -> Inputs:
    """The same numbers for every provider, process and run of one group."""
    import torch

    shape, dtype = SHAPES[combination.shape], torch_dtype(combination.dtype)
    seed = zlib.crc32(f"{combination.shape} {combination.tokens}".encode())
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(*sizes, generator=generator, device=device)
        return numbers.mul_(scale).to(dtype)

    hidden, intermediate, tokens = shape.hidden, shape.intermediate, combination.count
    training = combination.mode == "Training"
    return Inputs(
        combination,
        x=normal(tokens, hidden),
        d_output=normal(tokens, hidden) if training else None,
        up_weight=normal(intermediate, hidden, scale=hidden**-0.5),
        down_weight=normal(hidden, intermediate, scale=intermediate**-0.5),
        gate_weight=normal(intermediate, hidden, scale=hidden**-0.5) if shape.gated else None,
        up_bias=normal(intermediate, scale=0.1) if shape.bias else None,
        down_bias=normal(hidden, scale=0.1) if shape.bias else None,
    )
