"""What a kernel costs, read from its machine code: registers, spills, shared memory, instructions.

No GPU and no driver is needed: Triton compiles for any architecture, and NVIDIA's ``cuobjdump`` and
``nvdisasm`` come inside the triton package. There is no noise in these numbers, so any change is a
fact; equal ``sass_sha256`` proves that a kernel did not change at all.

``python -m benchmarks.suite.harness.static --help`` prints the table for people.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine_code, processes

ARCHITECTURES = ("sm80", "sm90", "sm100", "gfx942")


@dataclass(frozen=True)
class StaticMetrics:
    """Facts about one kernel compiled for one architecture.

    Attributes:
        registers: per thread (vector registers on AMD).
        spills: instructions that spill to or refill from local memory (scratch on AMD).
        shared_memory: bytes a block, static and dynamic.
        tensor_memory: columns of tensor memory a block (sm100).
        instructions: in the whole kernel.
        instruction_classes: how many of each class, see `machine_code.classify`.
        sass_sha256: of the instructions alone: not of names, lines or addresses of the source.
        fp_fusion: whether multiply and add were allowed to fuse.
        compiler: Triton's version.
    """

    registers: int
    spills: int
    shared_memory: int
    tensor_memory: int
    instructions: int
    instruction_classes: dict[str, int]
    sass_sha256: str
    fp_fusion: bool
    compiler: str


@dataclass(frozen=True)
class Failure:
    """A kernel that did not compile; ``reason`` is the compiler's own last line."""

    reason: str


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if re.fullmatch(r"sm\d+", arch):
        return GPUTarget("cuda", int(arch[2:]), 32)
    if re.fullmatch(r"gfx[0-9a-f]+", arch):
        return GPUTarget("hip", arch, 64)
    raise ValueError(f"unknown architecture {arch!r}; expected e.g. {', '.join(ARCHITECTURES)}")


def _cache_file(key: str) -> Path | None:
    """Where metrics are kept: beside Triton's own cache, or nowhere if that is not writable."""
    root = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    folder = Path(root).parent / "fused_mlp_static"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def compile_specimen(specimen: Any, arch: str, *, cache: bool = True) -> StaticMetrics:
    """Compile one `fused_mlp.kernels.Specimen` for ``arch`` and read its machine code.

    Args:
        specimen: kernel, signature, constants, attributes, warps and stages.
        arch: ``sm80``, ``sm90``, ``sm100``, ``sm120``, ``gfx942``, ...
        cache: keep the result, keyed by the kernel's source and everything else that goes in.

    Raises:
        ValueError: the architecture is unknown.
        RuntimeError: Triton runs in interpreter mode, where kernels are not compiled.
    """
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    target = _target(arch)
    if not isinstance(specimen.kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are not compiled; unset it first")
    fp_fusion = specimen.fp_fusion
    options = {
        "num_warps": specimen.num_warps,
        "num_stages": specimen.num_stages,
        "enable_fp_fusion": fp_fusion,
    }
    if specimen.registers is not None:
        options["maxnreg"] = specimen.registers
    source = ASTSource(
        specimen.kernel, dict(specimen.signature), dict(specimen.constexprs), dict(specimen.attrs)
    )
    backend = make_backend(target)
    # Triton's own key: its code, the assembler's version and options, what the environment changes.
    theirs = get_cache_key(
        source, backend, backend.parse_options(dict(options)), get_cache_invalidating_env_vars()
    )
    key = json.dumps([machine_code.READER, theirs, arch])
    file = _cache_file(key) if cache else None
    if file is not None and file.exists():
        try:
            return StaticMetrics(**json.loads(file.read_text()))
        except (ValueError, TypeError):
            pass  # half written or of another version: measure again
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "cuda":
        facts = machine_code.read_cubin(compiled.asm["cubin"])
    else:
        facts = machine_code.read_amdgcn(compiled.asm["amdgcn"])
    metrics = StaticMetrics(
        shared_memory=max(facts.pop("static_shared"), compiled.metadata.shared),
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        fp_fusion=fp_fusion,
        compiler=triton.__version__,
        **facts,
    )
    if file is not None:
        partial = file.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(dataclasses.asdict(metrics)))
        partial.replace(file)
    return metrics


