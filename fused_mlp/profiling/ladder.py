"""The rungs, and what is expected of each before anything runs.

Part 2 is the MLP of "Profiling in PyTorch" (https://huggingface.co/blog): one linear layer, then
gelu(gate(x)) · up(x) and its down projection, made faster step by step. Part 1 is its beginning: a
product and a sum.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import machine, paths, plan
from ..modules import FusedMLP

PARTS = (1, 2)


@dataclass(frozen=True)
class Setting:
    """What the ladder is climbed with. Sizes of the article: 8192 tokens of 768/3072, gelu,
    bf16."""

    hidden: int = 768
    intermediate: int = 3072
    tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    training: bool = False
    activation: str = "gelu"

    @property
    def unit(self) -> str:
        """What a rung's work is counted in."""
        return "kernels" if self.device == "cuda" else "operators"

    @property
    def mid(self) -> int:
        """Bytes of one (tokens, intermediate) activation."""
        return self.tokens * self.intermediate * self.dtype.itemsize

    def least_bytes(self, matrices: int) -> int:
        """Bytes that an MLP of so many matrices must move if each tensor moves once; forward
        alone."""
        weights = matrices * self.hidden * self.intermediate
        return (weights + 2 * self.tokens * self.hidden) * self.dtype.itemsize


@dataclass
class Rung:
    """One step of the ladder.

    Attributes:
        call: one forward, or forward and backward.
        expected: kernels (operators on a CPU) of one call; None where the number follows from
            sizes.
        gemms: how many of them are GEMMs.
        saved: activations of (tokens, intermediate) kept for backward, in training.
        why: the reason behind the expectation.
        traffic: a call made of operators that a dispatch mode can see, for counting bytes; or the
            bytes, computed.
        missing: why it cannot run here.
    """

    name: str
    text: str
    call: Callable[[], Any] | None
    expected: int | None
    gemms: int | None
    why: str
    least_bytes: int
    saved: float | None = None
    traffic: Callable[[], Any] | int | None = None
    parameters: tuple[Tensor, ...] = ()
    missing: str | None = None


