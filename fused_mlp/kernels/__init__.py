"""The Triton kernels, one family per file: the jit function, then the launcher that checks, picks a
tile and allocates.

They know nothing of autograd or of when to use them. `specimens` lists what they run, for compiling
with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .common import Specimen

__all__ = ["specimens"]

# Llama-3-8B: every tile divides it, so these are the kernels that real models run.
_HIDDEN, _INTERMEDIATE, _TOKENS = 4096, 14336, 8192


def specimens(full: bool = False, arch: str = "sm90") -> dict[str, Specimen]:
    """Every shipped kernel as ``arch`` would run it: name → specimen. Needs no GPU.

    Made by the launchers themselves, with tensors that have no storage, so nothing here can differ
    from what runs. Names are the same for every architecture; the tile behind a name is that
    architecture's default.

    Args:
        full: also every activation, dtype, token count, kept pre-activations, unaligned sizes and
            tile that the tuner tries, rather than the core set (bf16 of everything, silu and
            gelu_tanh, and one fp32 kernel of each family).
        arch: ``sm80``, ``sm90``, ``sm100``, ``gfx942``, ...
    """
    import torch

    from ..activations import ACTIVATIONS
    from ..tiles import math_of
    from .common import record

    found: dict[str, Specimen] = {}

    def add(name: str, run: Callable[[], Any], precision: str) -> None:
        with record(arch, precision) as recorded:
            run()
        for specimen in recorded:
            # A launcher with a second kernel, a sum of partial results, names it.
            key = name if specimen is recorded[0] else f"{name}/{specimen.kernel.__name__}"
            key = key.removesuffix("_kernel")
            if specimen.kernel.__name__ == "column_sum_kernel":
                key = f"column_sum/{name.split('/')[-1]}"
            found.setdefault(key, specimen.renamed(key))

    kinds = {
        "bf16": (torch.bfloat16, "ieee"),
        "fp16": (torch.float16, "ieee"),
        "tf32": (torch.float32, "tf32"),
        "fp32": (torch.float32, "ieee"),
    }
    for kind, (dtype, precision) in kinds.items():
        for activation in ACTIVATIONS:
            core = activation in ("silu", "gelu_tanh")
            if (kind == "bf16" and (core or full)) or (full and core):
                for name, run in _calls(dtype, activation, full).items():
                    add(f"{name}/{activation}/{kind}", run, precision)
            elif activation == "silu" and kind == "fp32":
                calls = _calls(dtype, activation, False)
                for name in ("act_backward", "glu", "glu_backward"):
                    add(f"{name}/{activation}/{kind}", calls[name], precision)
        if full or kind == "bf16":
            for name, run in (_decode_calls(dtype) | _quantized_calls(dtype, full)).items():
                add(f"{name}/{kind}", run, precision)
        if full and kind != "fp16":  # it takes the tiles of bf16
            for name, run in _tuned_calls(dtype, math_of(dtype, precision, arch), arch).items():
                add(f"{name}/{kind}", run, precision)
    return found


def _calls(dtype: Any, activation: str, full: bool) -> dict[str, Callable[[], Any]]:
    """Launches of one dtype and activation, by name."""
    import torch

    from .activation import act_backward, act_forward
    from .dact_gemm import gemm_dact
    from .glu_gemm import gemm_act

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def calls(tokens: int, H: int, I: int, suffix: str) -> dict[str, Callable[[], Any]]:
        x, wide, weight, down = empty(tokens, H), empty(tokens, 2 * I), empty(I, H), empty(H, I)
        gate, up, bias = wide[:, :I], wide[:, I:], empty(I)

        def backward(up: torch.Tensor | None, bias_grads: bool = False) -> Any:
            return gemm_dact(
                x, down, gate, up, activation, recompute_hidden=True, bias_grads=bias_grads
            )

        return {
            f"glu{suffix}": lambda: gemm_act(x, weight, weight, None, None, activation),
            f"glu_saved{suffix}": lambda: gemm_act(
                x, weight, weight, bias, bias, activation, save=True
            ),
            f"plain{suffix}": lambda: gemm_act(x, weight, None, bias, None, activation),
            f"plain_saved{suffix}": lambda: gemm_act(
                x, weight, None, bias, None, activation, save=True
            ),
            f"glu_backward{suffix}": lambda: backward(up),
            f"glu_backward_bias{suffix}": lambda: backward(up, bias_grads=True),
            f"plain_backward{suffix}": lambda: backward(None),
            f"plain_backward_bias{suffix}": lambda: backward(None, bias_grads=True),
            f"act_forward{suffix}": lambda: act_forward(gate, up, activation),
            f"act_backward{suffix}": lambda: act_backward(
                up, gate, up, activation, recompute_hidden=True
            ),
            f"act_backward_bias{suffix}": lambda: act_backward(
                up, gate, None, activation, bias_grads=True, recompute_hidden=True
            ),
        }

    found = calls(_TOKENS, _HIDDEN, _INTERMEDIATE, "")
    if full:
        found |= calls(64, _HIDDEN, _INTERMEDIATE, "_few_tokens")
        found |= calls(_TOKENS, 770, 3090, "_unaligned")
    return found


def _tuned_calls(dtype: Any, math: Any, arch: str) -> dict[str, Callable[[], Any]]:
    """Each problem's heaviest kernel with each tile that the tuner would time on ``arch``."""
    import torch

    from ..tiles import PROBLEMS, candidates
    from .dact_gemm import gemm_dact
    from .glu_gemm import gemm_act

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight, bias = empty(_TOKENS, _HIDDEN), empty(_INTERMEDIATE, _HIDDEN), empty(_INTERMEDIATE)
    down, wide = empty(_HIDDEN, _INTERMEDIATE), empty(_TOKENS, 2 * _INTERMEDIATE)
    gate, up = wide.chunk(2, 1)

    def call(problem: Any, tile: Any) -> Any:
        gated = problem.startswith("glu")
        if problem.endswith("backward"):
            return gemm_dact(
                x, down, gate, up if gated else None, "gelu_tanh", tile=tile,
                recompute_hidden=True, bias_grads=True,
            )  # fmt: skip
        other = (weight, bias) if gated else (None, None)
        return gemm_act(x, weight, other[0], bias, other[1], "gelu_tanh", tile=tile, save=True)

    return {
        f"{problem}_{t.m}x{t.n}x{t.k}_{t.warps}_warps_{t.stages}_stages/gelu_tanh": partial(
            call, problem, t
        )
        for problem in PROBLEMS
        for t in candidates(arch, math, problem)
    }


