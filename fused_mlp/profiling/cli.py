"""``python -m fused_mlp profile``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .ladder import PARTS, ladder
from .measure import Measured, measure, writable
from .report import diff, picture, table, to_json
from .rung import Setting

ARTICLE = (768, 3072)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--part", type=int, choices=PARTS, default=2, help="1: matmul + add; 2: the MLP"
    )
    parser.add_argument(
        "--shape", default="article", help="article (768/3072), or hidden/intermediate"
    )
    parser.add_argument(
        "--tokens", type=int, default=8192 if cuda else 512, help="default 8192, on a CPU 512"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32")
    parser.add_argument("--mode", choices=("inference", "training"), default="inference")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--out", type=Path, help="folder for a Chrome trace a rung and ladder.svg")
    parser.add_argument("--rungs", help="only these, by name: eager,fused")
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="what changes from one rung to another"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 measured (mismatches are marked, not failed), 2 bad usage, 4 no rung could run,
    130 stopped by Ctrl-C."""
    # What these say at import concerns nobody here.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        setting = _setting(args)
        if args.out is not None:
            writable(args.out)
        torch.set_num_threads(args.threads)
        rungs = ladder(setting, args.part)
        wanted = args.diff or (args.rungs.split(",") if args.rungs else None)
        if wanted:
            known = {r.name: r for r in rungs}
            for name in wanted:
                if name not in known:
                    raise ValueError(f"there is no rung {name!r}; known are {', '.join(known)}")
            rungs = [r for r in rungs if r.name in wanted]
        results = measure(rungs, setting, repeats=args.repeats, traces=args.out)
        if args.out is not None:
            _write(args.out, results, setting)
    except KeyboardInterrupt:
        print("fused_mlp profile: stopped; no table without all rungs", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"fused_mlp profile: {error}", file=sys.stderr)
        return 2
    code = 0 if any(r.rung.missing is None for r in results) else 4
    if args.json:
        print(json.dumps(to_json(results, setting), indent=1))
        return code
    print(table(results, setting))
    if args.diff:
        by_name = {r.rung.name: r for r in results}
        print("\n" + diff(by_name[args.diff[0]], by_name[args.diff[1]], setting))
    if args.out is not None:
        print(f"\ntraces (open in https://ui.perfetto.dev), ladder.svg and .json: {args.out}")
    return code


def _write(folder: Path, results: Sequence[Measured], setting: Setting) -> None:
    (folder / "ladder.svg").write_text(picture(results, setting), encoding="utf-8")
    text = json.dumps(to_json(results, setting), indent=1)
    (folder / "ladder.json").write_text(text, encoding="utf-8")


def _setting(args: argparse.Namespace) -> Setting:
    hidden, intermediate = ARTICLE
    if args.shape != "article":
        try:
            hidden, intermediate = (int(n) for n in args.shape.split("/"))
        except ValueError:
            raise ValueError(
                f"{args.shape!r} is not a shape; give article or hidden/intermediate, such as "
                "768/3072"
            ) from None
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here; use --device cpu")
    if min(hidden, intermediate, args.tokens, args.repeats) < 1:
        raise ValueError("sizes, tokens and repeats must be at least 1")
    return Setting(
        hidden, intermediate, args.tokens, DTYPES[args.dtype], args.device, args.mode == "training"
    )