class Plain(nn.Module):
    """The MLP as anyone would write it, on the very parameters of a `FusedMLP`."""

    def __init__(self, mlp: FusedMLP, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def ladder(setting: Setting, part: int = 2) -> list[Rung]:
    """The rungs of one part, ready to run.

    Raises:
        ValueError: there is no such part.
    """
    if part not in PARTS:
        raise ValueError(f"there is no part {part}; known are 1 (matmul + add) and 2 (the MLP)")
    torch.manual_seed(0)
    return _part_1(setting) if part == 1 else _part_2(setting)


def _compiled(call: Callable) -> Callable:
    import torch._inductor.config as settings

    # Without it a CPU profile shows nothing inside a compiled graph.
    settings.cpp.enable_kernel_profile = True
    return torch.compile(call, dynamic=False)


def _step(
    setting: Setting, module: Callable, x: Tensor, parameters: tuple[Tensor, ...]
) -> Callable[[], Any]:
    if not setting.training:
        return lambda: module(x)
    x = x.detach().requires_grad_(True)
    dy = torch.randn(x.shape[0], setting.hidden, device=x.device, dtype=x.dtype)

    def step() -> Any:
        y = module(x)
        return torch.autograd.grad(
            y, (x, *parameters), dy if y.shape == dy.shape else torch.ones_like(y)
        )

    return step


def _part_1(s: Setting) -> list[Rung]:
    make = {"device": s.device, "dtype": s.dtype}
    x, w = torch.randn(s.tokens, s.hidden, **make), torch.randn(s.intermediate, s.hidden, **make)
    b = torch.randn(s.intermediate, **make)
    out = s.tokens * s.intermediate
    least = (x.numel() + w.numel() + b.numel() + out) * s.dtype.itemsize
    add = Rung(
        "matmul + add",
        "x @ w.T + b",
        lambda: x @ w.t() + b,
        2,
        1,
        "a GEMM, then a pass that adds the bias",
        least,
        traffic=lambda: x @ w.t() + b,
    )
    addmm = Rung(
        "addmm",
        "torch.addmm(b, x, w.T)",
        lambda: torch.addmm(b, x, w.t()),
        1,
        1,
        "the bias is added in the GEMM's epilogue",
        least,
        traffic=lambda: torch.addmm(b, x, w.t()),
    )
    compiled = _compiled(lambda x, w, b: x @ w.t() + b)
    fused = Rung(
        "compiled",
        "torch.compile(matmul + add)",
        lambda: compiled(x, w, b),
        1,
        1,
        "the compiler rewrites matmul and add to addmm",
        least,
        traffic=least,
    )
    return [add, addmm, fused]


def _part_2(s: Setting) -> list[Rung]:
    from .. import activations

    act = activations.get(s.activation)
    mlp = FusedMLP(
        s.hidden, s.intermediate, activation=s.activation, device=s.device, dtype=s.dtype
    )
    mlp.requires_grad_(s.training)
    x = torch.randn(s.tokens, s.hidden, device=s.device, dtype=s.dtype)
    plain = Plain(mlp, act.eager)
    params = tuple(mlp.parameters())
    least, size = s.least_bytes(3), s.dtype.itemsize
    linear = nn.Linear(s.hidden, s.intermediate, device=s.device, dtype=s.dtype).requires_grad_(
        s.training
    )
    linear_params = tuple(linear.parameters())
    linear_least = size * (
        sum(p.numel() for p in linear_params) + s.tokens * (s.hidden + s.intermediate)
    )
    train = s.training

    return [
        Rung(
            "linear",
            "one nn.Linear with bias",
            _step(s, linear, x, linear_params),
            None if train else 1,
            3 if train else 1,
            "one GEMM, the bias in its epilogue",
            linear_least,
            0 if train else None,
            lambda: linear(x),
            linear_params,
        ),
        Rung(
            "compiled linear",
            "torch.compile of it",
            _step(s, _compiled(linear), x, linear_params),
            None if train else 1,
            3 if train else 1,
            "there is nothing left to fuse",
            linear_least,
            0 if train else None,
            linear_least,
            linear_params,
        ),
        Rung(
            "eager",
            "the gated MLP of nn.Linear",
            _step(s, plain, x, params),
            15 if train else 5,
            9 if train else 3,
            "3 GEMMs, activation, product"
            + (
                "; backward: 6 GEMMs, 2 products, 1 derivative, 1 sum of the two dx"
                if train
                else ""
            ),
            least,
            4 if train else None,
            lambda: plain(x),
            params,
        ),
        Rung(
            "compiled",
            "torch.compile of it",
            _step(s, _compiled(plain), x, params),
            None if train else 4,
            9 if train else 3,
            "activation and product become one kernel",
            least,
            None,
            _gemm_bytes(s) + 3 * s.mid,
            params,
        ),
        _liger(s, mlp, x, params, least),
        _packed(s, mlp, x, params, least, act),
        _fused(s, mlp, x, params, least),
        _quantized(s, mlp, x, least),
    ]


def _gemm_bytes(s: Setting) -> int:
    row, mid, weight = s.tokens * s.hidden, s.tokens * s.intermediate, s.hidden * s.intermediate
    return 3 * (row + mid + weight) * s.dtype.itemsize


def _liger(s: Setting, mlp: FusedMLP, x: Tensor, params: tuple, least: int) -> Rung:
    text = "liger-kernel's GEGLU: activation and product in one Triton kernel"
    missing = None
    if importlib.util.find_spec("liger_kernel") is None:
        missing = "liger-kernel is not installed"
    elif s.device != "cuda":
        missing = "liger-kernel needs a GPU"
    if missing:
        return Rung("liger", text, None, 4, 3, "3 GEMMs and one kernel", least, missing=missing)
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    def forward(x: Tensor) -> Tensor:
        return mlp.down_proj(LigerGELUMulFunction.apply(mlp.gate_proj(x), mlp.up_proj(x)))

    bytes_ = _gemm_bytes(s) + 3 * s.mid
    return Rung(
        "liger",
        text,
        _step(s, forward, x, params),
        None if s.training else 4,
        9 if s.training else 3,
        "3 GEMMs and one kernel",
        least,
        3 if s.training else None,
        bytes_,
        params,
    )


def _packed(s: Setting, mlp: FusedMLP, x: Tensor, params: tuple, least: int, act: Any) -> Rung:
    """gate and up in one GEMM: by the package's path on a GPU, by PyTorch's operators on a CPU."""
    if s.device == "cuda":

        def forward(x: Tensor) -> Tensor:
            with plan.use_path("packed"):
                return mlp(x)

        return Rung(
            "packed",
            "fused_mlp, path packed",
            _step(s, forward, x, params),
            None if s.training else 4,
            9 if s.training else 3,
            "2 GEMMs into one buffer, one activation kernel, 1 GEMM",
            least,
            2 if s.training else None,
            _gemm_bytes(s) + 3 * s.mid,
            params,
        )
    weight = (
        torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach().requires_grad_(s.training)
    )
    down = mlp.down_proj.weight

    def both(x: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.linear(act.eager(gate) * up, down)

    return Rung(
        "packed",
        "gate and up in one GEMM, PyTorch's operators",
        _step(s, both, x, (weight, down)),
        None if s.training else 4,
        6 if s.training else 2,
        "2 GEMMs, activation, product",
        least,
        4 if s.training else None,
        lambda: both(x),
        (weight, down),
    )


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


def _fused(s: Setting, mlp: FusedMLP, x: Tensor, params: tuple, least: int) -> Rung:
    from .. import activations, ops

    act = activations.get(s.activation)
    p = paths.Params(mlp.up_proj.weight, mlp.down_proj.weight, mlp.gate_proj.weight)
    chosen = ops.plan_for(x, p, act.name, s.training)
    # On a GPU the ladder ends at the two-kernel path, whether or not the plan would take it at this
    # size.
    path = chosen.path
    if s.device == "cuda" and not s.training:
        path = "epilogue" if s.tokens > plan.DECODE_TOKENS else "decode"

    def forward(x: Tensor) -> Tensor:
        with plan.use_path(path):
            return mlp(x)

    kernels, gemms, why = EXPECTED.get(path, (None, None, "no expectation for this path"))
    traffic: Any = s.least_bytes(3) + 2 * s.mid
    if s.device == "cpu":

        def traffic() -> Any:
            return paths.inference(plan.decide(_query(s, path)), x, p, act)

    reason = f"path {path}: {why}"
    return Rung(
        "fused",
        f"fused_mlp, path {path}",
        _step(s, forward if path != chosen.path else mlp, x, params),
        None if s.training else kernels,
        9 if s.training else gemms,
        reason,
        least,
        (4 if chosen.autograd and path == chosen.path else 2) if s.training else None,
        traffic,
        params,
    )


def _query(s: Setting, path: str) -> plan.Query:
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


def _quantized(s: Setting, mlp: FusedMLP, x: Tensor, least: int) -> Rung:
    text = "fused_mlp.quantize(mlp, 'int8_dynamic')"
    missing = None
    if s.training:
        missing = "a quantized MLP is for inference"
    elif importlib.util.find_spec("torchao") is None:
        missing = "torchao is not installed: pip install 'fused_mlp[quant]'"
    if missing:
        return Rung("quantized", text, None, None, 3, "3 int8 GEMMs", least, missing=missing)
    from ..quantization import bytes_of, quantize

    q = quantize(copy.deepcopy(mlp), "int8_dynamic")
    on_cpu = s.device == "cpu" and not machine.interpreted()
    why = "3 int8 GEMMs" + (
        " and, in blocks that stay in cache, what lies between them" if on_cpu else ""
    )
    bound = bytes_of(q) + 2 * s.tokens * s.hidden * s.dtype.itemsize
    return Rung(
        "quantized",
        text,
        lambda: q(x),
        None,
        3,
        why,
        bound,
        None,
        lambda: q(x),
        tuple(q.parameters()),
    )
