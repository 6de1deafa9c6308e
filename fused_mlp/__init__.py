"""Fused MLPs for PyTorch."""

from . import reference
from .explaining import explain
from .functional import fused_mlp
from .integrations import fuse, unfuse
from .modules import FusedMLP
from .plan import PathError, use_path

__version__ = "0.1.0"
__all__ = [
    "FusedMLP",
    "PathError",
    "explain",
    "fuse",
    "fused_mlp",
    "quantize",
    "reference",
    "unfuse",
    "use_path",
]


def __getattr__(name: str):
    if name == "quantize":  # on first use: it imports torchao, an extra
        from .quantization import quantize

        return quantize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
