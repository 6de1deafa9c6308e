"""Exact counts, with no clock: bytes that operators read and write, copies, and what autograd
keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that make a view or room and touch no element; and equal, by which the onednn path looks
# at a weight's diagonal, a few KB, to see that its packed copy is current.
_IDLE = (
    "alias", "as_strided", "chunk", "contiguous", "detach", "detach_", "empty", "empty_like",
    "empty_strided", "equal", "expand", "expand_as", "flatten", "is_nonzero", "is_same_size",
    "item", "lift_fresh", "linear", "matmul", "narrow", "new_empty", "new_empty_strided",
    "numpy_T", "permute", "reshape", "resize_", "resolve_conj", "resolve_neg", "result_type",
    "select", "set_", "size", "slice", "split", "split_with_sizes", "squeeze", "stride", "t",
    "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view",
)  # fmt: skip
IDLE = frozenset(f"aten::{name}" for name in _IDLE)
# What these do inside, such as addmm's copy of the bias into its output or the zeros a sum starts
# from, is their own affair.
WHOLE = (
    "aten::mm", "aten::addmm", "aten::_int_mm", "aten::sum", "mkldnn::", "onednn::", "quantized::",
)  # fmt: skip
# Their first argument, which they fill, is not read.
_ONLY_WRITES = ("aten::copy_", "aten::fill_", "aten::zero_")
_BOOKKEEPING = ("##", "autograd::", "torch::autograd")
COPIES = ("aten::copy_", "aten::clone", "aten::cat", "aten::stack")


@dataclass
class Traffic(TorchDispatchMode):
    """Counts, inside, the bytes that each operator's tensors span: what it moves if no cache helps.

    >>> with Traffic() as traffic:
    ...     _ = torch.ones(10) + torch.ones(10)
    >>> traffic.bytes_by_operator["aten::add"]
    120
    """

    bytes_by_operator: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        # As an operator of its own, which is all that is seen here, it is a copy.
        if name not in IDLE or name == "aten::_to_copy":
            read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            first = 1 if name in _ONLY_WRITES else 0
            # What is written in place is both read and written.
            moved = _spans((args[first:], read)) + _spans(out)
            self.bytes_by_operator[name] = self.bytes_by_operator.get(name, 0) + moved
        return out

    @property
    def total(self) -> int:
        return sum(self.bytes_by_operator.values())


def _spans(tree: Any) -> int:
    """Bytes of the tensors in it, each once."""
    found = {_identity(t): _span(t) for t in tree_leaves(tree) if isinstance(t, Tensor)}
    return sum(found.values())


def _identity(t: Tensor) -> tuple:
    if t.layout is not torch.strided:  # oneDNN's packed weights have no storage to be asked for
        return (id(t),)
    return t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape)


def _span(t: Tensor) -> int:
    """Bytes of the distinct elements of a view: a broadcast size of stride 0 is read once."""
    if t.layout is not torch.strided:
        return t.numel() * t.element_size()
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements *= size if stride else 1
    return elements * t.element_size()


def counted(events: Iterable[Any]) -> list[Any]:
    """The operators of a CPU profile that compute: whole GEMMs, else the innermost that are no
    view or wrapper."""
    found: list[Any] = []

    def visit(event: Any) -> bool:
        if event.name.startswith(WHOLE):
            found.append(event)
            return True
        inner = [visit(child) for child in event.cpu_children]
        if any(inner):
            return True
        name = event.name
        computes = "::" in name and name not in IDLE and not name.startswith(_BOOKKEEPING)
        if computes or "cpp_fused" in name:
            found.append(event)
            return True
        return False

    for event in events:
        if event.cpu_parent is None and event.device_type == torch.autograd.DeviceType.CPU:
            visit(event)
    return found


def copies(call: Callable[[], Any]) -> list[str]:
    """The copies that one call makes on a CPU, each with its shapes; empty if it makes none."""
    call()
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        call()
    return [f"{e.name} {e.input_shapes[0]}" for e in counted(prof.events()) if e.name in COPIES]


@contextmanager
def saved_bytes(parameters: Iterable[Tensor]):
    """Inside, what autograd keeps for backward, once a storage, without parameters; yields a list
    of one number."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    seen: dict[int, int] = {}
    total = [0]

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage.nbytes()
            total[0] += storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield total
