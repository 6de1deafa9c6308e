"""Which path runs for a call, and why: measured tables first, a stated conservative rule where
there is none.

The plan knows shapes, dtypes and tables; it knows nothing of Triton or autograd. It is a pure
function of a `Query`, the forced path and the tables, and is cached, so a call pays for one
dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from . import machine, tables
from .tiles import Tile

PATHS = ("eager", "packed", "epilogue", "decode", "onednn", "interpreted")
TRITON_PATHS = ("packed", "epilogue", "decode", "interpreted")
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DECODE_TOKENS = 16
# A training step through this package's own autograd node costs 50-90 µs of Python more than
# PyTorch's, whatever the size; measured on Zen 4 in fp32 that is 10-40 % of a step whose
# (tokens, intermediate_size) activations are below this many elements, and the bytes it saves there
# are under 512 KiB an activation.
AUTOGRAD_BELOW = 1 << 17


class Tiles(NamedTuple):
    """How a path's own GEMMs are cut, forward and backward; None is the default for the shape."""

    forward: Tile | None = None
    backward: Tile | None = None


DEFAULT_TILES = Tiles()

_forced: ContextVar[str | None] = ContextVar("fused_mlp_path", default=None)
_tiles: ContextVar[Tiles | None] = ContextVar("fused_mlp_tiles", default=None)


class PathError(RuntimeError):
    """A forced path cannot run here; the message says why."""


