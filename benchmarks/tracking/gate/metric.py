"""Which metric a benchmark measures, and how it is to be judged."""

from __future__ import annotations

from typing import NamedTuple

try:
    from benchmarks.suite.harness.metrics import METRICS as _TABLE
except ImportError:  # a results folder of another project, or the suite not installed
    _TABLE = {}


class Kind(NamedTuple):
    """How one benchmark's number is judged."""

    metric: str
    unit: str
    kind: str  # sampled, exact or derived
    better: str  # lower or higher
    tolerance: float = 0.0  # of an exact metric, in its unit


def kind_of(benchmark: str, unit: str = "", samples: bool = False) -> Kind:
    """The kind of `benchmark` by its method's name, then by asv's own conventions.

    >>> kind_of("latency.Inference.track_latency", "seconds").kind
    'sampled'
    >>> kind_of("other.time_sort").better
    'lower'
    """
    method = benchmark.rsplit(".", 1)[-1]
    prefix, _, metric = method.partition("_")
    if not metric:
        prefix, metric = "track", method
    known = _TABLE.get(metric)
    if known is not None:
        return Kind(metric, known.unit, known.kind, known.better, known.tolerance)
    unit = unit or {
        "time": "seconds",
        "timeraw": "seconds",
        "peakmem": "bytes",
        "mem": "bytes",
    }.get(prefix, "")
    # Unknown: asv's rule is that lower is better, and a number without samples and without a unit
    # that promises exactness may be anything, so it is shown and not judged.
    if samples or unit in ("seconds", "s", "ms"):
        return Kind(metric, unit, "sampled", "lower")
    if prefix == "mem":
        return Kind(metric, unit, "exact", "lower")
    return Kind(metric, unit, "sampled" if prefix == "peakmem" else "derived", "lower")
