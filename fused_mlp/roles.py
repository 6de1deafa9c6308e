"""Which child of a module plays which part in an MLP, and when a child may be used by its weight
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .paths import Params

PLAIN = (Tensor, nn.Parameter)
TRACED = (
    *PLAIN,
    FakeTensor,
    FunctionalTensor,
)  # what torch.compile and torch.export put in their place


@dataclass(frozen=True)
class Roles:
    """Which child plays which part.

    Attributes:
        gate, up, down: names of children; ``gate`` is None in a plain MLP. Where gate and up name
            the same child, it is a packed projection whose rows are the gate's, then the up's.
        activation: a name of the registry.
        after: name of a dropout that follows ``down``, or None.
        inside: names of dropouts elsewhere, which forbid fusing while they drop.
        recompute: as in `fused_mlp.fused_mlp`.
    """

    up: str
    down: str
    gate: str | None
    activation: str
    after: str | None = None
    inside: tuple[str, ...] = ()
    recompute: str = "activation"

    def params(self, children: Mapping[str, nn.Module | None]) -> Params:
        """The parameters, as views of the children's own."""
        up, up_bias = weight_and_bias(children[self.up])
        down, down_bias = weight_and_bias(children[self.down])
        gate = gate_bias = None
        if self.gate == self.up:
            gate, up = up.chunk(2)
            gate_bias, up_bias = (None, None) if up_bias is None else up_bias.chunk(2)
        elif self.gate is not None:
            gate, gate_bias = weight_and_bias(children[self.gate])
        return Params(up, down, gate, up_bias, gate_bias, down_bias)

    def obstacle(self, children: Mapping[str, nn.Module | None]) -> str | None:
        """Why the children have to be called one by one just now, or None."""
        for name in (self.up, self.down, self.gate):
            if name is not None and not _plain(child := children.get(name)):
                why = why_not_plain(name, child)
                if why is not None:
                    return why
        for name in self.inside:
            dropout = children[name]
            if dropout.training and dropout.p > 0:
                return f"{name} drops {dropout.p:g} inside the MLP while training"
        return None


def _plain(module: nn.Module | None) -> bool:
    """`why_not_plain` for every call: the cheap yes."""
    return (
        type(module) is nn.Linear
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and "weight" in module._parameters
    )


def is_linear(module: nn.Module | None) -> bool:
    """Whether a child is exactly an `nn.Linear`, or a Conv1D: a weight ``(in, out)`` and a bias, as
    in GPT-2.
    """
    return type(module) is nn.Linear or (
        type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not module._modules
    )


def weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight as in `nn.Linear`, ``(out, in)``; a Conv1D's is a transposed view."""
    weight = module._parameters["weight"]
    return (weight if type(module) is nn.Linear else weight.t()), module._parameters["bias"]


def why_not_plain(name: str, module: nn.Module | None) -> str | None:
    """Why a child has to be called as a module instead of by its weight, or None."""
    if module is None or not is_linear(module):
        library = type(module).__module__.partition(".")[0]
        why = f"{name} is a {library} {type(module).__name__}, not a plain linear layer"
        own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        return f"{why}: its own forward may do more than multiply" if own else why
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return f"{name} has hooks, which must see its call"
    if "forward" in module.__dict__:
        return f"{name} has a forward of its own"
    for key, parameter in module._parameters.items():
        if parameter is not None and type(parameter) not in TRACED:
            return (
                f"{name}.{key} is a {type(parameter).__name__}, which its own library must multiply"
            )
    if "weight" not in module._parameters or "bias" not in module._parameters:
        return f"{name}.weight is computed from other tensors"
    return None