def _decode_calls(dtype: Any) -> dict[str, Callable[[], Any]]:
    import torch

    from .decode import decode_mlp

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight, down = (
        empty(16, _HIDDEN),
        empty(_INTERMEDIATE, _HIDDEN),
        empty(_HIDDEN, _INTERMEDIATE),
    )
    return {
        "decode/glu/silu": lambda: decode_mlp(x, weight, weight, down, None, None, None, "silu"),
        "decode/plain/gelu_tanh": lambda: decode_mlp(
            x, weight, None, down, None, None, None, "gelu_tanh"
        ),
    }


def _quantized_calls(dtype: Any, full: bool) -> dict[str, Callable[[], Any]]:
    """int8 and int4 weights (a scale for 128 columns; all group sizes if ``full``)."""
    import torch

    from .int_gemm import QuantWeight, quant_gemm_act

    def empty(*shape: int, of: Any = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    def weight(out: int, width: int, group: int | None) -> QuantWeight:
        if group is None:
            return QuantWeight(
                empty(out, width, of=torch.int8), empty(1, out, of=torch.float32), None, width
            )
        scale = empty(
            width // group, out, of=torch.float16 if dtype == torch.float16 else torch.bfloat16
        )
        return QuantWeight(empty(out, width // 2, of=torch.int8), scale, scale, group)

    found: dict[str, Callable[[], Any]] = {}

    def add(name: str, H: int, I: int, group: int | None) -> None:
        first, second, x, hidden = (
            weight(I, H, group),
            weight(H, I, group),
            empty(16, H),
            empty(16, I),
        )
        bias = empty(I)
        found[f"{name}/glu/silu"] = lambda: quant_gemm_act(x, first, first, None, None, "silu")
        found[f"{name}/plain/gelu_tanh"] = lambda: quant_gemm_act(
            x, first, None, bias, None, "gelu_tanh"
        )
        found[f"{name}/down"] = lambda: quant_gemm_act(hidden, second, None, None, None, "identity")

    add("int8", _HIDDEN, _INTERMEDIATE, None)
    add("int4", _HIDDEN, _INTERMEDIATE, 128)
    if full:
        add("int8_unaligned", 770, 3090, None)
        for group in (32, 64, 256):
            add(f"int4_group{group}", _HIDDEN, _INTERMEDIATE, group)
        add("int4_narrow", 160, 480, 32)
    return found
