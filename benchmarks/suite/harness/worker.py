"""A process that measures: ``python -m ...harness.worker JOB.json``, one JSON line a combination.

It may die at any moment without taking more with it than the combination it is at: every line is
written and flushed before the next begins, and the supervisor starts another worker for the rest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from . import devices, energy, exact, providers, slowdown, verify
from .built import Built, NotApplicable
from .clock import Clock
from .inputs import Inputs, make_inputs
from .readings import Watch
from .selection import absent
from .shapes import PROVIDERS, Combination, Provider

POISONED = 70
GRAPH_CALLS = 20
_CLOCKED = {"latency", "host_overhead", "throughput", "bandwidth", "roofline"}


def _import_ahead(used: set[Provider]) -> None:
    """Imports, and Inductor's look at the CPU, would be counted into the cold start of whichever
    combination comes first."""
    names = ["fused_mlp"]
    if any(provider.compiles for provider in used):
        names += ["torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.package"]
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if any(provider.compiles for provider in used):
        with contextlib.suppress(Exception):  # without a compiler: the providers say so
            importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()


def _empty_cache() -> None:
    import torch

    torch.cuda.empty_cache()


class Worker:
    """Measures the combinations of one job in turn."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        self.kind: str = job["device"]
        self.exact: bool = job["exact"]
        self.prepare: bool = job.get("prepare", False)
        self.slow: list[float] = job.get("slow", [])
        self.graph: bool = job.get("graph", False) and self.kind == "cuda"
        torch.set_num_threads(int(job["threads"]))
        _import_ahead({PROVIDERS[key[4]] for key, _ in job["combinations"]})
        if self.kind == "cuda":
            self._warm_device(float(job.get("device_warm_seconds", 3.0)))
        self.clock = Clock(devices.timeline_of(self.kind), devices.settings_of(self.kind))
        self.watch = Watch()
        # What importing left is not looked at again: a collection takes 2 ms instead of 90.
        gc.collect()
        gc.freeze()
        self._group: tuple | None = None
        self._inputs: Inputs | None = None
        self._reference: verify.Reference | None = None

    def _warm_device(self, seconds: float) -> None:
        """Clocks settle, and the vendor library takes its workspace before memory is counted."""
        import torch

        x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        end = time.monotonic() + (0 if self.prepare else seconds)
        while True:
            for _ in range(20):
                x @ x
            torch.cuda.synchronize()
            if time.monotonic() >= end:
                return

    def inputs(self, combination: Combination) -> tuple[Inputs, verify.Reference | None]:
        """Inputs and reference of the combination's group, made once a group. Nothing is compared
        while compiling ahead, where several processes share the device's memory."""
        if self._group != combination.group or self._inputs is None:
            # A reference that failed leaves no group behind: the next combination tries again.
            self._group = self._inputs = self._reference = None
            gc.collect()
            if self.kind == "cuda":
                # Else blocks left by the group before would decide how much is reserved.
                _empty_cache()
            inputs = make_inputs(combination, self.kind)
            self._reference = None if self.prepare else verify.Reference(inputs)
            self._inputs, self._group = inputs, combination.group
        self._inputs.combination = combination
        return self._inputs, self._reference

    def measure(self, combination: Combination, wanted: set[str]) -> dict[str, Any]:
        """All numbers of one combination, as the line to write."""
        import torch

        if PROVIDERS[combination.provider].compiles:
            # Eight graphs of one forward are torch's limit; the ninth would silently run eager.
            torch._dynamo.reset()
        inputs, reference = self.inputs(combination)
        before = exact.cuda_baseline() if self.kind == "cuda" else (0, 0)
        built: list[Built] = []

        def first() -> None:
            built.append(providers.build(inputs))
            with built[0].context():
                result.append(built[0].call())

        result: list[Any] = []
        cold = self.clock.first(first)
        metrics: dict[str, Any] = {"cold_start": [cold]}
        if reference is None:
            return {"metrics": metrics, "notes": {}}
        metrics["error"] = reference.check(
            result.pop(), list(built[0].parameters), PROVIDERS[combination.provider].computes
        )
        notes: dict[str, Any] = {}
        with built[0].context():
            if self.exact:
                self._exact(combination, built[0], inputs, before, metrics, notes)
        if wanted & _CLOCKED:
            self._timed(built, inputs, metrics, notes, wanted)
        return {"metrics": metrics, "notes": notes}

    def _exact(
        self,
        combination: Combination,
        built: Built,
        inputs: Inputs,
        before: tuple[int, int],
        metrics: dict[str, Any],
        notes: dict[str, Any],
    ) -> None:
        built.call()
        peak = 0
        try:
            launches, peak = exact.launches_and_peak(built, self.kind)
            metrics["launches"] = launches.count
            if combination.mode == "ChannelsLast":
                metrics["copies"] = launches.copies
            notes["launches"], notes["launches_are"] = launches.names, launches.kind
        except exact.NoCount as reason:
            notes["no_launches"] = str(reason)
        if self.kind == "cuda":
            peak, metrics["reserved_memory"] = exact.cuda_peak(built.call, before)
        elif not PROVIDERS[combination.provider].compiles:
            peak += exact.kept_bytes(lambda: providers.build(inputs))
        metrics["peak_memory"] = peak
        if combination.mode == "Training":
            metrics["saved_bytes"] = exact.saved_bytes(built)

    def _timed(
        self,
        built: list[Built],
        inputs: Inputs,
        metrics: dict[str, Any],
        notes: dict[str, Any],
        wanted: set[str],
    ) -> None:
        count = devices.rotation(inputs.nbytes, self.kind)
        built += [providers.build(inputs.copy()) for _ in range(count - 1)]
        with built[0].context():
            for other in built[1:]:
                other.call()
            calls = [one.call for one in built]
            batch = 1
            if self.graph:
                batch = max(count, GRAPH_CALLS)
                calls = [devices.graphed(calls, batch)]
            reading = self.clock.measure(calls).per_call(batch)
            metrics["latency"], metrics["host_overhead"] = reading.latency, reading.host
            for fraction in self.slow:
                found = slowdown.recover(self.clock, calls, fraction)
                metrics[f"slower by {fraction:g}"] = [found]
            if "energy" in wanted and not absent(inputs.combination, "energy", self.kind):
                try:
                    joules = energy.joules_a_call(calls, self.clock.timeline.synchronize)
                    metrics["energy"] = [joules]
                except NotApplicable as reason:
                    notes["no_energy"] = str(reason)
        notes.update(
            calls=reading.calls,
            rotation=count,
            warm_seconds=round(reading.warm_seconds, 4),
            stable=reading.stable,
            launch_bound=reading.launch_bound,
        )

    def line(self, combination: Combination, wanted: set[str]) -> dict[str, Any]:
        """`measure`, with whatever went wrong in its place."""
        started, worked = time.monotonic(), time.process_time()
        try:
            line = {"event": "result", **self.measure(combination, wanted)}
        except NotApplicable as reason:
            line = {"event": "absent", "reason": str(reason)}
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".strip()
            line = {"event": "failure", "text": text[:2000]}
        disturbed = self.watch.look()
        if disturbed:
            line["disturbed"] = disturbed
        line["seconds"] = round(time.monotonic() - started, 3)
        line["cpu_seconds"] = round(time.process_time() - worked, 3)
        return line

    def poisoned(self) -> bool:
        """Whether the device's context no longer works, as after an illegal access."""
        if self.kind != "cuda":
            return False
        import torch

        try:
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
        except Exception:
            return True
        return False


def main(path: str) -> int:
    job = json.loads(Path(path).read_text())
    with open(job["out"], "a", encoding="utf-8") as out:

        def write(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        started = time.monotonic()
        worker = Worker(job)
        write({"event": "ready", "pid": os.getpid(), "seconds": time.monotonic() - started})
        for key, wanted in job["combinations"]:
            write({"event": "start", "key": key})
            line = worker.line(Combination(*key), set(wanted))
            write({"key": key, **line})
            gc.collect()
            if line["event"] == "failure" and worker.poisoned():
                return POISONED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
