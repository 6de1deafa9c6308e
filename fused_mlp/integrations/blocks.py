"""MLPs that are no module of their own: the feed-forward block of `nn.TransformerEncoderLayer`,
and BERT's pair.

Both are fused in place, as in `adopt`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import activations, functional, reference
from ..paths import Params
from ..roles import (
    MORE_IN_TRAINING,
    Roles,
    functions,
    hooked,
    hooked_globally,
    is_linear,
    tampered,
    weight_and_bias,
    why_not_plain,
)
from .adopt import STATE, Adopted, adopt, first_argument, fused_call, original_class, release
from .structure import (
    DROPOUTS,
    TOLERANCE,
    differs_in_training,
    distance,
    evaluating,
    held_activations,
    identify,
    mixed,
)


class AdoptedBlock(nn.Module):
    """A transformer layer whose ``_ff_block`` computes through `fused_mlp`.

    In eval mode and without gradients PyTorch takes a fast path of its own through the whole
    layer, and this is not called.
    """

    _fused_by_adoption = True

    def _ff_block(self, x: Tensor) -> Tensor:
        y = fused_call(self, x)
        return original_class(type(self))._ff_block(self, x) if y is None else y

    __reduce_ex__ = Adopted.__reduce_ex__


def recognise_block(module: nn.Module) -> Roles | str | None:
    """The roles in a layer with a ``_ff_block`` of linear1, activation, dropout, linear2; None if it
    has none.
    """
    if not callable(getattr(type(module), "_ff_block", None)):
        return None
    children = module._modules
    for name in ("linear1", "linear2"):
        why = why_not_plain(name, children.get(name))
        if why:
            return why
    activation = identify(getattr(module, "activation", None))
    if activation is None:
        return "its activation is none of the registry's"
    inner = children.get("dropout")
    # The dropout after linear2 is the highest numbered one, in the encoder's layer and in the
    # decoder's.
    outer = max((n for n in children if n.startswith("dropout") and n != "dropout"), default=None)
    roles = Roles(
        "linear1", "linear2", None, activation, outer, ("dropout",) if inner is not None else ()
    )
    x = _tokens(children["linear1"])
    if isinstance(x, str):
        return x
    with torch.no_grad(), evaluating(module):
        expected = module._ff_block(x)
        p = roles.params(children)
        y = reference.mlp(
            x,
            p.up_weight,
            p.down_weight,
            up_bias=p.up_bias,
            down_bias=p.down_bias,
            activation=activation,
        )
        if not _same(y, expected):
            return "its _ff_block computes something else"
        alone = differs_in_training(module, lambda: module._ff_block(x), roles.inside, outer)
    held = (*roles.inside, *(("activation",) if "activation" in children else ()))
    return replace(
        roles,
        evaluating=alone,
        held=tuple((n, children[n]) for n in held),
        functions=tuple((n, f) for n, f in functions(module) if n == "activation"),
    )


@dataclass
class Pair:
    """What both halves of a split MLP know: the linear child of each, and the other half."""

    up: str
    down: str
    activation: str
    first: nn.Module
    second: nn.Module
    recompute: str = "activation"
    tail: nn.Module | None = None
    evaluating: bool = False
    held: tuple[tuple[str, nn.Module], ...] = ()
    functions: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        self.held = tuple(
            (n, c) for n, c in self.first._modules.items() if c is not None and n != self.up
        )
        self.functions = functions(self.first)

    @property
    def inside(self) -> tuple[str, ...]:
        """Names of dropouts in the first half."""
        return tuple(n for n, c in self.held if isinstance(c, DROPOUTS))

    def obstacle(self) -> str | None:
        if (
            self.second.__dict__.get("_fused_mlp") is not self
            or self.first.__dict__.get("_fused_mlp") is not self
        ):
            return "its other half is no longer fused"
        up, down = self.first._modules.get(self.up), self.second._modules.get(self.down)
        return (
            why_not_plain(self.up, up)
            or why_not_plain(self.down, down)
            or mixed((self.up, up), (self.down, down))
            or _hooks(self.first)
            or _hooks(self.second)
            or hooked_globally()
            or tampered(self.first, self.held, self.functions, len(self.held) + 1)
            or self._drops()
        )

    def _drops(self) -> str | None:
        if self.evaluating and any(m.training for m in self.first.modules()):
            return MORE_IN_TRAINING
        for name, dropout in self.held:
            if isinstance(dropout, DROPOUTS) and dropout.training and dropout.p > 0:
                return f"{name} drops {dropout.p:g} inside the MLP while training"
        return None

    def params(self) -> Params:
        up, up_bias = weight_and_bias(self.first._modules[self.up])
        down, down_bias = weight_and_bias(self.second._modules[self.down])
        return Params(up, down, up_bias=up_bias, down_bias=down_bias)

    def mlp(self, x: Tensor) -> Tensor:
        return functional.run(x, self.params(), activations.get(self.activation), self.recompute)

    def rest(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the second half does after its linear layer: dropout, residual, norm."""
        second, tail = self.second, self.tail
        others = {n: c for n, c in second._modules.items() if n != self.down}
        if (
            tail is None
            or any(tail._modules.get(n) is not c for n, c in others.items())
            or (not torch.compiler.is_compiling() and _other_attributes(tail, second))
        ):
            cls = (
                original_class(type(second))
                if hasattr(type(second), "_fused_by_adoption")
                else type(second)
            )
            tail = cls.__new__(cls)
            tail.__dict__.update(second.__dict__)
            tail.__dict__["_modules"] = {
                n: nn.Identity() if n == self.down else c for n, c in second._modules.items()
            }
            self.tail = tail
        tail.training = second.training
        return tail.forward(*args, **kwargs)


