"""The upper rungs: kernels that somebody wrote, for fewer of them, and for smaller weights."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import activations, machine, ops, paths, plan, reference
from .rung import Case, Rung, Setting

# Kernels (operators on a CPU) and GEMMs of a gated forward, by path.
EXPECTED = {
    "eager": (5, 3, "3 GEMMs, activation, product"),
    "packed": (4, 3, "2 GEMMs into one buffer, one activation kernel, 1 GEMM"),
    "epilogue": (
        2,
        2,
        "a dual GEMM with activation and product in its epilogue, then the down projection",
    ),
    "decode": (2, 2, "as epilogue, for few tokens"),
    "onednn": (3, 3, "3 GEMMs; activation and product are post-operations of two of them"),
}
# From here on one GEMM of both weights side by side gives dx, and placing them there is a kernel.
BOTH_AT_ONCE = 1024


def trained(path: str, tokens: int, by_autograd: bool) -> tuple[int | None, int | None, str]:
    """Kernels (operators on a CPU) and GEMMs of a gated forward and backward, by path, and why."""
    if by_autograd:
        why = "; backward, PyTorch's own: 6 GEMMs, 2 products, 1 derivative, 1 sum of the two dx"
        return 15, 9, EXPECTED["eager"][2] + why
    dx = "dx by one GEMM of both weights" if tokens >= BOTH_AT_ONCE else "dx by 2 GEMMs"
    less = tokens >= BOTH_AT_ONCE
    if path == "epilogue":
        why = f"{EXPECTED[path][2]}; backward: a GEMM with the derivatives in its epilogue, {dx}, 3"
        return 8, 8 - less, f"{why} GEMMs for weights"
    if path == "packed":
        why = f"{EXPECTED[path][2]}; backward: a GEMM, one kernel for the derivatives, {dx}, 3"
        return 11, 9 - less, f"{why} GEMMs for weights"
    if path in ("eager", "onednn"):
        return 16, 9, (
            "3 GEMMs, activation, product: what is kept must exist; backward: 6 GEMMs, activation "
            "and product once more, as they were not kept, 2 products, 1 derivative"
        )  # fmt: skip
    return None, None, "no expectation for this path"


def liger(c: Case) -> Rung:
    """The library that the article buys its kernel from."""
    s = c.setting
    text = "liger-kernel's GEGLU: activation and product in one Triton kernel"
    why, least = "3 GEMMs and one kernel", s.least_bytes()
    missing = None
    if importlib.util.find_spec("liger_kernel") is None:
        missing = "liger-kernel is not installed"
    elif s.device != "cuda":
        missing = "liger-kernel needs a GPU"
    if missing:
        count, gemms = (None, 9) if s.training else (4, 3)
        return Rung("liger", text, None, count, gemms, why, least, missing=missing)
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    def forward(x: Tensor) -> Tensor:
        gate, up = c.mlp.gate_proj(x), c.mlp.up_proj(x)
        return c.mlp.down_proj(LigerGELUMulFunction.apply(gate, up))

    return Rung(
        "liger",
        text,
        c.step(forward),
        None if s.training else 4,
        9 if s.training else 3,
        why,
        least,
        3 if s.training else None,
        s.gemm_bytes + 3 * s.mid,
        c.parameters,
    )


def packed(c: Case) -> Rung:
    """gate and up in one GEMM: by the package's path on a GPU, by PyTorch's operators on a CPU."""
    s = c.setting
    if s.device == "cuda":

        def forward(x: Tensor) -> Tensor:
            with plan.use_path("packed"):
                return c.mlp(x)

        return Rung(
            "packed",
            "fused_mlp, path packed",
            c.step(forward),
            *(trained("packed", s.tokens, False) if s.training else EXPECTED["packed"]),
            s.least_bytes(),
            2 if s.training else None,
            s.gemm_bytes + 3 * s.mid,
            c.parameters,
        )
    backward = "; backward: 4 GEMMs, 2 products, 1 derivative, and gate's and up's put side by side"
    weight = torch.cat([c.mlp.gate_proj.weight, c.mlp.up_proj.weight]).detach()
    weight.requires_grad_(s.training)
    down = c.mlp.down_proj.weight

    def both(x: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.linear(c.act(gate) * up, down)

    return Rung(
        "packed",
        "gate and up in one GEMM, PyTorch's operators",
        c.step(both, (weight, down)),
        12 if s.training else 4,
        6 if s.training else 2,
        "2 GEMMs, activation, product" + (backward if s.training else ""),
        s.least_bytes(),
        4 if s.training else None,
        lambda: both(c.x),
        (weight, down),
    )


def fused(c: Case) -> Rung:
    """This package, by the path that its plan takes."""
    s, mlp = c.setting, c.mlp
    act = activations.get(s.activation)
    p = paths.Params(mlp.up_proj.weight, mlp.down_proj.weight, mlp.gate_proj.weight)
    chosen = ops.plan_for(c.x, p, act.name, s.training)
    # On a GPU the ladder ends at the two-kernel path, whether or not the plan would take it at this
    # size.
    path = chosen.path
    if s.device == "cuda" and not s.training:
        path = "epilogue" if s.tokens > plan.DECODE_TOKENS else "decode"

    def forward(x: Tensor) -> Tensor:
        with plan.use_path(path):
            return mlp(x)

    reason = chosen.reason
    if path != chosen.path:
        reason = f"where the ladder ends; the plan would take {chosen.path} here"
    own = chosen.autograd and path == chosen.path
    if s.training:
        kernels, gemms, why = trained(path, s.tokens, own)
    else:
        kernels, gemms, why = EXPECTED.get(path, (None, None, "no expectation for this path"))
    # A GPU's: what epilogue keeps for backward it also writes.
    traffic: Any = s.least_bytes() + (4 if s.training else 2) * s.mid
    if own or path == "packed":
        traffic = s.gemm_bytes + (5 if own else 3) * s.mid
    if s.device == "cpu":

        def traffic() -> Any:
            if own:
                return reference.mlp(
                    c.x, p.up_weight, p.down_weight, gate_weight=p.gate_weight, activation=act.name
                )
            if s.training:
                return paths.forward(chosen, c.x, p, act, 1)
            return paths.inference(plan.decide(_query(s)), c.x, p, act)

    return Rung(
        "fused",
        f"fused_mlp, path {path} ({reason})",
        c.step(forward if path != chosen.path else mlp),
        kernels,
        gemms,
        why,
        s.least_bytes(),
        (4 if own else 2) if s.training else None,
        traffic,
        c.parameters,
    )


def _query(s: Setting) -> plan.Query:
    return plan.Query(
        torch.device(s.device),
        s.dtype,
        s.tokens,
        s.hidden,
        s.intermediate,
        True,
        s.activation,
        False,
    )


def quantized(c: Case) -> Rung:
    """int8 weights and activations."""
    s = c.setting
    text = "fused_mlp.quantize(mlp, 'int8_dynamic')"
    missing = None
    if s.training:
        missing = "a quantized MLP is for inference"
    elif importlib.util.find_spec("torchao") is None:
        missing = "torchao is not installed: pip install 'fused_mlp[quant]'"
    if missing:
        why = "3 int8 GEMMs"
        return Rung("quantized", text, None, None, 3, why, s.least_bytes(), missing=missing)
    from ..quantization import bytes_of, quantize

    q = quantize(copy.deepcopy(c.mlp), "int8_dynamic")
    on_cpu = s.device == "cpu" and not machine.interpreted()
    why = "3 int8 GEMMs" + (
        " and, in blocks, what lies between them: each pass over a block is counted as moved, "
        "though a cache holds it"
        if on_cpu
        else ""
    )
    return Rung(
        "quantized",
        text,
        lambda: q(c.x),
        None,
        3,
        why,
        bytes_of(q) + 2 * s.tokens * s.hidden * s.dtype.itemsize,
        None,
        lambda: q(c.x),
        tuple(q.parameters()),
    )
