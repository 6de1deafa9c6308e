"""The command: commits by git, results by asv, one clear line for what is wrong, the exit codes."""

from __future__ import annotations

import argparse
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.tracking.commits import Usage
from benchmarks.tracking.gate import command as gate
from benchmarks.tracking.gate.compare import compare
from benchmarks.tracking.gate.rerun import order
from benchmarks.tracking.judging.verdict import Outcome
from benchmarks.tracking.results import Run, parse

from .made import LATENCY, history, latencies, repository, result, write

COMMITS = 60


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """60 commits measured; the last is 20 % slower in one combination of four."""
    folder = tmp_path_factory.mktemp("project")
    hashes = repository(folder, COMMITS)
    history(
        folder / "results",
        hashes,
        lambda at, s: 1e-3 * (s + 1) * (1.2 if at == COMMITS - 1 and s == 1 else 1),
    )
    return folder, hashes


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    return parser.parse_args([*words, "--repo", str(folder), "--results", str(folder / "results")])


def cli(folder: Path, *words: str) -> int:
    return main(["gate", *words, "--repo", str(folder), "--results", str(folder / "results")])


def test_a_slower_commit_fails_and_names_what_got_slower(project, capsys) -> None:
    folder, _ = project
    assert cli(folder, "HEAD~1", "HEAD") == 1
    said = capsys.readouterr().out
    assert "track_latency(p1)" in said
    assert "% slower" in said
    assert "track_latency(p0)" not in said
    assert "--rerun --bench" in said


def test_a_commit_that_changed_nothing_passes(project) -> None:
    assert cli(project[0], "HEAD~3", "HEAD~2") == 0


def test_a_commit_against_itself_says_so(project, capsys) -> None:
    assert cli(project[0], "HEAD~1", "HEAD~1") == 0
    assert "the same commit" in capsys.readouterr().out


def test_a_young_project_is_judged_from_its_second_commit_on(tmp_path: Path) -> None:
    hashes = repository(tmp_path, 2)
    history(tmp_path / "results", hashes, lambda at, s: 1e-3 * (1.2 if at and s == 1 else 1))
    report = compare(arguments(tmp_path, "HEAD~1", "HEAD"))
    (slow,) = [v for v in report.verdicts if v.outcome is not Outcome.PASS]
    assert slow.series.params == ("p1",)
    assert slow.outcome in (Outcome.REGRESSED, Outcome.INCONCLUSIVE)
    assert slow.rerun
    assert any("--rerun" in line for line in slow.explanation)


