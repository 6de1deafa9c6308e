"""Every quantization and precision mode: right answers, size and speed, in one table each."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from . import quantized

EXAMPLE = "example: python -m benchmarks quantized --only speed --shape 4096/14336 --tokens 16,128"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EXAMPLE}\n\n{parser.epilog or ''}"
    parts = ("accuracy", "speed", "models")
    parser.add_argument("--only", choices=parts, help="one of the three parts")
    parser.add_argument("--seeds", type=int, default=quantized.SEEDS)
    parser.add_argument("--idx", type=Path, help="folder of (Fashion-)MNIST's files, not digits")
    parser.add_argument("--shape", default="2048/7168", help="of the speeds (default 2048/7168)")
    parser.add_argument("--tokens", default="1,16,128,512", help="of the speeds")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls each (default 7)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 measured, 2 bad usage or a package that is missing."""
    import torch

    torch.set_num_threads(1)
    try:
        results = _results(args)
    except (ValueError, ImportError) as error:
        print(f"quantized: {error}", file=sys.stderr)
        return 2
    print(json.dumps(results) if args.json else tables(results))
    return 0


def _results(args: argparse.Namespace) -> dict[str, Any]:
    from .digits import digits, idx_folder

    results: dict[str, Any] = {}
    if args.seeds < 1 or args.rounds < 1:
        raise ValueError("seeds and rounds must be at least 1")
    # Asked before anything is measured, which takes minutes.
    shape = _sizes(args.shape, "/")
    if len(shape) != 2:
        raise ValueError(f"{args.shape!r} is not hidden/intermediate, such as 2048/7168")
    counts = _sizes(args.tokens, ",")
    if args.only in (None, "accuracy"):
        data = idx_folder(args.idx) if args.idx else digits()
        results["data"] = data.name
        _say(f"accuracy on {data.name}, {args.seeds} seeds")
        results["accuracy"] = list(quantized.accuracies(data, args.seeds))
    if args.only in (None, "speed"):
        _say(f"quantizing {args.shape}")
        modules = quantized.llama_like(shape)
        del modules["fp8_dynamic"]  # emulated on a CPU: its time means nothing
        results["shape"], results["speed"] = args.shape, {}
        for tokens in counts:
            _say(f"speed of {args.shape}, {tokens} tokens")
            taken = quantized.speeds(modules, tokens, args.rounds, limit=30.0)
            results["speed"][tokens] = {m: statistics.median(s) for m, s in taken.items()}
    if args.only in (None, "models"):
        _say("models of transformers")
        results["models"] = list(quantized.divergences())
    return results


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _sizes(text: str, separator: str) -> tuple[int, ...]:
    parts = text.split(separator)
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{text!r} is not whole numbers above zero, parted by {separator!r}")
    return tuple(map(int, parts))


def tables(results: dict[str, Any]) -> str:
    """All that was measured, for people."""
    parts = []
    if "accuracy" in results:
        parts.append(_accuracy(results["accuracy"], results["data"], results.get("speed")))
    if "speed" in results:
        parts.append(_speed(results["speed"], results["shape"]))
    if "models" in results:
        parts.append(_models(results["models"]))
    return "\n\n".join(parts)


def _accuracy(rows: list[dict[str, Any]], name: str, speed: dict | None) -> str:
    seeds = len({r["seed"] for r in rows})
    tokens = 128 if speed and 128 in speed else next(iter(speed)) if speed else None
    times = speed[tokens] if speed else {}
    fast = f"{'speed':>9}" if times else ""
    lines = [
        f"{name}, {seeds} seeds, weights stretched as in large models; int4 in groups of "
        f"{quantized.GROUP}; fp8 emulated on a CPU"
        + (f"; speed: of the MLP below at {tokens} tokens" if times else ""),
        f"{'mode':<14}{'right %':>9}{'± seeds':>9}{'nats':>9}{'MLP bytes':>11}{'of fp32':>9}{fast}",
    ]
    whole = next(r["bytes"] for r in rows if r["mode"] == "fused")
    for mode in dict.fromkeys(r["mode"] for r in rows):
        mine = [r for r in rows if r["mode"] == mode]
        right = [100 * r["accuracy"] for r in mine]
        spread = statistics.stdev(right) if seeds > 1 else 0.0
        loss = statistics.mean(r["loss"] for r in mine)
        line = f"{mode:<14}{statistics.mean(right):>9.2f}{spread:>9.2f}{loss:>9.4f}"
        line += f"{mine[0]['bytes']:>11}{mine[0]['bytes'] / whole:>9.1%}"
        timed = mode.replace("int4_qat", "int4_weight")
        if timed in times:
            line += f"{times['eager'] / times[timed]:>8.2f}×"
        lines.append(line)
    lines.append("int4_qat trained 2 epochs more, for int4; longer trained as long, not for it.")
    return "\n".join(lines)


def _speed(speed: dict[int, dict[str, float]], shape: str) -> str:
    lines = [
        f"a gated silu MLP of {shape}, fp32 in and out (bf16: bf16), one thread: median ms, and "
        "times as fast as eager fp32",
        f"{'mode':<14}" + "".join(f"{f'{tokens} tokens':>18}" for tokens in speed),
    ]
    for mode in next(iter(speed.values())):
        cells = [
            f"{1e3 * row[mode]:.2f} ({row['eager'] / row[mode]:.2f}×)" if mode in row else "–"
            for row in speed.values()
        ]
        lines.append(f"{mode:<14}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def _models(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(r["model"] for r in rows))
    lines = [
        "transformers from a config, random weights: relative error of the scores, and KL from "
        "fp32 in nats a token",
        f"{'mode':<14}" + "".join(f"{name:>22}" for name in names),
    ]
    for mode in dict.fromkeys(r["mode"] for r in rows):
        cells = {r["model"]: f"{r['error']:.1e} {r['kl']:.1e}" for r in rows if r["mode"] == mode}
        lines.append(f"{mode:<14}" + "".join(f"{cells.get(name, '–'):>22}" for name in names))
    return "\n".join(lines)
