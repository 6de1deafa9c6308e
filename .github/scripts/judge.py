"""Judge what was measured, on a machine that the measured code never ran on.

usage: judge.py [--exact] [--enforce] INCOMING FOLDER, with HEAD, BASE and PULL_REQUEST in the
environment

Leaves report.json and report.md in FOLDER. Without --enforce only broken infrastructure is an error
(exit code 2); with it the verdict decides (0 pass, 1 regressed, 3 inconclusive, 4 nothing
measured), unless somebody with write access accepted it with the label `perf-accepted`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import ROOT, Request, fetch

from benchmarks.tracking import history
from benchmarks.tracking.commits import Usage
from benchmarks.tracking.github import rights
from benchmarks.tracking.github.client import ApiError, Client
from benchmarks.tracking.github.message import harmless
from benchmarks.tracking.gitstore import GitError, remote_url
from benchmarks.tracking.incoming import Refused, check_measured, is_result, read_tree

BROKEN = 2
ACCEPTABLE = (1, 3)


def judge(request: Request, incoming: Path, out: Path, *, exact: bool = False) -> int:
    """The gate's exit code; its report and table lie in ``out``."""
    from benchmarks.tracking.gate import command as gate
    from benchmarks.tracking.gate import formats, render
    from benchmarks.tracking.gate.compare import compare
    from benchmarks.tracking.handover import Recorded

    base = fetch(request)
    tree = read_tree(incoming / "results")
    check_measured(tree)
    if request.pull_request:
        # Its own two commits: a result for another would change the history that it is judged by.
        mine = {commit[:8] for commit in (base, request.head)}
        for name in filter(is_result, tree):
            if name.split("/")[1][:8] not in mine:
                raise Refused(f"{name}: a result of neither base nor head")
    if not exact:
        history.pull(remote_url(ROOT), history.RESULTS)
    history.lay(tree, history.RESULTS)
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    asked = [base, request.head] if base else ["--history", request.head]
    runner = Recorded(incoming / "reruns") if base else None
    report = compare(parser.parse_args([*asked, "--repo", str(ROOT)]), runner)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(formats.as_json(report))
    table = formats.markdown(report)
    (out / "report.md").write_text(table)
    render.terminal(report, everything=False)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(harmless(table))
    return report.exit_code


def accepted(request: Request) -> str:
    """Who accepted it; an API that is away accepts nothing."""
    try:
        client = Client.from_environment()
        return rights.accepted_by(client, request.pull_request, request.head)
    except ApiError as error:
        print(f"whether it was accepted is not known: {error}")
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("incoming", type=Path, help="what measure.py handed over")
    parser.add_argument("out", type=Path, help="where the report goes")
    parser.add_argument("--exact", action="store_true", help="without the history's noise")
    parser.add_argument("--enforce", action="store_true", help="exit with the verdict's code")
    args = parser.parse_args()
    try:
        request = Request.read({"EVENT": "workflow_dispatch", **os.environ})
        code = judge(request, args.incoming, args.out, exact=args.exact)
    except (Refused, GitError, Usage, OSError) as error:
        print(f"judge: {error}", file=sys.stderr)
        return BROKEN
    if code not in (0, 1, 3, 4):
        return BROKEN
    if not args.enforce:
        return 0
    if code in ACCEPTABLE and (who := accepted(request)):
        print(f"accepted by {who}")
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
