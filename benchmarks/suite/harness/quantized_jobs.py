"""Runs the quantization workers in fresh processes and keeps what each printed. No torch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from . import processes
from .notes import note

PATIENCE_SECONDS = 300.0


def measure(jobs: Sequence[str], modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``mode -> {metric: value}`` from one process a job.

    What a process printed before it died counts; a mode that it did not come to is a failure, with
    its text. A package that is missing (torchao, scikit-learn) is no failure: there is nothing, and
    a note says why.
    """
    found: dict[str, dict[str, Any]] = {}
    for job in jobs:
        lines, trouble = _run(job)
        for line in lines:
            _keep(found.setdefault(line["mode"], {}), line)
        if trouble is None:
            continue
        if "ModuleNotFoundError" in trouble or "needs torchao" in trouble:
            note("absent", benchmark="quantization", params=[job], reason=trouble)
            return {}
        note("failure", benchmark="quantization", params=[job], text=trouble)
        seen = {line["mode"] for line in lines}
        for mode in modes:
            if mode not in seen:
                found.setdefault(mode, {})["failure"] = f"{job}: {trouble}"
    return found


def _keep(entry: dict[str, Any], line: dict[str, Any]) -> None:
    if line["what"] == "accuracy":
        _samples(entry, "accuracy").append(line["accuracy"])
    elif line["what"] == "speed":
        _samples(entry, "latency").extend(line["samples"])
    else:
        entry |= {key: line[key] for key in ("weight_bytes", "peak_memory", "launches")}


def _samples(entry: dict[str, Any], metric: str) -> list[float]:
    return entry.setdefault(metric, {"samples": [], "number": 1})["samples"]


def _run(job: str) -> tuple[list[dict[str, Any]], str | None]:
    """The results a worker printed, and why it ended early, if it did."""
    command, env = processes.command("quantized", job), processes.environment()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=PATIENCE_SECONDS, check=False
        )
        out, error, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        out, error, code = _text(late.stdout), _text(late.stderr), None
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"what"')]
    if code == 0:
        return lines, None
    last = error.strip().splitlines()[-1:] or ["it said nothing"]
    ended = f"no end after {PATIENCE_SECONDS:.0f} s" if code is None else f"exit code {code}"
    return lines, f"{ended}: {last[0]}"


def _text(raw: str | bytes | None) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""
