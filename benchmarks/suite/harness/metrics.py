"""Every metric once: its unit, whether it has noise, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """`kind`: "sampled" has noise and samples; "exact" has none, any change is a fact;
    "derived" follows from other numbers and is never judged. `better`: "lower" or "higher".
    `tolerance`: of an exact metric, in its unit, a change that says nothing."""

    name: str
    unit: str
    kind: str
    better: str
    text: str
    tolerance: float = 0.0


_ALL = (
    Metric("latency", "seconds", "sampled", "lower", "time of one call"),
    Metric(
        "cold_start",
        "seconds",
        "sampled",
        "lower",
        "first call in a process, imported and compiled before",
    ),
    Metric("host_overhead", "seconds", "sampled", "lower", "host time of one call"),
    Metric("energy", "joules", "sampled", "lower", "energy of one call"),
    Metric("throughput", "TFLOP/s", "derived", "higher", "GEMM arithmetic over latency"),
    Metric("bandwidth", "GB/s", "derived", "higher", "least bytes moved over latency"),
    Metric("roofline", "fraction", "derived", "higher", "of what this machine's ceilings allow"),
    Metric("peak_memory", "bytes", "exact", "lower", "peak above weights and inputs"),
    Metric("reserved_memory", "bytes", "exact", "lower", "peak reserved by the allocator"),
    Metric("saved_bytes", "bytes", "exact", "lower", "kept for backward, parameters excluded"),
    Metric("launches", "launches", "exact", "lower", "kernel launches of one call"),
    Metric("copies", "copies", "exact", "lower", "of these, copies from one layout to another"),
    Metric("registers", "registers", "exact", "lower", "registers of one thread"),
    Metric("spills", "instructions", "exact", "lower", "loads and stores of spilled registers"),
    Metric("shared_memory", "bytes", "exact", "lower", "shared memory of one block"),
    Metric("instructions", "instructions", "exact", "lower", "machine instructions of the kernel"),
    # Rounding every GEMM otherwise (bf16, int8, fp8) turned at most 1 of 1080 answers, net; 5 are free.
    Metric("accuracy", "fraction", "exact", "higher", "right answers on unseen pictures", 0.005),
    Metric("weight_bytes", "bytes", "exact", "lower", "of the weights, scales included"),
    Metric("error", "ratio", "derived", "lower", "error against float64 over eager's own"),
)
METRICS = {metric.name: metric for metric in _ALL}


def metric_of(benchmark: str) -> Metric:
    """The metric of a benchmark by its name, e.g. ``latency.Inference.track_latency``.

    >>> metric_of("latency.Inference.track_throughput").better
    'higher'
    """
    name = benchmark.rsplit(".", 1)[-1].removeprefix("track_")
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}; known: {', '.join(METRICS)}")
    return METRICS[name]
