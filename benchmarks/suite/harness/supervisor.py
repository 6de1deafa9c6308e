"""Runs workers in fresh processes and keeps what they measured, whatever happens to them. No torch.

Each of the suite size's processes measures every combination in turn, so samples of one
combination come from processes that are minutes apart.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import readings
from .notes import note
from .processes import Tail, cause, command, environment, kill, last_words
from .progress import Progress
from .selection import one_process
from .shapes import PROVIDERS, Combination, Size

STOP_VARIABLE = "FUSED_MLP_STOP"
THREADS_VARIABLE = "FUSED_MLP_THREADS"
# A combination that says nothing for this long is killed: a hung kernel, a compiler in a loop.
PATIENCE_SECONDS = 300.0
# Between looks at a GPU at work: around a round it idles, and an idle GPU never throttles.
LOOK_SECONDS = 10.0


@dataclass
class Entry:
    """What is known of one combination."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    absent: str | None = None
    failure: str | None = None
    disturbed: dict[int, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    processes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


Table = dict[Combination, Entry]


class Stop:
    """A wish to end early: Ctrl-C, a termination, or the file that FUSED_MLP_STOP names."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        path = os.environ.get(STOP_VARIABLE)
        if path and os.path.exists(path):
            self.asked = True
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        def ask(*_: object) -> None:
            self.asked = True

        old = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


class Supervisor:
    """Measures a set of combinations in `size.processes` rounds of workers."""

    def __init__(
        self,
        wanted: Mapping[Combination, frozenset[str]],
        kind: str,
        size: Size,
        folder: Path | None = None,
        processes: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`extra` goes into each job: "slow" (fractions to slow calls by), "graph" (CUDA graph)."""
        self.wanted, self.kind, self.size = dict(wanted), kind, size
        self.extra = dict(extra or {})
        self._temporary = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="fused-mlp-suite-"))
        self.table: Table = {combination: Entry() for combination in self.wanted}
        self.stop = Stop()
        self.command = command("worker")
        self.patience = PATIENCE_SECONDS
        self._jobs = 0
        self._looked = time.monotonic()
        noisy = not all(map(one_process, self.wanted.values()))
        self.rounds = (processes or size.processes) if noisy else 1
        self.progress = Progress(self.rounds * len(self.wanted))

    def run(self) -> Table:
        """Measure everything; ends early, with what there is, when asked to stop."""
        if not self.wanted:
            return self.table
        with self.stop.listening():
            self._prepare()
            self.progress.restart()
            for number in range(self.rounds):
                if not self.stop:
                    self._round(number)
        if self.stop:
            self.progress.say("stopped: what was measured so far is kept")
        self._summary()
        self.progress.close()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.table

    def _summary(self) -> None:
        failed = [c for c, entry in self.table.items() if entry.failure]
        disturbed = [c for c, entry in self.table.items() if entry.disturbed]
        for combination in failed[:10]:
            self.progress.say(f"failed: {combination}: {self.table[combination].failure}")
        if disturbed:
            reasons = sorted({r for c in disturbed for r in self.table[c].disturbed.values()})
            self.progress.say(
                f"{len(disturbed)} of {len(self.table)} combinations are marked invalid: "
                f"{reasons[-1]}"
            )

    def _prepare(self) -> None:
        """Compile everything in parallel before anything is timed; what fails fails again later."""
        slow = [
            c
            for c in self.wanted
            if PROVIDERS[c.provider].compiles or (self.kind == "cuda" and "fused" in c.provider)
        ]
        if not slow:
            return
        self.progress.say(f"compiling {len(slow)} combinations before any timing")
        started = time.monotonic()
        lanes = min(os.cpu_count() or 1, 8, len(slow))
        running = [self._start(slow[lane::lanes], False, prepare=True) for lane in range(lanes)]
        for process, out, _log in running:
            while process.poll() is None:
                late = time.monotonic() - started > self.patience + 30 * len(slow)
                if self.stop or late:
                    kill(process)
                time.sleep(0.1)
            for line in Tail(out).lines():
                if line["event"] == "result":
                    entry = self.table[Combination(*line["key"])]
                    entry.notes["prepare_seconds"] = round(line["metrics"]["cold_start"][0], 3)
        self.progress.say(f"compiled in {time.monotonic() - started:.0f} s")

    def _round(self, number: int) -> None:
        """One process over all combinations; another takes over where one dies."""
        left = [c for c in self.wanted if not (self.table[c].failure or self.table[c].absent)]
        self.progress.done = number * len(self.wanted) + len(self.wanted) - len(left)
        # Every other round in reverse, so that a drift does not always meet the same ones last.
        left = left[::-1] if number % 2 else left
        silent_deaths = 0
        before = readings.machine_reading(self.kind)
        while left and not self.stop:
            finished, text = self._worker(left, number)
            if finished == 0 and text is not None:
                silent_deaths += 1
                if silent_deaths == 3:
                    for combination in left:
                        self.table[combination].failure = text
                    return
            left = left[finished:]
        self._judge_round(number, before, readings.machine_reading(self.kind))

    def _judge_round(self, number: int, before: dict, after: dict) -> None:
        """Keep the machine's readings; say so if they make the whole round invalid."""
        problem = readings.unfit(before) or readings.unfit(after)
        note("reading", process=number, before=before, after=after, invalid=problem)
        if problem:
            self.progress.say(f"process {number + 1} of {self.rounds} is invalid: {problem}")
            for entry in self.table.values():
                if entry.processes:
                    entry.disturbed.setdefault(number, problem)

    def _look(self, at: Combination, number: int) -> None:
        """Now and then, whether the GPU throttles under the combination being measured."""
        if self.kind != "cuda" or time.monotonic() - self._looked < LOOK_SECONDS:
            return
        reading = readings.gpu_reading()
        self._looked = time.monotonic()
        problem = readings.throttled(reading)
        where = {"benchmark": f"latency.{at.mode}", "params": list(at.params)}
        note("reading", process=number, during={"gpu": reading}, invalid=problem, **where)
        if problem:
            self.table[at].disturbed.setdefault(number, problem)

    def _worker(self, left: list[Combination], number: int) -> tuple[int, str | None]:
        """One worker's life: how many combinations it is done with, and why it ended early."""
        process, out, log = self._start(left, exact=number == 0)
        finished, pid, at, spoke, text = 0, process.pid, None, time.monotonic(), None
        reader = Tail(out)
        while True:
            ended = process.poll() is not None
            for line in reader.lines():
                spoke = time.monotonic()
                if line["event"] == "ready":
                    pid = line["pid"]
                elif line["event"] == "start":
                    at = Combination(*line["key"])
                    self.progress.step(f"process {number + 1} of {self.rounds}, {at}")
                else:
                    self._keep(Combination(*line["key"]), line, number, pid)
                    finished, at = finished + 1, None
                    self.progress.step(str(left[finished - 1]), finished=1)
            if ended or self.stop:
                break
            if at is not None:
                self._look(at, number)
            if time.monotonic() - spoke > self.patience:
                text = f"no sign of life for {self.patience:.0f} s"
                kill(process)
            time.sleep(0.05)
        kill(process)
        if self.stop or process.returncode == 0:
            return finished, None
        if finished and at is None and text is None:
            return finished, None
        text = f"{text or cause(process.returncode)} in process {number + 1} of {self.rounds}"
        text += last_words(log)
        if at is not None:
            self.table[at].failure = text
            self.progress.say(f"failed: {at}: {text}")
            return finished + 1, text
        return finished, text

    def _start(
        self, combinations: list[Combination], exact: bool, prepare: bool = False
    ) -> tuple[subprocess.Popen, Path, Path]:
        self._jobs += 1
        job_file = self.folder / f"job-{self._jobs}.json"
        out, log = job_file.with_suffix(".out.jsonl"), job_file.with_suffix(".log")
        threads = os.environ.get(THREADS_VARIABLE, "1")
        job = {
            "device": self.kind,
            "exact": exact,
            "prepare": prepare,
            **self.extra,
            "threads": threads,
            "out": str(out),
            "combinations": [[[c.mode, *c.params], sorted(self.wanted[c])] for c in combinations],
        }
        job_file.write_text(json.dumps(job))
        out.touch()
        with open(log, "wb") as log_file:
            process = subprocess.Popen(
                [*self.command, str(job_file)],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=environment(threads),
                cwd=self.folder,
                # Ctrl-C reaches the supervisor alone, which then ends its worker.
                start_new_session=True,
            )
        return process, out, log

    def _keep(self, combination: Combination, line: dict, number: int, pid: int) -> None:
        entry = self.table[combination]
        entry.seconds += line["seconds"]
        entry.cpu_seconds += line.get("cpu_seconds", 0.0)
        if line["event"] == "absent":
            entry.absent = line["reason"]
        elif line["event"] == "failure":
            entry.failure = f"{line['text']} (process {number + 1} of {self.rounds})"
            self.progress.say(f"failed: {combination}: {entry.failure}")
        else:
            for name, value in line["metrics"].items():
                if isinstance(value, list):
                    entry.samples.setdefault(name, []).extend(value)
                else:
                    entry.numbers.setdefault(name, value)
            entry.notes.update(line["notes"])
            entry.processes.append(pid)
        if "disturbed" in line:
            entry.disturbed[number] = line["disturbed"]
