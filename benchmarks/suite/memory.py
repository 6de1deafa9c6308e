"""What one call needs of memory, to the byte."""

from __future__ import annotations

from .harness.cached import Measured, tracked


@tracked("peak_memory", "reserved_memory")
class Inference(Measured):
    """One forward."""

    mode = "Inference"


@tracked("peak_memory", "reserved_memory", "saved_bytes")
class Training(Measured):
    """One forward and backward."""

    mode = "Training"


@tracked("peak_memory", "reserved_memory")
class ChannelsLast(Measured):
    """One forward over the channels of an image."""

    mode = "ChannelsLast"


del Measured
