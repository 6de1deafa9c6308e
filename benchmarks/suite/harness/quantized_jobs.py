"""Runs the quantization workers in fresh processes and keeps what each printed. No torch."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

from . import processes
from .notes import note
from .quantized import SUITE_SEEDS

PATIENCE_SECONDS = 300.0


def measure(
    jobs: Sequence[str], modes: Sequence[str], benchmark: str = "quantization"
) -> dict[str, dict[str, Any]]:
    """``mode -> {metric: value}`` from one process a job; notes are of ``benchmark``.

    What a process printed before it died counts; a mode that it did not come to, or with fewer than
    all seeds of an accuracy, is a failure, with its text. A package that is missing (torchao,
    scikit-learn) is no failure: there is nothing, and a note says why.
    """
    found: dict[str, dict[str, Any]] = {}
    for job in jobs:
        lines, trouble = _run(job)
        for line in lines:
            _keep(found.setdefault(line["mode"], {}), line)
        done = _accuracies(lines)
        for mode, accuracy in done.items():
            found[mode]["accuracy"] = accuracy
        if trouble is None:
            continue
        if "ModuleNotFoundError" in trouble or "needs torchao" in trouble:
            for mode in modes:
                note("absent", benchmark=benchmark, params=[mode], reason=trouble)
            return {}
        seen = {line["mode"] for line in lines if line["what"] != "accuracy"} | set(done)
        for mode in modes:
            if mode not in seen:
                text = f"{job}: {trouble}"
                found.setdefault(mode, {})["failure"] = text
                note("failure", benchmark=benchmark, params=[mode], text=text)
    return found


def _keep(entry: dict[str, Any], line: dict[str, Any]) -> None:
    if line["what"] == "speed":
        latency = entry.setdefault("latency", {"samples": [], "number": 1})
        latency["samples"].extend(line["samples"])
    elif line["what"] == "exact":
        entry |= {key: line[key] for key in ("weight_bytes", "peak_memory", "launches")}


def _accuracies(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Each mode's mean over all seeds, which all ask the same number of answers; a mean over fewer
    seeds would be another number."""
    seeds: dict[str, list[float]] = {}
    for line in lines:
        if line["what"] == "accuracy":
            seeds.setdefault(line["mode"], []).append(line["accuracy"])
    return {mode: statistics.fmean(a) for mode, a in seeds.items() if len(a) == SUITE_SEEDS}


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
