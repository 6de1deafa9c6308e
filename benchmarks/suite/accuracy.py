"""How far from float64 each provider is, as a multiple of eager's own error."""

from __future__ import annotations

from .harness.cached import Measured, tracked


@tracked("error")
class Inference(Measured):
    """The output."""

    mode = "Inference"


@tracked("error")
class Training(Measured):
    """The output and every gradient."""

    mode = "Training"


@tracked("error")
class ChannelsLast(Measured):
    """The output."""

    mode = "ChannelsLast"


del Measured
