"""python -m benchmarks gate BASE HEAD: did this commit get slower or hungrier?"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import commits
from .cases import cases, pairs, results_folder, units, unlike
from .commits import Usage
from .judge import judge
from .render import terminal
from .results import load
from .verdict import USAGE, Report

HELP = "judge HEAD against BASE from the results already measured"
EXAMPLE = """\
example:
  python -m benchmarks gate main HEAD
exit codes:
  0 pass, 1 regressed, 2 bad usage or broken infrastructure, 3 inconclusive, 4 nothing measured
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = HELP
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("base", metavar="BASE", help="the commit to compare with")
    parser.add_argument("head", metavar="HEAD", help="the commit to judge")
    parser.add_argument("--results", type=Path, help="results folder (default: asv.conf.json's)")
    parser.add_argument("--repo", type=Path, default=Path(), help="the git repository")
    parser.add_argument("--machine", help="only this machine's results")
    parser.add_argument(
        "--unrelated", action="store_true", help="BASE need not be an ancestor of HEAD"
    )
    parser.add_argument("--all", action="store_true", help="list what passed too")


def run(args: argparse.Namespace) -> int:
    try:
        report = compare(args)
    except Usage as error:
        print(f"gate: {error}")
        return USAGE
    terminal(report, everything=args.all)
    return report.exit_code


def compare(args: argparse.Namespace) -> Report:
    """Load, pair, judge; Usage where the question makes no sense."""
    base, head = (commits.resolve(args.repo, name) for name in (args.base, args.head))
    if not args.unrelated:
        commits.require_ancestor(args.repo, base, head)
    folder = args.results or results_folder(args.repo / "asv.conf.json")
    if not folder.is_dir():
        raise Usage(f"there is no results folder {folder}; run asv first")
    line = commits.ancestors(args.repo, base)
    runs, problems = load(folder, machine=args.machine)
    notes = [str(p) for p in problems]
    found = []
    for pair in pairs(runs, base, head, line):
        for side, name, commit in ((pair.base, "base", base), (pair.head, "head", head)):
            if side is None:
                notes.append(f"{pair.machine}: no result for {name} {commit[:8]}")
        if (
            pair.base is not None
            and pair.head is not None
            and (why := unlike(pair.base, pair.head))
        ):
            notes.append(f"{pair.machine}: not compared, unlike systems: {', '.join(why)}")
            continue
        if pair.base is not None and pair.head is not None:
            found += cases(pair, units(folder))
    if not found and not notes:
        notes.append(
            f"no results for {base[:8]} or {head[:8]} below {folder.name}; run asv on both"
        )
    return Report(base, head, tuple(judge(found)), tuple(notes))
