"""MLP inference through oneDNN's fused linear layers on a CPU, with weights packed once and never
served stale.

    act(gate(x)) * up(x) is two calls (activation and product are post-ops), down(...) a third: no
    elementwise pass.

A packed copy costs as many bytes as the weight. It is made at the second call that sees the same
weight, so weights that live for one call are never copied, and it is dropped when the weight dies,
moves or changes:

- other storage, shape or dtype (``.to()``, ``.data = ...``, ``load_state_dict(assign=True)``): the
  storage is compared by identity and held weakly, so the copy goes when it goes;
- writes that PyTorch counts (optimizers, ``copy_``, ``load_state_dict``): ``Tensor._version``;
- writes that it does not count (``.data.mul_()``, NumPy views): the bits of a sample of the weight,
  which crosses every row and every column, are compared at each call. A write that misses the
  sample, such as a few single elements set through NumPy, cannot be seen: call `clear` after it.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from . import reference
from .activations import Activation
from .machine import onednn_native

_linear = torch.ops.mkldnn._linear_pointwise
# Measured on Zen 4 (fp32, 768/3072 and 2048/5632): below 4 tokens checking and reading a packed
# copy costs more than it gains; above 256 it gains under 4 % over packing within the call, and is
# not worth a second copy of the weights.
PACK_FROM, PACK_TO = 4, 256
# Its post-op turns NaN into 0, eager does not.
UNFAITHFUL = {"relu"}
_BITS = {2: torch.int16, 4: torch.int32}


def _sample(weight: Tensor) -> Tensor:
    """A view of the weight's bits that crosses every row and column; bits, since NaN differs from
    itself.
    """
    return weight.detach().view(_BITS[weight.element_size()]).view(-1)[:: _step(*weight.shape)]


@lru_cache(maxsize=4096)
def _step(rows: int, columns: int) -> int:
    """A stride through the flat weight: no longer than a row, so it meets every row, nor than
    ``rows``, so it takes at least ``columns`` steps, and with no common divisor with ``columns``, so
    those meet every column. Of such the longest: some max(rows, columns) elements.
    """
    return next(s for s in range(min(rows, columns), 0, -1) if math.gcd(s, columns) == 1)


@dataclass(eq=False)
class _Entry:
    """One weight, known by its storage: a weak reference to the tensor itself would forbid
    `torch.utils.swap_tensors`.
    """

    storage: weakref.ref
    version: int
    layout: tuple
    sample: Tensor
    sightings: int = 1
    packed: Tensor | None = None
    size: int = 0

    def current(self, weight: Tensor) -> bool:
        return (
            self.storage() is weight.untyped_storage()
            and self.version == weight._version
            and self.layout == (weight.shape, weight.dtype)
            and torch.equal(self.sample, _sample(weight))
        )


@dataclass
class Cache:
    """Packed weights, by the storage of the weight they were packed from and the place in it.

    ``limit`` bounds the bytes of all packed copies; weights beyond it are used as they lie, which
    is correct and somewhat slower.
    """

    limit: int = 1 << 40
    entries: dict[tuple[int, int], _Entry] = field(default_factory=dict)
    bytes: int = 0
    # Held where bytes are counted; reentrant, since freeing a weight there may drop its copy.
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def get(self, weight: Tensor, *, at_once: bool = False) -> Tensor | None:
        """The packed copy of ``weight``, or None if it is not (yet) worth one.

        ``at_once`` packs at the first sighting.
        """
        if weight.is_inference() or not weight.is_contiguous():
            return None  # no version counter, or no flat sample: nothing to tell a change by
        key = (weight.untyped_storage()._cdata, weight.storage_offset())
        entry = self.entries.get(key)
        if entry is not None and entry.current(weight):
            if entry.packed is None:
                entry.sightings += 1
        else:
            entry = self._see(key, weight)
        if entry.packed is None and (at_once or entry.sightings > 1):
            self._pack(entry, weight)
        return entry.packed

    def _see(self, key: tuple[int, int], weight: Tensor) -> _Entry:
        entry = _Entry(
            weakref.ref(weight.untyped_storage(), lambda _: self.drop(key)),
            weight._version,
            (weight.shape, weight.dtype),
            _sample(weight).clone(),
        )
        with self.lock:
            self.drop(key)
            self.entries[key] = entry
        return entry

    def _pack(self, entry: _Entry, weight: Tensor) -> None:
        size = weight.numel() * (weight.element_size() if _native(weight) else 4)
        key = (weight.untyped_storage()._cdata, weight.storage_offset())
        with self.lock:
            # Another thread may have packed it, or dropped it, since it was looked up.
            if entry.packed is not None or self.entries.get(key) is not entry:
                return
            if self.bytes + size > self.limit:
                return
            with torch.no_grad():
                source = weight.detach() if _native(weight) else weight.detach().float()
                entry.packed = torch.ops.mkldnn._reorder_linear_weight(source, None)
            self.bytes += size
            entry.size = size

    def drop(self, key: tuple[int, int]) -> None:
        """Drop one packed copy, if there is one."""
        with self.lock:
            entry = self.entries.pop(key, None)
            if entry is not None and entry.packed is not None:
                self.bytes -= entry.size

    def clear(self) -> None:
        """Drop every packed copy."""
        with self.lock:
            self.entries.clear()
            self.bytes = 0


cache = Cache()


def _after_fork() -> None:
    """The lock may have been held by a thread that the child process does not have."""
    cache.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def clear() -> None:
    """Forget every packed weight.

    Needed only after a write that PyTorch does not count and that changes single elements (NumPy
    views, ``.data``, another process's writes to shared memory): see above.

    >>> clear()
    >>> packed_bytes()
    0
    """
    cache.clear()


def packed_bytes() -> int:
    """Bytes that packed copies hold now."""
    return cache.bytes


def _native(weight: Tensor) -> bool:
    return onednn_native(weight.dtype)


def _interleaved(weight: Tensor) -> bool:
    """Whether rows and columns lie across each other in memory (overlapping windows, a stride
    shorter than what it strides over), instead of the ones within the others.
    """
    if weight.is_contiguous():
        return False
    (inner, size), (outer, _) = sorted(zip(weight.stride(), weight.shape, strict=True))
    return min(weight.shape) > 1 and outer < inner * size


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    post: tuple[str, str] = ("none", ""),
    times: Tensor | None = None,
    plus: Tensor | None = None,
) -> Tensor:
    """``post(x · weightᵀ + bias)``, or that times or plus another tensor, in one oneDNN call."""
    if not weight.is_mkldnn and _interleaved(weight):
        weight = weight.contiguous()  # oneDNN does not take it as it lies
    if bias is not None:
        bias = bias.contiguous()  # oneDNN reads it as if it were
    if times is not None:
        return _linear.binary(x, times, weight, bias, "mul")
    if plus is not None:
        return _linear.binary(x, plus, weight, bias, "add")
    return _linear(x, weight, bias, post[0], [], post[1])


def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
    act: Activation,
    *,
    at_once: bool = False,
) -> Tensor:
    """Inference of the whole MLP; ``x`` is ``(tokens, hidden_size)``.

    Where the CPU does not multiply the dtype natively, the packed weights are fp32, so that
    nothing is converted per call but ``x`` and the result; until they are packed, the weights are.
    """
    if not (x.numel() and up_weight.numel() and down_weight.numel()):  # oneDNN takes none of these
        return reference.mlp(
            x, up_weight, down_weight, gate_weight=gate_weight, up_bias=up_bias,
            gate_bias=gate_bias, down_bias=down_bias, activation=act.name,
        )  # fmt: skip
    upcast = not onednn_native(x.dtype)
    x_, out = (x.float() if upcast else x), x.dtype

    pack = PACK_FROM <= x.shape[0] <= PACK_TO

    def ready(weight: Tensor) -> Tensor:
        packed = cache.get(weight, at_once=at_once) if pack else None
        if packed is not None:
            return packed
        return weight.float() if upcast else weight

    def ready_bias(bias: Tensor | None) -> Tensor | None:
        return bias.float() if upcast and bias is not None else bias

    first, first_bias = (up_weight, up_bias) if gate_weight is None else (gate_weight, gate_bias)
    post = None if act.name in UNFAITHFUL else act.onednn
    hidden = linear(x_, ready(first), ready_bias(first_bias), post or ("none", ""))
    if post is None:
        hidden = act.eager(hidden)
    if gate_weight is not None:
        hidden = linear(x_, ready(up_weight), ready_bias(up_bias), times=hidden)
    return linear(hidden, ready(down_weight), ready_bias(down_bias)).to(out)
