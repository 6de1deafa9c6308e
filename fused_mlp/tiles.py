"""How a GEMM is cut into blocks, what an architecture allows, and what is used unmeasured.

The shared-memory and register rules are stated here once; defaults, tuner and tests all ask
`Tile.refusal`. They are held to what the compiler really does: the tests compile the tiles below
for every architecture and want no spill and no more shared memory than the rule predicts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Problem = Literal["glu", "plain", "glu_backward", "plain_backward"]
PROBLEMS: tuple[Problem, ...] = get_args(Problem)


def problem_of(gated: bool, backward: bool = False) -> Problem:
    """
    >>> problem_of(gated=True), problem_of(gated=False, backward=True)
    ('glu', 'plain_backward')
    """
    return PROBLEMS[2 * backward + (not gated)]


Math = Literal["half", "tf32", "fp32"]
"""How products are formed: 16-bit and tf32 on tensor cores, fp32 by multiply-add."""


@dataclass(frozen=True)
class Architecture:
    """What bounds a tile on one GPU architecture.

    Attributes:
        shared_memory: bytes a block may have (CUDA C++ Programming Guide, table of compute
        capabilities; CDNA3 ISA).
        processors: streaming multiprocessors or compute units of its best-known part; enough blocks
        keep all busy.
        family: which tensor-core instructions it has.
    """

    shared_memory: int
    processors: int
    family: Literal["mma", "wgmma", "tcgen05", "mfma", "interpreter"]

    @property
    def lanes(self) -> int:
        return 64 if self.family == "mfma" else 32


ARCHITECTURES: dict[str, Architecture] = {
    "sm80": Architecture(166912, 108, "mma"),  # A100
    "sm86": Architecture(101376, 84, "mma"),  # A40, RTX 30
    "sm89": Architecture(101376, 142, "mma"),  # L40, RTX 40
    "sm90": Architecture(232448, 132, "wgmma"),  # H100, H200
    "sm100": Architecture(232448, 148, "tcgen05"),  # B200
    "sm103": Architecture(232448, 148, "tcgen05"),  # B300
    "sm120": Architecture(101376, 170, "mma"),  # RTX 50
    "gfx942": Architecture(65536, 304, "mfma"),  # MI300X
    "gfx950": Architecture(163840, 256, "mfma"),  # MI350X
    "interpreter": Architecture(1 << 62, 8, "interpreter"),
}
# An architecture nobody has described gets the smallest limits known.
_UNKNOWN_CUDA = Architecture(101376, 64, "mma")
_UNKNOWN_HIP = Architecture(65536, 64, "mfma")


def describe(arch: str) -> Architecture:
    """The limits of ``arch``, or cautious ones if it is unknown."""
    fallback = _UNKNOWN_HIP if arch.startswith("gfx") else _UNKNOWN_CUDA
    return ARCHITECTURES.get(arch, fallback)


def math_of(dtype: torch.dtype, precision: str, arch: str) -> Math:
    """``precision`` is what the kernels pass as ``input_precision``."""
    if dtype != torch.float32:
        return "half"
    # CDNA multiplies fp32 exactly on its matrix cores: the cost of shared memory is tf32's, the
    # result is not.
    return "tf32" if precision == "tf32" or describe(arch).family == "mfma" else "fp32"


@dataclass(frozen=True)
class Tile:
    """How one GEMM is cut into blocks. Hashable, so it keys caches.

    Attributes:
        m, n, k: rows, columns (of each weight) and depth of a block, in elements.
        warps: warps of a block; stages: blocks of operands in flight.
        group: rows of blocks visited together, so that they share weights in L2.
    """

    m: int = 128
    n: int = 128
    k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8

    def shared_memory(self, arch: str, math: Math, problem: Problem) -> int:
        """Bytes at most: operands in flight, or after them a strip of sums changing layout."""
        family = describe(arch).family
        # mma.sync, mfma and multiply-add read operands into registers, which frees one buffer.
        from_shared = family in ("wgmma", "tcgen05") and math != "fp32"
        buffers = self.stages if from_shared else max(1, self.stages - 1)
        operands = buffers * self.k * (self.m + _weights(problem) * self.n) * _itemsize(math)
        strip = 4 * self.m * self.n // self.strips(arch, _itemsize(math))
        if math == "fp32":  # from multiply-add's layout it goes through a buffer twice as wide
            strip *= 2
        if family == "mfma" and math == "tf32":
            strip = 4 * self.m * self.n  # fp32 sums of CDNA change layout as a whole
        return max(operands, strip) + 64 * (family == "tcgen05")  # its barriers

    def accumulators(self, arch: str, problem: Problem) -> int:
        """Registers a thread needs for sums."""
        return _weights(problem) * self.m * self.n // (describe(arch).lanes * self.warps)

    def strips(self, arch: str, itemsize: int) -> int:
        """In how many strips of columns the epilogue runs: 16 elements a thread each (8 of fp32).

        Beside the sums it holds what it loads and what it stores. Backward at 128×128 on sm90: in
        one strip 255 registers and 302 spills, in two 173 and none, in four 128, so that two blocks
        share a processor and one's epilogue hides behind the other's products.
        """
        gpu = describe(arch)
        held = self.m * self.n // (gpu.lanes * self.warps)
        allowed = 16 if itemsize == 2 else 8
        # On CDNA more than 4 strips exchange the whole block through LDS, and its 512 registers
        # need no more.
        most = 4 if gpu.family == "mfma" else 8
        counts = [s for s in (1, 2, 4, 8) if s <= most and self.n // s >= 16]
        return next((s for s in counts if held <= s * allowed), max(counts))

    def registers(self, arch: str, math: Math, problem: Problem) -> int | None:
        """The most a thread may use, or None to leave it to the compiler.

        Backward at 128×128 on sm90: left alone it takes 131; at 128, still with no spill, two
        blocks share a processor.
        """
        gpu = describe(arch)
        two = 2 * self.shared_memory(arch, math, problem) <= gpu.shared_memory
        large = self.warps == 8 and self.accumulators(arch, problem) == 64
        backward = gpu.family == "wgmma" and math == "half" and problem == "glu_backward"
        return 128 if backward and large and two else None

    def refusal(self, arch: str, math: Math, problem: Problem) -> str | None:
        """Why this tile cannot run well, or None: the only statement of the rules."""
        gpu = describe(arch)
        needed = self.shared_memory(arch, math, problem)
        if needed > gpu.shared_memory:
            return f"needs {needed} bytes of shared memory, {arch} has {gpu.shared_memory} a block"
        sums = self.accumulators(arch, problem)
        limit = _sums_limit(gpu, math, problem, self.k, self.warps)
        if sums > limit:
            return f"needs {sums} registers a thread for sums; above {limit} it spills on {arch}"
        # The assembler would rather spill a little than give up one more block on a processor.
        crowded = {
            ("mma", "tf32", "glu"): sums >= 32,
            ("tcgen05", "fp32", "plain_backward"): sums <= 16 and self.stages == 2,
        }
        if crowded.get((gpu.family, math, problem)) and self.warps == 8 and self.k > 16:
            return f"spills on {arch}, where the assembler keeps registers for one more block"
        if gpu.family in ("wgmma", "tcgen05") and math != "fp32" and self.m < 64:
            return f"{arch}'s tensor cores take at least 64 rows, not {self.m}"
        return None

    def fits(self, arch: str, math: Math, problem: Problem) -> bool:
        return self.refusal(arch, math, problem) is None


def _weights(problem: Problem) -> int:
    return 2 if problem == "glu" else 1


def _itemsize(math: Math) -> int:
    return 2 if math == "half" else 4


def _sums_limit(gpu: Architecture, math: Math, problem: Problem, k: int, warps: int) -> int:
    """Registers for sums that leave room for the rest, found by compiling (see the tests)."""
    if math == "fp32":
        return 32  # operands sit in registers as well
    if gpu.family == "mma":
        return 128 if k <= 32 and problem == "plain" and math == "half" else 64
    # Beside its sums, backward holds what it loads: in tf32, and everywhere on CDNA, too much.
    if problem.endswith("backward") and (math == "tf32" or gpu.family == "mfma"):
        return 64
    # What wgmma takes from shared memory passes through registers once, to be rounded to tf32.
    if gpu.family == "wgmma" and math == "tf32" and problem == "plain" and warps == 4:
        return 64
    # 8 warps of 64 lanes have 256 registers each on CDNA, where 4 have 512.
    deep = gpu.family == "mfma" and problem == "glu" and warps == 8 and k > 32
    return 64 if deep else 128


# (family, math) → problem → (tile for many tokens, tile for few or where the first leaves
# processors idle). Chosen for zero spills and, at equal registers, the fewest bytes from L2 per
# product; not yet by a clock.
_DEFAULTS: dict[tuple[str, Math], dict[Problem, tuple[Tile, Tile]]] = {
    ("mma", "half"): {
        "glu": (Tile(128, 64, 64, 8, 3), Tile(64, 64, 64, 4, 3)),
        "plain": (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4)),
        "glu_backward": (Tile(128, 128, 32, 8, 4), Tile(64, 64, 64, 4, 4)),
        "plain_backward": (Tile(128, 128, 32, 8, 4), Tile(64, 64, 64, 4, 4)),
    },
    ("wgmma", "half"): {
        "glu": (Tile(128, 128, 64, 8, 4), Tile(64, 64, 64, 4, 4)),
        "plain": (Tile(128, 256, 64, 8, 4), Tile(64, 128, 64, 4, 4)),
        "glu_backward": (Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 4)),
        "plain_backward": (Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 4)),
    },
    ("tcgen05", "half"): {
        "glu": (Tile(128, 128, 64, 8, 4), Tile(64, 64, 64, 4, 4)),
        "plain": (Tile(128, 256, 64, 8, 4), Tile(64, 128, 64, 4, 4)),
        "glu_backward": (Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 4)),
        "plain_backward": (Tile(128, 256, 64, 8, 3), Tile(64, 128, 64, 4, 4)),
    },
    ("mfma", "half"): {
        "glu": (Tile(128, 128, 64, 8, 2), Tile(64, 64, 64, 4, 2)),
        "plain": (Tile(256, 256, 32, 8, 2), Tile(64, 64, 64, 4, 2)),
        "glu_backward": (Tile(128, 128, 64, 8, 2), Tile(64, 64, 64, 4, 2)),
        "plain_backward": (Tile(128, 128, 64, 8, 2), Tile(64, 64, 64, 4, 2)),
    },
}
for _family, _stages in (("mma", 3), ("wgmma", 3), ("tcgen05", 3), ("mfma", 2)):
    _wide = _family != "mma"
    _DEFAULTS[_family, "tf32"] = {
        "glu": (
            # At a depth of 32 on sm80 the assembler takes 128 registers for the sake of two blocks,
            # and spills 12 times; 16 needs 141.
            Tile(128, 128, 32, 8, _stages) if _wide else Tile(128, 64, 16, 8, 4),
            Tile(64, 64, 32, 4, _stages),
        ),
        **{
            problem: (Tile(128, 128, 32, 8, _stages), Tile(64, 64, 32, 4, _stages))
            for problem in PROBLEMS[1:]
        },
    }
    _DEFAULTS[_family, "fp32"] = {
        problem: (Tile(64, 64, 16, 8, 3), Tile(32, 64, 16, 4, 3)) for problem in PROBLEMS
    }
# Rows that are not 16-byte aligned are loaded element by element through registers, so few
# elements a thread.
_UNALIGNED: dict[Math, Tile] = {
    "half": Tile(64, 32, 32, 8, 2),
    "tf32": Tile(64, 32, 16, 8, 2),
    "fp32": Tile(32, 32, 16, 8, 2),
}
# Few, large blocks: under the interpreter a program costs far more than an element.
_INTERPRETED = Tile(64, 128, 64, 4, 1)


def default_tile(
    arch: str,
    dtype: torch.dtype,
    problem: Problem,
    tokens: int,
    intermediate: int,
    precision: str = "ieee",
    aligned: bool = True,
) -> Tile:
    """A tile that compiles without spills and fits, for where no table was measured."""
    gpu = describe(arch)
    if gpu.family == "interpreter":
        return _INTERPRETED
    math = math_of(dtype, precision, arch)
    large, small = _DEFAULTS[gpu.family, math][problem]
    if not aligned:
        return _UNALIGNED[math]
    blocks = -(-tokens // large.m) * -(-intermediate // large.n)
    if tokens <= small.m or blocks < gpu.processors:
        return small
    return large if large.fits(arch, math, problem) else small


def decode_tile(
    arch: str,
    dtype: torch.dtype,
    precision: str = "ieee",
    aligned: bool = True,
) -> Tile:
    """For at most 16 tokens: all in one block, few columns so that every processor reads.

    What counts is bytes in flight: 24 KiB a block, 40 with a gate, and five blocks on each
    processor.
    """
    gpu = describe(arch)
    if gpu.family == "interpreter":
        return Tile(16, 64, 64, 4, 1)
    math = math_of(dtype, precision, arch)
    if not aligned:
        return Tile(16, 32, 32, 4, 2, 1)
    if math == "fp32":
        return Tile(16, 32, 32, 4, 3, 1)
    stages = 2 if gpu.family == "mfma" else 5
    # Four warps: with two the GLU spills on sm90 and takes 40 % more instructions everywhere.
    return Tile(16, 32, 64 if math == "half" else 32, 4, stages, 1)


def quantized_tile(arch: str, dtype: torch.dtype, columns: int, group: int | None = None) -> Tile:
    """For at most 16 tokens and int8 or int4 weights; ``group`` is int4's columns to a scale.

    A block's depth divides the group, so that it has one scale; narrow blocks keep all processors
    busy. At a depth of 128, fp32 multiplied without tensor cores spilled 1879 times (sm90).
    """
    deepest = 128 if dtype.itemsize == 2 else 32
    depth = deepest if group is None else min(group & -group, deepest)
    if describe(arch).family == "interpreter":
        return Tile(16, 64, depth, 4, 1, 1)
    return Tile(16, 32 if columns > 8192 else 16, depth, 4, 4, 1)


def candidates(arch: str, math: Math, problem: Problem, limit: int = 16) -> Iterator[Tile]:
    """Tiles worth timing on ``arch``, default ones first, at most ``limit``; all keep the rules.

    >>> all(tile.fits("sm90", "half", "glu") for tile in candidates("sm90", "half", "glu"))
    True
    """
    gpu = describe(arch)
    ks: tuple[int, ...]
    stages: tuple[int, ...]
    shipped = [t for t in _DEFAULTS[gpu.family, math][problem] if t.fits(arch, math, problem)]
    if math == "fp32":
        ks, stages = (16, 32), (2, 3)
    elif math == "tf32":
        ks, stages = (32, 16) if gpu.family == "mma" else (32,), (2, 3, 4)
    else:
        ks, stages = (64, 32, 128), (2, 3, 4, 5)
    if gpu.family == "mfma":
        stages = (2,)
    grid = [
        Tile(m, n, k, warps, depth)
        for m, n, k, warps, depth in itertools.product(
            (64, 128, 256), (64, 128, 256), ks, (4, 8), stages
        )
    ]

    def cost(tile: Tile) -> tuple[float, int, int]:
        # Bytes from L2 per product first; then a pipeline of about 64 KiB in flight hides L2's
        # latency.
        traffic = 1 / tile.m + 1 / (_weights(problem) * tile.n)
        flight = tile.shared_memory(arch, math, problem)
        return (traffic, abs(flight - 3 * 65536), tile.warps)

    fitting = sorted((t for t in grid if t.fits(arch, math, problem)), key=cost)
    yield from itertools.islice(dict.fromkeys([*shipped, *fitting]), limit)
