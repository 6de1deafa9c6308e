"""Recognises an MLP by what it is made of and by what it computes, never by its class's name.

A module is taken for an MLP if it has two or three linear children of fitting sizes, nothing else
that holds parameters, and if, run on a few random tokens, it gives what ``down(act(gate(x)) *
up(x))`` or ``down(act(up(x)))`` gives. Which child is the gate, and which activation it is, are
found by trying; whatever does not reproduce the module's own output is kept as it was, with the
reason.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .. import activations, reference
from ..paths import Params
from ..roles import Roles, is_linear, weight_and_bias, why_not_plain

# Most that a right candidate's output may differ by, relative to the output: a few roundings of each
# dtype. In bf16 that is one and a half, as silu and hardswish are only 5 % apart.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 1.2e-2}
DROPOUTS = nn.modules.dropout._DropoutNd  # all of PyTorch's
# How far the pre-activations spread in turn. Near 0 all activations are alike; far from it a clamp
# shows, which else would be taken for none.
_SPREADS = (2.0, 64.0, 4096.0)


class Foreign(str):
    """Why a module is no MLP at all, as opposed to an MLP that has to stay as it is."""


def candidate(module: nn.Module) -> bool:
    """Whether a module looks enough like an MLP to be worth a word in `explain`."""
    children = [c for c in module._modules.values() if c is not None]
    linear = [
        c for c in children if isinstance(c, nn.Linear) or is_linear(c) or hasattr(c, "base_layer")
    ]
    rest = [c for c in children if c not in linear]
    if len(linear) not in (2, 3) or any(True for c in rest for _ in c.parameters()):
        return False
    shapes = _shapes(linear)
    return None in shapes.values() or next(_assignments(shapes), None) is not None


def plausible(module: nn.Module) -> bool:
    """Whether a `candidate` that is not taken is worth a word: an attention's projections can have an
    MLP's sizes as well, but hold no activation and end in another size than they began with.
    """
    shapes = _shapes([c for c in module._modules.values() if c is not None and _shape(c)])
    return len(shapes) < 2 or bool(
        held_activations(module)
        or any(shapes[up][1] == shapes[down][0] for _, up, down in _assignments(shapes))
    )


def _shapes(linear: list[nn.Module]) -> dict[str, torch.Size | None]:
    return {str(i): _shape(c) for i, c in enumerate(linear)}


def _shape(module: nn.Module) -> torch.Size | None:
    """``(out, in)`` of a linear child, or None where it has no weight of its own."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    return weight_and_bias(module)[0].shape if is_linear(module) else weight.shape


def recognise(module: nn.Module) -> Roles | str:
    """The roles of an MLP's children, or why the module is not (safely) one."""
    children = {n: c for n, c in module._modules.items() if c is not None}
    if module._parameters or module._buffers:
        return "it has parameters of its own"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return "it has hooks or a forward of its own"
    linear = [n for n, c in children.items() if is_linear(c) or list(c.parameters(recurse=False))]
    for name in linear:
        why = why_not_plain(name, children[name])
        if why:
            return why
    others = {n: c for n, c in children.items() if n not in linear}
    for name, child in others.items():
        if next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            return why_not_plain(name, child) or f"{name} holds parameters"
    if len(linear) not in (2, 3):
        return f"it has {len(linear)} linear children, not 2 or 3"
    first = weight_and_bias(children[linear[0]])[0]
    if first.device.type == "meta":
        return "its weights are on the meta device, so what it computes cannot be seen"
    if first.dtype not in TOLERANCE:
        return f"its weights are {first.dtype}"
    why = mixed(*((n, children[n]) for n in linear))
    if why is not None:
        return why
    dropouts = tuple(n for n, c in others.items() if isinstance(c, DROPOUTS))
    held = held_activations(module)
    if isinstance(held, str):
        return f"it computes something else than an MLP: {held}"
    found = _probe(module, children, linear, held or list(activations.ACTIVATIONS), dropouts)
    return found if isinstance(found, str) else found.within(module)


