"""python -m benchmarks bisect BASE HEAD BENCHMARK: which commit made it slower, and how sure?

What was measured is kept, so an interrupted search (search.py) goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from .. import commits
from ..commits import Usage
from ..judging.verdict import USAGE
from .search import SURE, Answer, Measure, Search, search

EXAMPLE = """\
example:
  python -m benchmarks bisect v0.1 HEAD 'latency.Inference.track_latency(gpt2, 16, fp32, fused)'

exit codes:
  0 found, 2 bad usage or broken infrastructure, 3 base and head do not differ or it stays unsure
"""

_LARGEST_STATE = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("base", metavar="BASE", help="a commit that was fast")
    parser.add_argument("head", metavar="HEAD", help="a later commit that is slow")
    parser.add_argument("benchmark", metavar="BENCHMARK", help="its full name, parameters and all")
    parser.add_argument("--most", type=int, default=60, help="measurements at most (%(default)s)")
    parser.add_argument("--repo", type=Path, default=Path(), help="the git repository (.)")
    parser.add_argument(
        "--afresh", action="store_true", help="forget an earlier, unfinished search"
    )


def run(args: argparse.Namespace, measure: Measure | None = None) -> int:
    try:
        base, head = (commits.resolve(args.repo, name) for name in (args.base, args.head))
        commits.require_ancestor(args.repo, base, head)
        if args.most < 1:
            raise Usage("--most must be at least 1")
        line = commits.between(args.repo, base, head)
        if len(line) < 2:
            raise Usage("BASE and HEAD are the same commit; there is nothing between them")
        name, params = split(args.benchmark)
        path = args.repo / ".asv" / "bisect" / f"{_key(base, head, args.benchmark)}.json"
        state = _resumed(path, line, args.afresh)
        measure = measure or _by_asv(args.repo, name, params)
        told = _told(measure)
        answer = search(state, told, lambda: _save(path, state), args.most)
    except Usage as error:
        print(f"bisect: {error}")
        return USAGE
    return _say(answer, state, args)


def split(benchmark: str) -> tuple[str, tuple[str, ...]]:
    """A benchmark's name and parameters.

    >>> split("latency.Inference.track_latency(llama3-8b, 16)")
    ('latency.Inference.track_latency', ('llama3-8b', '16'))
    """
    found = re.fullmatch(r"([^()]+)(?:\((.*)\))?", benchmark.strip())
    if not found:
        raise Usage(f"{benchmark[:80]!r} is no benchmark's name")
    params = tuple(p.strip().strip("'\"") for p in found[2].split(",")) if found[2] else ()
    return found[1], params


def _by_asv(repo: Path, name: str, params: tuple[str, ...]) -> Measure:
    from ..judging.verdict import Series
    from .explain import regex
    from .rerun import Asv

    asv = Asv(repo)
    pattern = regex(Series("", "", name, params))

    def measure(commit: str) -> float | None:
        run = asv(commit, [pattern])
        row = run.rows.get(name) if run else None
        if row is None or params not in row.params:
            return None
        return float(row.locations[row.params.index(params)])

    return measure


def _told(measure: Measure) -> Measure:
    def told(commit: str) -> float | None:
        value = measure(commit)
        print(f"{commit[:10]}  {'cannot be measured' if value is None else f'{value:.6g}'}")
        return value

    return told


def _key(base: str, head: str, benchmark: str) -> str:
    return hashlib.sha256(f"{base}\0{head}\0{benchmark}".encode()).hexdigest()[:16]


def _resumed(path: Path, line: Sequence[str], afresh: bool) -> Search:
    state = Search(list(line))
    if afresh or not path.is_file() or path.stat().st_size > _LARGEST_STATE:
        return state
    try:
        data = json.loads(path.read_bytes())
        for commit, values in data["values"].items():
            if commit in line:
                state.values[commit] = [float(v) for v in values if math.isfinite(float(v))]
        state.broken = [c for c in data["broken"] if c in line]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        print(f"bisect: {path.name} is no search that can go on; starting afresh")
        return Search(list(line))
    count = sum(map(len, state.values.values()))
    print(f"going on with {count} measurements made before")
    return state


def _save(path: Path, state: Search) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"values": state.values, "broken": state.broken}))
    partial.replace(path)


def _say(answer: Answer, state: Search, args: argparse.Namespace) -> int:
    spread = 100 * math.expm1(answer.sigma)
    if not answer.commit:
        print(
            f"inconclusive: head is {100 * math.expm1(answer.slower):+.1f} % against base, "
            f"at a spread of {spread:.1f} %: that is no difference to look for"
        )
        return 3
    size = 100 * math.expm1(answer.slower)
    subject = commits.git(args.repo, "log", "-1", "--format=%s", answer.commit)[1]
    print(
        f"{answer.commit[:12]} made it {size:.1f} % slower ({answer.sure:.1%} sure, "
        f"{answer.measurements} measurements, spread {spread:.1f} %)"
    )
    print(f"  {''.join(c if c.isprintable() else ' ' for c in subject)[:200]}")
    if len(answer.candidates) > 1:
        print(
            "  could also be: " + ", ".join(c[:10] for c in answer.candidates if c != answer.commit)
        )
    if state.broken:
        print(f"  cannot be measured: {', '.join(c[:10] for c in dict.fromkeys(state.broken))}")
    return 0 if answer.sure >= SURE else 3
