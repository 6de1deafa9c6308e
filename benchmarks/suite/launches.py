"""How many kernels one call launches (on a CPU: operators that would); names in the side file."""

from __future__ import annotations

from .harness.cached import Measured, tracked


@tracked("launches")
class Inference(Measured):
    """One forward."""

    mode = "Inference"


@tracked("launches")
class Training(Measured):
    """One forward and backward."""

    mode = "Training"


@tracked("launches", "copies")
class ChannelsLast(Measured):
    """One forward over the channels of an image; `copies` says what a layout cost."""

    mode = "ChannelsLast"


del Measured