def _other_attributes(tail: nn.Module, second: nn.Module) -> bool:
    """Whether the second half was changed since its tail was made of it."""
    now = {k: v for k, v in second.__dict__.items() if k not in ("_modules", "training")}
    return any(tail.__dict__.get(k, now) is not v for k, v in now.items())


class AdoptedFirst(nn.Module):
    """The first half of a split MLP; computes the whole of it."""

    _fused_by_adoption = True

    def forward(self, x: Tensor | None = None, **kwargs: Any) -> Tensor:
        cls = original_class(type(self))
        if x is None and len(kwargs) == 1:
            x = kwargs.pop(first_argument(cls), None)
        if x is None:
            return cls.forward(self, **kwargs)
        # A bound method that someone kept from before `unfuse` finds no pair.
        pair: Pair | None = self.__dict__.get(STATE)
        if kwargs or pair is None or pair.obstacle() is not None:
            return cls.forward(self, x, **kwargs)
        return pair.mlp(x)

    __reduce_ex__ = Adopted.__reduce_ex__


class AdoptedSecond(nn.Module):
    """The second half of a split MLP; does what follows the linear layer."""

    _fused_by_adoption = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        pair: Pair | None = self.__dict__.get(STATE)
        if pair is None or pair.obstacle() is not None:
            return original_class(type(self)).forward(self, *args, **kwargs)
        return pair.rest(*args, **kwargs)

    __reduce_ex__ = Adopted.__reduce_ex__


def recognise_pair(parent: nn.Module) -> Pair | str | None:
    """Two children of one module that make an MLP: linear and activation, then linear and whatever
    follows.
    """
    children = [c for c in parent._modules.values() if c is not None]
    for first, second in itertools.pairwise(children):
        if "_fused_mlp" in first.__dict__ or "_fused_mlp" in second.__dict__:
            continue
        up, down = _only_linear(first), _only_linear(second)
        if up is None or down is None or not _only_parameters(first, up):
            continue
        up_weight, down_weight = (
            weight_and_bias(m._modules[n])[0] for m, n in ((first, up), (second, down))
        )
        if up_weight.shape[0] != down_weight.shape[1] or up_weight.shape[1] != down_weight.shape[0]:
            continue
        held = held_activations(first)
        if isinstance(held, str):
            return f"its first half computes something else than an MLP's: {held}"
        pairs = [Pair(up, down, n, first, second) for n in held or activations.ACTIVATIONS]
        whys = [_hooks(first) or _hooks(second) or _try_pair(pair) for pair in pairs]
        if None not in whys:
            if len(held) == 1:
                return whys[0]
            continue
        pair = pairs[whys.index(None)]
        chained = _chained(parent, pair)
        if chained is False:
            return "what holds both halves does more with them than chain them"
        # With no activation in sight, only seeing them chained tells them from any two layers.
        if chained or held:
            return pair
    return None


def _chained(parent: nn.Module, pair: Pair) -> bool | None:
    """Whether what holds both halves gives the same with them fused; None if it takes more than a
    tensor, or has hooks that must not see a trial.
    """
    if any(m._forward_hooks or m._forward_pre_hooks for m in parent.modules()):
        return None
    x = _tokens(pair.first._modules[pair.up])
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.no_grad(), evaluating(parent), torch.random.fork_rng(devices=devices):
        try:
            expected = parent.forward(x)
        except Exception:  # a foreign forward may raise anything
            return None
        adopt(pair.first, pair, AdoptedFirst)
        adopt(pair.second, pair, AdoptedSecond)
        try:
            got = parent.forward(x)
        except Exception:
            return False
        finally:
            release(pair.first)
            release(pair.second)
            pair.tail = None
    flat = zip_longest(tree_leaves(expected), tree_leaves(got))
    return all(_same(a, b) if isinstance(b, Tensor) else type(a) is type(b) for b, a in flat)


def _try_pair(pair: Pair) -> str | None:
    x = _tokens(pair.first._modules[pair.up])
    if isinstance(x, str):
        return x
    with torch.no_grad(), evaluating(pair.first), evaluating(pair.second):
        try:
            expected = pair.second(pair.first(x), x)
            got = pair.rest(pair.mlp(x), x)
        except Exception as error:  # a foreign forward may raise anything
            return f"its halves do not chain as first(x), second(hidden, x): {type(error).__name__}"
    pair.tail = None
    if not _same(got, expected):
        return "its halves compute something else than an MLP and a residual"
    first = pair.first
    with torch.no_grad():
        pair.evaluating = differs_in_training(first, lambda: first.forward(x), pair.inside)
    return None


def _hooks(module: nn.Module) -> str | None:
    busy = hooked(module) or "forward" in module.__dict__
    return "one half has hooks, which must see its own output" if busy else None


def _only_linear(module: nn.Module) -> str | None:
    names = [n for n, c in module._modules.items() if is_linear(c)]
    return (
        names[0]
        if len(names) == 1 and why_not_plain(names[0], module._modules[names[0]]) is None
        else None
    )


def _only_parameters(module: nn.Module, name: str) -> bool:
    return len(list(module.parameters())) == len(list(module._modules[name].parameters()))


def _tokens(linear: nn.Module) -> Tensor | str:
    weight, _ = weight_and_bias(linear)
    if weight.device.type == "meta":
        return "its weights are on the meta device, so what it computes cannot be seen"
    if weight.dtype not in TOLERANCE:
        return f"its weights are {weight.dtype}"
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(1, 3, weight.shape[1], generator=generator, device="cpu").to(
        weight.device, weight.dtype
    )


def _same(got: object, expected: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.dtype != expected.dtype:
        return False
    if expected.dtype not in TOLERANCE:
        return torch.equal(got, expected)
    return distance(got, expected) <= TOLERANCE[expected.dtype]
