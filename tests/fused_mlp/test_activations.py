"""Each activation: its names, its gradient, and its Triton twin, against float64."""

import math
import subprocess
import sys

import pytest
import torch

from fused_mlp import activations
from fused_mlp.kernels.activation import act_backward, act_forward

ALL = list(activations.ACTIVATIONS)


def exact(name: str, x: torch.Tensor) -> torch.Tensor:
    """The textbook formula, in float64, written without the code under test."""
    x = x.double()
    return {
        "gelu": lambda: x * torch.special.ndtr(x),
        "gelu_tanh": lambda: (
            x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        ),
        "silu": lambda: x / (1 + torch.exp(-x)),
        "relu": lambda: x.clamp(min=0),
        "relu2": lambda: x.clamp(min=0) ** 2,
        "quick_gelu": lambda: x / (1 + torch.exp(-1.702 * x)),
        "sigmoid": lambda: 1 / (1 + torch.exp(-x)),
        "identity": lambda: x * 1,
    }[name]()


@pytest.mark.parametrize("name", ALL)
def test_eager_is_the_textbook_formula(name: str) -> None:
    x = torch.linspace(-12, 12, 1001, dtype=torch.float64)
    torch.testing.assert_close(
        activations.get(name).eager(x), exact(name, x), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ALL)
def test_backward_is_what_autograd_computes(name: str) -> None:
    activation = activations.get(name)
    x = torch.randn(257, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    (expected,) = torch.autograd.grad(activation.eager(x), x, grad)
    torch.testing.assert_close(activation.backward(grad, x.detach()), expected)
    torch.testing.assert_close(activation.derivative(x.detach()) * grad, expected)


def test_aliases_are_the_same_function() -> None:
    assert activations.get("swish") is activations.get("silu")
    assert activations.get("gelu_new") is activations.get("gelu_pytorch_tanh")
    assert activations.get("gelu_new").name == "gelu_tanh"
    assert activations.get("gelu") is not activations.get("gelu_tanh")
    assert set(activations.names()) > set(ALL)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'mish'.*quick_gelu.*swish"):
        activations.get("mish")
    with pytest.raises(ValueError, match="unknown activation"):
        activations.get([])  # type: ignore[arg-type]


def triton_forward(name: str, x: torch.Tensor) -> torch.Tensor:
    return act_forward(x[None], None, name)[0]


def triton_derivative(name: str, x: torch.Tensor) -> torch.Tensor:
    return act_backward(torch.ones_like(x)[None], x[None], None, name).d_gate[0]


@pytest.mark.parametrize("name", ALL)
def test_triton_in_fp32_is_as_exact_as_eager(name: str) -> None:
    activation = activations.get(name)
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.randn(2000)])
    reference = exact(name, x)
    error = (triton_forward(name, x) - reference).abs()
    eager = (activation.eager(x) - reference).abs()
    # Where eager happens to be exact, two units in the last place (erf and exp differ between
    # libraries).
    assert (error <= 2 * eager.max() + 2.4e-7 * reference.abs()).all()

    x64 = x.double().requires_grad_()
    (slope,) = torch.autograd.grad(exact(name, x64).sum(), x64)
    # At its kink relu has no derivative; eager's choice is 0.
    slope = torch.where((x64 == 0) & (name in ("relu", "relu2")), 0.0, slope)
    error = (triton_derivative(name, x) - slope).abs()
    eager = (activation.derivative(x) - slope).abs()
    assert (error <= 2 * eager.max() + 2.4e-7 * slope.abs()).all()


@pytest.mark.parametrize("name", ALL)
def test_large_inputs_stay_finite(name: str) -> None:
    x = torch.tensor([-1e4, -1e3, -500.0, -100.0, -90.0, -88.8, 88.8, 90.0, 100.0, 1e3, 1e4])
    reference = exact(name, x)
    for result, wanted in (
        (triton_forward(name, x), reference),
        (triton_derivative(name, x), activations.get(name).derivative(x.double())),
    ):
        assert torch.isfinite(result).all()
        torch.testing.assert_close(result.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_nan_and_infinity_propagate_as_in_eager(name: str) -> None:
    activation = activations.get(name)
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0])
    # Not eager itself: gelu(inf) is NaN in PyTorch's vectorized CPU code alone; elsewhere it is
    # inf.
    torch.testing.assert_close(triton_forward(name, x), exact(name, x).float(), equal_nan=True)
    grad = torch.tensor([1.0, 1.0, 1.0, math.inf, math.inf, math.nan])
    result = act_backward(grad[None], x[None], None, name).d_gate[0]
    torch.testing.assert_close(result, activation.backward(grad, x), equal_nan=True)


def test_eager_parts_work_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fused_mlp.activations as a\n"
        "print(a.get('silu').eager(torch.zeros(1)).item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.0"
