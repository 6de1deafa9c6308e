"""Measure a part of the suite without asv, and print a table.

example:
  python -m benchmarks.suite --shape tiny,gpt2 --provider eager,fused --dtype fp32
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .harness import selection, shapes
from .harness.progress import VARIABLE as PROGRESS
from .harness.roofline import ceilings, derive_all
from .harness.shapes import Combination
from .harness.supervisor import Entry, Supervisor, Table

_KEYS = ("mode", "shape", "tokens", "dtype", "provider", "metric")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """The options that choose combinations, the same for every command that measures."""
    for key in _KEYS:
        parser.add_argument(f"--{key}", metavar="A,B", help=f"only these: {_known(key)}")
    parser.add_argument("--size", help=f"one of {', '.join(shapes.SIZES)} (default: default)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--processes", type=int, metavar="N", help="fresh processes in turn")


def _known(key: str) -> str:
    return ", ".join(selection.known(key))


def chosen(args: argparse.Namespace) -> tuple[dict[Combination, frozenset[str]], str, shapes.Size]:
    """What the options ask for; ValueError, with one clear line, if they name the unknown or
    leave nothing."""
    parts = [f"{key}={getattr(args, key)}" for key in _KEYS if getattr(args, key)]
    if args.device:
        os.environ["FUSED_MLP_DEVICE"] = args.device
    kind, size = shapes.device_kind(), shapes.size_of(args.size)
    if args.processes is not None and args.processes < 1:
        raise ValueError(f"--processes is {args.processes}; it must be at least 1")
    text = " ".join(parts) or os.environ.get(selection.FILTER_VARIABLE, "")
    wanted = selection.wanted(kind, size, text)
    if not wanted:
        raise ValueError(selection.why_nothing(kind, size, text))
    return wanted, kind, size


def measure(
    wanted: dict[Combination, frozenset[str]],
    kind: str,
    size: shapes.Size,
    processes: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Table:
    """Measure with progress on the terminal."""
    if PROGRESS not in os.environ and sys.stderr.isatty():
        os.environ[PROGRESS] = "/dev/stderr"
    known = ceilings(kind, wanted)
    table = Supervisor(wanted, kind, size, processes=processes, extra=extra).run()
    derive_all(table, kind, known)
    return table


def readable(seconds: float) -> str:
    """
    >>> readable(0.00123), readable(2.5e-05)
    ('1.23 ms', '25 µs')
    """
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first five are names, the others numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 5 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def against(seconds: float, eager: float | None) -> str:
    """
    >>> against(0.5, 1.0), against(2.0, 1.0), against(1.0, None)
    ('2.00x faster', '2.00x slower', '')
    """
    if not eager:
        return ""
    return (
        f"{eager / seconds:.2f}x faster" if seconds <= eager else f"{seconds / eager:.2f}x slower"
    )


def render(table: Table) -> str:
    """One line a combination: latency, against eager, roofline, memory, launches."""
    head = ["mode", "shape", "tokens", "dtype", "provider", "latency", "against eager"]
    rows = [[*head, "roofline", "peak", "saved", "launches", "copies"]]
    rest = []
    for c, entry in table.items():
        if entry.absent or entry.failure:
            rest.append(
                f"{c}: {'n/a' if entry.absent else 'FAILED'}: {entry.absent or entry.failure}"
            )
            continue
        latency = _median(entry)
        eager = _median(table.get(Combination(c.mode, c.shape, c.tokens, c.dtype, "eager")))
        roof, peak = entry.numbers.get("roofline"), entry.numbers.get("peak_memory")
        saved, launches = entry.numbers.get("saved_bytes"), entry.numbers.get("launches")
        copies = entry.numbers.get("copies")
        rows.append(
            [
                *(c.mode, *c.params),
                readable(latency) if latency else "",
                against(latency, eager) if latency and c.provider != "eager" else "",
                f"{100 * roof:.0f} %" if roof else "",
                f"{peak / 1e6:.2f} MB" if peak is not None else "",
                f"{saved / 1e6:.2f} MB" if saved is not None else "",
                f"{launches:.0f}" if launches is not None else "",
                f"{copies:.0f}" if copies is not None else "",
            ]
        )
    shown = [at for at in range(len(rows[0])) if at < len(head) or any(r[at] for r in rows[1:])]
    return "\n".join([aligned([[row[at] for at in shown] for row in rows]), *rest])


def _median(entry: Entry | None) -> float | None:
    samples = entry.samples.get("latency") if entry and not entry.failure else None
    return statistics.median(samples) if samples else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite",
        description=__doc__,
        epilog="exit codes: 0 measured, 1 a combination failed, 2 bad usage, 4 nothing measured",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_filters(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a combination")
    parser.add_argument("--cuda-graph", action="store_true", help="time replays of a CUDA graph")
    parser.add_argument(
        "--list",
        action="store_true",
        help="say what would be measured, and why the rest is left out",
    )
    args = parser.parse_args(argv)
    try:
        wanted, kind, size = chosen(args)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if args.list:
        for mode in shapes.MODES:
            for c in shapes.combinations(mode):
                print(f"{c}: {shapes.left_out(c, kind, size) or 'measured'}")
        return 0
    if args.cuda_graph and kind != "cuda":
        print(f"{parser.prog}: --cuda-graph needs a GPU; the device is {kind}", file=sys.stderr)
        return 2
    table = measure(wanted, kind, size, args.processes, {"graph": args.cuda_graph})
    if args.json:
        for c, entry in table.items():
            print(json.dumps({"combination": [c.mode, *c.params], **vars(entry)}))
    else:
        print(render(table))
    if not any(entry.processes for entry in table.values()):
        return 4
    return 1 if any(entry.failure for entry in table.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
