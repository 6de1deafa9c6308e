"""``python -m fused_mlp compare``: this package against eager PyTorch on this machine, as ratios
within one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from . import measuring, ops, plan
from .measuring import Case, EagerMLP

# So small that a call is nothing but its own overhead; held to a figure of its own.
OVERHEAD = Case(64, 128, 8)


@dataclass(frozen=True)
class Row:
    """One case: the path the plan picked, microseconds of both, bytes kept for backward (training
    alone).
    """

    case: Case
    path: str
    eager: float
    fused: float
    eager_bytes: int | None = None
    fused_bytes: int | None = None

    @property
    def speedup(self) -> float:
        return self.eager / self.fused

    def json(self) -> dict[str, object]:
        return asdict(self) | {"speedup": self.speedup}


def compare(case: Case, device: torch.device, seconds: float) -> Row:
    """Both modules on the same parameters, in turn."""
    fused, x, dy = measuring.build(case, device)
    eager = EagerMLP(fused)
    calls = {
        "eager": measuring.step(eager, x, dy, case.training, None),
        "fused": measuring.step(fused, x, dy, case.training, None),
    }
    times = measuring.interleaved(calls, device, seconds)
    kept = (saved_bytes(eager, x), saved_bytes(fused, x)) if case.training else (None, None)
    p = fused._fused_mlp.params(fused._modules)
    path = ops.plan_for(x, p, case.activation, case.training).path
    return Row(case, path, times["eager"], times["fused"], *kept)


def saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward keeps for backward, beside the input and the parameters, each storage
    once.
    """
    own = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    seen: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    del y
    return sum(seen.values())


def table(rows: Sequence[Row]) -> str:
    """Aligned, with units, in words."""
    lines = [
        f"{'shape':<18}{'dtype':<10}{'mode':<11}{'tokens':>7}  {'path':<10}{'eager µs':>12}{'fused µs':>12}  "
        f"{'fused is':<16}kept for backward"
    ]
    for r in rows:
        c = r.case
        shape = f"{c.hidden}/{c.intermediate} {'gated' if c.gated else 'plain'}"
        kept = ""
        if r.fused_bytes is not None and r.eager_bytes:
            kept = f"{r.fused_bytes / 2**20:.1f} MiB, eager {r.eager_bytes / 2**20:.1f} MiB"
        lines.append(
            f"{shape:<18}{c.dtype:<10}{'training' if c.training else 'inference':<11}{c.tokens:>7}  "
            f"{r.path:<10}{r.eager:>12.1f}{r.fused:>12.1f}  {plan.comparison(r.speedup):<16}{kept}".rstrip()
        )
    return "\n".join([*lines, "", *summary(rows)])


def is_overhead(case: Case) -> bool:
    """Whether a case is `OVERHEAD`, gated or not and in any dtype."""
    return replace(OVERHEAD, gated=case.gated, dtype=case.dtype, activation=case.activation) == case


def summary(rows: Sequence[Row]) -> list[str]:
    """The figures that the project holds itself to: the worst of all shapes but `OVERHEAD`, the mean
    where oneDNN is to win, and the overhead of a call.
    """
    lines = []
    shapes = [r for r in rows if not is_overhead(r.case)]
    for training, name in ((False, "inference"), (True, "training")):
        of = [r for r in shapes if r.case.training == training]
        if of:
            worst = min(of, key=lambda r: r.speedup)
            lines.append(f"{name}: worst {worst.speedup:.2f}x of eager's speed ({worst.case})")
    prompt = [r.speedup for r in shapes if not r.case.training and 16 <= r.case.tokens <= 197]
    if prompt:
        mean = math.exp(sum(map(math.log, prompt)) / len(prompt))
        lines.append(f"inference, 16-197 tokens: geometric mean {mean:.2f}x eager's speed")
    for r in rows:
        if is_overhead(r.case):
            lines.append(f"host overhead, {r.case}: {r.fused / r.eager:.2f}x eager's time")
    return lines
