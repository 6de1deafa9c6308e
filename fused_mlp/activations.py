"""Each activation once: its names, its eager form, its gradient, and both of them in Triton.

Everything that needs to know an activation asks here. The Triton functions take fp32 and return
fp32; the activation is a compile-time string, so a kernel holds the code of exactly one of them.
Where Triton is missing (it has no wheel for the platform) the eager parts work all the same.

Written so that no step overflows for inputs whose result is finite: with ``s = 1 / (1 + exp(-z))``,
a large ``exp`` becomes an exact 0 or 1 instead of a NaN. ``gelu_tanh`` uses ``(1 + tanh(u)) / 2 =
sigmoid(2u)``, which also avoids the cancellation in ``1 + tanh(u)`` for negative inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a platform with no Triton wheel: the eager and onednn paths serve
    triton = None

_SQRT_HALF = math.sqrt(0.5)
_RSQRT_TAU = 1 / math.sqrt(2 * math.pi)
_TWO_SQRT_2_PI = 2 * math.sqrt(2 / math.pi)  # gelu_tanh(x) = x * sigmoid(2u); this is 2u's factor
_CUBIC = 0.044715
_QUICK = 1.702  # https://github.com/hendrycks/GELUs


@dataclass(frozen=True)
class Activation:
    """One activation function.

    Attributes:
        name: the name the package uses; also the compile-time constant that selects the Triton
            code.
        aliases: other names for exactly the same function.
        eager: tensor → tensor, in plain PyTorch. The specification.
        backward: ``(grad, x)`` → ``grad * eager'(x)``, as PyTorch's own autograd computes it.
        onednn: ``(attr, algorithm)`` of oneDNN's fused linear, or None where it has no such post-
            op.
    """

    name: str
    eager: Callable[[Tensor], Tensor] = field(repr=False)
    backward: Callable[[Tensor, Tensor], Tensor] = field(repr=False)
    aliases: tuple[str, ...] = ()
    onednn: tuple[str, str] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.eager(x)

    def derivative(self, x: Tensor) -> Tensor:
        """The derivative at ``x``, elementwise."""
        return self.backward(torch.ones_like(x), x)


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate="none")


def _gelu_tanh_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(grad, x)


def _relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, x, 0)


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _relu2_backward(grad: Tensor, x: Tensor) -> Tensor:
    return _relu_backward(grad * (2 * torch.relu(x)), x)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_QUICK * x)


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(_QUICK * x)
    return grad * (s + _QUICK * x * (s * (1 - s)))


def _sigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward(grad, torch.sigmoid(x))


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("gelu", torch.nn.functional.gelu, _gelu_backward, onednn=("gelu", "none")),
        Activation(
            "gelu_tanh",
            lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            _gelu_tanh_backward,
            aliases=("gelu_pytorch_tanh", "gelu_new"),
            onednn=("gelu", "tanh"),
        ),
        Activation(
            "silu",
            torch.nn.functional.silu,
            _silu_backward,
            aliases=("swish",),
            onednn=("swish", ""),
        ),
        Activation("relu", torch.relu, _relu_backward, onednn=("relu", "")),
        Activation("relu2", _relu2, _relu2_backward),
        Activation("quick_gelu", _quick_gelu, _quick_gelu_backward),
        Activation("sigmoid", torch.sigmoid, _sigmoid_backward, onednn=("sigmoid", "")),
        Activation("identity", lambda x: x, lambda grad, x: grad, onednn=("none", "")),
    )
}
_BY_NAME = {n: a for a in ACTIVATIONS.values() for n in (a.name, *a.aliases)}


def names() -> list[str]:
    """Every accepted name, aliases included."""
    return list(_BY_NAME)


def get(name: str | Activation) -> Activation:
    """The activation called ``name``, which may be an alias.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.

    >>> get("swish").name
    'silu'
    """
    if isinstance(name, Activation):
        return name
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        raise ValueError(
            f"unknown activation {name!r}; known are {', '.join(sorted(_BY_NAME))}"
        ) from None


if triton is not None:
    # Triton reads globals of a jit function only when they are constexpr.
    SQRT_HALF = tl.constexpr(_SQRT_HALF)
    RSQRT_TAU = tl.constexpr(_RSQRT_TAU)
    TWO_SQRT_2_PI = tl.constexpr(_TWO_SQRT_2_PI)
    CUBIC = tl.constexpr(_CUBIC)
    QUICK = tl.constexpr(_QUICK)
    FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)

    @triton.jit
    def _sigmoid(x):
        return 1 / (1 + tl.exp(-x))

    @triton.jit
    def _sigmoids(x):
        """sigmoid(x) and sigmoid(-x), the latter without the cancellation of 1 - sigmoid(x).

        Where exp overflows the second is 0 rather than 1, but then the first, which multiplies it,
        is 0.
        """
        e = tl.exp(-x)
        s = 1 / (1 + e)
        return s, tl.minimum(e, FLOAT_MAX) * s

    @triton.jit
    def forward(x, ACTIVATION: tl.constexpr):
        """act(x); fp32 in, fp32 out."""
        if ACTIVATION == "gelu":
            y = 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
        elif ACTIVATION == "gelu_tanh":
            y = x * _sigmoid((x + x * x * x * CUBIC) * TWO_SQRT_2_PI)
        elif ACTIVATION == "silu":
            y = x * _sigmoid(x)
        elif ACTIVATION == "relu":
            y = tl.where(x < 0, 0.0, x)  # keeps NaN, which maximum would drop
        elif ACTIVATION == "relu2":
            r = tl.where(x < 0, 0.0, x)
            y = r * r
        elif ACTIVATION == "quick_gelu":
            y = x * _sigmoid(x * QUICK)
        elif ACTIVATION == "sigmoid":
            y = _sigmoid(x)
        else:
            tl.static_assert(ACTIVATION == "identity", "unknown activation")
            y = x
        return y

    @triton.jit
    def forward_backward(x, grad, ACTIVATION: tl.constexpr):
        """(act(x), grad * act'(x)); both share the one exp or erf. fp32 in, fp32 out."""
        if ACTIVATION == "gelu":
            cdf = 0.5 * (1 + tl.erf(x * SQRT_HALF))
            y = x * cdf
            dx = grad * (cdf + x * (tl.exp(-0.5 * x * x) * RSQRT_TAU))
        elif ACTIVATION == "gelu_tanh":
            s, t = _sigmoids((x + x * x * x * CUBIC) * TWO_SQRT_2_PI)
            y = x * s
            slope = (1 + x * x * 3 * CUBIC) * TWO_SQRT_2_PI
            dx = grad * (s + y * t * slope)
        elif ACTIVATION == "silu":
            s, t = _sigmoids(x)
            y = x * s
            dx = grad * (s * (1 + x * t))
        elif ACTIVATION == "relu":
            y = tl.where(x < 0, 0.0, x)
            dx = tl.where(x <= 0, 0.0, grad)  # a choice, not a product: inf * 0 stays 0 as in eager
        elif ACTIVATION == "relu2":
            r = tl.where(x < 0, 0.0, x)
            y = r * r
            dx = tl.where(x <= 0, 0.0, grad * (2 * r))
        elif ACTIVATION == "quick_gelu":
            s, t = _sigmoids(x * QUICK)
            y = x * s
            dx = grad * (s + y * t * QUICK)
        elif ACTIVATION == "sigmoid":
            y, t = _sigmoids(x)
            dx = grad * (y * t)
        else:
            tl.static_assert(ACTIVATION == "identity", "unknown activation")
            y = x
            dx = grad
        return y, dx
