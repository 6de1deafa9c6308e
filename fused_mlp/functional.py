"""`fused_mlp`: checks its arguments, asks for a plan, runs it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from . import activations, ops, paths, plan, reference
from .paths import Params

_KEEP = {"none": 2, "activation": 1, "all": 0}
_PLAIN = (Tensor, Parameter)


def fused_mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_weight: Tensor | None = None,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
    recompute: str = "activation",
) -> Tensor:
    """A whole MLP: ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate.

    Args:
        x: ``(..., hidden_size)``, of any rank from 1, any strides, also with no tokens at all.
        up_weight: ``(intermediate_size, hidden_size)``, as in `torch.nn.Linear`.
        down_weight: ``(hidden_size, intermediate_size)``; its first size may differ from ``x``'s last.
        gate_weight: ``(intermediate_size, hidden_size)``, or None for a plain MLP.
        up_bias, gate_bias: ``(intermediate_size,)`` or None.
        down_bias: ``(hidden_size,)`` or None.
        activation: ``gelu``, ``gelu_tanh``, ``silu``, ``relu``, ``relu2``, ``quick_gelu``, ``sigmoid``, ``identity`` or
            an alias of these.
        recompute: what is computed again in backward instead of being kept: ``"none"`` keeps 3 activations of
            ``(tokens, intermediate_size)`` (2 without a gate), ``"activation"`` 2 (1), ``"all"`` none. Eager PyTorch
            keeps 4 (2).

    Returns:
        ``(..., hidden_size)`` in the dtype of ``x`` (under autocast, in autocast's).

    Raises:
        ValueError: shapes that do not fit together, or devices that differ; an unknown activation or recompute.
        TypeError: dtypes that differ or are not floating point.
        RuntimeError: a gradient is wanted in inference mode; parameters on the meta device with an ``x`` that is not.
        PathError: `use_path` forces a path that cannot run here.

    Differentiable once; `fused_mlp.reference.mlp` any number of times.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> fused_mlp(x, torch.ones(4, 3), torch.ones(3, 4), gate_weight=torch.ones(4, 3), activation="identity")
    tensor([[36., 36., 36.],
            [36., 36., 36.]])
    """
    p = Params(up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
    act = activations.get(activation)
    return run(x, p, act, recompute)


def run(x: Tensor, p: Params, act: activations.Activation, recompute: str) -> Tensor:
    """`fused_mlp` for parameters already gathered."""
    check(x, p, recompute)
    why = unusual(x, p)
    if why is not None:
        if plan.forced() not in (None, "eager"):
            raise plan.PathError(f"path {plan.forced()!r} was forced but cannot run: {why}")
        return reference.mlp(x, p[0], p[1], **_keywords(p), activation=act.name)
    training = torch.is_grad_enabled() and (x.requires_grad or any(t is not None and t.requires_grad for t in p))
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if training:
        y = ops.MLP.apply(rows, *p, act.name, _KEEP[recompute])
    else:
        y = paths.inference(ops.plan_for(rows, p, act.name, False), rows, p, act)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _keywords(p: Params) -> dict[str, Tensor | None]:
    return dict(zip(Params._fields[2:], p[2:], strict=True))


def unusual(x: Tensor, p: Params) -> str | None:
    """Why only `reference.mlp` can serve this call, or None."""
    for t in (x, *p):
        if t is not None and type(t) not in _PLAIN:
            return f"a {type(t).__name__} is not a plain tensor"
    return None


def check(x: Tensor, p: Params, recompute: str) -> None:
    """Raise the one clear exception for arguments that cannot work."""
    if recompute not in _KEEP:
        raise ValueError(f"unknown recompute {recompute!r}; known are {', '.join(map(repr, _KEEP))}")
    up, down, gate = p.up_weight, p.down_weight, p.gate_weight
    if up.dim() != 2 or down.dim() != 2 or x.dim() < 1 or x.shape[-1] != up.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)} but up_weight is {tuple(up.shape)}; "
            "they must be (..., hidden_size) and (intermediate_size, hidden_size)"
        )
