"""Is a provider right? Its error against float64, beside eager's own in the same dtype.

The dtype is that in which a provider computes. Under autocast it is not the weights': there the
yardstick is eager on weights and input rounded to it, and the truth that of the unrounded ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .built import activation_of, eager
from .inputs import Inputs, torch_dtype
from .shapes import SHAPES

if TYPE_CHECKING:
    import torch

# Twice eager's error is the package's own rule, and its tests hold it to that. Here "wrong" must
# not catch a compiler that sums in another order: in fp32 torch.compile's output reaches 2.3, and
# its bias gradients, one long sum each, 7. A sum of n terms in fp32 loses about sqrt(n) roundings
# in the worst order and log(n) in eager's, so those are granted on top.
FACTOR = 4.0
FP32_ROUNDING = 2.0**-24


class WrongResult(Exception):
    """A provider whose numbers are not those of the MLP; it is not timed."""


class Reference:
    """The float64 result of one group of combinations, and eager's error against it."""

    def __init__(self, inputs: Inputs) -> None:
        longest = max(inputs.combination.count, SHAPES[inputs.combination.shape].intermediate)
        self._any_order = longest**0.5 * FP32_ROUNDING
        self._exact = self._compute(inputs)
        self._inputs = inputs
        self._known: dict[str | None, dict[str, float]] = {}

    def eagers_errors(self, computes: str | None = None) -> dict[str, float]:
        """Eager's own errors, in the dtype of the inputs or in another."""
        if computes not in self._known:
            inputs = self._inputs
            built = eager(inputs.rounded(torch_dtype(computes)) if computes else inputs)
            with built.context():
                result = built.call()
            self._known[computes] = self._errors(self._named(result, list(built.parameters)))
        return self._known[computes]

    @staticmethod
    def _compute(inputs: Inputs) -> dict[str, torch.Tensor]:
        import torch
        from torch.nn import functional as F

        shape, training = SHAPES[inputs.combination.shape], inputs.d_output is not None
        weights = {
            name: tensor.double().requires_grad_(training)
            for name, tensor in inputs.weights.items()
        }
        x = inputs.x.double().requires_grad_(training)
        act = activation_of(shape.activation)
        with torch.set_grad_enabled(training):
            up = F.linear(x, weights["up_weight"], weights.get("up_bias"))
            mid = act(F.linear(x, weights["gate_weight"])) * up if shape.gated else act(up)
            output = F.linear(mid, weights["down_weight"], weights.get("down_bias"))
        exact = {"output": output.detach()}
        if inputs.d_output is not None:
            sources = {"x": x, **weights}
            grads = torch.autograd.grad(output, list(sources.values()), inputs.d_output.double())
            exact.update({f"d_{name}": grad for name, grad in zip(sources, grads, strict=True)})
        return exact

    @staticmethod
    def _named(result: Any, names: list[str]) -> dict[str, torch.Tensor]:
        if not isinstance(result, tuple):
            if result.dim() == 4:  # the tokens are an image's pixels
                result = result.permute(0, 2, 3, 1).flatten(0, 2)
            return {"output": result}
        keys = ["output", "d_x", *(f"d_{name}" for name in names)]
        return dict(zip(keys, result, strict=True))

    def _expected(self, name: str) -> torch.Tensor:
        import torch

        exact = self._exact
        if name == "d_packed_weight":
            return torch.cat([exact["d_gate_weight"], exact["d_up_weight"]])
        if name == "d_interleaved_weight":
            pair = [exact["d_gate_weight"], exact["d_up_weight"]]
            return torch.stack(pair, dim=1).flatten(0, 1)
        return exact[name]

    def _errors(self, named: dict[str, torch.Tensor]) -> dict[str, float]:
        """Relative Frobenius error of each tensor; infinite where a shape or a number is not."""
        errors = {}
        for name, tensor in named.items():
            expected = self._expected(name)
            if tensor.shape != expected.shape:
                errors[name] = float("inf")
                continue
            error = (tensor.detach().double() - expected).norm() / expected.norm()
            value = float(error)
            errors[name] = value if value == value else float("inf")
        return errors

    def check(self, result: Any, names: list[str], computes: str | None = None) -> float:
        """The worst error over eager's own, as a ratio; raises WrongResult beyond the rule.

        `computes` is the dtype of the arithmetic, where it is not the weights'.
        """
        import torch

        named = self._named(result, names)
        rounding = torch.finfo(named["output"].dtype).eps / 2
        worst, eagers = 0.0, self.eagers_errors(computes)
        for name, error in self._errors(named).items():
            own = eagers.get(name, eagers.get("d_up_weight", eagers["output"]))
            if error > FACTOR * own + rounding + self._any_order:
                raise WrongResult(
                    f"{name} is wrong: relative error {error:.2e} against float64, eager's is "
                    f"{own:.2e} in {named['output'].dtype}"
                )
            worst = max(worst, error / max(own, 1e-300))
        return worst
