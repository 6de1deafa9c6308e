"""Numbers without noise: launches and their names, peak memory, bytes saved for backward."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .built import Built

_GRAPH_NUMBER = re.compile(r"^graph_\d+_")
# Operators on a CPU, kernels of PyTorch, CUDA and cuDNN on a GPU that only move a tensor.
_COPY = re.compile(
    r"^aten::(copy_|clone|cat|stack)$|memcpy|copy_kernel|CatArrayBatchedCopy|nchwToNhwc|nhwcToNchw",
    re.IGNORECASE,
)


class NoCount(Exception):
    """Launches cannot be counted here; the message is the reason."""


@dataclass
class Launches:
    """`names` in order. On a CPU they are the operators that would launch, not kernels."""

    names: list[str]
    kind: str

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def copies(self) -> int:
        return sum(_COPY.search(name) is not None for name in self.names)


def _profile(call: Callable[[], Any], kind: str) -> Any:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (kind == "cuda")
    with profile(activities=activities, profile_memory=kind == "cpu") as seen:
        call()
        if kind == "cuda":
            import torch

            torch.cuda.synchronize()
    return seen


@functools.cache
def _operator_kind(name: str) -> str:
    """What an operator's event stands for: "launch", "nothing" (views, allocation) or "composite"
    (only a name for the operators it calls)."""
    import torch

    space, _, base = name.partition("::")
    if space == "aten":
        if base.startswith(("empty", "new_empty", "resolve_", "lift_fresh", "_reshape_alias")):
            return "nothing"
        packet = getattr(torch.ops.aten, base, None)
        overloads = [getattr(packet, o) for o in packet.overloads()] if packet else []
        # TorchScript's own overloads (aten::mul.left_t) are not in the dispatcher.
        overloads = [o for o in overloads if torch._C._dispatch_has_kernel(o.name())]
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if any(has(o.name(), "CompositeImplicitAutograd") for o in overloads):
            return "composite"
        infos = [r.alias_info for o in overloads for r in o._schema.returns]
        if infos and all(info is not None and not info.is_write for info in infos):
            return "nothing"
        return "launch"
    if space == "mkldnn" or "cpp_fused" in name:
        return "launch"
    # An AOTInductor package calls operators by functions of its own, the custom ones by a proxy.
    if name.startswith(("aoti_torch_cpu_", "aoti_torch_cuda_")):
        return "launch"
    # A custom operator is what it calls, or, where nothing inside it is seen, itself.
    return "custom" if base and space.isidentifier() and space != "autograd" else "composite"


def _launching(event: Any) -> list[str]:
    kind = _operator_kind(event.name)
    if kind == "nothing":
        return []
    if kind == "launch":
        return [_GRAPH_NUMBER.sub("", event.name)]
    inner = [name for child in event.cpu_children for name in _launching(child)]
    return [event.name] if kind == "custom" and not inner else inner


def _operators(events: Iterable[Any]) -> list[str]:
    roots = [e for e in events if e.cpu_parent is None and e.name != "[memory]"]
    return [name for e in sorted(roots, key=lambda e: e.time_range.start) for name in _launching(e)]


def live_bytes(seen: Any) -> tuple[int, int]:
    """Peak and final bytes above the start, from every allocation torch's allocator reported."""
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, live


def launches_and_peak(built: Built, kind: str) -> tuple[Launches, int]:
    """Launches of one warm call; and its peak bytes, which on a GPU are 0 (see `cuda_peak`)."""

    def once() -> None:
        result = built.call()
        del result

    if kind == "cuda":
        return Launches(settled(lambda: _kernels(_profile(once, kind).events())), "kernels"), 0
    seen = _profile(once, kind)
    return Launches(_operators(seen.events()), "operators"), live_bytes(seen)[0]


def _kernels(events: Iterable[Any]) -> list[str]:
    from torch.autograd import DeviceType

    ran = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return [e.name for e in sorted(ran, key=lambda e: e.time_range.start)]


def settled(look: Callable[[], list[str]], most: int = 4) -> list[str]:
    """What two looks in a row agree on: a profiler's first ones may lose kernels. NoCount where it
    sees none at all (no CUPTI, or no right to use it) or does not settle: a false exact number is
    worse than none."""
    last: list[str] | None = None
    for _ in range(most):
        seen = look()
        if seen and seen == last:
            return seen
        last = seen
    if not last:
        raise NoCount("the profiler sees no kernel on this GPU (CUPTI is missing or not permitted)")
    raise NoCount(f"the profiler saw another set of kernels each of {most} times")


def kept_bytes(build: Callable[[], Built]) -> int:
    """Bytes that building a provider and calling it once leaves behind (packed weights), on a
    CPU."""
    kept: list[Built] = []

    def once() -> None:
        built = build()
        with built.context():
            result = built.call()
        del result
        kept.append(built)
        gc.collect()

    return max(0, live_bytes(_profile(once, "cpu"))[1])


def cuda_peak(call: Callable[[], Any], before: tuple[int, int]) -> tuple[int, int]:
    """Peak allocated and reserved bytes above `before` (from `cuda_baseline`) in one call."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return allocated - before[0], reserved - before[1]


def cuda_baseline() -> tuple[int, int]:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def saved_bytes(built: Built) -> int:
    """Bytes that one forward keeps for backward: unique storages, parameters excluded."""
    import torch

    parameters = {t.untyped_storage().data_ptr() for t in built.parameters.values()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = built.call()
    del result
    return sum(saved.values())
