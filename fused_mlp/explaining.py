"""`explain`: which path a call, a module or a model takes, and why, in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import activations, functional, ops
from .modules import FusedMLP
from .paths import Params
from .plan import PathError
from .roles import PLAIN

TOKENS = (1, 16, 128, 1024)
ORIGINAL = "path    eager, the original forward"


def explain(what: nn.Module | Tensor, *args: Any, training: bool = False, **kwargs: Any) -> str:
    """What `fused_mlp` will do, and why.

    Takes one of

    - the arguments of `fused_mlp.fused_mlp`: the plan of that call;
    - a fused module, and optionally an ``x``: its plan, for that ``x`` or for a few token counts;
    - a model: each MLP in it, fused or not, with the path or the reason it was kept as it was.

    Args:
        training: explain a call that will be differentiated.

    >>> import torch
    >>> x, up, down = torch.ones(2, 3), torch.ones(4, 3), torch.ones(3, 4)
    >>> print(explain(x, up[:, :2], down))  # doctest: +ELLIPSIS
    refused  x is (2, 3) but up_weight is (4, 2); they must be ...
    """
    if isinstance(what, Tensor):
        return _call(what, *args, training=training, **kwargs)
    if not isinstance(what, nn.Module):
        raise TypeError(
            f"explain takes a module or the arguments of fused_mlp, not a {type(what).__name__}"
        )
    from .integrations import adopt

    x = args[0] if args else None
    if x is not None and not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a tensor (..., hidden_size)")
    if isinstance(what, FusedMLP) or adopt.adopted(what):
        return _module(what, x, training)
    return _model(what, x, training)


def _call(x: Tensor, *args: Any, training: bool, **kwargs: Any) -> str:
    activation = kwargs.pop("activation", "gelu")
    recompute = kwargs.pop("recompute", "activation")
    p = Params(*args, **kwargs)
    try:
        act = activations.get(activation)
        if functional.quantized(p):
            from .quantization import run as quantization

            quantization.check(x, p)  # their dtype need not be x's
        else:
            functional.check(x, p, recompute)
            functional.check_recorded(x)
        return _plan(x, p, act.name, training or functional.wants_grad(x, p))
    except (TypeError, ValueError, RuntimeError) as error:
        return f"refused  {error}"


def _plan(x: Tensor, p: Params, activation: str, training: bool) -> str:
    if functional.quantized(p):
        kind = type(p.up_weight)
        library = kind.__module__.partition(".")[0]
        return f"path    quantized\nreason  the weights are {library}'s {kind.__name__}"
    why = functional.by_reference(x, p)
    if why is not None:
        return f"path    eager\nreason  {why}"
    dtype = ops.autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)  # as the call would be cast
    rows = x if x.dim() == 2 else functional.rows(x)
    return str(ops.plan_for(rows, p, activation, training))


def _params(module: nn.Module) -> tuple[Params, str]:
    from .integrations import blocks

    state = module.__dict__["_fused_mlp"]
    if isinstance(state, blocks.Pair):
        return state.params(), state.activation
    if isinstance(module, FusedMLP):
        return state.params(module._modules), module._fused_activation().name
    return state.params(module._modules), state.activation


def _module(module: nn.Module, x: Tensor | None, training: bool) -> str:
    from . import integrations

    why = integrations.standing(module)
    if why is not None:
        return f"{ORIGINAL}\nreason  {why}"
    p, activation = _params(module)
    weight = p.up_weight
    if x is not None:
        plan = _call(x, p.up_weight, p.down_weight, training=training, activation=activation,
                     gate_weight=p.gate_weight, up_bias=p.up_bias,
                     gate_bias=p.gate_bias, down_bias=p.down_bias)  # fmt: skip
        if _leaves_misfits(module) and not functional.suits(x, p):
            return f"{ORIGINAL}\nreason  {plan.removeprefix('refused  ')}"
        return plan
    lines = []
    for tokens in TOKENS:
        x = torch.empty(tokens, weight.shape[1], device=weight.device, dtype=weight.dtype)
        try:
            path, *rest = _plan(x, p, activation, training).splitlines()
        except PathError as error:
            lines.append(f"{tokens:>6} tokens  {'refused':<12}{error}")
            continue
        reason = next(line for line in rest if line.startswith("reason"))
        lines.append(
            f"{tokens:>6} tokens  {path.split()[1]:<12}{reason.removeprefix('reason').strip()}"
        )
    return "\n".join(lines)


def _leaves_misfits(module: nn.Module) -> bool:
    """Whether a call that `fused_mlp` refuses goes to the original forward, which may convert it."""
    from .integrations import adopt, blocks

    return adopt.adopted(module) and not isinstance(module.__dict__[adopt.STATE], blocks.Pair)


def _model(model: nn.Module, x: Tensor | None, training: bool) -> str:
    from . import integrations
    from .integrations import adopt, blocks

    rows: list[tuple[str, str, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, blocks.AdoptedSecond) or not (
            isinstance(module, FusedMLP) or adopt.adopted(module)
        ):
            continue
        why = integrations.standing(module)
        rows.append((name, "original" if why else "fused", why or _once(module, training)))
    for name, module, found in integrations.candidates(model):
        why = found if isinstance(found, str) else "not fused yet: fused_mlp.fuse(model) would"
        rows.append((name or type(module).__name__, "original", why))
    if not rows:
        return "no MLP found: nothing here has two or three linear layers of fitting sizes and no other parameters"
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:<{width}}  {state:<9} {why}" for name, state, why in rows)


def _once(module: nn.Module, training: bool) -> str:
    p, activation = _params(module)
    sizes = f"{p.up_weight.shape[1]}/{p.up_weight.shape[0]}"
    text = f"{'gated' if p.gate_weight is not None else 'plain'} {activation} {sizes}"
    for kind in dict.fromkeys(type(t) for t in p if t is not None):
        if kind not in PLAIN:
            text += f"; its weights are {kind.__module__.partition('.')[0]}'s {kind.__name__}"
    return text
