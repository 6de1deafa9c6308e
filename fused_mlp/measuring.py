"""Time of one call, for the tuner, `compare` and the GPU check: interleaved, so that drift hits all
alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from . import activations, plan, reference
from .modules import FusedMLP

Name = TypeVar("Name", bound=Hashable)

WORK_US = 200.0  # least work a sample; shorter calls are repeated within it


@dataclass(frozen=True)
class Case:
    """One MLP at one token count. Sizes in elements; ``dtype`` by name."""

    hidden: int
    intermediate: int
    tokens: int
    dtype: str = "float32"
    gated: bool = True
    training: bool = False
    activation: str = "silu"

    def __str__(self) -> str:
        return (
            f"{'gated' if self.gated else 'plain'} {self.hidden}/{self.intermediate} {self.dtype} "
            f"{'training' if self.training else 'inference'} {self.tokens} tokens"
        )

    @property
    def flop(self) -> int:
        """Arithmetic of one call; backward has twice the forward's."""
        matrices = 3 if self.gated else 2
        return (
            2
            * matrices
            * self.tokens
            * self.hidden
            * self.intermediate
            * (3 if self.training else 1)
        )

    @property
    def least_bytes(self) -> int:
        """Weights once (training: read twice, gradients written), input and output."""
        size = getattr(torch, self.dtype).itemsize
        weights = (3 if self.gated else 2) * self.hidden * self.intermediate
        passes = 3 if self.training else 1
        return size * (weights * passes + 2 * passes * self.tokens * self.hidden)


class EagerMLP(nn.Module):
    """The MLP as a model author writes it: what everything is compared with."""

    def __init__(self, like: FusedMLP) -> None:
        super().__init__()
        self.up_proj, self.down_proj = like.up_proj, like.down_proj
        self.gate_proj = like._modules.get("gate_proj")
        self.act = activations.get(like.activation).eager

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def build(case: Case, device: torch.device) -> tuple[FusedMLP, Tensor, Tensor]:
    """A module with seeded weights of the usual scale, its input, and the gradient of its output."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    module = FusedMLP(
        case.hidden, case.intermediate, activation=case.activation, gated=case.gated,
        device=device, dtype=dtype,
    )  # fmt: skip
    x = torch.randn(case.tokens, case.hidden, device=device).to(dtype)
    return module, x.requires_grad_(case.training), torch.randn_like(x)


def step(
    module: nn.Module, x: Tensor, dy: Tensor, training: bool, path: str | None
) -> Callable[[], None]:
    """One call of a module, or one training step, on a forced path."""

    def once() -> None:
        if training:
            module.zero_grad(set_to_none=True)
            x.grad = None
            module(x).backward(dy)
        else:
            with torch.no_grad():
                module(x)

    if path is None:
        return once

    def forced() -> None:
        with plan.use_path(path):
            once()

    return forced


def interleaved(
    calls: Mapping[Name, Callable[[], object]], device: torch.device, seconds: float
) -> dict[Name, float]:
    """Median microseconds of each call, taken in turn and back (A B B A) within about ``seconds``."""
    repeats = {}
    spent = 0.0
    for name, call in calls.items():
        call(), call()
        took = _timed(call, 1, device)
        repeats[name] = max(1, int(WORK_US / max(took, 1e-3)))
        spent += took * repeats[name]
    rounds = max(3, min(400, int(seconds * 1e6 / max(spent, 1.0))))
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for i in range(rounds):
        for name in order if i % 2 else reversed(order):
            samples[name].append(_timed(calls[name], repeats[name], device))
    return {name: statistics.median(values) for name, values in samples.items()}


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Microseconds a call: device events on a GPU; on a CPU this thread's own time if it works
    alone, which other
    processes do not stretch, else a monotonic clock."""
    if device.type == "cuda":
        # An event is recorded on a stream of the current device, wherever the work is.
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e3 / repeats
    clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    begin_ns = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin_ns) / 1e3 / repeats


def able_paths(case: Case, device: torch.device) -> list[str]:
    """Paths worth measuring for a case; through the interpreter none is."""
    q = query(case, device)
    paths = [p for p in plan.PATHS if p != "interpreted" and plan.obstacle(p, q) is None]
    return paths if device.type != "cpu" else [p for p in paths if p in ("eager", "onednn")]


def query(case: Case, device: torch.device) -> plan.Query:
    return plan.Query(
        device, getattr(torch, case.dtype), case.tokens, case.hidden, case.intermediate,
        case.gated, case.activation, case.training,
    )  # fmt: skip


def error_over_eager(case: Case, device: torch.device, path: str) -> float:
    """Largest error of a path against float64, over eager's own in the same dtype plus one rounding."""
    module, x, _ = build(replace(case, training=False), device)
    with torch.no_grad():
        exact = reference_of(module, x.double(), torch.float64)
        eager = (reference_of(module, x, x.dtype).double() - exact).abs().max()
        with plan.use_path(path):
            got = (module(x).double() - exact).abs().max()
    rounding = exact.abs().max() * torch.finfo(x.dtype).eps
    return (got / (eager + rounding / 2)).item()


def reference_of(module: FusedMLP, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.mlp` with a module's weights in some dtype."""
    w = {n: None if p is None else p.to(dtype) for n, p in module.named_parameters()}
    return reference.mlp(
        x, w["up_proj.weight"], w["down_proj.weight"], gate_weight=w.get("gate_proj.weight"),
        activation=module.activation,
    )  # fmt: skip


def grid(
    shapes: list[tuple[int, int]],
    tokens: list[int],
    dtypes: list[str],
    gated: list[bool],
    training: list[bool],
) -> Iterator[Case]:
    """All combinations, smallest first, so that a tuner stopped early has covered most."""
    cases = [
        Case(hidden, intermediate, t, dtype, g, mode)
        for hidden, intermediate in shapes
        for t in tokens
        for dtype in dtypes
        for g in gated
        for mode in training
    ]
    yield from sorted(cases, key=lambda c: c.flop)
