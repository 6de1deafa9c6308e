"""How a GEMM is cut into blocks, and what an architecture allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """How one GEMM is cut into blocks. Hashable, so it keys caches."""

    m: int = 128
    n: int = 128
    k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8


def default_tile(arch, dtype, problem, tokens):
    return Tile()