def mixed(*linear: tuple[str, nn.Module | None]) -> str | None:
    """Why linear layers cannot be one MLP's for being of several dtypes or devices, or None."""
    first: tuple[str, Tensor] | None = None
    for name, child in linear:
        for key, t in (child._parameters if child is not None else {}).items():
            first = first or (f"{name}.{key}", t)
            if t is not None and (t.dtype, t.device) != (first[1].dtype, first[1].device):
                return (
                    f"{name}.{key} is {t.dtype} on {t.device}, {first[0]} {first[1].dtype} on "
                    f"{first[1].device}; only its own forward knows how to convert"
                )
    return None


def differs_in_training(
    module: nn.Module, call: Callable[[], Tensor], inside: tuple[str, ...], after: str | None = None
) -> bool:
    """Whether a module that is an MLP in eval mode is none while training: it draws random numbers,
    or gives something else, for which its own dropouts do not account.
    """
    known = [module._modules[n] for n in (*inside, after) if n is not None]
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with evaluating(module), torch.random.fork_rng(devices=devices):
        expected = call()
        for m in module.modules():
            m.training = all(m is not dropout for dropout in known)
        before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
        got = call()
        after_ = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
    drew = not all(torch.equal(a, b) for a, b in zip(before, after_, strict=True))
    return drew or not torch.equal(expected, got)


def held_activations(module: nn.Module) -> list[str] | str:
    """Names of the activations that a module holds, as children or as functions; or, where there is
    none but something that looks like one, what that is.
    """
    functions: dict[str, Callable] = {
        n: c
        for n, c in module._modules.items()
        if c is not None
        and not isinstance(c, (DROPOUTS, nn.Identity))
        and next(c.parameters(), None) is None
    }
    functions |= {
        n: f
        for n, f in module.__dict__.items()
        if callable(f) and not isinstance(f, (nn.Module, type)) and not n.startswith("_")
    }
    with evaluating(module):
        known = {n: identify(f) for n, f in functions.items()}
        strange = [
            n for n, name in known.items() if name is None and _values(functions[n]) is not None
        ]
    names = [name for name in known.values() if name is not None]
    if strange and not names:
        return f"{strange[0]} is none of the known activations"
    return names


def identify(function: object) -> str | None:
    """The registry's name of an activation, found by evaluating it in float64, or None."""
    y = _values(function)
    if y is None:
        return None
    for act in activations.ACTIVATIONS.values():
        if torch.allclose(act.eager(_POINTS), y, rtol=1e-9, atol=1e-7):
            return act.name
    return None


# The last ones are beyond a clamp.
_POINTS = torch.tensor(
    [*(i / 8 for i in range(-48, 49)), *(s * x for x in (9, 12, 25, 100, 1e4) for s in (1, -1))],
    dtype=torch.float64,
    device="cpu",
)


def _values(function: object) -> Tensor | None:
    """What a function makes of `_POINTS`, or None if it is not one that keeps a shape."""
    if not callable(function):
        return None
    try:
        with torch.no_grad():
            y = function(_POINTS.clone())
    except Exception:  # whatever it is, it is not an activation
        return None
    return y.to(_POINTS.dtype) if isinstance(y, Tensor) and y.shape == _POINTS.shape else None


def _assignments(shape: dict[str, torch.Size]) -> Iterator[tuple[str | None, str, str]]:
    """(gate, up, down) by name, wherever the sizes fit."""
    for names in itertools.permutations(shape):
        *first, down = names
        width = shape[down][1]
        if len(first) == 1:
            (up,) = first
            if shape[up][0] == width:
                yield None, up, down
            elif shape[up][0] == 2 * width:
                yield up, up, down
        elif shape[first[0]] == shape[first[1]] and shape[first[0]][0] == width:
            yield first[0], first[1], down


def _probe(
    module: nn.Module,
    children: dict[str, nn.Module],
    linear: list[str],
    names: list[str],
    dropouts: tuple[str, ...],
) -> Roles | str:
    """Run the module and every candidate on the same three tokens; the one that agrees is it."""
    shapes = {n: weight_and_bias(children[n])[0].shape for n in linear}
    roles = [Roles(up, down, gate, act) for gate, up, down in _assignments(shapes) for act in names]
    if not roles:
        return Foreign("the sizes of its linear layers do not make an MLP")
    why = ""
    for width in dict.fromkeys(weight_and_bias(children[r.up])[0].shape[1] for r in roles):
        same = [r for r in roles if weight_and_bias(children[r.up])[0].shape[1] == width]
        with torch.no_grad(), evaluating(module):
            chosen = _agreeing(module, children, same)
            if isinstance(chosen, Roles):
                break
            why = why or chosen
    else:
        return why
    x = _tokens(children[chosen.up])
    with torch.no_grad(), evaluating(module):
        after = _outer_dropout(module, x, dropouts)
    with torch.no_grad():
        evaluating_alone = differs_in_training(module, lambda: module(x), dropouts)
    return Roles(
        chosen.up, chosen.down, chosen.gate, chosen.activation,
        after, tuple(n for n in dropouts if n != after), evaluating=evaluating_alone,
    )  # fmt: skip


