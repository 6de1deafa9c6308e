"""bench.yml itself, run by act on this machine: from the event to the comment, status and
history.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, load, tool

# A real part of the quick suite: both kinds of metric at the smallest shape.
PART = "metric=launches,latency shape=tiny tokens=16 provider=fused dtype=fp32"


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Any:
    tool("act")
    # Tests run kernels through the interpreter; a job does not.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.syspath_prepend(str(ROOT / ".github" / "local"))
    return load(".github/local/run.py")


@pytest.fixture
def made_up() -> dict[str, str]:
    here = Path(__file__).parent
    return {"PYTHONPATH": str(here / "made_up"), "MADE_UP_SAMPLES": str(here)}


def points(outcome: Any) -> list[str]:
    return sorted(p for p in outcome.history if p.endswith(".json") and "-" in Path(p).name)


def test_people_are_shown_the_jobs_and_not_how_act_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".github" / "local"))
    said = [
        {"msg": "Couldn't get a valid docker connection: no DOCKER_HOST"},
        {"jobID": "measure", "msg": "LocalRepositoryCache matched"},
        {"jobID": "measure", "msg": "preflight: ready", "jobResult": "success"},
    ]
    text = "\n".join([*map(json.dumps, said), "Error: no such workflow"])
    act = subprocess.Popen(
        [sys.executable, "-c", f"print({text!r})"], stdout=subprocess.PIPE, text=True
    )
    jobs, log = load(".github/local/run.py").follow(act, show=True)
    assert jobs == {"measure": "success"}
    assert len(log.splitlines()) == 4
    assert capsys.readouterr().out == "[measure] preflight: ready\n[] Error: no such workflow\n"


def test_a_pull_request_that_does_more_is_red_and_says_why(
    local: Any, made_up: dict[str, str], tmp_path: Path
) -> None:
    outcome = local.run("pull-request", tmp_path, change=local.slower, environment=made_up)
    assert outcome.jobs == dict.fromkeys(("measure", "judge", "notify-pull-request"), "success"), (
        outcome.log[-3000:]
    )
    assert outcome.github.status(outcome.head) == "failure"
    assert len(outcome.github.comments) == 1
    body = outcome.github.comments[0]["body"]
    assert "track" in body
    assert "5 launches" in body
    assert "6 launches" in body
    # What was measured where a pull request's code ran is not history.
    assert outcome.history == {}
    assert not outcome.site.exists()
    assert outcome.github.issues == []


@pytest.mark.full
def test_a_run_that_measures_nothing_is_an_error_and_not_a_verdict(
    local: Any, made_up: dict[str, str], tmp_path: Path
) -> None:
    broken = {**made_up, "MADE_UP_BROKEN": "1"}
    outcome = local.run("pull-request", tmp_path, environment=broken)
    assert outcome.jobs == {"measure": "failure", "notify-pull-request": "success"}
    assert outcome.github.status(outcome.head) == "error"
    assert "the measurement broke" in outcome.github.comments[0]["body"]


@pytest.mark.full
def test_a_push_is_recorded_though_pages_is_down(
    local: Any, made_up: dict[str, str], tmp_path: Path
) -> None:
    down = {**made_up, "LOCAL_PAGES_DOWN": "1"}
    outcome = local.run("push", tmp_path, environment=down)
    assert outcome.jobs.pop("deploy") == "failure"
    assert set(outcome.jobs.values()) == {"success"}
    assert len(points(outcome)) == 1


@pytest.mark.full
def test_a_push_is_recorded_though_the_api_is_down(
    local: Any, made_up: dict[str, str], tmp_path: Path
) -> None:
    gone = {**made_up, "GITHUB_API_URL": "http://127.0.0.1:9"}
    outcome = local.run("push", tmp_path, environment=gone)
    assert outcome.jobs.pop("notify-main") == "failure"
    assert set(outcome.jobs.values()) == {"success"}
    assert len(points(outcome)) == 1
    assert (outcome.site / "index.html").is_file()


@pytest.mark.full
@pytest.mark.parametrize("event", ["push", "nightly"])
def test_main_is_measured_recorded_published_and_judged(
    local: Any, tmp_path: Path, event: str
) -> None:
    outcome = local.run(event, tmp_path, suite_filter=PART)
    assert set(outcome.jobs) == {"measure", "record", "judge", "publish", "deploy", "notify-main"}
    assert set(outcome.jobs.values()) == {"success"}, outcome.log[-3000:]
    assert any(Path(path).name.startswith(outcome.base[:8]) for path in points(outcome))
    assert (outcome.site / "index.html").is_file()
    assert outcome.github.statuses == []


@pytest.mark.full
@pytest.mark.parametrize(("change", "state"), [("slower", "failure"), ("note", "success")])
def test_a_pull_request_is_measured_by_asv_and_judged(
    local: Any, tmp_path: Path, change: str, state: str
) -> None:
    # Launches alone: exact, so that a busy machine gives the same verdict.
    part = PART.replace("launches,latency", "launches")
    outcome = local.run("pull-request", tmp_path, suite_filter=part, change=getattr(local, change))
    assert set(outcome.jobs.values()) == {"success"}, outcome.log[-3000:]
    assert outcome.github.status(outcome.head) == state
    assert outcome.history == {}


@pytest.mark.full
def test_a_writer_may_accept_what_is_slower(
    local: Any, made_up: dict[str, str], tmp_path: Path
) -> None:
    def accept(github: Any, base: str, head: str) -> None:
        github.permissions["someone"] = "maintain"
        github.label(local.PULL_REQUEST, "perf-accepted", "someone")

    outcome = local.run(
        "pull-request", tmp_path, change=local.slower, environment=made_up, prepared=accept
    )
    assert outcome.github.status(outcome.head) == "success"
    assert "set by someone" in outcome.github.comments[0]["body"]
