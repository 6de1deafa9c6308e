"""What the asv classes share: one measuring run for all of them, and the look-up of its numbers.

All device work happens once, in `Measured.setup_cache`; asv's processes, one a value, read from it.
"""

from __future__ import annotations

import math
from typing import Any

from . import selection, shapes
from .metrics import METRICS
from .notes import note
from .roofline import ceilings, derive_all
from .shapes import SAMPLES_PER_PROCESS, Combination
from .supervisor import Entry, Supervisor

# Part of every version: asv keeps results apart when what a number means has changed.
VERSION = f"1; {SAMPLES_PER_PROCESS} samples/process"
ONCE = "1; 1 samples/process"


def measure_all() -> dict[tuple[str, ...], dict[str, Any]]:
    """Measure what the size, filter and asv's plan ask for; the values asv will store.

    One entry a combination: ``(mode, *params) -> {metric: value}``; a failure under "failure".
    """
    kind, size = shapes.device_kind(), shapes.size_of()
    wanted = selection.wanted(kind, size)
    for mode in shapes.MODES:
        note(
            "left_out",
            benchmark=f"latency.{mode}",
            params=[],
            count=sum(1 for _ in shapes.combinations(mode))
            - sum(1 for c in wanted if c.mode == mode),
            size=size.name,
            device=kind,
            reach=size.reach,
            cpu_flop=size.cpu_flop,
            cpu_bytes=size.cpu_bytes,
        )
    known = ceilings(kind, wanted)
    table = Supervisor(wanted, kind, size).run()
    derive_all(table, kind, known)
    for combination, entry in table.items():
        _write_notes(combination, entry)
    return {(c.mode, *c.params): values(c, entry, kind) for c, entry in table.items()}


def values(combination: Combination, entry: Entry, kind: str) -> dict[str, Any]:
    """An entry as asv stores it."""
    if entry.failure:
        return {"failure": entry.failure}
    found: dict[str, Any] = dict(entry.numbers)
    for name, samples in entry.samples.items():
        if not selection.absent(combination, name, kind):
            found[name] = {"samples": samples, "number": 1}
    return found


def _write_notes(combination: Combination, entry: Entry) -> None:
    where = {"benchmark": f"latency.{combination.mode}", "params": list(combination.params)}
    if entry.absent:
        note("absent", reason=entry.absent, **where)
        return
    if entry.failure:
        note("failure", text=entry.failure, **where)
        return
    if not entry.processes:
        note("absent", reason="the run was stopped before it was measured", **where)
        return
    notes = dict(entry.notes)
    names = notes.pop("launches", None)
    if names is not None:
        launched = {"benchmark": f"launches.{combination.mode}", "params": where["params"]}
        note("launches", names=names, of=notes.pop("launches_are"), **launched)
    cost = {"seconds": round(entry.seconds, 2), "cpu_seconds": round(entry.cpu_seconds, 2)}
    note("measured", pids=entry.processes, **cost, **notes, **where)
    for process, reason in entry.disturbed.items():
        note("invalid", process=process, reason=reason, **where)


class Measured:
    """Base of the asv classes over the shape table; `mode` is the class's own."""

    mode = ""
    timeout = 60.0
    version = VERSION
    param_names = shapes.PARAM_NAMES

    def setup_cache(self) -> dict[tuple[str, ...], dict[str, Any]]:
        return measure_all()

    # asv reads the limit from the function itself: the workers have limits of their own.
    setup_cache.timeout = 6 * 3600.0  # type: ignore[attr-defined]

    def look_up(self, cache: dict, metric: str, params: tuple[str, ...]) -> Any:
        """A number, samples, or NaN where there is none; a failed combination raises."""
        found = cache.get((self.mode, *params))
        if found is None:
            return math.nan
        if "failure" in found:
            raise RuntimeError(found["failure"])
        return found.get(metric, math.nan)


def tracked(*names: str, versions: dict[str, str] | None = None) -> Any:
    """Class decorator: one ``track_<metric>`` method for each metric named."""

    def decorate(cls: type) -> type:
        cls.params = shapes.params_of(cls.mode)  # type: ignore[attr-defined]
        for name in names:
            setattr(cls, f"track_{name}", _method(name, cls, (versions or {}).get(name)))
        return cls

    return decorate


def _method(name: str, cls: type, version: str | None) -> Any:
    def track(self: Measured, cache: dict, *params: str) -> Any:
        return self.look_up(cache, name, params)

    track.__name__ = f"track_{name}"
    track.__qualname__ = f"{cls.__qualname__}.track_{name}"
    track.__doc__ = METRICS[name].text
    track.__module__ = cls.__module__
    track.unit = METRICS[name].unit  # type: ignore[attr-defined]
    if version:
        track.version = version  # type: ignore[attr-defined]
    return track


__all__ = ["ONCE", "VERSION", "Measured", "measure_all", "tracked", "values"]