def worker_environment() -> dict[str, str]:
    """The environment kernels are compiled in: no interpreter, no line tables, fusion stated."""
    stated = {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_DISABLE_LINE_INFO": "1"}
    return processes.environment() | stated


def _serve() -> None:
    """Answer jobs, one JSON line each, until stdin ends. Results alone go to stdout."""
    out, sys.stdout = sys.stdout, sys.stderr
    from fused_mlp.kernels import specimens

    known: dict[tuple[str, bool], dict[str, Any]] = {}
    for line in sys.stdin:
        name, arch, full = json.loads(line)
        try:
            if (arch, full) not in known:
                known[arch, full] = specimens(full=full, arch=arch)
            answer = dataclasses.asdict(compile_specimen(known[arch, full][name], arch))
        except Exception as error:  # whatever the compiler raises is this kernel's result
            text = str(error).strip() or repr(error)
            answer = {"failure": f"{type(error).__name__}: {text.splitlines()[-1]}"}
        print(json.dumps(answer), file=out, flush=True)


def compile_all(
    jobs: Iterable[tuple[str, str]], *, workers: int | None = None, full: bool = False
) -> Iterator[tuple[str, str, StaticMetrics | Failure]]:
    """Compile many kernels over several processes; yields ``(name, arch, metrics)`` as they end.

    ``jobs`` are (specimen's name, architecture). A worker that dies (the compiler aborted) costs
    its one job.
    """
    todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    count = 0
    for job in jobs:
        todo.put(job)
        count += 1
    done: queue.SimpleQueue[tuple[str, str, StaticMetrics | Failure]] = queue.SimpleQueue()
    stopping = threading.Event()

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            processes.command("static", "--serve"),
            env=worker_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def supervise() -> None:
        process: subprocess.Popen[str] | None = None
        while not stopping.is_set():
            try:
                name, arch = todo.get_nowait()
            except queue.Empty:
                break
            process = process or start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps([name, arch, full]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if line:
                answer = json.loads(line)
                failed = answer.get("failure")
                done.put((name, arch, Failure(failed) if failed else StaticMetrics(**answer)))
            else:
                code = process.wait()
                done.put((name, arch, Failure(f"the compiler's process ended with {code}")))
                process = None
        if process is not None:
            process.communicate()

    threads = [
        threading.Thread(target=supervise, daemon=True)
        for _ in range(min(count, workers or os.cpu_count() or 1))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in range(count):
            yield done.get()
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Registers, spills, shared memory and instructions of the shipped kernels.",
        epilog="example: python -m benchmarks.suite.harness.static --arch sm90 glu",
    )
    parser.add_argument("filter", nargs="?", default="", help="part of a kernel's name")
    parser.add_argument("--arch", action="append", choices=(*ARCHITECTURES, "sm120"), default=None)
    parser.add_argument("--full", action="store_true", help="every tile, dtype and activation")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        _serve()
        return 0
    from fused_mlp.kernels import specimens

    jobs = [
        (name, arch)
        for arch in args.arch or ARCHITECTURES
        for name in specimens(full=args.full, arch=arch)
        if args.filter in name
    ]
    if not jobs:
        print(f"no kernel's name contains {args.filter!r}", file=sys.stderr)
        return 2
    width = max(len(name) for name, _ in jobs)
    bad = 0
    if not args.json:
        print(
            f"{'kernel':{width}}  arch    registers  spills  shared bytes  instructions  by class"
        )
    for name, arch, metrics in compile_all(jobs, workers=args.workers, full=args.full):
        if isinstance(metrics, Failure):
            bad += 1
            record: dict[str, Any] = {"failure": metrics.reason}
        else:
            record = dataclasses.asdict(metrics)
        if args.json:
            print(json.dumps({"kernel": name, "arch": arch, **record}), flush=True)
        elif isinstance(metrics, Failure):
            print(f"{name:{width}}  {arch:6}  failed: {metrics.reason}", flush=True)
        else:
            classes = " ".join(f"{k}={v}" for k, v in metrics.instruction_classes.items() if v)
            print(
                f"{name:{width}}  {arch:6}  {metrics.registers:9}  {metrics.spills:6}"
                f"  {metrics.shared_memory:12}  {metrics.instructions:12}  {classes}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
