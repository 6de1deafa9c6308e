"""A worker process seen from outside: what it writes, how it is ended, what it died of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = __package__ or "suite.harness"  # asv imports it as suite, tests as benchmarks.suite
_ROOT = Path(__file__).resolve().parents[len(_PACKAGE.split("."))]


def command(module: str, *arguments: str) -> list[str]:
    """A fresh interpreter that runs a module of this package."""
    return [sys.executable, "-m", f"{_PACKAGE}.{module}", *arguments]


def environment(threads: str = "1") -> dict[str, str]:
    """Where that interpreter finds the package, compiles kernels and uses so many threads."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads}


class Tail:
    """Whole lines of a file that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self) -> Iterator[dict]:
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)


def kill(process: subprocess.Popen) -> None:
    """End a worker and the compilers it may have started."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            process.kill()
    process.wait()


def cause(code: int) -> str:
    from .worker import POISONED

    if code < 0:
        name = signal.Signals(-code).name
        more = " (the system kills so when memory runs out)" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{more}"
    if code == POISONED:
        return "the device's context no longer worked"
    return f"the worker ended with exit code {code}"


def last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    spoken = [line for line in lines if line.strip() and not line.startswith("USDT:")]
    return f"; it last said: {spoken[-1][:300]}" if spoken else ""
