"""The history loses nothing and doubles nothing, whoever writes, dies or is turned away
meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tracking import gitstore, history
from benchmarks.tracking.gitstore import GitError, Store
from benchmarks.tracking.incoming import Refused

from . import samples

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    path = tmp_path / "origin.git"
    subprocess.run(["git", "init", "-q", "--bare", str(path)], check=True)
    return path


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history.time, "sleep", lambda seconds: None)
    monkeypatch.delenv(gitstore.TOKEN, raising=False)


def stored(origin: Path) -> dict[str, bytes]:
    with Store.open(str(origin), "results") as store:
        store.fetch()
        return store.files()


def commits(origin: Path) -> list[str]:
    return gitstore.git(["rev-list", "results"], origin).split()


def writer(origin: Path, folder: Path, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks", "history", "append", str(folder)]
    command += ["--remote", str(origin)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def test_eight_writers_at_once_lose_and_double_nothing(origin: Path, tmp_path: Path) -> None:
    folders = [samples.write(tmp_path / f"w{n}", [n, 100 + n]) for n in range(8)]
    running = [writer(origin, folder) for folder in folders]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 8, outputs
    files = stored(origin)
    expected = {samples.name(n + base) for n in range(8) for base in (0, 100)}
    assert {path for path in files if path.endswith(".json") and "machine" not in path} == expected
    assert len(commits(origin)) == 8
    for path in expected:
        assert json.loads(files[path])["results"]["latency.Inference.track_latency"][-1] == [
            [0.4, 0.6]
        ]
    subprocess.run(["git", "fsck", "--strict"], cwd=origin, check=True, capture_output=True)


GIT_THAT_KILLS = """#!/bin/sh
count=$(($(cat "$KILL_COUNT" 2>/dev/null || echo 0) + 1))
echo "$count" > "$KILL_COUNT"
if [ "$count" = "$KILL_AT" ] && [ "$KILL_WHEN" = before ]; then kill -9 "$PPID"; exit 1; fi
"$REAL_GIT" "$@"; code=$?
if [ "$count" = "$KILL_AT" ]; then kill -9 "$PPID"; fi
exit $code
"""


def kill_at(origin: Path, folder: Path, tmp_path: Path, step: int, when: str) -> int:
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "git").write_text(GIT_THAT_KILLS)
    (tools / "git").chmod(0o755)
    count = tmp_path / "count"
    count.unlink(missing_ok=True)
    real = subprocess.run(
        ["which", "git"], capture_output=True, text=True, check=True
    ).stdout.strip()
    settings = {"KILL_AT": str(step), "KILL_WHEN": when, "KILL_COUNT": str(count), "REAL_GIT": real}
    environment = {**os.environ, **settings, "PATH": f"{tools}:{os.environ['PATH']}"}
    # It is killed with its folder still there, as on a machine that loses power.
    process = writer(origin, folder, env={**environment, "TMPDIR": str(tmp_path)})
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_killed_anywhere_leaves_all_or_nothing(
    origin: Path, tmp_path: Path, when: str
) -> None:
    history.append(samples.write(tmp_path / "first", [1]), str(origin))
    before = stored(origin)
    folder = samples.write(tmp_path / "second", [2])
    complete = {*before, samples.name(2), samples.name(2) + "l"}
    shutil.copytree(origin, tmp_path / "copy.git")
    assert kill_at(tmp_path / "copy.git", folder, tmp_path, 0, when) == 0
    last = int((tmp_path / "count").read_text())  # the push; no earlier step touches what is shared
    for step in (2, last - 2, last - 1, last):
        code = kill_at(origin, folder, tmp_path, step, when)
        assert code == -signal.SIGKILL, f"not killed at step {step}"
        reached = when == "after" and step == last
        assert set(stored(origin)) == (complete if reached else set(before)), f"after step {step}"
        subprocess.run(["git", "fsck"], cwd=origin, check=True, capture_output=True)
    # Whoever comes next finishes the work, once.
    history.append(folder, str(origin))
    assert set(stored(origin)) == complete
    assert history.append(folder, str(origin)) == []
    assert len(commits(origin)) == 2


def refuse_pushes(origin: Path, times: int) -> None:
    hook = origin / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(
        f'#!/bin/sh\nn=$(cat "{origin}/refused" 2>/dev/null || echo 0)\n'
        f'if [ "$n" -lt {times} ]; then echo $((n + 1)) > "{origin}/refused"; '
        "echo 'the server says no' >&2; exit 1; fi\n"
    )
    hook.chmod(0o755)


def test_a_rejected_push_is_tried_again(origin: Path, tmp_path: Path) -> None:
    refuse_pushes(origin, 3)
    history.append(samples.write(tmp_path / "in", [1]), str(origin))
    assert len(commits(origin)) == 1
    assert (origin / "refused").read_text().strip() == "3"


def test_a_push_rejected_for_ever_says_so_and_writes_nothing(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_pushes(origin, 10**6)
    folder = samples.write(tmp_path / "in", [1])
    with pytest.raises(GitError, match="after 3 tries"):
        history.append(folder, str(origin), tries=3)
    assert stored(origin) == {}
    assert samples.name(1) in {str(p.relative_to(folder)) for p in folder.rglob("*.json")}


def test_a_push_whose_answer_was_lost_is_not_repeated(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = Store.push

    def cut_off(self: Store, files: dict[str, bytes], message: str) -> str:
        push(self, files, message)
        raise GitError("git push: the connection was reset")

    monkeypatch.setattr(Store, "push", cut_off)
    assert history.append(samples.write(tmp_path / "in", [1]), str(origin)) == []
    assert len(commits(origin)) == 1


def test_two_machines_with_one_name_are_refused(origin: Path, tmp_path: Path) -> None:
    history.append(samples.write(tmp_path / "one", [1]), str(origin))
    other = samples.write(tmp_path / "two", [2])
    (other / "box" / "machine.json").write_bytes(samples.encode({**samples.MACHINE, "gpu": "H200"}))
    with pytest.raises(
        Refused, match="two machines with one name: gpu is 'H200' here and 'none' there"
    ):
        history.append(other, str(origin))
    assert samples.name(2) not in stored(origin)


def test_a_result_of_another_machine_is_refused_by_what_it_says_itself(
    origin: Path, tmp_path: Path
) -> None:
    history.append(samples.write(tmp_path / "one", [1]), str(origin))
    other = samples.write(tmp_path / "two", [2], params={**samples.MACHINE, "gpu": "H200"})
    (other / "box" / "machine.json").unlink()
    with pytest.raises(Refused, match="of another machine: gpu is 'H200' here and 'none' there"):
        history.append(other, str(origin))
    assert samples.name(2) not in stored(origin)


def test_pull_lays_the_history_over_and_removes_nothing(origin: Path, tmp_path: Path) -> None:
    history.append(samples.write(tmp_path / "in", [1, 2]), str(origin))
    into = samples.write(tmp_path / "results", [3])
    (into / "README.md").write_text("kept")
    history.pull(str(origin), into)
    assert {path.name[:8] for path in into.glob("box/0*.json")} == {
        samples.commit(n)[:8] for n in (1, 2, 3)
    }
    assert (into / "README.md").read_text() == "kept"
    assert history.pull(str(origin), into) == []


def test_pull_without_a_history_is_no_error(origin: Path, tmp_path: Path) -> None:
    assert history.pull(str(origin), tmp_path / "results") == []


@pytest.fixture
def project(tmp_path: Path) -> tuple[Path, list[str]]:
    """A repository of five commits to main, the third of which touches nothing that is measured."""
    root = tmp_path / "project"
    root.mkdir()
    who = {f"GIT_{r}_{f}": "t@e" for r in ("AUTHOR", "COMMITTER") for f in ("NAME", "EMAIL")}
    gitstore.git(["init", "-q", "-b", "main"], root)
    made = []
    for number in range(5):
        path = root / ("README.md" if number == 2 else "fused_mlp/x.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
        gitstore.git(["add", "-A"], root)
        gitstore.git(["commit", "-q", "-m", f"c{number}"], root, env=who)
        made.append(gitstore.git(["rev-parse", "HEAD"], root).strip())
    return root, made


def point(results: Path, commit: str) -> None:
    (results / "box").mkdir(parents=True, exist_ok=True)
    (results / "box" / f"{commit[:8]}-{samples.ENVIRONMENT}.json").write_text("{}")


def test_fill_names_the_commits_without_a_point(
    project: tuple[Path, list[str]], tmp_path: Path
) -> None:
    root, made = project
    results = tmp_path / "results"
    assert history.missing(results, "box", root=root) == [made[4]]
    point(results, made[0])
    assert history.missing(results, "box", root=root) == [made[4], made[3], made[1]]
    point(results, made[3])
    assert history.missing(results, "box", root=root) == [made[4], made[1]]
    assert history.missing(results, "other", root=root) == [made[4]]
    assert history.previous(made[4], results, "box", root=root) == made[3]
    assert history.previous(made[3], results, "box", root=root) == made[0]
    assert history.previous(made[0] + "~0", results, "box", root=root) is None


def test_the_token_is_in_no_command_line_and_no_file(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gitstore.TOKEN, "s3cret")
    seen: list[list[str]] = []
    run = subprocess.run

    def watch(command: list[str], **options: object) -> object:
        seen.append(command)
        assert options["env"]["GIT_CONFIG_KEY_0"] == "http.https://github.com/.extraheader"  # type: ignore[index]
        return run(command, **options)

    monkeypatch.setattr(gitstore.subprocess, "run", watch)
    history.append(samples.write(tmp_path / "in", [1]), str(origin))
    assert seen
    assert not any("s3cret" in word for command in seen for word in command)
    for path in origin.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes()
