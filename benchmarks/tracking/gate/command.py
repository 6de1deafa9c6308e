"""python -m benchmarks gate: did this commit get slower or hungrier, and why?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..commits import Usage
from ..judging.verdict import USAGE, Report
from . import formats

HELP = "judge HEAD against BASE from what was measured"
EXAMPLE = """\
examples:
  python -m benchmarks gate main HEAD                  from the results already there
  python -m benchmarks gate main HEAD --rerun          measures again what looks changed
  python -m benchmarks gate --history                  drift and steps over all commits
  python -m benchmarks gate --env triton3.7 triton3.9  the same commit, two environments

exit codes:
  0 pass, 1 regressed, 2 bad usage or broken infrastructure, 3 inconclusive, 4 nothing measured
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("base", nargs="?", metavar="BASE", help="the commit to compare with")
    parser.add_argument("head", nargs="?", metavar="HEAD", help="the commit to judge (HEAD)")
    parser.add_argument(
        "--history", action="store_true", help="the whole history up to BASE (HEAD)"
    )
    parser.add_argument(
        "--env",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="compare two environments at BASE (HEAD); each named by a part of its name",
    )
    parser.add_argument(
        "--rerun", action="store_true", help="let asv measure again what is flagged"
    )
    parser.add_argument("--bench", metavar="REGEX", help="only benchmarks whose name matches")
    parser.add_argument("--machine", help="only this machine's results")
    parser.add_argument("--results", type=Path, help="results folder (default: asv.conf.json's)")
    parser.add_argument("--repo", type=Path, default=Path(), help="the git repository (.)")
    parser.add_argument(
        "--unrelated", action="store_true", help="BASE need not be an ancestor of HEAD"
    )
    parser.add_argument("--all", action="store_true", help="list what passed too")
    for name, what in (
        ("json", "the whole report (schema: benchmarks/tracking/README.md)"),
        ("markdown", "a pull request's table, under 60 KB"),
        ("junit", "JUnit XML"),
        ("annotations", "GitHub workflow commands"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what}")


def run(args: argparse.Namespace) -> int:
    from .compare import compare  # numpy and scipy load only when there is something to judge
    from .render import terminal

    try:
        report = compare(args)
        _write(report, args)
    except Usage as error:
        print(f"gate: {error}")
        return USAGE
    terminal(report, everything=args.all)
    return report.exit_code


def _write(report: Report, args: argparse.Namespace) -> None:
    makers: dict[str, Callable[[Report], str]] = {
        "json": formats.as_json,
        "markdown": formats.markdown,
        "junit": formats.junit,
        "annotations": formats.github,
    }
    for name, make in makers.items():
        path: Path | None = getattr(args, name)
        if path is not None:
            try:
                path.write_text(make(report), encoding="utf-8", errors="replace")
            except OSError as error:
                raise Usage(f"cannot write {path} ({error.strerror})") from None
