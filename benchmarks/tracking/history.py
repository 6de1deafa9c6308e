"""Keep every measured point on the orphan branch ``results``, whoever else is writing to it.

  pull     lay the history over results/ (for publishing and judging)
  append   add the results in a folder: newest tip, union of files, fast-forward push, retried
  fill     measure the commits of main that have no point yet

example:
  python -m benchmarks history append outgoing/results
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .gitstore import GitError, Store, git, remote_url
from .incoming import Refused, Tree, check_measured, is_result, known, read_tree
from .machine import identify
from .merge import union

ROOT = Path(__file__).resolve().parents[2]
BRANCH = "results"
RESULTS = ROOT / "results"
# A commit that touches none of these measures like the one before it. bench.yml starts on the same
# list.
MEASURED = (
    "fused_mlp/**",
    "benchmarks/**",
    "asv.conf.json",
    "constraints.txt",
    "pyproject.toml",
)
# Eight writers at once need eight rounds at most; the rest is for a server that is briefly away.
TRIES = 20


def append(
    source: Path, remote: str, *, branch: str = BRANCH, tries: int = TRIES, message: str = ""
) -> list[str]:
    """Add the files below ``source`` to the history; the paths that changed (none: all were there).

    Nothing outside a private temporary repository is written until the one push that makes it
    public, so a writer killed at any moment leaves the history as it was or complete. A rejected
    push starts over from the newer tip. Raises Refused (nothing was written) or GitError (after all
    tries).
    """
    new = read_tree(source)
    if not new:
        raise Refused(f"{source}: no results to add")
    last = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(random.uniform(0.05, min(2.0, 0.1 * 2**attempt)))
        with Store.open(remote, branch) as store:
            try:
                store.fetch()
                changed = union(store.read, new)
                if not changed:
                    return []
                store.push(changed, message or _message(changed))
            except GitError as error:
                # Also after a push whose answer was lost: the next round finds its own files and
                # stops.
                last = str(error)
                continue
            return sorted(changed)
    raise GitError(f"the history could not be written after {tries} tries: {last}")


def _message(changed: Tree) -> str:
    points = sorted(name for name in changed if is_result(name))
    machines = sorted({name.split("/")[0] for name in points})
    if not points:
        return "Update the description of machines and benchmarks"
    listed = "\n".join(points[:50])
    return f"Add {len(points)} point(s) of {', '.join(machines)}\n\n{listed}"


def pull(remote: str, into: Path, *, branch: str = BRANCH) -> list[str]:
    """Lay the history over the folder ``into``; the paths that changed. No branch yet is no
    error.
    """
    with Store.open(remote, branch) as store:
        if store.fetch() is None:
            return []
        return lay({name: body for name, body in store.files().items() if known(name)}, into)


def lay(files: Tree, into: Path) -> list[str]:
    """Lay results over the folder ``into``; the paths that changed. Nothing is removed."""
    mine: Tree = {}
    for name in files:
        path = into / name
        if path.is_file() and not path.is_symlink():
            mine[name] = path.read_bytes()
    changed = union(mine.get, files)
    for name, body in changed.items():
        _replace(into / name, body)
    return sorted(changed)


def _replace(path: Path, body: bytes) -> None:
    # Whole or not at all: whoever reads the folder meanwhile sees the old file or the new one.
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def measured(results: Path, machine: str) -> set[str]:
    """The first eight digits of each commit that has a point of ``machine`` in the folder."""
    folder = results / machine
    names = (f"{machine}/{path.name}" for path in folder.glob("*-*.json"))
    return {name.split("/")[1][:8] for name in names if is_result(name)}


def missing(
    results: Path, machine: str, *, branch: str = "main", root: Path = ROOT, last: int = 200
) -> list[str]:
    """Main's commits without a point, newest first: all since the machine's first point.

    A machine with no point at all is given the newest commit alone, not the whole past.
    """
    listed = git(
        ["rev-list", "--first-parent", f"--max-count={last}", branch, "--", *_pathspecs()], root
    ).split()
    done = measured(results, machine)
    places = [index for index, commit in enumerate(listed) if commit[:8] in done]
    if not places:
        return listed[:1]
    return [commit for commit in listed[: places[-1]] if commit[:8] not in done]


def _pathspecs() -> list[str]:
    return [f":(glob){path}" for path in MEASURED]


def previous(commit: str, results: Path, machine: str, *, root: Path = ROOT) -> str | None:
    """The nearest first-parent ancestor of ``commit`` that has a point of ``machine``."""
    done = measured(results, machine)
    ancestors = git(
        ["rev-list", "--first-parent", "--skip=1", "--max-count=500", commit], root
    ).split()
    return next((each for each in ancestors if each[:8] in done), None)


@contextmanager
def _commits_file(commits: list[str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "commits"
        path.write_text("\n".join(commits) + "\n")
        yield path


def fill(args: argparse.Namespace) -> int:
    machine = args.machine or identify()["machine"]
    commits = missing(args.results, machine, branch=args.branch)[: args.limit]
    if not commits:
        print(f"{machine}: every commit of {args.branch} has its point")
        return 0
    print(f"{machine}: {len(commits)} commit(s) to measure, newest first")
    for commit in commits:
        print(f"  {git(['log', '-1', '--format=%h %s', commit], ROOT).strip()}", flush=True)
    if args.dry_run:
        return 0
    with _commits_file(commits) as path:
        command = [sys.executable, "-m", "asv", "run", "--skip-existing-successful"]
        command += [*args.asv, f"HASHFILE:{path}"]
        done = subprocess.run(command, cwd=ROOT, check=False).returncode
    left = set(commits) & set(missing(args.results, machine, branch=args.branch))
    if left:
        print(f"{len(left)} commit(s) still have no point; asv ended with {done}", file=sys.stderr)
        return 2
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="pull|append|fill", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--remote", help="repository holding the history (default: origin)")
    common.add_argument("--history", default=BRANCH, help="its branch (default: %(default)s)")

    one = actions.add_parser("pull", parents=[common], help="lay the history over results/")
    one.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    one.add_argument("--with", dest="extra", type=Path, metavar="FOLDER", help="and these results")

    two = actions.add_parser(
        "append", parents=[common], help="add a folder of results to the history"
    )
    two.add_argument("source", type=Path, help="a folder laid out like results/")
    two.add_argument(
        "--tries", type=int, default=TRIES, help="pushes to try (default: %(default)s)"
    )
    two.add_argument(
        "--check",
        action="store_true",
        help="only check that the folder could be added; write nothing",
    )

    three = actions.add_parser("fill", help="measure main's commits that have no point")
    three.add_argument(
        "--limit", type=int, default=5, help="commits at most (default: %(default)s)"
    )
    three.add_argument("--branch", default="main", help="whose commits (default: %(default)s)")
    three.add_argument("--machine", help="whose points (default: this machine's)")
    three.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    three.add_argument("--dry-run", action="store_true", help="only say what would be measured")
    three.add_argument("asv", nargs="*", help="more arguments for asv run, after --")


def run(args: argparse.Namespace) -> int:
    try:
        if args.action == "fill":
            return fill(args)
        if args.action == "append" and args.check:
            tree = read_tree(args.source)
            print(f"{len(tree)} file(s), {check_measured(tree)} numbers: sound")
            return 0
        remote = args.remote or remote_url(ROOT)
        if args.action == "pull":
            changed = pull(remote, args.into, branch=args.history)
            if args.extra:
                changed += lay(read_tree(args.extra), args.into)
            print(f"{len(changed)} file(s) laid over {args.into.name}/")
        else:
            changed = append(args.source, remote, branch=args.history, tries=args.tries)
            print(f"{len(changed)} file(s) added to the history" if changed else "nothing new")
        return 0
    except (Refused, GitError, OSError) as error:
        print(f"history: {error}", file=sys.stderr)
        return 2
