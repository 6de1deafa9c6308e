"""The import of torchao: says what to install, and keeps from users what is no news to them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def news(record: logging.LogRecord) -> bool:
    """Whether anyone can act on what torchao's import says: not on GPU libraries that do not load
    into a torch without a GPU, nor on what torch will deprecate in torchao.
    """
    text = record.getMessage()
    gpu = torch.version.cuda is not None or torch.version.hip is not None
    return (gpu or not text.startswith("Failed to load ")) and "is an Enum subclass" not in text


@contextmanager
def only_news() -> Iterator[None]:
    """Around what imports parts of torchao: lets through only what is `news`."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(news)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(news)


try:
    with only_news():
        import torchao.quantization  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"fused_mlp.quantize needs torchao ({error}); install it with: pip install "
        "'fused_mlp[quant]'"
    ) from error