def _tokens(linear: nn.Module, spread: float = _SPREADS[0]) -> Tensor:
    """Three tokens whose pre-activations have a standard deviation of ``spread``."""
    weight, bias = weight_and_bias(linear)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, 3, weight.shape[1], generator=generator, device="cpu").to(
        weight.device, weight.dtype
    )
    now = nn.functional.linear(x, weight, bias).float().std().item()
    return x * (spread / now) if 0 < now < float("inf") else x


def _agreeing(module: nn.Module, children: dict[str, nn.Module], roles: list[Roles]) -> Roles | str:
    """Those of the roles, all of one input size, that give the module's own output; or why none
    does.
    """
    x = _tokens(children[roles[0].up])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = module(x)
    except Exception as error:  # a foreign forward may raise anything
        return Foreign(
            f"its forward{_arguments(module)} does not take one tensor "
            f"(batch, tokens, hidden_size): {type(error).__name__}"
        )
    if not isinstance(expected, Tensor):
        return Foreign(f"it returns a {type(expected).__name__}")
    if not expected.isfinite().all() or (len(roles) > 1 and not expected.any()):
        return "its output says nothing about what it computes (all zero, or not finite)"
    errors = [_distance(expected, x, r.params(children), r.activation) for r in roles]
    best = min(range(len(roles)), key=errors.__getitem__)
    if not errors[best] <= TOLERANCE[x.dtype]:
        return "it computes something else than down(act(gate(x)) * up(x))"
    chosen = roles[best]
    for spread in _SPREADS[1:]:
        x = _tokens(children[chosen.up], spread)
        expected = module(x)
        if not expected.isfinite().all():
            break
        if (
            not _distance(expected, x, chosen.params(children), chosen.activation)
            <= TOLERANCE[x.dtype]
        ):
            return "it computes something else than down(act(gate(x)) * up(x)) for large values"
    return chosen


def _arguments(module: nn.Module) -> str:
    try:
        names = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward written in C, or wrapped
        return ""
    return f"({', '.join(names)})"


def _distance(expected: Tensor, x: Tensor, p: Params, activation: str) -> float:
    y = reference.mlp(
        x, p.up_weight, p.down_weight, gate_weight=p.gate_weight, up_bias=p.up_bias,
        gate_bias=p.gate_bias, down_bias=p.down_bias, activation=activation,
    )  # fmt: skip
    return distance(y, expected)


def distance(got: Tensor, expected: Tensor) -> float:
    """How far apart two outputs are, relative to the second; root mean squares."""
    if got.shape != expected.shape:
        return float("inf")
    difference, size = (
        t.double().square().mean().sqrt() for t in (got.double() - expected, expected)
    )
    return (difference / size.clamp_min(1e-30)).item()


def _outer_dropout(module: nn.Module, x: Tensor, dropouts: tuple[str, ...]) -> str | None:
    """The name of the only dropout if it follows the down projection: its outputs are then 0 or
    twice the others.
    """
    if len(dropouts) != 1:
        return None
    dropout = module._modules[dropouts[0]]
    p, training, expected = dropout.p, dropout.training, module(x)
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        dropout.p, dropout.training = 0.5, True
        with torch.random.fork_rng(devices=devices):
            dropped = module(x)
    finally:
        dropout.p, dropout.training = p, training
    return dropouts[0] if torch.equal(dropped, torch.where(dropped == 0, 0, 2 * expected)) else None


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode, every submodule's own mode restored at the end."""
    modes = [(m, m.training) for m in module.modules()]
    try:
        for m, _ in modes:
            m.training = False
        yield
    finally:
        for m, mode in modes:
            m.training = mode
