"""Measured tables: one JSON file per architecture, written by ``python -m fused_mlp tune``.

A file holds the architecture, what measured it, and entries: dtype (``tf32`` for fp32 multiplied
so), gated, training, tokens, hidden, intermediate, the microseconds of each path, and the tile of
those that have one. A user's own tables, in the folder named by ``FUSED_MLP_TABLES``, are laid over
the package's.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .. import machine

if TYPE_CHECKING:
    from ..plan import Query

FOLDER = Path(__file__).parent
NEAR = math.log(
    4
)  # an entry speaks for shapes and token counts within a factor of four, the nearest first


@cache
def load(architecture: str) -> list[dict]:
    """All entries for one architecture; a damaged file is named in a warning and skipped."""
    entries: dict[tuple, dict] = {}
    for folder in (
        FOLDER,
        *([Path(os.environ[k])] if (k := "FUSED_MLP_TABLES") in os.environ else []),
    ):
        file = folder / f"{architecture}.json"
        if not file.is_file():
            continue
        try:
            for entry in json.loads(file.read_text(encoding="utf-8"))["entries"]:
                entries[identity(entry)] = entry
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"fused_mlp: table {file} is damaged and was skipped: {error!r}", stacklevel=2
            )
    return list(entries.values())


def identity(entry: dict) -> tuple:
    """What one entry is about."""
    return tuple(
        entry[k] for k in ("dtype", "gated", "training", "hidden", "intermediate", "tokens")
    )


def arithmetic(dtype: str, architecture: str) -> str:
    """An entry's dtype: ``dtype``, or ``tf32`` where torch is set to multiply fp32 so: neither times
    nor tiles are fp32's then.
    """
    tf32 = dtype == "float32" and machine.has_tf32(architecture)
    return "tf32" if tf32 and machine.fp32_setting() == "tf32" else dtype


def _even(*sizes: int) -> bool:
    """Whether rows of these sizes are ones that GPU kernels can read 16 bytes at a time."""
    return all(size % 16 == 0 for size in sizes)


def nearest(architecture: str, q: Query) -> dict | None:
    """The entry nearest to ``q`` in log tokens and log sizes, or None if none is within a factor of four of each."""
    dtype = arithmetic(str(q.dtype).removeprefix("torch."), architecture)
    best, least = None, math.inf
    for entry in load(architecture):
        if (entry["dtype"], entry["gated"], entry["training"]) != (dtype, q.gated, q.training):
            continue
        if q.device.type == "cuda" and _even(q.hidden, q.intermediate) != _even(
            entry["hidden"], entry["intermediate"]
        ):
            continue  # no asynchronous copies for the one: neither times nor tiles are the other's
        gaps = [
            abs(math.log(max(here, 1) / entry[k]))
            for k, here in (
                ("tokens", q.tokens),
                ("hidden", q.hidden),
                ("intermediate", q.intermediate),
            )
        ]
        if max(gaps) <= NEAR and sum(gaps) < least:
            best, least = entry, sum(gaps)
    return best
