"""Run bench.yml on this machine, from an event to the comment, without GitHub.

usage: run.py push | nightly | pull-request [--filter "shape=tiny tokens=16"] [--keep FOLDER]

The workflow file is the real one, run by act on the host. A bare repository stands for the remote,
a server on loopback for GitHub's API, folders for artifacts and Pages, and the CPU for the GPU.
What is measured is the last commit; nothing outside a temporary folder is written.

exit codes: 0 every job that had to run succeeded, 2 one did not, or a tool is missing
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fake_github

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PULL_REQUEST = 7
EVENTS = {"push": "push", "nightly": "schedule", "pull-request": "workflow_dispatch"}
# What act says of itself: where it found the stubs, and the docker that it does without.
ACTS_OWN = ("LocalRepositoryCache ", "Couldn't get a valid docker connection")
# What a pull request changes where nobody says otherwise: nothing that can be measured.
NOTE = "\n# A note that a pull request adds.\n"


@dataclass
class Outcome:
    """What a run left behind."""

    jobs: dict[str, str]  # job -> success, failure or skipped
    log: str
    github: fake_github.State
    folder: Path
    head: str
    base: str
    history: dict[str, str] = field(default_factory=dict)  # path -> content of the branch

    @property
    def site(self) -> Path:
        return self.folder / "site"


def git(folder: Path, *arguments: str) -> str:
    who = {
        f"GIT_{r}_{f}": "local@invalid" for r in ("AUTHOR", "COMMITTER") for f in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={**os.environ, **who},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def act_tool() -> str:
    """Where act lies, beside this interpreter or on the path."""
    beside = Path(sys.executable).parent / "act"
    found = str(beside) if beside.exists() else shutil.which("act")
    if found is None:
        raise SystemExit("run.py: act is missing: pip install -c constraints.txt -e '.[ci]'")
    return found


def prepare(folder: Path, change: Callable[[Path], None], source: Path = ROOT) -> tuple[str, str]:
    """The bare remote with ``main`` and one pull request; (main's commit, the pull request's)."""
    git(folder, "clone", "--quiet", "--bare", str(source), "origin.git")
    origin = folder / "origin.git"
    base = git(source, "rev-parse", "HEAD").strip()
    for ref in git(origin, "for-each-ref", "--format=%(refname)").split():
        git(origin, "update-ref", "-d", ref)
    git(origin, "update-ref", "refs/heads/main", base)
    git(origin, "symbolic-ref", "HEAD", "refs/heads/main")
    git(folder, "clone", "--quiet", "origin.git", "seed")
    seed = folder / "seed"
    change(seed)
    git(seed, "commit", "--quiet", "--all", "--message", "A change to measure")
    head = git(seed, "rev-parse", "HEAD").strip()
    git(seed, "push", "--quiet", "origin", f"HEAD:refs/pull/{PULL_REQUEST}/head")
    git(seed, "reset", "--quiet", "--hard", base)
    return base, head


def note(seed: Path) -> None:
    with (seed / "fused_mlp" / "__init__.py").open("a") as file:
        file.write(NOTE)


def slower(seed: Path) -> None:
    """One more operator a call: what a pull request must not do unnoticed."""
    with (seed / "fused_mlp" / "__init__.py").open("a") as file:
        file.write(
            "\n_forward = FusedMLP.forward\n"
            "FusedMLP.forward = lambda self, x: _forward(self, x) * 1.0\n"
        )


def stage(folder: Path) -> Path:
    """The workflow as act takes it: `queue: max` is newer than act and left out."""
    text = (ROOT / ".github" / "workflows" / "bench.yml").read_text()
    path = folder / "bench.yml"
    path.write_text(re.sub(r"(?m)^\s*queue: max\n", "", text))
    return path


def stubs() -> list[str]:
    """act's options that put the local actions in the place of the pinned ones."""
    text = (ROOT / ".github" / "workflows" / "bench.yml").read_text()
    options = []
    for name, commit in sorted(set(re.findall(r"uses: (actions/[\w-]+)@([0-9a-f]{40})", text))):
        stub = HERE / "actions" / name.split("/")[1]
        options += ["--local-repository", f"{name}@{commit}={stub}"]
    return options


