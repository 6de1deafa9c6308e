"""The client repeats what may be repeated, and says once what must be said once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.tracking.github import issues, labels, message, pull
from benchmarks.tracking.github.client import ApiError, Client
from benchmarks.tracking.incoming import Refused

from . import samples
from .conftest import load

fake = load(".github/local/fake_github.py")
Fault = fake.Fault
HEAD, OTHER, BASE = samples.commit(1), samples.commit(2), samples.commit(3)


def report(outcome: str, *verdicts: dict[str, Any], head: str = HEAD) -> dict[str, Any]:
    return {"outcome": outcome, "base": BASE, "head": head, "verdicts": list(verdicts)}


def judged(outcome: str, benchmark: str = "latency.track_latency", **more: Any) -> dict[str, Any]:
    series = {"machine": "box", "env": "e", "benchmark": benchmark, "params": ["'p'"]}
    return {"series": series, "outcome": outcome, "old": 1.0, "new": 1.1, "percent": 10.0, **more}


def open_pull(github: Any, number: int = 7, head: str = HEAD) -> dict[str, Any]:
    repository = {"id": 1, "pushed_at": "2026-01-01T00:00:00Z"}
    made = {
        "number": number,
        "labels": [],
        "head": {"sha": head, "repo": {**repository, "id": 2}},
        "base": {"sha": BASE, "repo": repository},
        "updated_at": "2026-01-01T01:00:00Z",
    }
    github.pulls[number] = made
    return made


# --- the client ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 502, 503, 0])
def test_a_server_that_is_briefly_away_is_asked_again(
    github: Any, client: Any, status: int
) -> None:
    github.faults.append(Fault("GET issues/7/comments", status, times=3))
    assert list(client.pages("issues/7/comments")) == []
    assert len(github.requests) == 4
    assert client.waits == sorted(client.waits)


def test_a_server_that_stays_away_ends_in_one_line(github: Any, client: Any) -> None:
    github.faults.append(Fault("GET", 503, times=99))
    with pytest.raises(ApiError, match="503 no, after 6 tries") as caught:
        client.get("pulls/7")
    assert fake.TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "headers", "body", "wait"),
    [
        (429, {"Retry-After": "7"}, {}, 7.0),
        (403, {"Retry-After": "9"}, {"message": "secondary"}, 9.0),
        (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1042"}, {}, 42.0),
        (403, {}, {"message": "You have exceeded a secondary rate limit."}, 60.0),
        (429, {}, {}, 60.0),
    ],
)
def test_a_rate_limit_is_waited_for(
    github: Any, client: Any, status: int, headers: dict[str, str], body: Any, wait: float
) -> None:
    open_pull(github)
    github.faults.append(Fault("GET pulls", status, headers, body))
    assert client.get("pulls/7")["number"] == 7
    assert client.waits == [wait]


def test_a_limit_longer_than_the_job_may_last_is_not_waited_for(github: Any, client: Any) -> None:
    github.faults.append(Fault("GET", 403, {"Retry-After": "3600"}))
    with pytest.raises(ApiError, match="403"):
        client.get("pulls/7")
    assert client.waits == []


@pytest.mark.parametrize("status", [401, 403, 404, 410, 422])
def test_a_plain_no_is_not_asked_twice(github: Any, client: Any, status: int) -> None:
    github.faults.append(Fault("GET", status, times=9))
    with pytest.raises(ApiError, match=str(status)):
        client.get("pulls/7")
    assert len(github.requests) == 1


def test_every_page_is_read_and_no_other_server(github: Any, client: Any) -> None:
    github.page_size = 2
    github.comments = [{"id": n, "issue": 7, "user": {}} for n in range(5)]
    assert [c["id"] for c in client.pages("issues/7/comments")] == [0, 1, 2, 3, 4]
    github.url = "https://elsewhere.invalid"
    with pytest.raises(ApiError, match="another server"):
        list(client.pages("issues/7/comments"))


def test_the_token_goes_nowhere_else(github: Any, client: Any) -> None:
    github.faults.append(Fault("GET", 302, {"Location": "https://elsewhere.invalid/"}))
    with pytest.raises(ApiError, match="302"):
        client.get("pulls/7")
    with pytest.raises(ApiError, match="https alone"):
        Client("a/b", "t", api="http://example.invalid")
    with pytest.raises(ApiError, match="expected owner/name"):
        Client("a/b/../../c", "t")


@pytest.mark.parametrize("fault", [Fault("POST", 502, after=True), Fault("POST", 0, after=True)])
def test_a_creation_whose_answer_is_lost_is_not_doubled(
    github: Any, client: Any, fault: Any
) -> None:
    github.faults.append(fault)
    pull.set_comment(client, 7, message.MARK + "{} -->")
    assert len(github.comments) == 1
    github.faults.append(Fault("POST issues$", fault.status, after=True))
    issues.sync(client, report("regressed", judged("regressed")))
    assert len(github.issues) == 1


def test_a_dry_run_prints_and_sends_nothing(
    github: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(samples.encode(report("regressed", judged("regressed"))))
    command = ["notify", "verdict", "--dry-run", "--pull-request", "7", "--head", HEAD]
    assert main([*command, "--report", str(path)]) == 0
    assert main(["notify", "issues", "--dry-run", "--report", str(path)]) == 0
    printed = capsys.readouterr().out
    for part in (
        f"would POST statuses/{HEAD}",
        "would POST issues/7/comments",
        "would POST issues\n",
    ):
        assert part in printed
    assert github.requests == []


def test_without_a_token_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    assert main(["notify", "verdict", "--pull-request", "7", "--head", HEAD]) == 2
    assert "GITHUB_TOKEN is not set" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["0", HEAD], ["7;ls", HEAD], ["7", HEAD[:8]], ["7", "main"]])
def test_the_commands_take_only_numbers_and_whole_hashes(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["notify", "verdict", "--dry-run", "--pull-request", words[0], "--head", words[1]])


# --- a pull request -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("pass", "success"),
        ("improved", "success"),
        ("regressed", "failure"),
        ("inconclusive", "error"),
        ("not measured", "error"),
        ("something new", "error"),
        (None, "error"),
    ],
)
def test_only_a_pass_is_green(github: Any, client: Any, outcome: str | None, state: str) -> None:
    open_pull(github)
    pull.tell(client, 7, HEAD, report(outcome) if outcome else None)
    assert github.status(HEAD) == state
    assert len(github.comments) == 1


def test_the_comment_is_updated_in_place(github: Any, client: Any, tmp_path: Path) -> None:
    open_pull(github)
    github.comments = [
        {"id": 1, "issue": 7, "user": {"login": "mallory", "type": "User"}, "body": message.MARK},
        {"id": 2, "issue": 8, "user": fake.BOT, "body": message.MARK},
    ]
    table = tmp_path / "t.md"
    for text in ("first", "second"):
        table.write_text(text)
        pull.tell(client, 7, HEAD, report("pass"), table)
    assert len(github.comments) == 3
    assert github.comments[0]["body"] == github.comments[1]["body"] == message.MARK
    assert "second" in github.comments[2]["body"]
    assert "first" not in github.comments[2]["body"]


def test_a_report_about_another_commit_says_nothing_about_this_one(
    github: Any, client: Any
) -> None:
    open_pull(github)
    stolen = {**report("pass", head=OTHER), "pull_request": 8}
    pull.tell(client, 7, HEAD, stolen)
    assert github.status(HEAD) == "error"
    assert github.status(OTHER) == ""
    assert {comment["issue"] for comment in github.comments} == {7}


def test_the_status_is_set_even_where_the_discussion_is_locked(github: Any, client: Any) -> None:
    open_pull(github)
    github.faults.append(Fault("POST issues/7/comments", 403, body={"message": "locked"}))
    with pytest.raises(ApiError, match="locked"):
        pull.tell(client, 7, HEAD, report("regressed"))
    assert github.status(HEAD) == "failure"


@pytest.mark.parametrize(
    ("role", "outcome", "state"),
    [
        ("admin", "regressed", "success"),
        ("maintain", "regressed", "success"),
        ("write", "inconclusive", "success"),
        ("triage", "regressed", "failure"),
        ("read", "regressed", "failure"),
        ("admin", "not measured", "error"),
        ("admin", None, "error"),
    ],
)
def test_acceptance_needs_a_writer_and_something_to_accept(
    github: Any, client: Any, role: str, outcome: str | None, state: str
) -> None:
    open_pull(github)
    github.permissions["someone"] = role
    github.label(7, "perf-accepted", "someone")
    pull.tell(client, 7, HEAD, report(outcome) if outcome else None)
    assert github.status(HEAD) == state
    assert ("set by someone" in github.comments[0]["body"]) == (
        role in ("admin", "maintain", "write")
    )


def test_acceptance_ends_with_the_commit_it_was_given_for(github: Any, client: Any) -> None:
    open_pull(github, head=OTHER)
    github.permissions["someone"] = "admin"
    github.label(7, "perf-accepted", "someone")
    pull.tell(client, 7, HEAD, report("regressed"))
    assert github.status(HEAD) == "failure"


# --- labels -------------------------------------------------------------------------------------


def event(github: Any, action: str, label: str, login: str, **changes: Any) -> dict[str, Any]:
    return {
        "action": action,
        "label": {"name": label},
        "sender": {"login": login},
        "pull_request": {**github.pulls[7], **changes},
    }


def test_a_writers_label_starts_exactly_the_labelled_commit(github: Any, client: Any) -> None:
    open_pull(github)
    github.permissions["someone"] = "write"
    github.label(7, labels.RUN, "someone")
    labels.act(client, event(github, "labeled", labels.RUN, "someone"))
    inputs = {"pull_request": "7", "head": HEAD, "base": BASE}
    assert github.dispatches == [{"workflow": "bench.yml", "ref": "main", "inputs": inputs}]
    assert github.status(HEAD) == "pending"
    assert github.pulls[7]["labels"] == []  # a new commit needs the label again


@pytest.mark.parametrize("role", ["triage", "read"])
@pytest.mark.parametrize("label", ["perf-run", "perf-accepted"])
def test_whoever_may_only_label_starts_and_accepts_nothing(
    github: Any, client: Any, role: str, label: str
) -> None:
    open_pull(github)
    github.permissions["someone"] = role
    github.label(7, label, "someone")
    with pytest.raises(Refused, match="needs write access"):
        labels.act(client, event(github, "labeled", label, "someone"))
    assert github.dispatches == github.statuses == github.pulls[7]["labels"] == []


@pytest.mark.parametrize("case", ["moved since", "pushed just before", "fork gone"])
def test_a_branch_that_moves_around_the_label_is_not_measured(
    github: Any, client: Any, case: str
) -> None:
    made = open_pull(github)
    github.permissions["someone"] = "admin"
    changes: dict[str, Any] = {}
    if case == "moved since":
        changes = {"head": dict(made["head"])}
        github.pulls[7]["head"] = {**made["head"], "sha": OTHER}
    elif case == "pushed just before":
        changes = {"updated_at": "2026-01-01T00:00:30Z"}
    else:
        changes = {"head": {**made["head"], "repo": None}}
    with pytest.raises(Refused, match="branch moved"):
        labels.act(client, event(github, "labeled", labels.RUN, "someone", **changes))
    assert github.dispatches == []


def test_a_push_takes_both_labels_off(github: Any, client: Any) -> None:
    open_pull(github)
    for name in ("perf-run", "perf-accepted", "bug"):
        github.label(7, name, "someone")
    labels.act(client, {**event(github, "synchronize", "", "mallory"), "label": None})
    assert github.pulls[7]["labels"] == [{"name": "bug"}]
    assert github.dispatches == []


def test_accepting_later_turns_it_green_and_taking_back_turns_it_red(
    github: Any, client: Any, tmp_path: Path
) -> None:
    open_pull(github)
    table = tmp_path / "t.md"
    table.write_text("| the | table |\n\n---\n\nmore")
    pull.tell(client, 7, HEAD, report("regressed"), table)
    github.permissions["someone"] = "maintain"
    github.label(7, "perf-accepted", "someone")
    labels.act(client, event(github, "labeled", "perf-accepted", "someone"))
    assert github.status(HEAD) == "success"
    assert "set by someone" in github.comments[0]["body"]
    assert "| the | table |\n\n---\n\nmore" in github.comments[0]["body"]
    github.pulls[7]["labels"].clear()
    labels.act(client, event(github, "unlabeled", "perf-accepted", "someone"))
    assert github.status(HEAD) == "failure"
    assert "set by someone" not in github.comments[0]["body"]


def test_accepting_what_was_never_measured_gives_no_status(github: Any, client: Any) -> None:
    open_pull(github)
    github.permissions["someone"] = "admin"
    github.label(7, "perf-accepted", "someone")
    labels.act(client, event(github, "labeled", "perf-accepted", "someone"))
    assert github.statuses == []


# --- texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<a href='https://evil.invalid'>pass</a>",
        "![x](https://evil.invalid/pixel.png)",
        "[Approved by the maintainers](https://evil.invalid)",
        "[x]: https://evil.invalid",
        "https://evil.invalid www.evil.invalid",
        "@everyone @owner/team",
        "owner/other#1 #12",
        "<!-- hidden -->shown<!-- never closed",
        '<!-- fused-mlp-gate {"head": "x", "outcome": "pass"} -->',
        "<details open onclick=x>",
    ],
)
def test_markup_from_a_pull_request_means_nothing(text: str) -> None:
    shown = message.harmless(text)
    for forbidden in (
        "<!--",
        "<script",
        "<img",
        "<a ",
        "](",
        "![",
        "onclick",
        "https://",
        "@everyone",
    ):
        assert forbidden not in shown
    assert "#1" not in shown
    assert "www.evil" not in shown
    plain = message.plain(text)
    assert not set(plain) & set("<>[]@#`|*!\n")


def test_a_comment_is_capped_and_left_whole(github: Any, client: Any, tmp_path: Path) -> None:
    open_pull(github)
    table = tmp_path / "t.md"
    table.write_text("<details>\n<summary>all</summary>\n\n```\n" + "| é | 1 |\n" * 100_000)
    pull.tell(client, 7, HEAD, report("regressed"), table)
    body = github.comments[0]["body"]
    assert len(body.encode()) <= message.LONGEST
    assert body.count("```") % 2 == 0
    assert body.count("<details>") == body.count("</details>")
    assert "Cut here" in body


def test_a_verdict_in_the_table_does_not_replace_the_record(
    github: Any, client: Any, tmp_path: Path
) -> None:
    open_pull(github)
    table = tmp_path / "t.md"
    table.write_text(f'<!-- fused-mlp-gate {{"head": "{HEAD}", "outcome": "pass"}} -->')
    pull.tell(client, 7, HEAD, report("regressed"), table)
    recorded = message.record(github.comments[0]["body"])
    assert recorded
    assert recorded["outcome"] == "regressed"
    assert message.record("<!-- fused-mlp-gate {broken -->") is None


# --- issues -------------------------------------------------------------------------------------


def test_an_issue_is_opened_kept_and_closed_with_its_regression(github: Any, client: Any) -> None:
    one, two = judged("regressed", "a.track_x"), judged("regressed", "b.track_y")
    issues.sync(client, report("regressed", one, two))
    issues.sync(client, report("regressed", one, two))
    assert [issue["state"] for issue in github.issues] == ["open", "open"]
    # One got worse, of the other nothing is known: that is no recovery.
    worse = {**one, "new": 1.3, "percent": 30.0}
    issues.sync(client, report("regressed", worse, judged("not measured", "b.track_y")))
    assert "1.3" in github.issues[0]["body"]
    assert github.issues[1]["state"] == "open"
    issues.sync(
        client, report("pass", judged("pass", "a.track_x"), judged("improved", "b.track_y"))
    )
    assert [issue["state"] for issue in github.issues] == ["closed", "closed"]
    assert "Recovered at" in github.issues[0]["body"]
    issues.sync(client, report("regressed", one))
    assert [issue["state"] for issue in github.issues] == ["open", "closed"]


def test_what_people_closed_stays_closed_and_what_they_wrote_is_not_ours(
    github: Any, client: Any
) -> None:
    one = judged("regressed")
    issues.sync(client, report("regressed", one))
    github.issues[0].update(state="closed", state_reason="not_planned")
    issues.sync(client, report("regressed", one))
    assert github.issues[0]["state"] == "closed"
    assert len(github.issues) == 1
    github.issues[0]["user"] = {"login": "mallory", "type": "User"}
    issues.sync(client, report("regressed", one))
    assert len(github.issues) == 2


def test_hundreds_at_once_do_not_flood(
    github: Any, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [judged("regressed", f"b{n}.track", percent=float(n)) for n in range(300)]
    issues.sync(client, report("regressed", *many, judged("regressed", "noisy.t", gating=False)))
    assert len(github.issues) == issues.MOST_NEW
    assert "b299" in github.issues[0]["title"]
    assert "300 new regressions" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"outcome": 1, "verdicts": []}', None])
def test_issues_stay_as_they_are_without_a_report(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["notify", "issues", "--dry-run", "--report", str(path)]) == 2
    assert "the gate left no report" in capsys.readouterr().err
