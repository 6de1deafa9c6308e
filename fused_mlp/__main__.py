"""``python -m fused_mlp explain | tune | compare | profile | gpu-check``.

Exit codes: 0 done (gpu-check: all passed), 1 gpu-check found a failure, 2 bad usage, 4 nothing
could be measured, 130 stopped by Ctrl-C (tune goes on where it was).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import comparing, machine, measuring, plan, tables, tuning
from .measuring import Case


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero")
    return seconds


def _tokens(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        hidden, slash, intermediate = part.partition("/")
        if not slash:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not hidden/intermediate, such as 768/3072"
            )
        shapes.append((_positive(hidden), _positive(intermediate)))
    return shapes


def _device(text: str) -> torch.device:
    kind = text.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no GPU here")
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _some_of(*known: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words

    return parse


def _dtypes(text: str) -> list[str]:
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    names = [short.get(name, name) for name in text.split(",")]
    for name in names:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise argparse.ArgumentTypeError(f"{name!r} is not a dtype, such as fp32, bf16 or fp16")
    return names


def _case_arguments(parser: argparse.ArgumentParser, tokens: list[int]) -> None:
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=_device, default=there, help=f"cuda or cpu (here: {there})"
    )
    parser.add_argument("--shapes", type=_shapes, default=tuning.SHAPES, help="768/3072,...")
    parser.add_argument("--tokens", type=_tokens, default=tokens, help="1,16,128,...")
    parser.add_argument("--dtypes", type=_dtypes, default=None, help="fp32,bf16,fp16")
    for name, known in (("--forms", ["gated", "plain"]), ("--modes", ["inference", "training"])):
        text = f"{','.join(known)} (both)"
        parser.add_argument(name, type=_some_of(*known), default=known, help=text)


def _timing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=_seconds, default=1.0, help="time for each case (default 1)"
    )
    parser.add_argument("--threads", type=_positive, default=1, help="CPU threads (default 1)")


def _cases(args: argparse.Namespace) -> list[Case]:
    dtypes = args.dtypes or (["bfloat16"] if args.device.type == "cuda" else ["float32"])
    gated = [form == "gated" for form in args.forms]
    training = [mode == "training" for mode in args.modes]
    return list(measuring.grid(args.shapes, args.tokens, dtypes, gated, training))


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    top = argparse.ArgumentParser(
        prog="python -m fused_mlp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    tokens = tuning.TOKENS if torch.cuda.is_available() else tuning.CPU_TOKENS

    def command(name: str, text: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=text, epilog=f"example: python -m fused_mlp {example}"
        )

    explain = command(
        "explain", "which path runs for a shape, and why", "explain --shapes 768/3072 --tokens 128"
    )
    _case_arguments(explain, [1, 16, 128, 1024])
    explain.add_argument("--activation", default="silu", help="its name (silu)")
    explain.add_argument("--json", action="store_true", help="for programs")

    tune = command(
        "tune",
        "measure every path on this device and write its table",
        "tune --dtypes fp32 --tokens 16,128",
    )
    _case_arguments(tune, tokens)
    _timing_arguments(tune)
    tune.add_argument(
        "--folder",
        type=Path,
        default=tables.FOLDER,
        help="where the table goes (default: the package)",
    )
    tune.add_argument(
        "--again", action="store_true", help="measure also what the table has already"
    )

    compare = command(
        "compare",
        "measure this package against eager PyTorch",
        "compare --shapes 768/3072 --modes inference",
    )
    _case_arguments(compare, tokens)
    _timing_arguments(compare)
    compare.add_argument("--json", action="store_true", help="for programs")

    from .profiling import cli as profiling

    profile = command(
        "profile",
        "the ladder from nn.Linear to a fused MLP, expected and seen",
        "profile --out traces",
    )
    profiling.add_arguments(profile)

    check = command("gpu-check", "test, tune and measure on a GPU, in under 5 minutes", "gpu-check")
    check.add_argument("--folder", type=Path, default=tables.FOLDER)
    check.add_argument("--json", action="store_true", help="for programs")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = parser().parse_args(argv)
    if args.command == "profile":
        from .profiling import cli

        return cli.run(args)
    if args.command == "gpu-check":
        from . import gpu_check

        return gpu_check.main(args.folder, as_json=args.json)
    device = args.device
    try:
        cases = _cases(args)
        if args.command == "explain":
            return _explain(cases, device, args.activation, args.json)
        torch.set_num_threads(args.threads)
        if args.command == "tune":
            file = tuning.tune(cases, device, args.folder, seconds=args.seconds, again=args.again)
            print(file)
            return 0
        return _compare(cases, device, args.seconds, args.json)
    except KeyboardInterrupt:
        print("stopped; what was measured is kept", file=sys.stderr)
        return 130
    except (ValueError, plan.PathError) as error:
        print(f"fused_mlp: {error}", file=sys.stderr)
        return 2


def _explain(cases: list[Case], device: torch.device, activation: str, as_json: bool) -> int:
    plans = [(c, plan.decide(measuring.query(_with(c, activation), device))) for c in cases]
    if as_json:
        rows = [
            {"case": str(c), "path": p.path, "reason": p.reason, "entry": p.entry} for c, p in plans
        ]
        print(json.dumps({"architecture": machine.architecture(device), "plans": rows}, indent=2))
        return 0
    for case, chosen in plans:
        print(f"{case}\n{chosen}\n")
    return 0


def _with(case: Case, activation: str) -> Case:
    from dataclasses import replace

    from . import activations

    return replace(case, activation=activations.get(activation).name)


def _compare(cases: list[Case], device: torch.device, seconds: float, as_json: bool) -> int:
    rows = []
    each = dict.fromkeys([comparing.OVERHEAD, *cases])
    for number, case in enumerate(each, 1):
        print(f"[{number}/{len(each)}] {case} ...", file=sys.stderr)
        rows.append(comparing.compare(case, device, seconds))
    if as_json:
        print(json.dumps([row.json() for row in rows], indent=2))
    else:
        print(comparing.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