def interpreter(folder: Path) -> Path:
    """A folder for the path whose python installs nothing: what a job needs is here already."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("python", "python3"):
        path = tools / name
        path.write_text(
            '#!/bin/sh\n[ "$1 $2" = "-m pip" ] && { echo "pip: all is here"; exit 0; }\n'
            f'exec "{sys.executable}" "$@"\n'
        )
        path.chmod(0o755)
    return tools


def event(kind: str, base: str, head: str) -> dict[str, Any]:
    repository = {"fork": False, "full_name": fake_github.REPOSITORY, "default_branch": "main"}
    made: dict[str, Any] = {
        "repository": {**repository, "name": "name", "owner": {"login": "owner"}}
    }
    if kind == "pull-request":
        made["inputs"] = {"pull_request": str(PULL_REQUEST), "head": head, "base": base}
    return made


def run(
    kind: str,
    folder: Path,
    *,
    suite_filter: str = "",
    change: Callable[[Path], None] = note,
    environment: dict[str, str] | None = None,
    prepared: Callable[[fake_github.State, str, str], None] | None = None,
    show: bool = False,
) -> Outcome:
    """One event from end to end. ``prepared`` may set up the fake GitHub before it starts."""
    base, head = prepare(folder, change)
    (folder / "event.json").write_text(json.dumps(event(kind, base, head)))
    (folder / "home").mkdir()
    tools = interpreter(folder)
    with fake_github.serve() as github:
        github.pulls[PULL_REQUEST] = {
            "number": PULL_REQUEST,
            "labels": [],
            "head": {"sha": head},
            "base": {"sha": base},
        }
        if prepared:
            prepared(github, base, head)
        settings = {
            "LOCAL_ORIGIN": str(folder / "origin.git"),
            "LOCAL_ARTIFACTS": str(folder / "artifacts"),
            "LOCAL_SITE": str(folder / "site"),
            "LOCAL_PAGES_DOWN": "",
            "PREFLIGHT_FREE_GIB": "1",
            "OMP_NUM_THREADS": "1",
            "GITHUB_API_URL": github.url,
            "GITHUB_REPOSITORY": fake_github.REPOSITORY,
            **(environment or {}),
        }
        variables = {"BENCH_PYTHON": "python", "BENCH_DEVICE": "cpu", "BENCH_SUITE": "quick"}
        command = [
            *(act_tool(), EVENTS[kind], "--directory", str(folder / "seed")),
            *("--workflows", str(stage(folder)), "--eventpath", str(folder / "event.json")),
            *("--platform", "ubuntu-24.04=-self-hosted", "--platform", "self-hosted=-self-hosted"),
            *(
                "--platform",
                "gpu=-self-hosted",
                "--no-skip-checkout",
                "--no-cache-server",
                "--json",
            ),
            *(
                "--action-cache-path",
                str(folder / "cache"),
                "--secret",
                f"GITHUB_TOKEN={fake_github.TOKEN}",
            ),
            *stubs(),
        ]
        for name, value in settings.items():
            command += ["--env", f"{name}={value}"]
        for name, value in {**variables, "BENCH_FILTER": suite_filter}.items():
            command += ["--var", f"{name}={value}"]
        held = ("GITHUB_", "ACTIONS_", "FUSED_MLP_", "HISTORY_TOKEN", "CI")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(held)}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**kept, "HOME": str(folder / "home"), "PATH": f"{tools}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        jobs, log = follow(process, show)
    outcome = Outcome(jobs, log, github, folder, head if kind == "pull-request" else base, base)
    origin = folder / "origin.git"
    if "refs/heads/results" in git(origin, "for-each-ref", "--format=%(refname)"):
        for path in git(origin, "ls-tree", "-r", "--name-only", "results").splitlines():
            outcome.history[path] = git(origin, "show", f"results:{path}")
    return outcome


def follow(process: subprocess.Popen[str], show: bool) -> tuple[dict[str, str], str]:
    """act's output as it comes: each job's end, and the text people would read."""
    jobs: dict[str, str] = {}
    lines: list[str] = []
    assert process.stdout
    for line in process.stdout:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {"msg": line}
        text = f"[{entry.get('jobID', '')}] {str(entry.get('msg', '')).rstrip()}"
        lines.append(text)
        if show and not text.partition("] ")[2].startswith(ACTS_OWN):
            print(text, flush=True)
        if "jobResult" in entry:
            jobs[entry["jobID"]] = entry["jobResult"]
    process.wait()
    return jobs, "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog='example: python .github/local/run.py pull-request --filter "shape=tiny tokens=16"',
    )
    parser.add_argument("event", choices=EVENTS)
    parser.add_argument("--filter", default="", help="a part of the quick suite (FUSED_MLP_FILTER)")
    parser.add_argument("--slower", action="store_true", help="a pull request that does more work")
    parser.add_argument("--keep", type=Path, help="an empty folder for all that the run leaves")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = run(
            args.event,
            folder.resolve(),
            suite_filter=args.filter,
            change=slower if args.slower else note,
            show=True,
        )
        print("\nWhat GitHub would show:")
        for status in outcome.github.statuses:
            print(f"  status {status['context']}: {status['state']}, {status['description']}")
        for comment in outcome.github.comments:
            print(f"  comment:\n{comment['body']}")
        for issue in outcome.github.issues:
            print(f"  issue ({issue['state']}): {issue['title']}")
        points = [path for path in outcome.history if re.search(r"/[0-9a-f]{8}-.*\.json$", path)]
        print(f"  {len(points)} point(s) on the branch `results`")
        for job, result in outcome.jobs.items():
            print(f"  {job}: {result}")
    return 0 if outcome.jobs and "failure" not in outcome.jobs.values() else 2


if __name__ == "__main__":
    sys.exit(main())
