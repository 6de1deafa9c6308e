"""How long one call takes: model shapes × tokens × dtype × provider."""

from __future__ import annotations

from .harness.cached import ONCE, Measured, tracked

_METRICS = (
    "latency",
    "cold_start",
    "host_overhead",
    "energy",
    "throughput",
    "bandwidth",
    "roofline",
)
_VERSIONS = {"cold_start": ONCE, "energy": ONCE}


@tracked(*_METRICS, versions=_VERSIONS)
class Inference(Measured):
    """One forward."""

    mode = "Inference"


@tracked(*_METRICS, versions=_VERSIONS)
class Training(Measured):
    """One forward and backward."""

    mode = "Training"


@tracked(*_METRICS, versions=_VERSIONS)
class ChannelsLast(Measured):
    """One forward over the channels of an image in channels-last memory."""

    mode = "ChannelsLast"


del Measured  # asv would take an imported class for one of this module's own
