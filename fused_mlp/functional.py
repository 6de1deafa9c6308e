"""`fused_mlp`: checks its arguments, asks for a plan, runs it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import activations, ops, paths, plan, reference
from .paths import Params
from .roles import PLAIN, TRACED

_STRIDED = torch.strided  # looked up once, as every call asks for it
_KEEP = {"none": 2, "activation": 1, "all": 0}


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
        down_weight: ``(hidden_size, intermediate_size)``; its first size may differ from ``x``'s
        last.
        gate_weight: ``(intermediate_size, hidden_size)``, or None for a plain MLP.
        up_bias, gate_bias: ``(intermediate_size,)`` or None.
        down_bias: ``(hidden_size,)`` or None.
        activation: ``gelu``, ``gelu_tanh``, ``silu``, ``relu``, ``relu2``, ``quick_gelu``,
            ``sigmoid``, ``identity`` or an alias of these.
        recompute: what is computed again in backward instead of being kept: ``"none"`` keeps 3
            activations of ``(tokens, intermediate_size)`` (2 without a gate), ``"activation"`` 2
            (1), ``"all"`` none. Eager PyTorch keeps 4 (2), and so does this where the plan is
            ``eager`` and ``tokens * intermediate_size`` is below `plan.AUTOGRAD_BELOW` (unless
            ``"all"`` is asked for): there its own autograd is the quicker one.

    Returns:
        ``(..., hidden_size)`` in the dtype of ``x`` (under autocast, in autocast's).

    Raises:
        ValueError: shapes that do not fit together, or devices that differ; an unknown activation
        or recompute.
        TypeError: an argument that is no tensor; dtypes that differ or are not floating point.
        RuntimeError: a gradient is wanted in inference mode; parameters on the meta device with an
        ``x`` that is not.
        PathError: `use_path` forces a path that cannot run here.

    Differentiable once (such small calls: any number of times); `fused_mlp.reference.mlp` any
    number of times. Weights may change between calls, as `FusedMLP` says.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> up, down = torch.ones(4, 3), torch.ones(3, 4)
    >>> fused_mlp(x, up, down, gate_weight=torch.ones(4, 3), activation="identity")
    tensor([[36., 36., 36.],
            [36., 36., 36.]])
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a tensor (..., hidden_size)")
    p = Params(up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
    for name, t in zip(Params._fields, p, strict=True):
        if not isinstance(t, Tensor) and (t is not None or name in ("up_weight", "down_weight")):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a tensor, as in nn.Linear")
    act = activations.get(activation)
    return run(x, p, act, recompute)


def run(
    x: Tensor, p: Params, act: activations.Activation, recompute: str, *, fitting: bool = False
) -> Tensor:
    """`fused_mlp` for parameters already gathered; ``fitting`` says that they were checked."""
    if type(p.up_weight) not in TRACED and quantized(p) and not torch.compiler.is_compiling():
        from .quantization import run as quantization

        return quantization.run(x, p, act)
    if x.is_nested and type(x) is Tensor:  # it has no shape to check
        return reference.mlp(x, p[0], p[1], **_keywords(p), activation=act.name)
    keep = kept(recompute) if fitting else check(x, p, recompute)
    if torch.compiler.is_compiling():
        return _traced(x, p, act, keep)
    check_recorded(x)
    dtype = ops.autocast_dtype(x.device.type)
    if dtype is not None:
        x, p = ops.cast(x, dtype), Params(*(ops.cast(t, dtype) for t in p))
    if by_reference(x, p) is not None:
        return reference.mlp(x, p[0], p[1], **_keywords(p), activation=act.name)
    flat = x if x.dim() == 2 else rows(x)
    if wants_grad(x, p):
        if keep and ops.plan_for(flat, p, act.name, True).autograd:
            return reference.mlp(x, p[0], p[1], **_keywords(p), activation=act.name)
        y = ops.MLP.apply(flat, *p, act.name, keep)
    else:
        y = paths.inference(ops.plan_for(flat, p, act.name, False), flat, p, act)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def left_to_pytorch(x: Tensor, p: Params, act: activations.Activation, recompute: str) -> bool:
    """Whether calls like this one are best made of PyTorch's own operators, whatever else holds.

    Settled once for a kind of call, so nothing may be in force that another call could lack.
    """
    if ops.autocast_dtype(x.device.type) is not None or unusual(x, p) is not None:
        return False
    keep = check(x, p, recompute)
    if x.requires_grad and torch.is_inference_mode_enabled():
        return False
    flat = x if x.dim() == 2 else rows(x)
    if wants_grad(x, p):
        return bool(keep) and ops.plan_for(flat, p, act.name, True).autograd
    # With gradients enabled but none wanted, a later call of this kind may want one.
    return not torch.is_grad_enabled() and ops.plan_for(flat, p, act.name, False).path == "eager"


def quantized(p: Params) -> bool:
    """Whether the weights are torchao's tensors; asks no more of torchao than that it was imported
    by someone.
    """
    if not type(p.up_weight).__module__.startswith("torchao."):
        return False
    from .quantization import is_quantized

    return is_quantized(p.up_weight)


def _transforming() -> bool:
    """Whether a torch.func transform is in force, within which an operator of ours cannot be."""
    return torch._C._are_functorch_transforms_active()


# torch.compiler.assume_constant_result, which would import the compiler: the compiler asks it while
# it traces the transform's function.
_transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced(x: Tensor, p: Params, act: activations.Activation, keep: int) -> Tensor:
    training = wants_grad(x, p)
    if _transforming() or any(t is not None and type(t) not in TRACED for t in (x, *p)):
        return reference.mlp(x, p[0], p[1], **_keywords(p), activation=act.name)
    flat = x if x.dim() == 2 else rows(x)
    y = ops.mlp_op(flat, *p, act.name, keep if training else 0, training)[0]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def rows(x: Tensor) -> Tensor:
    """``(..., hidden_size)`` as ``(tokens, hidden_size)``."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def wants_grad(x: Tensor, p: Params) -> bool:
    """Whether autograd will ask for a gradient of this call."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(t is not None and t.requires_grad for t in p)


def _keywords(p: Params) -> dict[str, Tensor | None]:
    return dict(zip(Params._fields[2:], p[2:], strict=True))


def unusual(x: Tensor, p: Params) -> str | None:
    """Why only `reference.mlp`, made of PyTorch's own operators, can serve this call; None if it is
    a plain one.
    """
    for t in (x, *p):
        if t is not None:
            if type(t) not in PLAIN:
                return (
                    f"a {type(t).__name__} is not a plain tensor; PyTorch's own operators handle it"
                )
            if t.layout is not _STRIDED:
                return f"a {t.layout} tensor is not strided"
            if t.is_neg():
                return "a lazily negated view, whose memory holds the opposite"
    if x.device.type == "meta":
        return "meta tensors have shapes only"
    if torch._C._are_functorch_transforms_active():
        return "inside a torch.func transform (vmap, grad, jvp, ...)"
    if torch.autograd.forward_ad._current_level >= 0:
        return "inside forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "inside torch.jit.trace, which has to see every operator"
    if torch._C._len_torch_dispatch_stack():
        return "inside a TorchDispatchMode, which has to see every operator"
    return None


def by_reference(x: Tensor, p: Params) -> str | None:
    """Why `reference.mlp` serves this call, as `unusual` says; None if a path does.

    Raises:
        PathError: `use_path` forces a path that hence cannot run.
    """
    why = unusual(x, p)
    if why is not None and plan.forced() not in (None, "eager"):
        raise plan.PathError(f"path {plan.forced()!r} was forced but cannot run: {why}")
    return why


def check_recorded(x: Tensor) -> None:
    """Raise where a gradient is wanted that is not recorded."""
    if x.requires_grad and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "x requires a gradient, but inference mode records none; use torch.no_grad(), or x.detach()"
        )


def kept(recompute: str) -> int:
    """How much a value of ``recompute`` keeps, as `paths.forward` counts it.

    Raises:
        ValueError: it is not one of the known values.
    """
    try:
        return _KEEP[recompute]
    except KeyError:
        known = ", ".join(map(repr, _KEEP))
        raise ValueError(f"unknown recompute {recompute!r}; known are {known}") from None


def check(x: Tensor, p: Params, recompute: str) -> int:
    """Raise the one clear exception for arguments that cannot work; returns how much `recompute`
    keeps.
    """
    keep = kept(recompute)
    if _fitting(x, p):
        return keep
    up, down, gate, up_bias, gate_bias, down_bias = p
    dtype, device = x.dtype, x.device
    if not dtype.is_floating_point:
        raise TypeError(f"x is {dtype}; an MLP needs a floating-point x, for instance x.float()")
    _fits(x.dim() >= 1 and up.dim() == 2 and x.shape[-1] == up.shape[1], "x", x, "up_weight", up,
          "(..., hidden_size)", "(intermediate_size, hidden_size)")  # fmt: skip
    _fits(down.dim() == 2 and down.shape[1] == up.shape[0], "down_weight", down, "up_weight", up,
          "(hidden_size, intermediate_size)", "(intermediate_size, hidden_size)")  # fmt: skip
    if gate is not None:
        _fits(gate.shape == up.shape, "gate_weight", gate, "up_weight", up,
              "(intermediate_size, hidden_size)", "(intermediate_size, hidden_size)")  # fmt: skip
    elif gate_bias is not None:
        raise ValueError(f"gate_bias is {tuple(gate_bias.shape)} but there is no gate_weight")
    for name, bias, owner, weight in (
        ("up_bias", up_bias, "up_weight", up),
        ("gate_bias", gate_bias, "gate_weight", gate),
        ("down_bias", down_bias, "down_weight", down),
    ):
        if bias is not None:
            _fits(bias.dim() == 1 and bias.shape[0] == weight.shape[0], name, bias, owner, weight,
                  "(out_features,)", "(out_features, in_features)")  # fmt: skip
    for name, t in zip(Params._fields, p, strict=True):
        if t is None:
            continue
        if t.device != device:
            if t.device.type == "meta":
                raise RuntimeError(
                    f"{name} is on the meta device and has no values; materialise it "
                    f"(module.to_empty, then load_state_dict) before an x on {device} goes in"
                )
            raise ValueError(
                f"{name} is on {t.device} but x is on {device}; both must be on one device"
            )
        if t.dtype != dtype and not (
            ops.autocast_dtype(device.type) is not None and torch.float64 not in (t.dtype, dtype)
        ):
            raise TypeError(
                f"{name} is {t.dtype} but x is {dtype}; both must have one dtype, or run under "
                "torch.autocast, which casts all but float64"
            )
    return keep


def run_if_suited(
    x: Tensor, p: Params, act: activations.Activation, recompute: str
) -> Tensor | None:
    """`run`, or None for a call that it would refuse, or that is not for it to refuse."""
    fitting = isinstance(x, Tensor) and not x.is_nested and _fitting(x, p)
    if not fitting and not suits(x, p):
        return None
    return run(x, p, act, recompute, fitting=fitting)


def suits(x: Tensor, p: Params) -> bool:
    """Whether shapes, dtypes and devices of a call are such as `check` lets pass; parameters without
    values are for it to refuse.
    """
    if not isinstance(x, Tensor) or x.is_nested:
        return False
    if not _fitting(x, p):
        if quantized(p):
            return True  # their dtype need not be x's, and what runs them has words of its own
        try:
            check(x, p, "none")
        except (TypeError, ValueError):
            return False
        except RuntimeError:
            return True
    return True


def _fitting(x: Tensor, p: Params) -> bool:
    """Whether nothing can be wrong: `check` for every call, without its words. A no may be false."""
    up, down, gate, up_bias, gate_bias, down_bias = p
    dtype, device = x.dtype, x.device
    shape, width, size = up.shape, down.shape, x.shape
    if not (
        dtype.is_floating_point
        and size
        and len(shape) == len(width) == 2
        and size[-1] == shape[1]
        and width[1] == shape[0]
        and up.dtype is down.dtype is dtype
        and up.device == down.device == device
    ):
        return False
    if gate is None:
        if gate_bias is not None:
            return False
    elif gate.shape != shape or gate.dtype is not dtype or gate.device != device:
        return False
    for bias, rows_ in ((up_bias, shape), (gate_bias, shape), (down_bias, width)):
        if bias is not None and (
            bias.shape != rows_[:1] or bias.dtype is not dtype or bias.device != device
        ):
            return False
    return True


def _fits(
    ok: bool, name: str, t: Tensor, other: str, reference: Tensor, shape: str, reference_shape: str
) -> None:
    if not ok:
        both = "both" if shape == reference_shape else "they"
        expected = shape if shape == reference_shape else f"{shape} and {reference_shape}"
        raise ValueError(
            f"{name} is {tuple(t.shape)} but {other} is {tuple(reference.shape)}; {both} must be {expected}"
        )
