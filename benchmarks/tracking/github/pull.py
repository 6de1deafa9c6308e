"""A pull request's one comment and its status ``perf/gate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import message, rights
from .client import Client, upsert

STATUS = "perf/gate"
BROKEN = "broken"


def set_status(client: Client, head: str, state: str, text: str, url: str = "") -> None:
    """The commit status ``perf/gate``; the newest one of a name is the one that counts."""
    body = {"state": state, "context": STATUS, "description": message.plain(text, 140)}
    client.send("POST", f"statuses/{head}", {**body, **({"target_url": url} if url else {})})


def set_comment(client: Client, number: int, body: str) -> None:
    """The pull request's one comment of ours, written anew or updated in place."""
    upsert(
        lambda: find_comment(client, number),
        lambda: client.send("POST", f"issues/{number}/comments", {"body": body}, repeatable=False),
        lambda found: client.send("PATCH", f"issues/comments/{found['id']}", {"body": body}),
    )


def find_comment(client: Client, number: int) -> Any:
    """Our comment, told by its mark and by its author: anyone may write the mark."""
    for comment in client.pages(f"issues/{number}/comments"):
        if rights.is_bot(comment.get("user")) and message.MARK in str(comment.get("body", "")):
            return comment
    return None


def tell(
    client: Client,
    pull_request: int,
    head: str,
    report: dict[str, Any] | None,
    markdown: Path | None = None,
    url: str = "",
) -> None:
    """Publish a verdict (None: there is none, the run broke) on ``head``.

    Number and commit are the run's own inputs. What the report says of either is only compared.
    """
    if report and report.get("head") not in (None, head):
        report = None
    table = ""
    if report and markdown and markdown.is_file():
        with markdown.open("rb") as file:
            table = file.read(4 * message.LONGEST).decode("utf-8", "replace")
    record = {
        "head": head,
        "outcome": report["outcome"] if report else BROKEN,
        "accepted_by": rights.accepted_by(client, pull_request, head),
        "run": url,
    }
    # The status first: it decides, and a comment too long or a locked discussion must not hide it.
    publish(client, record)
    set_comment(client, pull_request, message.comment(record, table))


def publish(client: Client, record: dict[str, Any]) -> None:
    """The status that a recorded verdict amounts to."""
    state, text = message.state(record)
    set_status(client, record["head"], state, text, record.get("run", ""))
    print(f"{STATUS}: {state}, {text}")


def republish(client: Client, pull_request: int, head: str) -> None:
    """State the recorded verdict anew, with or without the acceptance that just came or went."""
    comment = find_comment(client, pull_request)
    record = message.record(str(comment.get("body", ""))) if comment else None
    if comment is None or record is None or record["head"] != head:
        print("nothing was measured for this commit yet; the label is looked at when it is")
        return
    record["accepted_by"] = rights.accepted_by(client, pull_request, head)
    publish(client, record)
    body = message.with_record(str(comment["body"]), record)
    client.send("PATCH", f"issues/comments/{comment['id']}", {"body": body})
