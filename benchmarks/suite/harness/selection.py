"""Which of the table's combinations one run measures: size, device, filter, asv's choice.

For the asv plugin: ``selected(benchmark, kind, size)`` lists the parameter tuples worth a process;
``write_plan(path, {...})`` and the variable FUSED_MLP_PLAN tell the workers what asv will ask for.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from . import shapes, specimens
from .metrics import METRICS, metric_of
from .shapes import Combination, Size

FILTER_VARIABLE = "FUSED_MLP_FILTER"
PLAN_VARIABLE = "FUSED_MLP_PLAN"

Params = tuple[str, ...]
_KNOWN: dict[str, tuple[str, ...]] = {
    "mode": shapes.MODES,
    "shape": tuple(shapes.SHAPES),
    "tokens": shapes.TOKENS,
    "dtype": tuple(shapes.ITEMSIZE),
    "provider": tuple(shapes.PROVIDERS),
    "metric": tuple(METRICS),
}
# What a device cannot measure at all: whole metrics that start no process there.
ABSENT = {
    ("cpu", "reserved_memory"): "a CPU has no caching allocator that reserves memory",
    ("cpu", "energy"): "no energy counter is read on a CPU",
}
_EXACT = ("peak_memory", "reserved_memory", "saved_bytes", "launches", "copies", "error")


def one_process(metrics: Collection[str]) -> bool:
    """Whether one process tells all there is to know: nothing asked for has noise."""
    return all(name in _EXACT for name in metrics)


def parse_filter(text: str) -> dict[str, tuple[str, ...]]:
    """``"shape=tiny,gpt2 provider=eager"`` as names to keep; ValueError names what is unknown.

    >>> parse_filter("shape=tiny,gpt2 dtype=fp32")
    {'shape': ('tiny', 'gpt2'), 'dtype': ('fp32',)}
    """
    kept: dict[str, tuple[str, ...]] = {}
    for part in text.replace(";", " ").split():
        key, equals, names = part.partition("=")
        if not equals or key not in _KNOWN:
            raise ValueError(
                f"unknown filter {part!r}; write one of {', '.join(_KNOWN)} as KEY=A,B"
            )
        kept[key] = tuple(name for name in names.split(",") if name)
        for name in kept[key] or ("",):
            if name not in _KNOWN[key]:
                raise ValueError(
                    f"unknown {key} {name!r} in a filter; known: {', '.join(_KNOWN[key])}"
                )
    return kept


def _passes(combination: Combination, kept: Mapping[str, tuple[str, ...]]) -> bool:
    return all(getattr(combination, key) in names for key, names in kept.items() if key != "metric")


def absent(combination: Combination, metric: str, kind: str) -> str | None:
    """Why a metric of this combination cannot be measured on this kind of device, or None."""
    if (kind, metric) in ABSENT:
        return ABSENT[kind, metric]
    if metric == "host_overhead" and kind == "cpu" and combination.shape != "tiny":
        return "on a CPU host and device are one: only a call too small to compute shows the host"
    if metric == "energy" and combination.tokens != "batch":
        return "too short a call for the energy counter: measured on batches"
    if metric == "energy" and (
        shapes.PROVIDERS[combination.provider].rank or shapes.DTYPES[kind][combination.dtype]
    ):
        # 0.4 s a combination and process would be 200 s of a default suite on a GPU.
        return "energy is measured for eager and fused in the device's first dtype"
    if metric == "saved_bytes" and combination.mode != "Training":
        return "nothing is saved without a backward"
    if metric == "copies" and combination.mode != "ChannelsLast":
        return "copies are counted where a layout may cost one: over the channels of an image"
    return None


def selected(
    benchmark: str,
    kind: str | None = None,
    size: Size | str | None = None,
    text: str | None = None,
) -> list[Params]:
    """The parameters of a benchmark or class that this machine and suite size measure.

    `benchmark` is ``"latency.Inference"``, ``"latency.Inference.track_latency"`` or, over kernels
    and architectures, ``"kernels.Static"``; KeyError for a benchmark over neither table.
    """
    kind = kind or shapes.device_kind()
    size = size if isinstance(size, Size) else shapes.size_of(size)
    kept = parse_filter(os.environ.get(FILTER_VARIABLE, "") if text is None else text)
    parts = benchmark.split(".")
    mode = next((part for part in parts if part in shapes.MODES), None)
    metric = metric_of(benchmark).name if parts[-1].startswith("track_") else None
    if metric and metric not in kept.get("metric", (metric,)):
        return []
    if "Static" in parts:
        # A filter that names shapes or providers asks for no kernel.
        return [] if set(kept) - {"metric"} else list(specimens.chosen(size))
    if mode is None and kept:
        return []  # as above: what a filter names is none of a quantizer's parameters
    if mode is None:
        raise KeyError(f"{benchmark} has no parameters from the tables")
    return [
        c.params
        for c in shapes.chosen(mode, kind, size)
        if _passes(c, kept) and not (metric and absent(c, metric, kind))
    ]


def write_plan(path: str | Path, benchmarks: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Say which parameters of which benchmarks asv will run, for the workers to measure no more."""
    plan = {name: [list(params) for params in chosen] for name, chosen in benchmarks.items()}
    Path(path).write_text(json.dumps(plan))


