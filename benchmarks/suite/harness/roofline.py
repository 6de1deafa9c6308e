"""What this machine could do at best, measured once, and every latency as a fraction of it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from . import processes
from .shapes import Combination
from .supervisor import THREADS_VARIABLE, Entry

MACHINE_VARIABLE = "FUSED_MLP_MACHINE_DIR"
FILE = "ceilings.jsonl"


_NEED = {"throughput", "bandwidth", "roofline", "latency"}


def ceilings(
    kind: str, wanted: Mapping[Combination, Collection[str]], again: bool = False
) -> dict[str, float]:
    """``{"bandwidth": bytes/s, "fp32": FLOP/s, ...}`` of this machine; empty if unmeasurable.

    Kept in the machine's results folder with the identity they belong to, measured where they are
    not there yet, or `again`.
    """
    dtypes = sorted({c.computes for c, metrics in wanted.items() if not _NEED.isdisjoint(metrics)})
    if not dtypes:
        return {}
    threads = os.environ.get(THREADS_VARIABLE, "1") if kind == "cpu" else "0"
    folder = os.environ.get(MACHINE_VARIABLE)
    path = Path(folder, FILE) if folder else None
    known: dict[str, float] = {}
    for record in _records(path):
        if record.get("device") == kind and record.get("threads") == threads:
            for name, value in record.get("ceilings", {}).items():
                # The best ever seen: a ceiling measured while the machine was busy is too low.
                known[name] = max(value, known.get(name, 0.0))
    names = ["bandwidth", *dtypes]
    missing = names if again else [name for name in names if name not in known]
    if missing:
        found, identity = _measure(kind, threads, missing)
        known.update({name: max(value, known.get(name, 0.0)) for name, value in found.items()})
        if path is not None and found:
            record = {"device": kind, "threads": threads, "identity": identity, "ceilings": found}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError:
                pass  # a read-only folder costs the next run a second measurement, nothing more
    return known


def _records(path: Path | None) -> list[dict[str, Any]]:
    records = []
    try:
        lines = path.read_text().splitlines() if path else []
    except OSError:
        lines = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _measure(kind: str, threads: str, names: list[str]) -> tuple[dict[str, float], dict[str, str]]:
    count = threads if threads != "0" else "1"
    command = processes.command("ceilings", kind, count, *names)
    environment = processes.environment(count)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, check=True
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}, {}
    return answer["ceilings"], answer["identity"]


def derive_all(table: Mapping[Combination, Entry], kind: str, known: dict[str, float]) -> None:
    """`derive` for every entry; a fraction above one means that the ceilings were measured on a
    disturbed machine, and they are measured once more."""
    for combination, entry in table.items():
        derive(combination, entry, known)
    if any(entry.numbers.get("roofline", 0.0) > 1.05 for entry in table.values()):
        known = ceilings(kind, {c: {"roofline"} for c in table}, again=True)
        for combination, entry in table.items():
            derive(combination, entry, known)


def derive(combination: Combination, entry: Entry, known: dict[str, float]) -> None:
    """Add throughput, bandwidth and roofline to an entry that has a latency."""
    latency = entry.samples.get("latency")
    if not latency:
        return
    seconds = statistics.median(latency)
    entry.numbers["throughput"] = combination.flop / seconds / 1e12
    entry.numbers["bandwidth"] = combination.least_bytes / seconds / 1e9
    peak, stream = known.get(combination.computes), known.get("bandwidth")
    if peak and stream:
        least = max(combination.flop / peak, combination.least_bytes / stream)
        entry.numbers["roofline"] = least / seconds
