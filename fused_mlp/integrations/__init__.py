"""Fused MLPs inside other libraries' models: `fuse`, `unfuse`, `from_module`, and what `explain`
says of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from .. import functional
from ..modules import FusedMLP
from ..roles import Roles, why_not_plain
from . import adopt, blocks, near, structure


def from_module(mlp: nn.Module, output: nn.Module | None = None) -> FusedMLP:
    """See `FusedMLP.from_module`."""
    if isinstance(mlp, FusedMLP):
        return mlp
    if output is not None:
        return _from_halves(mlp, output)
    block = blocks.recognise_block(mlp)
    found = structure.recognise(mlp) if block is None else block
    if isinstance(found, str):
        raise ValueError(f"{type(mlp).__name__} cannot be fused: {found}")
    if block is not None:
        names = [found.up, *found.inside, found.down, found.after]
        holder = nn.Sequential()
        for name in names:
            if name is not None:
                holder.add_module(name, mlp._modules[name])
        holder.train(mlp.training)
        return adopt.sharing(_activated(holder, found), found)
    return adopt.sharing(mlp, found)


def _activated(holder: nn.Sequential, roles: Roles) -> nn.Sequential:
    """The activation as a child after ``up``, so that the holder's own forward is the MLP as well."""
    from ..activations import ACTIVATIONS

    children = list(holder._modules.items())
    holder._modules.clear()
    for name, child in children:
        holder.add_module(name, child)
        if name == roles.up:
            holder.add_module("activation", _Activation(ACTIVATIONS[roles.activation].name))
    return holder


class _Activation(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x):
        from ..activations import get

        return get(self.name).eager(x)


def _from_halves(first: nn.Module, second: nn.Module) -> FusedMLP:
    parent = nn.Module()
    parent.add_module("first", first)
    parent.add_module("second", second)
    pair = blocks.recognise_pair(parent)
    if not isinstance(pair, blocks.Pair):
        why = pair or "they are not linear and activation, then linear"
        raise ValueError(
            f"{type(first).__name__} and {type(second).__name__} cannot be fused: {why}"
        )
    holder = nn.Sequential()
    holder.add_module("up_proj", first._modules[pair.up])
    holder.add_module("activation", _Activation(pair.activation))
    holder.add_module("down_proj", second._modules[pair.down])
    return adopt.sharing(holder, Roles("up_proj", "down_proj", None, pair.activation))


def fuse(model: nn.Module, *, recompute: str = "activation") -> list[str]:
    """Fuse every MLP in a model, in place, and return their names.

    An MLP is recognised by its structure and by what it computes on a few random tokens, not by
    its name. The modules stay the same objects with the same parameters and ``state_dict``; only
    how they compute changes. What cannot be fused safely stays as it was, and `explain` says why.

    Args:
        model: any module; itself, too, if it is an MLP.
        recompute: as in `fused_mlp.fused_mlp`.

    Raises:
        TypeError: no module.
        ValueError: an unknown recompute.

    >>> model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))})
    >>> fuse(model)
    ['mlp']
    >>> unfuse(model)
    ['mlp']
    """
    functional.kept(recompute)
    _require_module("fuse", model)
    fused = []
    for name, module, found in list(candidates(model)):
        if isinstance(found, str):
            continue
        if isinstance(found, blocks.Pair):
            found.recompute = recompute
            adopt.adopt(found.first, found, blocks.AdoptedFirst)
            adopt.adopt(found.second, found, blocks.AdoptedSecond)
        elif callable(getattr(module, "_ff_block", None)):
            adopt.adopt(module, replace(found, recompute=recompute), blocks.AdoptedBlock)
        else:
            adopt.adopt(module, replace(found, recompute=recompute))
        fused.append(name)
    return fused


def _require_module(verb: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb} takes a module, not a {type(model).__name__}")


def unfuse(model: nn.Module) -> list[str]:
    """Undo `fuse`, in place, and return the names of what was fused.

    Raises:
        TypeError: no module.
    """
    _require_module("unfuse", model)
    released = []
    for name, module in list(model.named_modules()):
        first_half = not isinstance(module, blocks.AdoptedSecond)
        if adopt.release(module) and first_half:
            released.append(name)
    return released


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, Roles | blocks.Pair | str]]:
    """Everything in a model that is an MLP or nearly one, not fused yet: name, module, and what it
    is or why not.
    """
    taken: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in taken or isinstance(module, FusedMLP) or adopt.adopted(module):
            continue
        block = blocks.recognise_block(module)
        if block is not None:
            yield name, module, block
            continue
        pair = blocks.recognise_pair(module)
        if pair is not None:
            if isinstance(pair, blocks.Pair):
                taken |= {id(pair.first), id(pair.second)}
                name = next(n for n, m in model.named_modules() if m is pair.first)
            yield name, module, pair
        elif structure.candidate(module):
            found = structure.recognise(module)
            if isinstance(found, structure.Foreign):
                found = near.near_miss(module, found)
            elif isinstance(found, str) and not structure.plausible(module):
                found = None
            if found is not None:
                yield name, module, found
        elif (why := near.near_miss(module)) is not None:
            yield name, module, why


def standing(module: nn.Module) -> str | None:
    """Why a fused module calls its children one by one just now, or None."""
    state = module.__dict__[adopt.STATE]
    if isinstance(state, blocks.Pair):
        return state.obstacle()
    return state.obstacle(module)


__all__ = ["candidates", "from_module", "fuse", "standing", "unfuse", "why_not_plain"]
