"""Quantized MLPs on torchao's tensors: dynamic, static, weight-only, and quantization-aware
training.

torchao owns the number formats and their tensors; this room owns what an MLP can share that single
linear layers cannot (one quantization of x for gate and up, no pass over memory between the GEMMs)
and refuses what cannot work.
"""

from __future__ import annotations

from . import library  # before all that imports torchao  # noqa: F401
from .convert import prepare_qat, quantize
from .modes import MODES, Mode
from .weights import bytes_of, dequantize, is_quantized

__all__ = ["MODES", "Mode", "bytes_of", "dequantize", "is_quantized", "prepare_qat", "quantize"]
