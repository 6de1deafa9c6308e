"""Measure what an event asks for, and hand over the new results alone.

usage: measure.py [--exact] FOLDER, with EVENT, HEAD, BASE and PULL_REQUEST in the environment

Runs in a checkout of main (or of a pull request's base): suite, judge and this script are never the
pull request's. Its code is built and run, as whoever runs this script; that is why the job that
runs it holds no secret. Exit codes: 0 measured, 2 refused or broken.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.tracking import history  # noqa: E402
from benchmarks.tracking.gitstore import GitError, git, remote_url  # noqa: E402
from benchmarks.tracking.incoming import Refused, check_measured, known, read_tree  # noqa: E402

# The exact metrics that a machine without a GPU gives to the digit.
EXACT = ("registers", "spills", "shared_memory", "instructions", "launches", "saved_bytes")
# A night's worth: more would still be running when people come back.
FILL = 5


@dataclass(frozen=True)
class Request:
    """What an event asks for; every field checked, since people type some of them."""

    event: str
    head: str
    base: str = ""
    pull_request: int = 0

    @classmethod
    def read(cls, environment: dict[str, str]) -> Request:
        event, head, base, number = (
            environment.get(name, "").strip() for name in ("EVENT", "HEAD", "BASE", "PULL_REQUEST")
        )
        if event not in ("push", "schedule", "workflow_dispatch", "pull_request"):
            raise Refused("EVENT is none that is measured for")
        whole = r"[0-9a-f]{40}|[0-9a-f]{64}"
        if not re.fullmatch(whole, head):
            raise Refused("HEAD is not a full commit hash")
        if base and not re.fullmatch(whole, base):
            raise Refused("BASE is not a full commit hash")
        if number and not re.fullmatch(r"[1-9][0-9]{0,9}", number):
            raise Refused("PULL_REQUEST is not a number")
        if number and event not in ("workflow_dispatch", "pull_request"):
            raise Refused(f"a {event} has no pull request")
        return cls(event, head, base, int(number or 0))


def fetch(request: Request, root: Path = ROOT) -> str:
    """Get the commits and check whose they are; the base to compare with ("" for main)."""
    # The checkout is main, or a base that was main; the remote's own main is asked, not a local
    # branch.
    git(
        ["fetch", "--quiet", "--no-tags", "origin", "+refs/heads/main:refs/remotes/origin/main"],
        root,
    )
    if not request.pull_request:
        if not ancestor(request.head, "refs/remotes/origin/main", root):
            raise Refused(f"{request.head} is not a commit of main")
        return ""
    pulled = f"refs/remotes/pull/{request.pull_request}"
    source = f"refs/pull/{request.pull_request}/head"
    git(["fetch", "--quiet", "--no-tags", "origin", f"+{source}:{pulled}"], root)
    if not ancestor(request.head, pulled, root):
        raise Refused(f"{request.head} is not a commit of pull request {request.pull_request}")
    # What the branch grew from: main's newer commits are not the pull request's doing.
    onto = request.base or "refs/remotes/origin/main"
    if request.base and not ancestor(request.base, "refs/remotes/origin/main", root):
        raise Refused(f"{request.base} is not a commit of main")
    base = git(["merge-base", onto, request.head], root).strip()
    if base == request.head:
        raise Refused("the pull request adds no commit to its base")
    return base


def ancestor(old: str, new: str, root: Path) -> bool:
    """Whether ``old`` is known and lies in the past of ``new``."""
    try:
        git(["merge-base", "--is-ancestor", old, new], root)
    except GitError:
        return False
    return True


def asv(commits: list[str]) -> None:
    """Measure commits that have no point yet.

    asv's own exit code is not asked: it is not zero where one benchmark of hundreds fails, which is
    for the judge to say.
    """
    listed = ROOT / ".asv" / "commits"
    listed.parent.mkdir(exist_ok=True)
    listed.write_text("\n".join(commits) + "\n")
    command = [sys.executable, "-m", "asv", "run", "--skip-existing-successful"]
    subprocess.run([*command, f"HASHFILE:{listed}"], cwd=ROOT, check=False)


def again(base: str, head: str, keep: Path) -> None:
    """Let the gate measure again what it flags, and keep that as data for the judge elsewhere."""
    from benchmarks.tracking.commits import Usage
    from benchmarks.tracking.gate import command as gate
    from benchmarks.tracking.gate.compare import compare
    from benchmarks.tracking.handover import Recording

    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    try:
        compare(parser.parse_args([base, head]), Recording(ROOT, keep))
    except Usage as error:
        print(f"nothing is measured again: {error}")


def disarm() -> None:
    """Forget what the job holds: measured code needs no token and no file of GitHub's."""
    held = ("GITHUB_", "ACTIONS_", "RUNNER_")
    for name in list(os.environ):
        if name.startswith(held) or "TOKEN" in name:
            del os.environ[name]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def hand_over(before: dict[str, bytes], results: Path, out: Path) -> int:
    """Copy what the run added or changed, with the machine it was measured on."""
    after = snapshot(results)
    fresh = {name for name, body in after.items() if before.get(name) != body and known(name)}
    machines = {name.split("/")[0] for name in fresh if "/" in name}
    fresh |= {f"{machine}/machine.json" for machine in machines} & set(after)
    for name in fresh:
        path = out / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(after[name])
    return len(fresh)


def measure(request: Request, out: Path, *, exact: bool = False) -> int:
    """Fetch, pull the history, measure, hand over; the number of files."""
    base = fetch(request)
    if exact:
        os.environ["FUSED_MLP_FILTER"] = f"metric={','.join(EXACT)}"
    else:
        history.pull(remote_url(ROOT), history.RESULTS)
    before = snapshot(history.RESULTS)
    if request.event == "schedule":
        asv([request.head])
        command = [sys.executable, "-m", "benchmarks", "history", "fill", "--limit", str(FILL)]
        command += ["--branch", "refs/remotes/origin/main"]
        subprocess.run(command, cwd=ROOT, check=False)
    else:
        asv([*filter(None, [base]), request.head])
    count = hand_over(before, history.RESULTS, out)
    if base and not exact:
        again(base, request.head, out / "reruns")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="where the new results go")
    parser.add_argument("--exact", action="store_true", help="only metrics that need no GPU")
    args = parser.parse_args()
    try:
        request = Request.read(dict(os.environ))
        disarm()
        shutil.rmtree(args.out, ignore_errors=True)
        (args.out / "results").mkdir(parents=True)
        measure(request, args.out, exact=args.exact)
        count = check_measured(read_tree(args.out / "results"))
        print(f"{count} numbers measured")
        return 0
    except (Refused, GitError, OSError) as error:
        print(f"::error::measure: {error}" if "CI" in os.environ else f"measure: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
