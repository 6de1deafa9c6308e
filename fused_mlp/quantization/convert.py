"""`quantize` and `prepare_qat`: the checks first, over everything, so that a refusal changes
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import quantize_
from torchao.quantization.granularity import PerTensor
from torchao.quantization.observer import AffineQuantizedMinMaxObserver
from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig, QATConfig
from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig
from torchao.quantization.quant_primitives import MappingType

from ..integrations import adopt
from ..modules import FusedMLP
from . import library, modes, weights
from .modes import Mode

_MODE = "_fused_mlp_mode"  # (mode's name, group size) of a converted module
_PREPARED = "_fused_mlp_qat"


def quantize(
    module: nn.Module,
    mode: str,
    *,
    group_size: int = 128,
    calibration: Iterable[Any] | None = None,
) -> nn.Module:
    """Quantize every `FusedMLP` in ``module``, in place, for inference.

    Args:
        module: a `FusedMLP`, or a model that holds some (see `fused_mlp.fuse`); the rest of the
            model is left alone. One that went through `prepare_qat` is converted.
        mode: ``int8_dynamic`` (int8 weights and activations, a scale a token), ``int8_static`` (one
            fixed scale an activation, from ``calibration``), ``int8_weight``, ``int4_weight``,
            ``fp8_dynamic``.
        group_size: weights that share a scale in ``int4_weight``: 32, 64, 128 or 256.
        calibration: for ``int8_static``, inputs of ``module``: each a tensor, a tuple of arguments
            or a mapping of keywords.

    Returns:
        ``module``. Its weights are torchao's tensors without gradients; ``state_dict`` saves them,
        and ``load_state_dict(..., assign=True)`` loads them into a module that is quantized or not.

    Raises:
        ValueError: an unknown mode; no `FusedMLP` in ``module``; already quantized; a group size
            that does not divide the rows; NaN in a weight or in calibration; no calibration data,
            or data for a mode that takes none.
        TypeError: a calibration input is a list.
        ImportError: torchao is missing.

    Weights that are tied stay tied, but for int8_static, where each has its own input's scale.
    In another process, import `fused_mlp.quantization` before ``torch.load``. Other files than
    torch's (safetensors) go through torchao's own flattening, which knows every mode but
    ``int4_weight`` on a CPU.

    On a CPU, ``int8_weight`` and ``int4_weight`` compute in bf16 where the CPU does; ``int4_weight``
    is for memory there, not for speed. https://github.com/pytorch/ao

    >>> import torch, fused_mlp
    >>> mlp = fused_mlp.quantize(fused_mlp.FusedMLP(64, 128), "int8_dynamic")
    >>> mlp(torch.ones(2, 64)).shape
    torch.Size([2, 64])
    """
    chosen = modes.get(mode)
    found = _fused_mlps(module)
    if chosen.calibrated and calibration is None:
        raise ValueError(
            f"{mode} needs calibration data: calibration=[x, ...], inputs like those to come"
        )
    if not chosen.calibrated and calibration is not None:
        raise ValueError(f"{mode} takes no calibration; only int8_static does")
    for name, mlp in found:
        _check(name, mlp, chosen, group_size)
    scales = _calibrate(module, found, calibration) if calibration is not None else {}
    tied: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id; the first keeps it taken
    for name, mlp in found:
        _unprepare(mlp)
        for child, linear in _linears(mlp):
            act_scale = scales.get((name, child == mlp._fused_mlp.down))
            before = linear.weight
            if act_scale is not None or id(before) not in tied:
                made = weights.make(before, chosen, group_size, act_scale)
                tied[id(before)] = before, nn.Parameter(made, requires_grad=False)
            linear.weight = tied[id(before)][1]
            if linear.bias is not None:
                linear.bias.requires_grad_(False)
        setattr(mlp, _MODE, (mode, group_size))
        mlp.eval()
        mlp.register_forward_pre_hook(_refuse_training)
    return module


def prepare_qat(module: nn.Module, mode: str, *, group_size: int = 128) -> nn.Module:
    """Let every `FusedMLP` in ``module`` train as if quantized, in place; `quantize` with the same
    mode converts it.

    Weights (and, for ``int8_dynamic``, activations) are rounded in forward and gradients pass
    through the rounding (Jacob et al., https://arxiv.org/abs/1712.05877), by torchao's `QATConfig`.

    Args:
        module: as in `quantize`.
        mode: ``int8_dynamic``, ``int8_weight`` or ``int4_weight``.
        group_size: as in `quantize`.

    Raises:
        ValueError: as in `quantize`; a mode that has no fake quantization; prepared already.
    """
    chosen = modes.get(mode)
    if not chosen.trainable:
        known = ", ".join(m.name for m in modes.MODES.values() if m.trainable)
        raise ValueError(f"{mode} cannot be trained for; known are {known}")
    found = _fused_mlps(module)
    for name, mlp in found:
        if hasattr(mlp, _PREPARED):
            raise ValueError(
                f"{name} is already prepared for {getattr(mlp, _PREPARED)[0]}; quantize() "
                "converts it"
            )
        _check(name, mlp, chosen, group_size)
    for _, mlp in found:
        # Each child is replaced, not the MLP: so optimizers keep their parameters.
        with library.only_news():  # it imports torchao's prototypes
            quantize_(mlp, _qat_config(chosen, group_size), lambda m, _: isinstance(m, nn.Linear))
        setattr(mlp, _PREPARED, (mode, group_size))
    return module


def _qat_config(mode: Mode, group_size: int) -> QATConfig:
    if mode.name == "int4_weight":
        return QATConfig(
            weight_config=Int4WeightFakeQuantizeConfig(group_size, torch.bfloat16), step="prepare"
        )
    weight = IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    activation = None
    if mode.name == "int8_dynamic":
        # torchao imitates per-token activations only with a zero point; it is the finer of the two
        # roundings.
        activation = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    return QATConfig(activation_config=activation, weight_config=weight, step="prepare")


def _unprepare(mlp: nn.Module) -> None:
    if hasattr(mlp, _PREPARED):
        quantize_(mlp, QATConfig(step="convert"), lambda m, _: isinstance(m, FakeQuantizedLinear))
        delattr(mlp, _PREPARED)


def _fused_mlps(module: nn.Module) -> list[tuple[str, FusedMLP]]:
    found = [
        (name or type(m).__name__, m)
        for name, m in module.named_modules()
        if isinstance(m, FusedMLP)
    ]
    if not found:
        blocks = [name or "it" for name, m in module.named_modules() if adopt.adopted(m)]
        if blocks:
            raise ValueError(
                f"{type(module).__name__} holds no FusedMLP of its own: {', '.join(blocks)} is a "
                "fused block, whose two layers quantize does not take; unfuse it and put its MLP "
                "in a module of its own"
            )
        raise ValueError(
            f"{type(module).__name__} holds no FusedMLP; make one with fused_mlp.fuse(model) or "
            "FusedMLP.from_module(mlp)"
        )
    return found


def _linears(mlp: FusedMLP) -> list[tuple[str, nn.Module]]:
    roles = mlp._fused_mlp
    names = dict.fromkeys(name for name in (roles.gate, roles.up, roles.down) if name is not None)
    return [(name, mlp._modules[name]) for name in names]


def _check(name: str, mlp: FusedMLP, mode: Mode, group_size: int) -> None:
    prepared = getattr(mlp, _PREPARED, None)
    wanted = (mode.name, group_size) if mode.grouped else (mode.name,)
    if prepared is not None and prepared[: len(wanted)] != wanted:
        raise ValueError(
            f"{name} was trained for {prepared[0]} with group size {prepared[1]}, so quantize it "
            "so, "
            f"not for {mode.name} with {group_size}"
        )
    if mlp._fused_mlp.gate == mlp._fused_mlp.up:
        raise ValueError(
            f"{name} packs gate and up in {mlp._fused_mlp.up}; quantize takes them as two linear "
            "layers: copy the upper half of its rows into a FusedMLP's gate_proj and the lower "
            "into its up_proj, and put that in its place"
        )
    for child, linear in _linears(mlp):
        if not isinstance(linear, nn.Linear):
            raise ValueError(
                f"{name}.{child} is a {type(linear).__name__}; quantize takes nn.Linear layers"
                + (
                    ": put one with the transposed weight in its place before fusing"
                    if type(linear).__name__ == "Conv1D"
                    else ""
                )
            )
        if weights.is_quantized(linear.weight):
            raise ValueError(
                f"{name} is already quantized "
                f"({getattr(mlp, _MODE, ('loaded from a state_dict',))[0]}); "
                "quantizing rounded weights again only loses more: start from the original weights"
            )
        why = weights.obstacle(linear.weight, mode, group_size)
        if why is not None:
            raise ValueError(f"{name}.{child}.weight cannot become {mode.name}: {why}")


def _refuse_training(mlp: nn.Module, _: Any) -> None:
    if mlp.training and torch.is_grad_enabled():
        mode = getattr(mlp, _MODE)[0]
        raise RuntimeError(
            f"this FusedMLP was converted to {mode} and cannot be trained: rounded weights have "
            "no gradient. Train before "
            "converting (fused_mlp.quantization.prepare_qat), or call .eval() to use it"
        )


# ---------------------------------------------------------------- calibration


def _observer(name: str, where: str) -> Callable[[Tensor], None]:
    observer = AffineQuantizedMinMaxObserver(
        MappingType.SYMMETRIC,
        torch.int8,
        PerTensor(),
        eps=torch.finfo(torch.float32).eps,
        scale_dtype=torch.float32,
    )

    def observe(x: Tensor) -> None:
        if not torch.isfinite(x).all():
            raise ValueError(
                f"calibration: {where} of {name} holds NaN or infinity; a scale cannot be found "
                "from it, clean the data"
            )
        if x.numel():  # the observer wants one shape; two numbers say all it asks
            observer(torch.stack(x.float().aminmax()).view(2, 1))

    observe.observer = observer  # type: ignore[attr-defined]
    return observe


@contextmanager
def _observed(found: list[tuple[str, FusedMLP]]) -> Iterator[dict[tuple[str, bool], Any]]:
    """Inside, what goes into each MLP and into its down projection is observed; keys are (name,
    is it the latter)."""
    observers: dict[tuple[str, bool], Any] = {}
    handles = []
    for name, mlp in found:
        at_input, at_hidden = _observer(name, "the input"), _observer(name, "the hidden activation")
        observers[name, False], observers[name, True] = at_input, at_hidden

        def hook(
            mlp: FusedMLP, args: tuple, kwargs: dict, at_input=at_input, at_hidden=at_hidden
        ) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            at_input(x)
            at_hidden(_hidden(mlp, x))

        handles.append(mlp.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield observers
    finally:
        for handle in handles:
            handle.remove()


def _hidden(mlp: FusedMLP, x: Tensor) -> Tensor:
    roles = mlp._fused_mlp
    act, up = mlp._fused_activation().eager, mlp._modules[roles.up](x)
    return act(up) if roles.gate is None else act(mlp._modules[roles.gate](x)) * up


def _calibrate(
    module: nn.Module, found: list[tuple[str, FusedMLP]], calibration: Iterable[Any]
) -> dict[tuple[str, bool], Tensor]:
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), _observed(found) as observers:
            for batch in calibration:
                if isinstance(batch, list):
                    raise TypeError(
                        "a calibration input is a list; make it a tuple of arguments or a tensor"
                    )
                if isinstance(batch, Mapping):  # a tokenizer's output is one, and no dict
                    module(**batch)
                else:
                    module(*batch if isinstance(batch, tuple) else (batch,))
    finally:
        module.train(was_training)
    scales = {}
    for key, observe in observers.items():
        if not hasattr(observe.observer, "min_val"):
            raise ValueError(
                f"calibration gave no data to {key[0]}: it was empty, or never reached this module"
            )
        scale, _ = observe.observer.calculate_qparams()
        scales[key] = scale.reshape(1, 1).float()
    return scales