def test_an_abbreviated_hash_is_a_name_too(project) -> None:
    folder, hashes = project
    assert cli(folder, hashes[-2][:12], hashes[-1][:12]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense", "HEAD"), "not a commit known here"),
        (("HEAD", "HEAD~1"), "not an ancestor"),
        (("--", "-x", "HEAD"), "no name of a commit"),
        ((), "which commit"),
        (("--history", "--rerun"), "--history takes"),
        (("HEAD~1", "HEAD", "--bench", "("), "no regular expression"),
        (("--env", "one", "two"), "no environment"),
        (("HEAD~1", "HEAD", "--json", "/nowhere/at/all.json"), "cannot write"),
    ],
)
def test_bad_usage_is_one_line_and_code_two(project, capsys, words, said) -> None:
    folder, _ = project
    options = ["--repo", str(folder), "--results", str(folder / "results")]
    assert main(["gate", *options, *words]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_an_ambiguous_hash_is_refused(tmp_path: Path, capsys) -> None:
    hashes = repository(tmp_path, 800)
    (tmp_path / "results").mkdir()
    starts = [h[:4] for h in hashes]
    twice = next((s for s in starts if starts.count(s) > 1), None)
    if twice is None:
        pytest.skip("no two of these hashes start alike")
    assert cli(tmp_path, twice, "HEAD") == 2
    assert "ambiguous" in capsys.readouterr().out


def test_a_folder_that_is_no_repository(tmp_path: Path, capsys) -> None:
    (tmp_path / "results").mkdir()
    assert cli(tmp_path, "HEAD~1", "HEAD") == 2
    assert "not a git repository" in capsys.readouterr().out


def test_no_results_is_not_a_pass(tmp_path: Path, capsys) -> None:
    base, head = (c[:8] for c in repository(tmp_path, 2))
    assert cli(tmp_path, "HEAD~1", "HEAD") == 2  # no folder
    (tmp_path / "results").mkdir()
    assert cli(tmp_path, "HEAD~1", "HEAD") == 4
    assert f"first asv run {base}^! && asv run {head}^!" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_is_missing_is_said_with_the_command_for_it(tmp_path: Path, capsys) -> None:
    base, head = repository(tmp_path, 2)
    rows = {"a.B.track_launches": [[2.0], [], "1"]}
    write(tmp_path / "results", result(head, rows))
    assert cli(tmp_path, "HEAD~1", "HEAD") == 4
    assert f"asv run {base[:8]}^!" in capsys.readouterr().out
    write(tmp_path / "results", result(base, rows))
    assert cli(tmp_path, "HEAD~1", "HEAD") == 0
    capsys.readouterr()
    assert cli(tmp_path, "HEAD~1", "HEAD", "--bench", "latncy") == 4
    assert "no benchmark's name matches --bench latncy" in capsys.readouterr().out


def test_unlike_systems_are_not_compared(tmp_path: Path, capsys) -> None:
    hashes = repository(tmp_path, 2)
    random = np.random.default_rng(0)
    for commit, driver in zip(hashes, ("550", "560"), strict=True):
        write(
            tmp_path / "results", result(commit, {LATENCY: latencies([1.0], random)}, driver=driver)
        )
    assert cli(tmp_path, "HEAD~1", "HEAD") == 4
    assert "driver 550 → 560" in capsys.readouterr().out


def test_two_machines_are_judged_apart(tmp_path: Path) -> None:
    hashes = repository(tmp_path, 2)
    random = np.random.default_rng(0)
    for at, commit in enumerate(hashes):
        rows = {"a.B.track_launches": [[2.0], [], "1"]}
        write(tmp_path / "results", result(commit, rows, machine="one"))
        rows = {"a.B.track_launches": [[5.0 + at], [], "1"], LATENCY: latencies([1.0], random)}
        write(tmp_path / "results", result(commit, rows, machine="two"))
    report = compare(arguments(tmp_path, "HEAD~1", "HEAD"))
    assert {(v.series.machine, v.outcome) for v in report.verdicts if v.kind == "exact"} == {
        ("one", Outcome.PASS),
        ("two", Outcome.REGRESSED),
    }


def test_a_corrupt_file_is_named_and_skipped(tmp_path: Path, capsys) -> None:
    hashes = repository(tmp_path, 2)
    for commit in hashes:
        write(tmp_path / "results", result(commit, {"a.B.track_launches": [[2.0], [], "1"]}))
    (tmp_path / "results" / "box" / "12345678-env.json").write_text('{"commit_hash": ')
    assert cli(tmp_path, "HEAD~1", "HEAD") == 0
    assert "12345678-env.json: not valid JSON" in capsys.readouterr().out


def test_two_environments_of_one_commit(tmp_path: Path) -> None:
    (commit,) = repository(tmp_path, 1)
    for version, spills in (("3.7.1", 0.0), ("3.9.0", 12.0)):
        rows = {"kernels.Static.track_spills": [[spills], [["'k'"], ["'sm90'"]][:1], "1"]}
        env = f"py3.11-triton{version}"
        write(tmp_path / "results", result(commit, rows, env=env, triton=version))
    report = compare(arguments(tmp_path, "--env", "triton3.7", "triton 3.9"))
    assert report.exit_code == 1
    assert compare(arguments(tmp_path, "--env", "triton3.9", "triton3.7")).exit_code == 0
    with pytest.raises(Usage, match="both name"):
        compare(arguments(tmp_path, "--env", "triton3.9", "triton3.9.0"))


class Fake:
    """Stands in for asv: every combination of a run, at the level of its commit."""

    def __init__(self, slow: str, by: float, fails: bool = False) -> None:
        self.slow, self.by, self.fails = slow, by, fails
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.random = np.random.default_rng(5)

    def __call__(self, commit: str, patterns: Sequence[str]) -> Run | None:
        self.asked.append((commit, tuple(patterns)))
        if self.fails:
            return None
        values = [1e-3 * (s + 1) * math.exp(0.005 * self.random.normal()) for s in range(4)]
        if commit == self.slow:
            values[1] *= self.by
        return parse(result(commit, {LATENCY: latencies(values, self.random)}))


def test_reruns_go_a_b_b_a_and_settle_what_was_flagged(project) -> None:
    folder, hashes = project
    runner = Fake(hashes[-1], 1.2)
    report = compare(arguments(folder, "HEAD~1", "HEAD"), runner)
    (slow,) = report.of(Outcome.REGRESSED)
    assert slow.series.params == ("p1",)
    assert "10 re-runs" in slow.reason
    sides = ["AB"[commit == hashes[-1]] for commit, _ in runner.asked]
    assert sides == order(5) + order(5)
    assert sides[:4] == list("ABBA")
    assert all("p3" not in pattern for _, patterns in runner.asked[10:] for pattern in patterns)


def test_reruns_clear_a_slow_first_look(project) -> None:
    folder, hashes = project
    runner = Fake(hashes[-1], 1.0)
    report = compare(arguments(folder, "HEAD~1", "HEAD"), runner)
    assert report.exit_code == 0
    assert len(runner.asked) == 10


def test_reruns_that_bring_nothing_leave_the_first_look(project) -> None:
    folder, hashes = project
    report = compare(arguments(folder, "HEAD~1", "HEAD"), Fake(hashes[-1], 1.0, fails=True))
    assert any("brought nothing" in n for n in report.notes)
    assert report.exit_code == 1


def test_an_accepted_regression_does_not_fail_and_says_why(project, tmp_path: Path) -> None:
    folder, hashes = project
    results = tmp_path / "results"
    results.mkdir()
    (results / "box").symlink_to(folder / "results" / "box")
    args = arguments(folder, "HEAD~1", "HEAD")
    args.results = results

    def accept(text: str):
        (results / "accepted.toml").write_text(text)
        return compare(args)

    entry = (
        '[[accepted]]\nbenchmark = "latency.*"\nreason = "exact gelu"\n'
        f'commit = "{hashes[-1][:8]}"\n'
    )
    report = accept(entry)
    assert report.exit_code == 0
    assert "exact gelu" in report.of(Outcome.REGRESSED)[0].accepted
    assert accept(entry + "at_most = 5.0\n").exit_code == 1
    assert accept(entry + "until = 2020-01-01\n").exit_code == 1
    assert accept(entry + "until = 2020-01-01\n" + entry).exit_code == 0  # renewed below
    assert accept(entry + 'params = "p7"\n').exit_code == 1
    assert accept(entry.replace(hashes[-1][:8], hashes[3][:8])).exit_code == 1
    info = '[[threshold]]\nbenchmark = "latency.*"\ngating = false\nreason = "disk"\n'
    assert accept(info).exit_code == 0
    for wrong in ("[[accepted]]\n", "x = 1\n", "[", entry + "until = 7\n", entry + "who = 'me'\n"):
        with pytest.raises(Usage, match=r"accepted\.toml"):
            accept(wrong)


def test_an_accepted_baseline_starts_the_history_anew(tmp_path: Path) -> None:
    hashes = repository(tmp_path, 60)
    history(tmp_path / "results", hashes, lambda at, s: 1e-3 * (1.3 if at >= 40 else 1))
    (tmp_path / "results" / "accepted.toml").write_text(
        f'[[accepted]]\nbenchmark = "*"\ncommit = "{hashes[40]}"\nreason = "r"\nbaseline = true\n'
    )
    report = compare(arguments(tmp_path, "HEAD~1", "HEAD"))
    latency = [v for v in report.verdicts if v.kind == "sampled"]
    assert all("noise from its history of 19" in v.flags for v in latency)


def test_history_finds_a_step_and_its_commits(tmp_path: Path, capsys) -> None:
    hashes = repository(tmp_path, 60)
    history(tmp_path / "results", hashes, lambda at, s: 1e-3 * (1.06 if s == 2 and at >= 35 else 1))
    assert cli(tmp_path, "--history", "--json", str(tmp_path / "h.json")) == 1
    verdicts = json.loads((tmp_path / "h.json").read_text())["verdicts"]
    (found,) = [v for v in verdicts if v["outcome"] == "regressed"]
    assert found["params"] == ["p2"]
    assert hashes.index(found["base"]) in (33, 34, 35)
    assert hashes.index(found["head"]) == hashes.index(found["base"]) + 1
    assert math.isclose(found["percent"], 6, abs_tol=1)


def test_a_short_history_is_one_line_and_no_table(tmp_path: Path, capsys) -> None:
    hashes = repository(tmp_path, 19)
    history(tmp_path / "results", hashes, lambda at, s: 1e-3)
    cli(tmp_path, "--history")
    said = capsys.readouterr().out
    assert "fewer values than the 20 that steps need: " in said
    assert "old → new" not in said


def test_outputs_agree_with_the_exit_code(project, tmp_path: Path) -> None:
    folder, _ = project
    names = {n: tmp_path / n for n in ("json", "markdown", "junit", "annotations")}
    assert (
        cli(folder, "HEAD~1", "HEAD", *(w for n, p in names.items() for w in (f"--{n}", str(p))))
        == 1
    )
    data = json.loads(names["json"].read_text())
    assert (data["outcome"], data["exit_code"], data["schema"]) == ("regressed", 1, 1)
    assert "track\\_latency(p1)" in names["markdown"].read_text()
    assert ElementTree.fromstring(names["junit"].read_text()).get("failures") == "1"
    assert names["annotations"].read_text().startswith("::error title=regressed%3A ")
