"""Turns a recognised module into a fused one by giving the very same object another class, and
back.

The object keeps its identity, parameters, children, hooks, buffers and attributes; only its
``forward`` differs, and its class is a subclass of the one it had. Whenever a child stops being a
plain linear layer (LoRA, a quantized weight, a hook, a dropout that drops), the original
``forward`` runs.
"""

from __future__ import annotations

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

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        roles: Roles = self._fused_mlp
        if args or kwargs or roles.obstacle(self._modules) is not None:
            return original_class(type(self)).forward(self, x, *args, **kwargs)
        y = functional.run(
            x, roles.params(self._modules), activations.get(roles.activation), roles.recompute
        )
        return y if roles.after is None else self._modules[roles.after](y)

    def extra_repr(self) -> str:
        return original_class(type(self)).extra_repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (original_class(type(self)), type(self).__bases__[0]), self.__dict__


def _revive(cls: type, base: type) -> nn.Module:
    fused = fused_class(cls, base)
    return fused.__new__(fused)


@cache
def fused_class(cls: type, base: type = Adopted) -> type:
    """The fused subclass of an MLP's class."""
    return type(f"Fused{cls.__name__}", (base, cls), {"__module__": cls.__module__})


def original_class(cls: type) -> type:
    """The class that a fused class was made from."""
    return cls.__bases__[1]


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
    module.__class__ = original_class(type(module))
    del module.__dict__[STATE]
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
    twin.__dict__[STATE] = roles
    return twin
