"""The ladder from `nn.Linear` to a fused, quantized MLP, each rung measured beside what was
expected of it."""

from __future__ import annotations

from .counting import Traffic, copies, counted, saved_bytes
from .ladder import PARTS, ladder
from .measure import Measured, measure
from .report import diff, picture, table, to_json
from .rung import Rung, Setting

__all__ = [
    "PARTS",
    "Measured",
    "Rung",
    "Setting",
    "Traffic",
    "copies",
    "counted",
    "diff",
    "ladder",
    "measure",
    "picture",
    "saved_bytes",
    "table",
    "to_json",
]
