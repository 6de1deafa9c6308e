"""One issue per regression that is open in main's history."""

from __future__ import annotations

import math
from typing import Any

from . import message, rights
from .client import Client, upsert

LABEL = "perf-regression"
# More at once is one cause, and an issue for each buries the ones people are working on.
MOST_NEW = 10


def sync(client: Client, report: dict[str, Any]) -> None:
    """Open, update and close issues until they say what ``report`` says of main."""
    known: dict[str, dict[str, Any]] = {}
    for issue in client.pages("issues", state="all", labels=LABEL):
        key = message.issue_key(str(issue.get("body", "")))
        if key and rights.is_bot(issue.get("user")) and "pull_request" not in issue:
            known.setdefault(key, issue)
    new = []
    for each in (v for v in report["verdicts"] if isinstance(v, dict)):
        issue = known.get(message.key(each))
        if each.get("outcome") == "regressed" and each.get("gating", True):
            if issue is None:
                new.append(each)
            else:
                _update(client, each, report, issue)
        elif each.get("outcome") in ("pass", "improved") and issue and issue["state"] == "open":
            # Not measured or inconclusive is no recovery.
            _close(client, each, report, issue)
    for each in sorted(new, key=_change, reverse=True)[:MOST_NEW]:
        _open(client, each, report)
    if len(new) > MOST_NEW:
        print(f"{len(new)} new regressions at once: issues for the worst {MOST_NEW} alone")


def _change(each: dict[str, Any]) -> float:
    percent = each.get("percent")
    known = isinstance(percent, (int, float)) and math.isfinite(percent)
    return float(percent) if known and percent is not None else 0.0


def _open(client: Client, each: dict[str, Any], report: dict[str, Any]) -> None:
    key, body = message.key(each), message.issue(each, report)

    def find() -> Any:
        listed = client.pages("issues", state="open", labels=LABEL)
        return next((i for i in listed if message.issue_key(str(i.get("body", ""))) == key), None)

    new = {"title": message.title(each), "body": body, "labels": [LABEL]}
    upsert(
        find,
        lambda: client.send("POST", "issues", new, repeatable=False),
        lambda found: client.send("PATCH", f"issues/{found['number']}", {"body": body}),
    )


def _update(
    client: Client, each: dict[str, Any], report: dict[str, Any], issue: dict[str, Any]
) -> None:
    closed = issue["state"] == "closed"
    if closed and issue.get("state_reason") == "not_planned":
        return  # A person decided to live with it.
    body = message.issue(each, report)
    if closed or issue.get("body") != body:
        change = {"body": body, **({"state": "open"} if closed else {})}
        client.send("PATCH", f"issues/{issue['number']}", change)


def _close(
    client: Client, each: dict[str, Any], report: dict[str, Any], issue: dict[str, Any]
) -> None:
    # What closed it goes into the body, in the same repeatable call that closes it.
    body = f"{issue.get('body', '')}\n\n{message.recovered(each, report)}"
    change = {"state": "closed", "state_reason": "completed", "body": body}
    client.send("PATCH", f"issues/{issue['number']}", change)
