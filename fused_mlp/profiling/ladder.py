"""The rungs, and what is expected of each before anything runs.

Part 2 is the MLP of "Profiling in PyTorch" (https://huggingface.co/blog): one linear layer, then
gelu(gate(x)) · up(x) and its down projection, made faster step by step: here by PyTorch's own
switches, in `fusing` by what writes or buys a kernel. Part 1 is its beginning: a product and a sum.
"""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor, nn

from .. import activations
from ..modules import FusedMLP
from . import fusing
from .rung import Case, Plain, Rung, Setting, compiled

PARTS = (1, 2)


def ladder(setting: Setting, part: int = 2) -> list[Rung]:
    """The rungs of one part, ready to run.

    Raises:
        ValueError: there is no such part.
    """
    if part not in PARTS:
        raise ValueError(f"there is no part {part}; known are 1 (matmul + add) and 2 (the MLP)")
    torch.manual_seed(0)
    rungs = _part_1(setting) if part == 1 else _part_2(setting)
    return [dataclasses.replace(rung, place=place) for place, rung in enumerate(rungs, 1)]


def _part_1(s: Setting) -> list[Rung]:
    x, w = (
        torch.randn(s.tokens, s.hidden, **s.make),
        torch.randn(s.intermediate, s.hidden, **s.make),
    )
    b = torch.randn(s.intermediate, **s.make)
    out = s.tokens * s.intermediate
    least = (x.numel() + w.numel() + b.numel() + out) * s.dtype.itemsize

    def separate(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x @ w.t() + b

    one = compiled(separate)
    return [
        Rung(
            "matmul + add",
            "x @ w.T + b",
            lambda: separate(x, w, b),
            2,
            1,
            "a GEMM, then a pass that adds the bias",
            least,
            traffic=lambda: separate(x, w, b),
        ),
        Rung(
            "addmm",
            "torch.addmm(b, x, w.T)",
            lambda: torch.addmm(b, x, w.t()),
            1,
            1,
            "the bias is added in the GEMM's epilogue",
            least,
            traffic=lambda: torch.addmm(b, x, w.t()),
        ),
        Rung(
            "compiled",
            "torch.compile(matmul + add)",
            lambda: one(x, w, b),
            1,
            1,
            "the compiler rewrites matmul and add to addmm",
            least,
            traffic=least,
        ),
    ]


def _part_2(s: Setting) -> list[Rung]:
    act = activations.get(s.activation)
    mlp = FusedMLP(s.hidden, s.intermediate, activation=s.activation, **s.make)
    mlp.requires_grad_(s.training)
    case = Case(s, mlp, torch.randn(s.tokens, s.hidden, **s.make), act.eager)
    plain = Plain(mlp, act.eager)
    return [
        *_linears(case),
        _eager(case, plain),
        _inference_mode(case, plain),
        _autocast(case, plain),
        _torchscript(case, plain),
        _compiled(case, plain),
        fusing.liger(case),
        fusing.packed(case),
        fusing.fused(case),
        fusing.quantized(case),
    ]


def _linears(c: Case) -> list[Rung]:
    s, train = c.setting, c.setting.training
    layer = nn.Linear(s.hidden, s.intermediate, **s.make).requires_grad_(train)
    parameters = tuple(layer.parameters())
    weights = sum(p.numel() for p in parameters)
    least = (weights + s.tokens * (s.hidden + s.intermediate)) * s.dtype.itemsize
    # On a GPU the sum over tokens for the bias takes as many kernels as its size asks for.
    on_cpu = 4 if s.device == "cpu" else None
    count, gemms, saved = (on_cpu, 3, 0) if train else (1, 1, None)
    backward = "; backward: 2 GEMMs, and the sum over tokens for the bias"
    return [
        Rung(
            "linear",
            "one nn.Linear with bias",
            c.step(layer, parameters),
            count,
            gemms,
            "one GEMM, the bias in its epilogue" + (backward if train else ""),
            least,
            saved,
            lambda: layer(c.x),
            parameters,
        ),
        Rung(
            "compiled linear",
            "torch.compile of it",
            c.step(compiled(layer), parameters),
            count,
            gemms,
            "there is nothing left to fuse" + (backward if train else ""),
            least,
            saved,
            least,
            parameters,
        ),
    ]


def _eager(c: Case, plain: Plain) -> Rung:
    train = c.setting.training
    backward = "; backward: 6 GEMMs, 2 products, 1 derivative, 1 sum of the two dx"
    return Rung(
        "eager",
        "the gated MLP of nn.Linear",
        c.step(plain),
        15 if train else 5,
        9 if train else 3,
        "3 GEMMs, activation, product" + (backward if train else ""),
        c.setting.least_bytes(),
        4 if train else None,
        lambda: plain(c.x),
        c.parameters,
    )


def _inference_mode(c: Case, plain: Plain) -> Rung:
    def forward() -> Tensor:
        with torch.inference_mode():
            return plain(c.x)

    return Rung(
        "inference mode",
        "eager under torch.inference_mode",
        forward,
        5,
        3,
        "what eager runs: it spares the host some bookkeeping, the device nothing",
        c.setting.least_bytes(),
        traffic=lambda: plain(c.x),
        parameters=c.parameters,
        missing="it has no backward" if c.setting.training else None,
    )


def _autocast(c: Case, plain: Plain) -> Rung:
    s = c.setting

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(s.device, torch.bfloat16):
            return plain(x)

    why = "eager's, and a pass for each tensor cast: 3 weights, and x once for each of 2 GEMMs"
    return Rung(
        "autocast",
        "eager under torch.autocast: fp32 weights, bf16 arithmetic",
        c.step(forward),
        None if s.training else 10,
        9 if s.training else 3,
        why + ("; in backward again" if s.training else ""),
        s.least_bytes(),
        traffic=lambda: forward(c.x),
        parameters=c.parameters,
        missing=None if s.dtype == torch.float32 else "it is for weights in fp32",
    )


def _torchscript(c: Case, plain: Plain) -> Rung:
    s = c.setting
    rung = Rung(
        "torchscript",
        "historical, deprecated: eager traced, frozen and optimized for inference",
        None,
        5 if s.device == "cpu" else None,
        3,
        "the weights become transposed constants; on a CPU nothing is fused, on a GPU its own "
        "fuser may join activation and product",
        s.least_bytes(),
        parameters=c.parameters,
    )
    if s.training:
        return dataclasses.replace(rung, missing="frozen weights have no gradient")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = torch.jit.trace(plain.eval(), c.x, check_trace=False)
            frozen = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
    except Exception as error:  # a Python or torch that has given it up says so in its own way
        return dataclasses.replace(rung, missing=f"no TorchScript here: {error}".splitlines()[0])
    return dataclasses.replace(rung, call=lambda: frozen(c.x), traffic=lambda: frozen(c.x))


def _compiled(c: Case, plain: Plain) -> Rung:
    s, train = c.setting, c.setting.training
    # On a GPU the compiler may add the two dx elsewhere.
    count = (11 if s.device == "cpu" else None) if train else 4
    backward = (
        "; backward: so do its products and derivative, and a GEMM's epilogue adds the two dx"
    )
    return Rung(
        "compiled",
        "torch.compile of eager",
        c.step(compiled(plain)),
        count,
        9 if train else 3,
        "activation and product become one kernel" + (backward if train else ""),
        s.least_bytes(),
        None,
        s.gemm_bytes + 3 * s.mid,
        c.parameters,
    )
