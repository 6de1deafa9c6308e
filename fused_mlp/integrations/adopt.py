"""Turns a recognised module into a fused one by giving the very same object another class, and
back.

The object keeps its identity, parameters, children, hooks, buffers and attributes; only its
``forward`` differs, and its class is a subclass of the one it had. Whenever a child stops being a
plain linear layer (LoRA, a quantized weight, a hook, a dropout that drops), or the activation or a
dropout is exchanged or hooked, or a call is one that `fused_mlp.fused_mlp` refuses, the original
``forward`` runs.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor, nn

from .. import activations, functional
from ..modules import FusedMLP
from ..roles import Roles

STATE = "_fused_mlp"  # in the module's __dict__, so that copies and pickles carry it


class Adopted(FusedMLP):
    """A module of another library that computes through `fused_mlp` wherever its children allow it."""

    _fused_by_adoption = True

    def forward(self, x: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        cls = original_class(type(self))
        if x is None and len(kwargs) == 1:
            x = kwargs.pop(first_argument(cls), None)
        if x is None:
            return cls.forward(self, *args, **kwargs)
        y = None if args or kwargs else fused_call(self, x)
        return cls.forward(self, x, *args, **kwargs) if y is None else y

    def _fused_activation(self) -> activations.Activation:
        return activations.get(self._fused_mlp.activation)  # what the class calls so is its own

    def extra_repr(self) -> str:
        return original_class(type(self)).extra_repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (original_class(type(self)), _fused(type(self)).__bases__[0]), self.__dict__


def fused_call(module: nn.Module, x: Tensor) -> Tensor | None:
    """The MLP of an adopted module, or None where its original code has to run."""
    # A bound method that someone kept from before `release` finds no roles.
    roles: Roles | None = module.__dict__.get(STATE)
    if roles is None or roles.obstacle(module) is not None:
        return None
    p = roles.params(module._modules)
    # The original may convert what does not suit, or has its own words for why not.
    y = functional.run_if_suited(x, p, activations.get(roles.activation), roles.recompute)
    return y if y is None or roles.after is None else module._modules[roles.after](y)


@cache
def first_argument(cls: type) -> str:
    """The name of the first argument of a class's ``forward``, by which it may be called."""
    return next(iter(list(inspect.signature(cls.forward).parameters)[1:]), "")


def _revive(cls: type, base: type) -> nn.Module:
    fused = fused_class(cls, base)
    return fused.__new__(fused)


@cache
def fused_class(cls: type, base: type = Adopted) -> type:
    """The fused subclass of an MLP's class."""
    own = {
        "__module__": cls.__module__,
        "_fused_from": cls,
        "__new__": _new,
        "__init__": cls.__init__,
    }
    return type(f"Fused{cls.__name__}", (base, cls), own)


def _new(cls: type, *args: Any, **kwargs: Any) -> nn.Module:
    """A slice of an `nn.Sequential`, and the like, is made by the class of the whole: it is another
    module, and not fused. Without arguments, what copies modules wants an empty one.
    """
    return original_class(cls)(*args, **kwargs) if args or kwargs else object.__new__(cls)


def _fused(cls: type) -> type:
    """The fused class that ``cls`` is or was made from: others (FSDP) subclass in the same way."""
    return next((c for c in cls.__mro__ if "_fused_from" in c.__dict__), cls)


def original_class(cls: type) -> type:
    """The class that a fused class was made from; a class that is not fused is its own."""
    return getattr(cls, "_fused_from", cls)


def _without_fusing(cls: type) -> type:
    """The class as it would be had the fused class in it never been made."""
    fused = _fused(cls)
    if cls is fused:
        return original_class(cls)
    bases = tuple(_without_fusing(b) if issubclass(b, fused) else b for b in cls.__bases__)
    own = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace(fused.__name__, original_class(cls).__name__), bases, own)


def adopt(module: nn.Module, state: Any, base: type = Adopted) -> None:
    """Fuse in place."""
    module.__dict__[STATE] = state
    module.__class__ = fused_class(type(module), base)


def adopted(module: nn.Module) -> bool:
    return STATE in module.__dict__ and hasattr(type(module), "_fused_by_adoption")


def release(module: nn.Module) -> bool:
    """Undo `adopt` in place; False if the module was not adopted."""
    if not adopted(module):
        return False
    module.__class__ = _without_fusing(type(module))
    del module.__dict__[STATE]
    module.__dict__.pop("_fused_settled", None)
    return True


def sharing(module: nn.Module, roles: Roles) -> FusedMLP:
    """A fused module beside the original, with the same children and parameters; the original stays
    as it was.
    """
    cls = fused_class(type(module))
    twin = cls.__new__(cls)
    # Hooks and children added to one later are not the other's.
    twin.__dict__.update(
        {k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()}
    )
    twin.__dict__[STATE] = roles.within(twin)
    return twin
