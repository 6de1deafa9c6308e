"""Who may do what: event × actor × label → the jobs that run, and what their tokens may do."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tracking import history
from benchmarks.tracking.github import labels
from benchmarks.tracking.incoming import Refused

from . import actions, samples
from .actions import Event

READ = {"contents": "read"}
CI = {"lint", "test", "workflows", "wheel"}
MAIN = {
    "measure": READ,
    "record": {"contents": "write"},
    "publish": READ,
    "deploy": {"pages": "write", "id-token": "write"},
    "judge": READ,
    "notify-main": {**READ, "issues": "write"},
}
PULL = {
    "measure": READ,
    "judge": READ,
    "notify-pull-request": {**READ, "statuses": "write", "pull-requests": "write"},
}
START = {**READ, "actions": "write", "statuses": "write", "pull-requests": "write"}
ACCEPT = {**READ, "statuses": "write", "pull-requests": "write"}
RESET = {**READ, "pull-requests": "write"}
DISPATCH = {"pull_request": "7", "head": "a" * 40, "base": "b" * 40}
TARGET = "pull_request_target"

# (what happens, the event, workflow -> job -> rights); a workflow that is not named runs nothing.
TABLE: list[tuple[str, Event, dict[str, dict[str, dict[str, str]]]]] = [
    (
        "a writer pushes to main",
        Event("push"),
        {"bench.yml": MAIN, "ci.yml": dict.fromkeys(CI, READ)},
    ),
    (
        "a writer pushes text to main",
        Event("push", paths=("README.md",)),
        {"ci.yml": dict.fromkeys(CI, READ)},
    ),
    ("a writer pushes a branch", Event("push", ref="refs/heads/topic"), {}),
    ("night falls", Event("schedule"), {"bench.yml": MAIN}),
    (
        "a stranger opens a pull request, with workflows of their own or not",
        Event("pull_request", "opened", from_fork=True),
        {
            "ci.yml": {
                **dict.fromkeys({*CI, "exact"}, READ),
                "exact-gate": {**READ, "pull-requests": "read"},
            }
        },
    ),
    (
        "a stranger's pull request is opened, seen from the base",
        Event(TARGET, "opened", from_fork=True),
        {},
    ),
    (
        "a stranger pushes to their pull request",
        Event(TARGET, "synchronize", from_fork=True),
        {"bench-pr.yml": {"reset": RESET}},
    ),
    (
        "somebody labels a pull request perf-run",
        Event(TARGET, "labeled", "perf-run", from_fork=True),
        {"bench-pr.yml": {"start": START}},
    ),
    (
        "somebody labels a pull request perf-accepted",
        Event(TARGET, "labeled", "perf-accepted", from_fork=True),
        {"bench-pr.yml": {"accept": ACCEPT}},
    ),
    (
        "somebody takes perf-accepted off",
        Event(TARGET, "unlabeled", "perf-accepted", from_fork=True),
        {"bench-pr.yml": {"accept": ACCEPT}},
    ),
    (
        "somebody takes perf-run off",
        Event(TARGET, "unlabeled", "perf-run", from_fork=True),
        {},
    ),
    (
        "somebody sets another label, with a name that means to be ours",
        Event(TARGET, "labeled", "perf-run'; exit", from_fork=True),
        {},
    ),
    (
        "bench.yml is started for a pull request",
        Event("workflow_dispatch", inputs=DISPATCH),
        {"bench.yml": PULL},
    ),
    (
        "a writer starts bench.yml for a commit of main",
        Event("workflow_dispatch", inputs={"pull_request": "", "head": "a" * 40}),
        {"bench.yml": MAIN},
    ),
    (
        "a writer starts a bench.yml of their own branch",
        Event("workflow_dispatch", inputs=DISPATCH, ref="refs/heads/topic"),
        {},
    ),
    (
        "a version is tagged",
        Event("push", ref="refs/tags/v1.2.3"),
        {"release.yml": {"build": READ, "publish": {"id-token": "write"}}},
    ),
    ("something else is tagged", Event("push", ref="refs/tags/nightly"), {}),
    (
        "somebody pushes to main of their own fork",
        Event("push", in_fork=True),
        {"ci.yml": dict.fromkeys(CI, READ)},
    ),
    ("night falls in a fork", Event("schedule", in_fork=True), {}),
    ("a version is tagged in a fork", Event("push", ref="refs/tags/v1.2.3", in_fork=True), {}),
    (
        "a label is set in a fork",
        Event(TARGET, "labeled", "perf-run", in_fork=True),
        {},
    ),
    (
        "the measurement of main breaks off: what it left is still looked at",
        Event("push", results={"measure": "failure", "record": "failure"}, paths=("fused_mlp/a",)),
        {
            "bench.yml": {"measure": READ, "record": MAIN["record"]},
            "ci.yml": dict.fromkeys(CI, READ),
        },
    ),
    (
        "Pages is down: the point is recorded, judged and told",
        Event("schedule", results={"publish": "failure"}),
        {"bench.yml": {k: v for k, v in MAIN.items() if k != "deploy"}},
    ),
    (
        "the history cannot be written: it is judged and told all the same",
        Event("schedule", results={"record": "failure"}),
        {"bench.yml": {k: v for k, v in MAIN.items() if k not in ("publish", "deploy")}},
    ),
    (
        "the measurement of a pull request breaks off: its status says so",
        Event("workflow_dispatch", inputs=DISPATCH, results={"measure": "failure"}),
        {"bench.yml": {k: v for k, v in PULL.items() if k != "judge"}},
    ),
    (
        "the judge of a pull request breaks: its status says so",
        Event("workflow_dispatch", inputs=DISPATCH, results={"judge": "failure"}),
        {"bench.yml": PULL},
    ),
]


@pytest.mark.parametrize(
    ("event", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_who_may_do_what(event: Event, expected: dict[str, Any]) -> None:
    found = {name: actions.jobs(name, event) for name in actions.names()}
    assert {name: running for name, running in found.items() if running} == expected


@pytest.mark.parametrize(
    ("actor", "label", "measured", "state"),
    [
        ("admin", "perf-run", True, "pending"),
        ("write", "perf-run", True, "pending"),
        ("triage", "perf-run", False, ""),
        ("read", "perf-run", False, ""),
        ("admin", "perf-accepted", False, ""),
        ("triage", "perf-accepted", False, ""),
    ],
)
def test_what_a_label_leads_to_is_up_to_who_set_it(
    github: Any, client: Any, actor: str, label: str, measured: bool, state: str
) -> None:
    head, base = samples.commit(1), samples.commit(2)
    repository = {"id": 1, "pushed_at": "2026-01-01T00:00:00Z"}
    pull = {
        "number": 7,
        "labels": [],
        "updated_at": "2026-01-02T00:00:00Z",
        "head": {"sha": head, "repo": {**repository, "id": 2}},
        "base": {"sha": base, "repo": repository},
    }
    github.pulls[7] = pull
    github.permissions["someone"] = actor
    github.label(7, label, "someone")
    event = {"action": "labeled", "label": {"name": label}, "sender": {"login": "someone"}}
    with contextlib.suppress(Refused):
        labels.act(client, {**event, "pull_request": pull})
    assert bool(github.dispatches) == measured
    assert github.status(head) == state
    for dispatch in github.dispatches:
        # What it starts is bench.yml as it is on main, which then runs with these jobs and rights.
        assert dispatch["ref"] == "main"
        started = Event("workflow_dispatch", ref="refs/heads/main", inputs=dispatch["inputs"])
        assert actions.jobs(dispatch["workflow"], started) == PULL
        assert set(dispatch["inputs"]) == set(
            actions.workflow("bench.yml")["on"]["workflow_dispatch"]["inputs"]
        )


def every_job() -> list[tuple[str, str, dict[str, Any]]]:
    return [(n, j, job) for n in actions.names() for j, job in actions.workflow(n)["jobs"].items()]


def steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    return job.get("steps", [])


EVERY = pytest.mark.parametrize(
    ("name", "job"),
    [(n, job) for n, _, job in every_job()],
    ids=[f"{n}-{j}" for n, j, _ in every_job()],
)


@EVERY
def test_every_job_lists_its_rights_and_its_time(name: str, job: dict[str, Any]) -> None:
    assert actions.workflow(name)["permissions"] == {}
    assert isinstance(job["permissions"], dict)
    assert job["timeout-minutes"] <= 180


@EVERY
def test_no_expression_reaches_a_shell(name: str, job: dict[str, Any]) -> None:
    for step in steps(job):
        assert "${{" not in str(step.get("run", "")), step
        assert "GITHUB_ENV" not in str(step)
        assert "GITHUB_PATH" not in str(step)


# What an outsider writes: titles, bodies, branch names, labels, messages, user names.
UNTRUSTED = re.compile(
    r"\.(title|body|message|name|email|login|label|head_ref|page_name|description|default_branch)\b"
    r"|github\.(head_ref|actor)|head\.(ref|label|repo)"
)


@EVERY
def test_no_text_of_an_outsider_is_used_at_all(name: str, job: dict[str, Any]) -> None:
    for step in steps(job):
        for expression in re.findall(r"\$\{\{(.*?)\}\}", str({**step, "if": ""})):
            assert not UNTRUSTED.search(expression.replace("github.ref_name", "")), expression


@EVERY
def test_secrets_are_not_used_and_tokens_go_to_single_steps(name: str, job: dict[str, Any]) -> None:
    assert "secrets." not in str(job)
    assert "token" not in str(job.get("env", ""))
    for step in steps(job):
        if "github.token" in str(step):
            # Only programs of main's own checkout are given one.
            assert re.match(r"python3? (-m benchmarks|\.github/scripts/judge\.py)", step["run"])


@EVERY
def test_every_checkout_leaves_no_token_behind(name: str, job: dict[str, Any]) -> None:
    for step in steps(job):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_jobs_with_rights_check_out_main_and_nothing_else() -> None:
    for name, job_name, job in every_job():
        writes = "write" in job["permissions"].values()
        privileged = "pull_request_target" in actions.workflow(name)["on"] or name == "bench.yml"
        for step in steps(job):
            if step.get("uses", "").startswith("actions/checkout@") and (writes or privileged):
                assert step["with"]["ref"] == "main", f"{name}: {job_name}"
            # What runs the pull request's code, or installs anything, holds no right to write.
            built = re.search(
                r"measure\.py|pip install|build\.sh|asv run", str(step.get("run", ""))
            )
            assert not (writes and built), f"{name}: {job_name}"


def test_the_gpu_runs_main_workflows_alone_and_holds_nothing() -> None:
    hosted = {name: job for name, j, job in every_job() if "self-hosted" in str(job["runs-on"])}
    assert set(hosted) == {"bench.yml"}
    job = hosted["bench.yml"]
    assert job["runs-on"]["group"]
    assert job["permissions"] == READ
    assert "token" not in str(job)
    assert not {"pull_request", TARGET} & set(actions.workflow("bench.yml")["on"])


def test_no_waiting_run_is_dropped_and_the_gpu_serves_one_at_a_time() -> None:
    measure = actions.workflow("bench.yml")["jobs"]["measure"]
    assert measure["concurrency"] == {"group": "gpu", "queue": "max", "cancel-in-progress": False}
    assert "${{" not in measure["concurrency"]["group"]
    for each in (actions.workflow("bench.yml"), actions.workflow("bench-pr.yml")):
        assert each["concurrency"]["queue"] == "max"
        assert each["concurrency"]["cancel-in-progress"] is False


def test_clocks_are_released_whatever_happens() -> None:
    listed = steps(actions.workflow("bench.yml")["jobs"]["measure"])
    order = {step.get("name", step.get("uses", "")): i for i, step in enumerate(listed)}
    release = listed[order["Release the clocks"]]
    assert release["if"] == "${{ always() }}"
    assert order["Lock the clocks"] < order["Measure"] < order["Release the clocks"]
    assert order["Refuse a machine that cannot be trusted to measure"] < order["Lock the clocks"]


def test_artifacts_are_taken_by_the_id_that_their_job_put_out() -> None:
    for name, job_name, job in every_job():
        for step in steps(job):
            if step.get("uses", "").startswith("actions/download-artifact@"):
                source = re.fullmatch(
                    r"\$\{\{ needs\.([a-z-]+)\.outputs\.artifact \}\}", step["with"]["artifact-ids"]
                )
                assert source, f"{name}: {job_name}"
                assert source[1] in actions.needs(job)
                assert "name" not in step["with"]


def test_the_paths_that_are_measured_are_stated_once() -> None:
    assert tuple(actions.workflow("bench.yml")["on"]["push"]["paths"]) == history.MEASURED


def test_owners_watch_over_the_workflows_and_the_results() -> None:
    text = (Path(__file__).resolve().parents[2] / ".github" / "CODEOWNERS").read_text()
    owned = dict(line.split(maxsplit=1) for line in text.splitlines() if line[:1] == "/")
    assert {"/.github/", "/results/"} <= set(owned)
    assert all(owner.startswith("@") for owner in owned.values())
