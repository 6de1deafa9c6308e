"""What a run measures and what a judge believes is decided by main's own scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tracking.gitstore import git
from benchmarks.tracking.handover import MOST, Recorded
from benchmarks.tracking.incoming import Refused

from . import samples
from .conftest import ROOT, load

A, B = "a" * 40, "b" * 40


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".github" / "scripts"))
    return load(".github/scripts/measure.py")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"EVENT": "pull_request_target", "HEAD": A}, "EVENT"),
        ({"EVENT": "push", "HEAD": "main"}, "HEAD"),
        ({"EVENT": "push", "HEAD": A[:8]}, "HEAD"),
        ({"EVENT": "push", "HEAD": f"{A}; touch /tmp/owned"}, "HEAD"),
        ({"EVENT": "push", "HEAD": f"--upload-pack={A}"}, "HEAD"),
        ({"EVENT": "workflow_dispatch", "HEAD": A, "BASE": "$(id)"}, "BASE"),
        ({"EVENT": "workflow_dispatch", "HEAD": A, "PULL_REQUEST": "7/../8"}, "PULL_REQUEST"),
        ({"EVENT": "workflow_dispatch", "HEAD": A, "PULL_REQUEST": "0"}, "PULL_REQUEST"),
        ({"EVENT": "push", "HEAD": A, "PULL_REQUEST": "7"}, "has no pull request"),
    ],
)
def test_only_numbers_and_hashes_get_in(measure: Any, settings: dict[str, str], match: str) -> None:
    with pytest.raises(Refused, match=match):
        measure.Request.read(settings)


@pytest.fixture
def remote(tmp_path: Path) -> dict[str, str]:
    """A remote with main (two commits), one pull request, and a commit that is in neither."""
    origin, work = tmp_path / "origin.git", tmp_path / "work"
    git(["init", "-q", "--bare", "-b", "main", str(origin)], tmp_path)
    git(["init", "-q", "-b", "main", str(work)], tmp_path)
    git(["remote", "add", "origin", str(origin)], work)
    who = {f"GIT_{r}_{f}": "t@e" for r in ("AUTHOR", "COMMITTER") for f in ("NAME", "EMAIL")}
    found = {"work": str(work)}

    def commit(name: str, *target: str) -> None:
        git(["commit", "-q", "--allow-empty", "-m", name], work, env=who)
        found[name] = git(["rev-parse", "HEAD"], work).strip()
        for ref in target:
            git(["push", "-q", "origin", f"HEAD:{ref}"], work)

    commit("first", "refs/heads/main")
    commit("pull", "refs/pull/7/head")
    commit("unpushed")
    git(["reset", "-q", "--hard", found["first"]], work)
    commit("second", "refs/heads/main")
    commit("stray", "refs/heads/topic")
    return found


def fetched(measure: Any, remote: dict[str, str], head: str, **more: Any) -> str:
    request = measure.Request("workflow_dispatch", remote[head], **more)
    return measure.fetch(request, Path(remote["work"]))


def test_a_pull_request_is_compared_with_what_it_grew_from(
    measure: Any, remote: dict[str, str]
) -> None:
    assert fetched(measure, remote, "pull", pull_request=7) == remote["first"]
    based = {"pull_request": 7, "base": remote["second"]}
    assert fetched(measure, remote, "pull", **based) == remote["first"]
    assert fetched(measure, remote, "second") == ""


@pytest.mark.parametrize(
    ("head", "more", "match"),
    [
        ("stray", {}, "not a commit of main"),
        ("pull", {}, "not a commit of main"),
        ("unpushed", {"pull_request": 7}, "not a commit of pull request 7"),
        ("second", {"pull_request": 7}, "not a commit of pull request 7"),
        ("first", {"pull_request": 7}, "adds no commit"),
        ("pull", {"pull_request": 7, "base": "stray"}, "not a commit of main"),
    ],
)
def test_a_commit_of_somebody_else_is_not_measured(
    measure: Any, remote: dict[str, str], head: str, more: dict[str, Any], match: str
) -> None:
    if "base" in more:
        more = {**more, "base": remote[more["base"]]}
    with pytest.raises(Refused, match=match):
        fetched(measure, remote, head, **more)


def test_measured_code_is_given_no_token(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_TOKEN", "GITHUB_ENV", "ACTIONS_RUNTIME_TOKEN", "RUNNER_TEMP", "MY_TOKEN"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("FUSED_MLP_DEVICE", "cpu")
    measure.disarm()
    left = set(measure.os.environ)
    assert not {
        name for name in left if "TOKEN" in name or name.startswith(("GITHUB_", "ACTIONS_"))
    }
    assert "FUSED_MLP_DEVICE" in left


def test_only_what_a_run_added_is_handed_over(measure: Any, tmp_path: Path) -> None:
    results = samples.write(tmp_path / "results", [1])
    (results / "README.md").write_text("")
    before = measure.snapshot(results)
    samples.write(results, [2])
    (results / "box" / "stray.txt").write_text("x")
    (results / "box" / "link.json").symlink_to("/etc/passwd")
    count = measure.hand_over(before, results, tmp_path / "out")
    names = {
        p.relative_to(tmp_path / "out/results").as_posix() for p in (tmp_path / "out").rglob("*.*")
    }
    assert names == {"box/machine.json", samples.name(2), samples.name(2) + "l"}
    assert count == 3


def test_exact_metrics_are_asked_for_by_their_names(measure: Any) -> None:
    from benchmarks.suite.harness.metrics import METRICS

    assert {METRICS[name].kind for name in measure.EXACT} == {"exact"}


def judged(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """judge.py in a clone whose remote is itself, so that it fetches what it knows."""
    return subprocess.run(
        [sys.executable, ".github/scripts/judge.py", str(folder / "in"), str(folder / "out")],
        cwd=folder / "clone",
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def clone(tmp_path: Path) -> dict[str, str]:
    git(["clone", "-q", "--bare", str(ROOT), "origin.git"], tmp_path)
    git(["update-ref", "refs/heads/main", "HEAD~1"], tmp_path / "origin.git")
    git(["update-ref", "refs/pull/7/head", "HEAD"], tmp_path / "origin.git")
    # What is judged is history; the scripts are the ones of the working tree.
    git(["clone", "-q", "origin.git", "clone"], tmp_path)
    work = tmp_path / "clone"
    for name in (".github", "benchmarks"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(work)], check=True)
    heads = git(["log", "--format=%H", "-2", "refs/pull/7/head"], tmp_path / "origin.git").split()
    return {"EVENT": "workflow_dispatch", "HEAD": heads[0], "BASE": heads[1], "PULL_REQUEST": "7"}


def put(folder: Path, commit: str, value: float) -> None:
    rows = {"launches.Inference.track_launches": samples.row([value], [None])}
    data = {**samples.result(1, rows), "commit_hash": commit}
    path = folder / "in" / "results" / "box" / f"{commit[:8]}-{samples.ENVIRONMENT}.json"
    samples.write(folder / "in" / "results", [])
    path.write_bytes(samples.encode(data))


def test_the_judge_judges_and_refuses_results_of_other_commits(
    tmp_path: Path, clone: dict[str, str]
) -> None:
    put(tmp_path, clone["HEAD"], 6)
    put(tmp_path, clone["BASE"], 5)
    done = judged(tmp_path, **clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"outcome": "regressed"' in (tmp_path / "out" / "report.json").read_text()
    put(tmp_path, "c" * 40, 5)
    done = judged(tmp_path, **clone)
    assert done.returncode == 2
    assert "a result of neither base nor head" in done.stderr


def test_re_runs_are_read_in_order_and_only_if_they_are_results(tmp_path: Path) -> None:
    for number, commit in enumerate((1, 2, 2, 1), start=1):
        value = samples.result(commit, {"a.track_x": samples.row([float(number)], [None])})
        samples.write(tmp_path / "reruns" / f"{number:03d}", [commit])
        (tmp_path / "reruns" / f"{number:03d}" / samples.name(commit)).write_bytes(
            samples.encode(value)
        )
    recorded = Recorded(tmp_path / "reruns")
    asked = [recorded(samples.commit(commit), ["."]) for commit in (1, 2, 2, 1, 1)]
    assert [run and run.rows["a.track_x"].values[0] for run in asked] == [1.0, 2.0, 3.0, 4.0, None]
    (tmp_path / "reruns" / "002" / "evil.sh").write_text("")
    with pytest.raises(Refused):
        Recorded(tmp_path / "reruns")
    for number in range(MOST + 1):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
    with pytest.raises(Refused, match="more than the gate ever asks for"):
        Recorded(tmp_path / "many")


@pytest.mark.parametrize(
    ("tag", "reason"),
    [("v9.9.9", "the tag is v9.9.9 but"), ("v0.1.0", "does not lie on main")],
)
def test_a_release_is_the_version_that_it_says_and_lies_on_main(
    tmp_path: Path, remote: dict[str, str], tag: str, reason: str
) -> None:
    work = Path(remote["work"])  # at a commit that was never merged
    (work / ".github" / "scripts").mkdir(parents=True)
    script = work / ".github" / "scripts" / "build.sh"
    script.write_text((ROOT / ".github" / "scripts" / "build.sh").read_text())
    (work / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    done = subprocess.run(
        ["bash", str(script), "dist"],
        env={"PATH": f"{tools}:/usr/bin:/bin", "TAG": tag},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert reason in done.stderr


@pytest.mark.parametrize(
    "name", ["incoming", "merge", "gitstore", "history", "github.message", "github.rights"]
)
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    import doctest
    import importlib

    module = importlib.import_module(f"benchmarks.tracking.{name}")
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(load("tests/ci/actions.py")).failed == 0
