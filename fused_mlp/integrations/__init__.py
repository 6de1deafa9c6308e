"""Fused MLPs inside other libraries' models."""

from __future__ import annotations

from torch import nn


def convert(mlp: nn.Module):
    raise NotImplementedError


def fuse(model: nn.Module) -> list[str]:
    """Replace what can be replaced; returns the names."""
    return []


def unfuse(model: nn.Module) -> list[str]:
    return []


def explain(*args, **kwargs) -> str:
    return ""