@dataclass(frozen=True)
class Query:
    """All that a plan may depend on."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    hidden: int
    intermediate: int
    gated: bool
    activation: str
    training: bool


@dataclass(frozen=True)
class Plan:
    """One decision. ``entry`` is the table's row behind it, with the microseconds of each path
    measured; ``autograd`` says that training is left to PyTorch's own autograd, which keeps what it
    likes, unless ``recompute="all"`` asks for nothing to be kept.
    """

    path: str
    reason: str
    tiles: Tiles = DEFAULT_TILES
    entry: dict | None = field(default=None, hash=False)
    autograd: bool = False

    def __str__(self) -> str:
        lines = [f"path    {self.path}", f"reason  {self.reason}"]
        if self.path in ("epilogue", "decode") or any(self.tiles):
            default = "the default for this architecture and shape (tiles.default_tile)"
            lines.insert(1, f"tile    {self.tiles.forward or default}")
        if self.tiles.backward is not None:
            lines.insert(2, f"        {self.tiles.backward} in backward")
        if self.entry is not None:
            times = sorted(self.entry["microseconds"].items(), key=lambda item: item[1])
            eager = self.entry["microseconds"].get("eager")
            for name, us in times:
                versus = "" if not eager or name == "eager" else f"  {comparison(eager / us)}"
                lines.append(f"        {name:<12}{us:>12.1f} µs{versus}")
        return "\n".join(lines)


def comparison(speedup: float) -> str:
    """A ratio in words: '1.25x faster', '1.10x slower', 'the same'."""
    if abs(speedup - 1) < 0.005:
        return "the same"
    return f"{speedup:.2f}x faster" if speedup > 1 else f"{1 / speedup:.2f}x slower"


@contextmanager
def use_path(path: str) -> Iterator[None]:
    """Force one path within the block; a call that cannot take it raises `PathError`.

    Args:
        path: one of ``eager``, ``packed``, ``epilogue``, ``decode``, ``onednn``, ``interpreted``.

    >>> import torch, fused_mlp
    >>> x, up, down = torch.ones(1, 2), torch.ones(3, 2), torch.ones(2, 3)
    >>> with fused_mlp.use_path("eager"):
    ...     fused_mlp.fused_mlp(x, up, down, activation="relu")
    tensor([[6., 6.]])
    """
    if path not in PATHS:
        raise ValueError(f"unknown path {path!r}; known are {', '.join(PATHS)}")
    token = _forced.set(path)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def use_tiles(forward: Tile | None = None, backward: Tile | None = None) -> Iterator[None]:
    """Cut the GEMMs of a forced path so within the block, whatever the table says; None is the
    default tile. For the tuner and tests.
    """
    token = _tiles.set(Tiles(forward, backward))
    try:
        yield
    finally:
        _tiles.reset(token)


def forced() -> str | None:
    """The path that `use_path` forces here, if any."""
    return _forced.get()


def obstacle(path: str, q: Query) -> str | None:
    """Why ``path`` cannot run for ``q``, or None if it can. Asked by the plan, `use_path`, the
    tuner and tests.
    """
    if path == "eager":
        return None
    if path == "onednn":
        return machine.onednn_obstacle(q.device, q.dtype, q.activation, q.training)
    if q.dtype not in TRITON_DTYPES:
        return f"{path} has no {_name(q.dtype)} kernels"
    if not machine.has_triton():
        return f"{path} needs triton, which is not installed"
    if q.device.type == "cpu" and not machine.interpreted():
        return f"{path} needs a GPU; on a CPU it runs only through Triton's interpreter (TRITON_INTERPRET=1)"
    if q.device.type not in ("cpu", "cuda"):
        return f"{path} has no kernels for {q.device.type} devices"
    if path == "interpreted" and not (q.device.type == "cpu" and machine.interpreted()):
        return "interpreted is Triton's interpreter, for CPU tensors with TRITON_INTERPRET=1"
    if path == "decode":
        if q.training:
            return "decode keeps nothing for a backward pass"
        if q.tokens > DECODE_TOKENS:
            return f"decode serves at most {DECODE_TOKENS} tokens, not {q.tokens}"
    return None


def decide(*question: Any) -> Plan:
    """The plan for one call: the fields of a `Query`, or one, in a form that is quick to look up.

    Raises:
        PathError: a path is forced that cannot run.
    """
    settings = machine.onednn_enabled(), machine.fp32_setting()
    return _cached(question, _forced.get(), _tiles.get(), settings)


@lru_cache(maxsize=4096)
def _cached(question: tuple, path: str | None, tiles: Tiles | None, settings: tuple) -> Plan:
    # Hashing a tuple costs a fifth of hashing a dataclass, and every call pays for it. ``settings``
    # only keep apart what was decided under others of torch's.
    query = question[0] if isinstance(question[0], Query) else Query(*question)
    return _decide(query, path, tiles)


def _decide(q: Query, path: str | None, tiles: Tiles | None) -> Plan:
    if path is not None:
        why = obstacle(path, q)
        if why is not None:
            raise PathError(f"path {path!r} was forced but cannot run: {why}")
        if tiles is None:
            tiles = _tuned(tables.nearest(machine.architecture(q.device), q), path)
        return Plan(path, "forced by use_path", tiles)
    if q.tokens == 0:
        return Plan("eager", "there are no tokens")
    chosen = _chosen(q)
    if q.training and chosen.path == "eager" and q.tokens * q.intermediate < AUTOGRAD_BELOW:
        reason = (
            f"{chosen.reason}; {q.tokens} x {q.intermediate} is so small that PyTorch's own "
            'autograd is quicker, unless recompute="all" is to keep nothing'
        )
        return replace(chosen, reason=reason, autograd=True)
    return chosen


def _chosen(q: Query) -> Plan:
    """By the table, or else by the rule."""
    architecture = machine.architecture(q.device)
    entry = tables.nearest(architecture, q)
    if entry is not None:
        return _measured(q, entry, architecture)
    chosen, reason = rule(q)
    why = obstacle(chosen, q)
    if why is not None:
        chosen, reason = "eager", why
    return Plan(chosen, f"{reason} (no table for {architecture} covers this shape)")


def _measured(q: Query, entry: dict, architecture: str) -> Plan:
    """The fastest measured path that can run; within 2 % of eager, eager."""
    times = entry["microseconds"]
    obstacles = {path: obstacle(path, q) for path in times}
    able = {path: us for path, us in times.items() if obstacles[path] is None}
    best = min(able, key=able.__getitem__, default="eager")
    shape = f"{entry['tokens']} tokens of {entry['hidden']}/{entry['intermediate']}"
    if best != "eager" and "eager" in able and able[best] > 0.98 * able["eager"]:
        best = "eager"
    reason = f"fastest of {len(times)} measured on {architecture} near {shape}"
    refused = [f"{path} can't: {why}" for path, why in obstacles.items() if why]
    if refused:
        reason += "; " + "; ".join(refused)
    return Plan(best, reason, _tuned(entry, best), entry)


def _tuned(entry: dict | None, path: str) -> Tiles:
    """The tiles that an entry has for a path."""
    known = (entry or {}).get("tiles", {})
    return Tiles(*(Tile(**known[k]) if k in known else None for k in (path, f"{path}_backward")))


def rule(q: Query) -> tuple[str, str]:
    """The path where nothing was measured, chosen so that it cannot lose much, and the reason in
    words.

    On a GPU: `packed` from 512 tokens, where it only replaces elementwise kernels by one that
    moves fewer bytes, and eager below; a kernel that has to beat the vendor's GEMM is never picked
    on hope. On a CPU: `onednn` on weights of at least 256K elements, for inference from 16 tokens
    and, where they are fp32, for training from 64; below that the call's own overhead decides, and
    PyTorch's own bf16 training runs on oneDNN already. On no entry of the package's CPU tables does
    that cost more than 5 %.
    """
    if q.device.type == "cuda":
        if q.tokens >= 512:
            return (
                "packed",
                "the rule for a GPU that was not tuned: vendor GEMMs, one activation kernel",
            )
        return (
            "eager",
            "the rule for a GPU that was not tuned: below 512 tokens nothing is certain to win",
        )
    if q.device.type == "cpu":
        words = "the rule for a CPU that was not tuned"
        if q.training and q.dtype != torch.float32:
            return "eager", f"{words}: only fp32 training is certain to gain by oneDNN"
        least = 64 if q.training else 16
        if q.tokens >= least and q.hidden * q.intermediate >= 1 << 18:
            return "onednn", f"{words}: oneDNN from {least} tokens"
        return "eager", f"{words}: too little work to gain by oneDNN"
    return "eager", f"no other path on {q.device.type} devices"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def forget() -> None:
    """Drop cached decisions, after tables or the machine's settings changed."""
    _cached.cache_clear()
    tables.load.cache_clear()
