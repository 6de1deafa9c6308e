"""What every kernel shares: how it is launched, where its rows start, how it multiplies and rounds.

Launchers go through `launch`, so that `record` can see what they would run: the kernels compiled
for a GPU that is not there are then the launchers' own choices, never a second list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import machine

# Triton 3.10 turns this off by default, which made one kernel 15 % longer; so it is stated at
# every launch.
FP_FUSION = True

# Offsets inside one block are 32-bit (64-bit ones cost registers); its corner is 64-bit. 256 rows
# is the most a block has, so strides below this keep the former exact.
MAX_STRIDE = 2**31 // 256 - 1

# Counts that change from call to call and only bound masks: a specialization for each would only
# mean recompiles.
UNSPECIALIZED = ("tokens", "rows")


@triton.jit
def _probe():
    pass


# Under TRITON_INTERPRET=1 `triton.jit` returns another class. Two of its faults are worked around
# below: `tl.dot` multiplies the bit patterns of bf16, and the cast from fp32 to bf16 truncates.
INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))


@dataclass(frozen=True)
class Specimen:
    """One kernel as a launcher would run it, ready to be compiled for a GPU that is not there."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]] = field(repr=False)
    num_warps: int
    num_stages: int
    registers: int | None = None
    fp_fusion: bool = FP_FUSION

    def renamed(self, name: str) -> Specimen:
        return replace(self, name=name)


_recorder: ContextVar[tuple[str, str, list[Specimen]] | None] = ContextVar("recorder", default=None)

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int8: "i8",
}


def _specialize(
    kernel: Any, args: dict[str, Any], warps: int, stages: int, registers: int | None = None
) -> Specimen:
    """Triton's own rules: None and 1 are constants, a multiple of 16 is known to be one."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    stated = kernel.fn.__annotations__  # N and K are upper case as well, and arguments
    for index, name in enumerate(kernel.arg_names):
        value = args[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
        elif name in stated or value is None or (value == 1 and name not in UNSPECIALIZED):
            signature[name] = "constexpr"
            constexprs[name] = value
            continue
        else:
            signature[name] = "i64" if value >= 2**31 else "i32"
            aligned = value % 16 == 0 and name not in UNSPECIALIZED
        if aligned:
            attrs[(index,)] = [["tt.divisibility", 16]]
    return Specimen(kernel.__name__, kernel, signature, constexprs, attrs, warps, stages, registers)


@contextlib.contextmanager
def record(arch: str, precision: str = "ieee") -> Iterator[list[Specimen]]:
    """Inside, launchers run nothing and take meta tensors; what they would launch on ``arch`` is
    collected, as if torch's setting for fp32 products were ``precision``.
    """
    specimens: list[Specimen] = []
    token = _recorder.set((arch, precision, specimens))
    try:
        yield specimens
    finally:
        _recorder.reset(token)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    stages: int,
    registers: int | None = None,
    **meta: Any,
) -> None:
    """``kernel[grid](*args, **meta)`` with every compile option stated; ``registers`` is the most a
    thread may use, on NVIDIA alone.
    """
    recording = _recorder.get()
    if recording is not None:
        bound = dict(zip(kernel.arg_names, args, strict=False)) | meta
        recording[2].append(_specialize(kernel, bound, warps, stages, registers))
        return
    if registers is not None:
        meta["maxnreg"] = registers
    with _on(args[0].device):
        kernel[grid](*args, **meta, num_warps=warps, num_stages=stages, enable_fp_fusion=FP_FUSION)


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device and its stream, whatever its tensors' device is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE = contextlib.nullcontext()


def architecture(device: torch.device) -> str:
    """``sm90``, ``gfx942``, ...; ``interpreter`` where kernels run on a CPU."""
    recording = _recorder.get()
    if recording is not None:
        return recording[0]
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def input_precision(dtype: torch.dtype, arch: str) -> str:
    """How fp32 operands are multiplied: as torch's own products are set to be, where the hardware
    can.
    """
    if dtype != torch.float32 or not machine.has_tf32(arch):
        return "ieee"
    recording = _recorder.get()
    setting = recording[1] if recording else machine.fp32_setting()
    return "tf32" if setting == "tf32" else "ieee"


def tame(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where a stride is too long for 32-bit offsets inside a
    block.
    """
    if all(stride <= MAX_STRIDE for stride in tensor.stride()):
        return tensor
    tensor = tensor.contiguous()
    if tensor.shape[-1] > MAX_STRIDE:
        raise ValueError(f"rows of {tensor.shape[-1]} elements; kernels take at most {MAX_STRIDE}")
    return tensor


def aligned(*operands: Tensor) -> bool:
    """Whether 16-byte loads reach every row: without them there is no asynchronous copy and far
    more registers. Of a stride Triton learns only that 16 divides it, in elements; 8 bf16 are 16
    bytes as well, but it cannot know.
    """
    return all(
        1 in operand.stride()
        and operand.storage_offset() * operand.element_size() % 16 == 0
        and all(s == 1 or s % 16 == 0 for s in operand.stride())
        for operand in operands
    )


def rows_of(tensor: Tensor) -> Tensor:
    """A 2-d tensor whose rows have unit stride, which is what lets loads be 16 bytes wide."""
    return tame(tensor if tensor.stride(-1) == 1 else tensor.contiguous())


def dense(bias: Tensor | None) -> Tensor | None:
    """A bias that kernels may read at unit stride: a slice or an expanded scalar is copied."""
    return bias if bias is None or bias.stride(0) == 1 else bias.contiguous()


@triton.jit
def _to_tf32(x):
    """fp32 to the nearest tf32, ties away from zero, as cuBLAS does. Without it tensor cores cut
    off the 13 last bits, and the error of a product is 2.4 to 2.9 times as large.
    """
    return tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if PRECISION == "tf32":
        a = _to_tf32(a)
        b = _to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 to ``dtype``, to nearest even, on a GPU and under the interpreter."""
    if INTERPRETED:  # noqa: SIM102 - both are compile-time, and Triton takes no chained condition
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            up = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x == x, up.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def corner(pointer, block, BLOCK: tl.constexpr, stride):
    """Where a block starts: the one place a product can pass 2^31."""
    return pointer + (block * BLOCK).to(tl.int64) * stride


@triton.jit
def _halves(block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(block, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def split_columns(block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIPS: tl.constexpr):
    """A block as STRIPS (1, 2, 4 or 8) strips of columns, a tuple; registers are only renamed."""
    if STRIPS == 1:
        strips = (block,)
    else:
        left, right = _halves(block, BLOCK_M, BLOCK_N)
        strips = split_columns(left, BLOCK_M, BLOCK_N // 2, STRIPS // 2) + split_columns(
            right, BLOCK_M, BLOCK_N // 2, STRIPS // 2
        )
    return strips


@triton.jit
def grouped(program, blocks_m, blocks_n, GROUP: tl.constexpr):
    """Program number to (block row, block column): GROUP rows together share columns in L2."""
    width = GROUP * blocks_n
    first = (program // width) * GROUP
    rows = tl.minimum(blocks_m - first, GROUP)
    return first + (program % width) % rows, (program % width) // rows
