"""The examples at real sizes, side by side on one CPU thread.

Example:
  python -m tests.examples
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fused_mlp

from . import test_language, test_recommendation, test_vision
from .measuring import kept, operators

ROUNDS = 9


@dataclass(frozen=True)
class Case:
    """One example: a model, its inputs, and which of its outputs is compared."""

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    output: Callable[[Any], Tensor] = lambda y: y


@dataclass(frozen=True)
class Compared:
    """One model eager, fused and in int8. Times in seconds, sizes in bytes, errors relative to
    eager's output."""

    fused: list[str]
    operators: tuple[int, int]
    kept: tuple[int, int]
    seconds: tuple[float, float, float]
    errors: tuple[float, float]


def cases() -> list[Case]:
    torch.manual_seed(0)
    llama, tokens = test_language.llama_of(1024, 3584, layers=1), torch.randint(0, 128, (1, 128))
    image = torch.randn(1, 384, 14, 14).to(memory_format=torch.channels_last)
    convnext = test_vision.ConvNeXtBlock(384).to(memory_format=torch.channels_last)
    dlrm = test_recommendation.DLRM(tables=26, width=64, inner=1024)
    clicks = torch.randn(2048, 16), torch.randint(0, 50, (2048, 26))
    return [
        Case("Llama block, 1024/3584, 128 tokens", llama, (tokens,), lambda y: y.logits),
        Case("ViT-B block, 768/3072, 197 tokens", test_vision.ViTBlock(768, 12),
             (torch.randn(1, 197, 768),)),
        Case("ConvNeXt-T block, 384/1536, 14×14", convnext, (image,)),
        Case("DLRM, towers of 1024, batch 2048", dlrm, clicks),
    ]  # fmt: skip


def compare(case: Case, rounds: int = ROUNDS) -> Compared:
    """Counts, bytes, times and errors of one example; the times in turn, so that a machine's drift
    meets all alike."""
    eager = case.model.eval()
    fused = copy.deepcopy(eager)
    names = fused_mlp.fuse(fused)
    models = (eager, fused, fused_mlp.quantize(copy.deepcopy(fused), "int8_dynamic"))
    taken: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        want, *others = [case.output(model(*case.inputs)) for model in models]
        for _ in range(rounds + 2):  # the first two pack weights
            for model, samples in zip(models, taken, strict=True):
                start = time.perf_counter()
                model(*case.inputs)
                samples.append(time.perf_counter() - start)
    both = (eager, fused)
    return Compared(
        names,
        tuple(operators(lambda m=m: m(*case.inputs)) for m in both),  # type: ignore[arg-type]
        tuple(kept(m, *case.inputs) for m in both),  # type: ignore[arg-type]
        tuple(statistics.median(samples[2:]) for samples in taken),  # type: ignore[arg-type]
        tuple(float((y - want).norm() / want.norm()) for y in others),  # type: ignore[arg-type]
    )


def row(case: Case, c: Compared) -> list[str]:
    eager, fused, int8 = c.seconds
    return [
        case.name,
        str(len(c.fused)),
        f"{c.operators[0]} → {c.operators[1]}",
        f"{c.kept[0] / 1e6:.1f} → {c.kept[1] / 1e6:.1f}",
        f"{eager * 1e3:.2f}",
        f"{fused * 1e3:.2f} ({fused_mlp.plan.comparison(eager / fused)})",
        f"{c.errors[0]:.0e}",
        f"{int8 * 1e3:.2f} ({fused_mlp.plan.comparison(eager / int8)})",
        f"{c.errors[1]:.0e}",
    ]


HEADER = [
    "example, fp32", "MLPs", "operators", "kept for backward, MB", "eager ms", "fused ms", "error",
    "int8_dynamic ms", "error",
]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    rows = [HEADER, ["---"] + ["--:"] * (len(HEADER) - 1)]
    rows += [row(case, compare(case)) for case in cases()]
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
