"""MLPs to test with, and the one rule for how wrong a result may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fused_mlp
from fused_mlp import reference


@dataclass
class Problem:
    """Inputs in some dtype; all of them differentiable."""

    x: Tensor
    weights: dict[str, Tensor | None]
    activation: str

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, *(t for t in self.weights.values() if t is not None)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Problem:
        def new(t: Tensor | None) -> Tensor | None:
            return None if t is None else function(t.detach()).requires_grad_()

        return Problem(new(self.x), {k: new(t) for k, t in self.weights.items()}, self.activation)

    def to(self, dtype: torch.dtype) -> Problem:
        return self.map(lambda t: t.to(dtype))

    def reference(self) -> Tensor:
        return reference.mlp(self.x, **self.weights, activation=self.activation)

    def fused(self, **kwargs) -> Tensor:
        return fused_mlp.fused_mlp(self.x, **self.weights, activation=self.activation, **kwargs)


def problem(
    tokens: int,
    hidden: int,
    intermediate: int,
    *,
    gated: bool = True,
    bias: bool = True,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        t = torch.randn(*size, generator=generator, dtype=torch.float64) * scale
        return t.to(dtype).requires_grad_()

    weights = {
        "up_weight": random(intermediate, hidden, scale=hidden**-0.5),
        "down_weight": random(hidden, intermediate, scale=intermediate**-0.5),
        "gate_weight": random(intermediate, hidden, scale=hidden**-0.5) if gated else None,
        "up_bias": random(intermediate) if bias else None,
        "gate_bias": random(intermediate) if bias and gated else None,
        "down_bias": random(hidden) if bias else None,
    }
    return Problem(random(tokens, hidden), weights, activation)


def results(p: Problem, y: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    return [y.detach(), *torch.autograd.grad(y, p.tensors, dy.to(y.dtype))]


FEW = 256  # elements


def assert_as_exact_as_eager(
    got: list[Tensor], eager: list[Tensor], exact: list[Tensor], sizes: list[Tensor]
) -> None:
    """Every error against float64 is at most twice eager's own, and one rounding of the largest
    value.

    A result of few elements can be nearly exact by luck, or tiny because its terms cancel. For
    those, the largest value is that of ``sizes``, the same MLP of absolute values, and eager's
    error the worst relative one of all its results.
    """
    scales = [
        max((c if c.numel() >= FEW else s).abs().max().item(), 1e-300) if c.numel() else 1.0
        for c, s in zip(exact, sizes, strict=True)
    ]
    relative = [_error(b, c) / s for b, c, s in zip(eager, exact, scales, strict=True)]
    for i, (a, b, c, scale) in enumerate(zip(got, eager, exact, scales, strict=True)):
        assert a.dtype == b.dtype
        assert a.shape == c.shape
        own = relative[i] if c.numel() >= FEW else max(relative)
        if a.dtype == torch.float64:
            own = max(own, 4 * torch.finfo(a.dtype).eps)  # the yardstick is rounded as well
        error, allowed = _error(a, c) / scale, 2 * own + torch.finfo(a.dtype).eps
        assert error <= allowed, (
            f"result {i}: error {error:.3g} is {error / allowed:.2f} times what is allowed"
        )


def _error(a: Tensor, exact: Tensor) -> float:
    return (a.double() - exact).abs().max().item() if exact.numel() else 0.0


def assert_path_is_exact(p: Problem, path: str, **kwargs) -> None:
    """Forward, and backward where the path has one, of ``p`` on ``path``."""
    exact = p.to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(*p.x.shape[:-1], p.weights["down_weight"].shape[0], generator=generator).to(
        p.x.dtype
    )
    want = results(exact, exact.reference(), dy)
    eager = results(p, p.reference(), dy)
    absolute = exact.map(torch.abs)
    sizes = results(absolute, absolute.reference(), dy.abs())
    with torch.no_grad(), fused_mlp.use_path(path):
        assert_as_exact_as_eager([p.fused(**kwargs)], eager[:1], want[:1], sizes[:1])
    if path != "decode":
        with fused_mlp.use_path(path):
            assert_as_exact_as_eager(results(p, p.fused(**kwargs), dy), eager, want, sizes)
