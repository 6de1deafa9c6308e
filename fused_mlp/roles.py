"""Which child of a module plays which part in an MLP, and when a child may be used by its weight
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as _hooks

from .paths import Params

PLAIN = (Tensor, nn.Parameter)
TRACED = (
    *PLAIN,
    FakeTensor,
    FunctionalTensor,
)  # what torch.compile and torch.export put in their place

MORE_IN_TRAINING = "while training its own forward does more, such as dropping at random"


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
        evaluating: whether it is an MLP in eval mode alone, as its own forward does more while
            training.
        held: the children that play none of these parts, such as the activation: they are called
            no more, so that nothing may be done to them. The very objects, which copies and
            pickles of the module carry along with it.
        functions: attributes that are functions, numbers or words, likewise.
        children: how many there were; 0 where more do not matter.
    """

    up: str
    down: str
    gate: str | None
    activation: str
    after: str | None = None
    inside: tuple[str, ...] = ()
    recompute: str = "activation"
    evaluating: bool = False
    held: tuple[tuple[str, nn.Module], ...] = field(default=(), compare=False, repr=False)
    functions: tuple[tuple[str, object], ...] = field(default=(), compare=False, repr=False)
    children: int = field(default=0, compare=False, repr=False)

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

    def obstacle(self, module: nn.Module) -> str | None:
        """Why the children of ``module`` have to be called one by one just now, or None."""
        children = module._modules
        for name in (self.up, self.down, self.gate):
            if name is not None and not _plain(child := children.get(name)):
                why = why_not_plain(name, child)
                if why is not None:
                    return why
        why = hooked_globally() or tampered(module, self.held, self.functions, self.children)
        if why is not None:
            return why
        if self.evaluating and any(m.training for m in module.modules()):
            return MORE_IN_TRAINING
        for name in self.inside:
            dropout = children[name]
            if dropout.training and dropout.p > 0:
                return f"{name} drops {dropout.p:g} inside the MLP while training"
        return None

    def within(self, module: nn.Module) -> Roles:
        """The same in ``module``, of which all else that it has now must stay as it is."""
        parts = (self.up, self.down, self.gate, self.after)
        held = tuple((n, c) for n, c in module._modules.items() if c is not None and n not in parts)
        return replace(self, held=held, functions=functions(module), children=len(module._modules))


def functions(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """Attributes that are functions, such as an activation, or numbers or words, such as a factor."""
    return tuple(
        (name, value)
        for name, value in module.__dict__.items()
        if (callable(value) or isinstance(value, (int, float, str)))
        and not isinstance(value, (nn.Module, type))
        and name != "training"
        and not name.startswith("_")
    )


def hooked_globally() -> str | None:
    """Why every module's call matters just now, or None."""
    if (
        _hooks._global_forward_hooks
        or _hooks._global_forward_pre_hooks
        or _hooks._global_backward_hooks
        or _hooks._global_backward_pre_hooks
    ) and not torch.compiler.is_compiling():
        return "hooks on all modules must see the calls of its children"
    return None


def tampered(
    module: nn.Module,
    held: tuple[tuple[str, nn.Module], ...],
    functions: tuple[tuple[str, object], ...],
    count: int,
) -> str | None:
    """What was done since to a child or a function that is called no more, or None."""
    children = module._modules
    if count and len(children) != count:
        return f"it has {len(children)} children, and had {count} when it was fused"
    for name, child in held:
        if children.get(name) is not child:
            return f"{name} is another module than when it was fused"
        if hooked(child) or "forward" in child.__dict__:
            return f"{name} has hooks or a forward of its own, which must see its call"
    for name, function in functions:
        if module.__dict__.get(name) != function:
            return f"{name} is not what it was when it was fused"
    return None


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, of any kind that its call would run."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _plain(module: nn.Module | None) -> bool:
    """`why_not_plain` for every call: the cheap yes."""
    return (
        type(module) is nn.Linear
        and not hooked(module)
        and "forward" not in module.__dict__
        and "weight" in module._parameters
        and "bias" in module._parameters
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
    if module is None:
        return f"{name} is no longer there"
    if not is_linear(module):
        library = type(module).__module__.partition(".")[0]
        why = f"{name} is a {library} {type(module).__name__}, not a plain linear layer"
        own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        return f"{why}: its own forward may do more than multiply" if own else why
    if hooked(module):
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
