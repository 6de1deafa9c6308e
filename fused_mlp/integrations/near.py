"""Says of modules that hold an MLP's weights and are none why they stay as they are, in words for
their author.
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from ..roles import is_linear, weight_and_bias
from .structure import Foreign


def near_miss(module: nn.Module, found: Foreign | None = None) -> str | None:
    """Why a module with an MLP's weights is not fused; None if it has no such weights.

    ``found`` is what `recognise` said of it, if it was asked.
    """
    experts = _experts(module)
    if experts is not None:
        return experts
    linear = {
        n: weight_and_bias(c)[0].shape for n, c in module._modules.items() if c is not None and is_linear(c)
    }  # fmt: skip
    for up, down in itertools.permutations(linear, 2):
        rows, columns = linear[up]
        # Square or narrowing pairs are more often an attention's or a classifier's.
        if rows > columns and linear[down] == (columns, rows):
            break
    else:
        return None
    pair = f"{up} and {down} have an MLP's sizes"
    others = [
        n for n, c in module._modules.items()
        if n not in linear and c is not None and next(c.parameters(), None) is not None
    ]  # fmt: skip
    if others:
        names = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        return (
            f"{pair}, but its forward does more than an MLP, with the parameters of {names}; if "
            f"{up}, an activation and {down} follow each other in it, a module of those alone "
            "would be fused"
        )
    return None if found is None else f"{pair}, but {found}"


def _experts(module: nn.Module) -> str | None:
    """The reason of a mixture of experts whose weights are stacked, one slice an expert."""
    stacks: list[tuple[str, str, Tensor]] = [
        (name, f"{name}.{n}" if name else n, p)
        for name, owner in (("", module), *module._modules.items())
        if owner is not None and not isinstance(owner, nn.modules.conv._ConvNd)
        for n, p in owner._parameters.items()
        if p is not None and p.dim() == 3 and p.shape[0] > 1
    ]
    for (owner, first, a), (other, second, b) in itertools.permutations(stacks, 2):
        # Both in one child: that child is told of.
        square = a.shape[1] == a.shape[2]  # more often a gate of each head
        apart = owner != other or not owner
        if apart and not square and a.shape[0] == b.shape[0] and _fit(a, b):
            return (
                f"{first} {tuple(a.shape)} and {second} {tuple(b.shape)} stack the weights of "
                f"{a.shape[0]} experts, of which every token chooses its own; an MLP that is fused "
                "is the same for all tokens"
            )
    return None


def _fit(up: Tensor, down: Tensor) -> bool:
    """Whether their slices are an MLP's, each perhaps transposed, ``up`` perhaps with the gate in it."""
    return any(
        (u[1], u[0]) == d or (u[1], u[0]) == (d[0], 2 * d[1])
        for u in (tuple(up.shape[1:]), tuple(up.shape[:0:-1]))
        for d in (tuple(down.shape[1:]), tuple(down.shape[:0:-1]))
    )