@functools.cache
def _read_plan(path: str) -> dict[str, list[list[str]]]:
    return json.loads(Path(path).read_text())


def wanted_kernels(size: Size) -> list[tuple[str, str]]:
    """The (kernel, architecture) pairs to compile: from asv's plan, else what the size takes in."""
    path = os.environ.get(PLAN_VARIABLE)
    if not path:
        return specimens.chosen(size)
    asked = {
        (kernel, arch)
        for benchmark, chosen in _read_plan(path).items()
        if "Static" in benchmark.split(".")
        for kernel, arch in chosen
    }
    return [pair for pair in specimens.chosen(shapes.SIZES["full"]) if pair in asked]


def known(key: str) -> tuple[str, ...]:
    """The names a filter may give for `key`."""
    return _KNOWN[key]


def why_nothing(kind: str, size: Size, text: str) -> str:
    """Why a filter selects nothing, in a line: the rule that left out what it asks for."""
    kept = parse_filter(text)
    asked = [c for mode in shapes.MODES for c in shapes.combinations(mode) if _passes(c, kept)]
    if not asked:
        return f"no combination of the table matches {text!r}"
    reason = shapes.left_out(asked[0], kind, size)
    return f"nothing is left to measure: {len(asked)} left out, the first because {reason}"


def wanted(kind: str, size: Size, text: str | None = None) -> dict[Combination, frozenset[str]]:
    """Every combination to measure and the metrics asked of it, in the table's order.

    From asv's plan where there is one and no filter is given, else all that the filter lets pass.
    """
    path = os.environ.get(PLAN_VARIABLE) if text is None else None
    kept = parse_filter(os.environ.get(FILTER_VARIABLE, "") if text is None else text)
    asked: dict[Combination, set[str]] = {}
    if path:
        for benchmark, chosen in _read_plan(path).items():
            mode = next((part for part in benchmark.split(".") if part in shapes.MODES), None)
            metric = metric_of(benchmark).name
            for params in chosen if mode else ():
                asked.setdefault(Combination(str(mode), *params), set()).add(metric)
    else:
        for mode in shapes.MODES:
            for combination in shapes.chosen(mode, kind, size):
                if _passes(combination, kept):
                    asked[combination] = set(kept.get("metric", METRICS))
    order = {
        c: i for i, c in enumerate(c for mode in shapes.MODES for c in shapes.combinations(mode))
    }
    return {c: frozenset(asked[c]) for c in sorted(asked, key=lambda c: order.get(c, 0))}
