"""What plain ``asv run`` and ``asv publish`` do more here than elsewhere; loaded by
``asv.conf.json``.

asv offers plugins no hook around a run, so the three functions that matter are wrapped, once,
below: ``Run.run`` (the machine's identity without a question, samples always kept, a report at
the end), ``run_benchmarks`` (side records beside the result; whatever was measured survives an
interruption) and ``Publish.run`` (a report that opens with the network off).
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import asv.commands.run
import asv.runner
from asv import util
from asv.commands.publish import Publish
from asv.commands.run import Run
from asv.console import log
from asv.machine import Machine, MachineCollection
from asv.results import Results

from ..suite.harness import progress, selection, supervisor
from . import environment, notes, report, saving, terminal  # noqa: F401  (environment registers)
from .machine import conflicts, identify

NOTES_VARIABLE = "FUSED_MLP_NOTES"
MACHINE_DIR_VARIABLE = "FUSED_MLP_MACHINE_DIR"


@dataclass
class Session:
    """What one ``asv run`` needs to know in the wrapped functions below it."""

    results_dir: Path
    scratch: Path
    machine: str
    saves: bool


_session: Session | None = None


@functools.cache
def _identity() -> dict[str, str]:
    return identify()


def _adopt_machine(conf, name: str | None, scratch: Path) -> str:
    """Write the identity where asv looks for it: a file of this run's own, never the one in HOME.

    Two runs sharing the file in HOME crash on it, and ``asv machine --yes`` drops unknown fields
    from it.
    """
    info = dict(_identity())
    if name:
        info["machine"] = name
    known_path = Path(conf.results_dir, info["machine"], "machine.json")
    if known_path.is_file():
        try:
            known = json.loads(known_path.read_text())
        except ValueError as error:
            raise util.UserError(f"{known_path} is not JSON ({error}): restore it") from error
        differing = conflicts(known, info)
        if differing:
            raise util.UserError(
                f"{known_path.parent} holds results of another machine: {'; '.join(differing)}. "
                "Give this one its own name: FUSED_MLP_MACHINE=NAME asv run"
            )
    file = scratch / "machine.json"
    file.unlink(missing_ok=True)
    MachineCollection.save(info["machine"], info, _path=str(file))
    return info["machine"]


def _warn_of_uncommitted(repo: str) -> None:
    command = [
        "git",
        "-C",
        repo,
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "fused_mlp",
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.stdout.strip():
        log.warning("fused_mlp has uncommitted changes: asv measures commits, not the working tree")


def _wrap_run(original):
    @functools.wraps(original)
    def run(cls, conf, *args, **kwargs):
        global _session
        results_dir = Path(conf.results_dir).resolve()
        scratch = Path(conf.env_dir).resolve().parent / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        saves = not kwargs.get("dry_run")
        if saves:
            saving.check_writable(results_dir)
        machine = _adopt_machine(conf, kwargs.pop("machine", None), scratch)
        if saves:
            saving.check_format(results_dir, machine)
        _warn_of_uncommitted(conf.repo)
        _session = Session(results_dir, scratch, machine, saves)
        kwargs.update(
            machine=machine, _machine_file=str(scratch / "machine.json"), record_samples=True
        )
        log.info(f"Machine {machine}")
        try:
            code = original(cls, conf, *args, **kwargs)
        finally:
            _session = None
        if saves and list(results_dir.glob(f"{machine}/*-*.json")):
            Publish.run(conf)
            log.info(f"Report in {conf.html_dir}; python -m benchmarks report shows it")
        return code

    return classmethod(run)


def _narrow(benchmarks, plan: Path) -> None:
    """Leave out what this machine cannot measure, so that it starts no process of its own.

    asv keeps one process a combination; the suite's own rule says which are worth one, and the
    workers are told what is left.
    """
    asked = {}
    for name, benchmark in benchmarks.items():
        chosen = benchmarks.benchmark_selection.get(name)
        if chosen is None:
            continue
        try:
            worth = set(selection.selected(name))
        except KeyError:
            continue  # not of the shape table
        except ValueError as error:
            raise util.UserError(str(error)) from error
        names = [[ast.literal_eval(value) for value in axis] for axis in benchmark["params"]]
        combinations = list(itertools.product(*names))
        left = [index for index in chosen if combinations[index] in worth]
        benchmarks.benchmark_selection[name] = left
        asked[name] = [combinations[index] for index in left]
    if asked and not any(asked.values()) and len(asked) == len(benchmarks):
        raise util.UserError(
            "nothing is left to measure: the suite's size, its filter and --bench leave out every "
            "combination on this machine (python -m benchmarks doctor says what it can measure)"
        )
    selection.write_plan(plan, asked)


@contextmanager
def _stopping(flag: Path) -> Iterator[None]:
    """The first Ctrl-C asks the suite to end with what it has; the second ends at once."""

    def ask(number, frame) -> None:
        if flag.exists():
            raise KeyboardInterrupt
        flag.touch()
        terminal.say("stopping: what was measured is kept (Ctrl-C again ends at once)")

    flag.unlink(missing_ok=True)
    old = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
        flag.unlink(missing_ok=True)


def _wrap_run_benchmarks(original):
    @functools.wraps(original)
    def run_benchmarks(benchmarks, env, results=None, **kwargs):
        session = _session
        if session is None or results is None:
            return original(benchmarks, env, results=results, **kwargs)
        side, plan, flag, said = (
            session.scratch / f"{name}-{os.getpid()}" for name in ("notes", "plan", "stop", "said")
        )
        side.unlink(missing_ok=True)
        _narrow(benchmarks, plan)
        os.environ[NOTES_VARIABLE] = str(side)
        os.environ[MACHINE_DIR_VARIABLE] = str(session.results_dir / session.machine)
        os.environ[selection.PLAN_VARIABLE] = str(plan)
        os.environ[supervisor.STOP_VARIABLE] = str(flag)
        follow = nullcontext() if terminal.has_terminal() else terminal.following(said)
        if not terminal.has_terminal():
            os.environ[progress.VARIABLE] = str(said)
        try:
            with _stopping(flag), follow:
                original(benchmarks, env, results=results, **kwargs)
                if flag.exists():
                    raise KeyboardInterrupt
            return results
        except (util.UserError, KeyboardInterrupt) as error:
            # asv saves only whole runs; what was measured before the interruption is kept here.
            if session.saves and list(results.get_all_result_keys()):
                results.save(str(session.results_dir))
                log.warning("Stopped early: what was measured so far is kept")
            if isinstance(error, KeyboardInterrupt):
                raise util.UserError("Interrupted.") from error
            raise
        finally:
            plan.unlink(missing_ok=True)
            if session.saves:
                notes.lay_beside(side, session.results_dir / results._filename)
            side.unlink(missing_ok=True)

    return run_benchmarks


def _wrap_publish(original):
    @functools.wraps(original)
    def run(cls, conf, *args, **kwargs):
        answer = original(cls, conf, *args, **kwargs)
        report.finish(Path(conf.html_dir))
        return answer

    return classmethod(run)


def setup() -> None:
    """Called by asv each time it loads the plugin; wraps once."""
    if getattr(Run.run, "__wrapped__", None) is not None:
        return
    # NVML answers whether there is a GPU without creating a context that forked benchmarks would
    # inherit.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # From the configuration's folder: `asv --config` may be called from anywhere.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    Machine.get_unique_machine_name = classmethod(lambda cls: _identity()["machine"])
    Run.run = _wrap_run(Run.run.__func__)
    asv.commands.run.run_benchmarks = _wrap_run_benchmarks(asv.commands.run.run_benchmarks)
    Results.save = saving.whole_or_not_at_all(Results.save)
    asv.runner.format_benchmark_result = terminal.measured_table
    Publish.run = _wrap_publish(Publish.run.__func__)
