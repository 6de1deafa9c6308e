"""Tell GitHub what the gate said: one comment and one status per pull request, one issue per
regression.

  verdict   after a measurement of a pull request: its comment, updated in place, and its status
  issues    after a measurement of main: an issue per open regression, closed when it recovers
  label     when somebody labelled a pull request: start, accept, or take the label off

example:
  python -m benchmarks notify issues --report history.json --dry-run
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..incoming import LARGEST_FILE, Refused
from . import issues, labels, pull, rights
from .client import ApiError, Client


def read_report(path: Path | None) -> dict[str, Any] | None:
    """The gate's JSON; None where it left none that can be read (broken infrastructure)."""
    try:
        if path is None or path.stat().st_size > LARGEST_FILE:
            return None
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(data, dict) and isinstance(data.get("verdicts"), list)
    return data if known and isinstance(data.get("outcome"), str) else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="verdict|issues|label", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dry-run", action="store_true", help="print the calls, make none")

    one = actions.add_parser("verdict", parents=[common], help="comment and status")
    one.add_argument("--pull-request", type=rights.number, required=True, metavar="NUMBER")
    one.add_argument("--head", type=rights.full_hash, required=True, help="the commit measured")
    one.add_argument("--report", type=Path, help="the gate's JSON; unreadable means broken")
    one.add_argument("--markdown", type=Path, help="the gate's Markdown")
    one.add_argument("--url", default="", help="the run, for whoever wants to know more")

    two = actions.add_parser("issues", parents=[common], help="one issue per open regression")
    two.add_argument("--report", type=Path, required=True, help="the JSON of gate --history")

    three = actions.add_parser("label", parents=[common], help="act on a pull request's label")
    three.add_argument("--event", type=Path, default=os.environ.get("GITHUB_EVENT_PATH"))


def run(args: argparse.Namespace) -> int:
    try:
        client = Client.from_environment(dry_run=args.dry_run)
        if args.action == "label":
            labels.act(client, labels.read_event(args.event))
            return 0
        report = read_report(args.report)
        if args.action == "verdict":
            pull.tell(client, args.pull_request, args.head, report, args.markdown, args.url)
        elif report is None:
            raise Refused("the gate left no report; the issues stay as they are")
        else:
            issues.sync(client, report)
        return 0
    except (ApiError, Refused) as error:
        print(f"notify: {error}", file=sys.stderr)
        return 2
