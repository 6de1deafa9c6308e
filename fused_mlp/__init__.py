"""Fused MLPs for PyTorch."""

from . import reference
from .functional import fused_mlp
from .integrations import explain, fuse, unfuse
from .modules import FusedMLP
from .plan import PathError, use_path

__version__ = "0.1.0"
__all__ = [
    "FusedMLP",
    "PathError",
    "explain",
    "fuse",
    "fused_mlp",
    "reference",
    "unfuse",
    "use_path",
]
