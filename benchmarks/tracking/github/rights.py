"""Who somebody is, and what they may do: asked of GitHub, never of what they wrote."""

from __future__ import annotations

import argparse
import re
from typing import Any

from .client import Client

ACCEPTED = "perf-accepted"
WRITERS = frozenset({"admin", "maintain", "write"})
BOT = "github-actions[bot]"
LOGIN = re.compile(r"[A-Za-z0-9_-]{1,60}(\[bot\])?")


def number(text: str) -> int:
    """A pull request's number.

    >>> number("12")
    12
    """
    if not re.fullmatch(r"[1-9][0-9]{0,9}", text):
        raise argparse.ArgumentTypeError("expected a pull request's number")
    return int(text)


def full_hash(text: str) -> str:
    """A whole commit hash: a short one may come to mean another commit."""
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError("expected a full commit hash")
    return text


def is_bot(user: Any) -> bool:
    """Whether the workflows' own token wrote something."""
    return isinstance(user, dict) and user.get("login") == BOT and user.get("type") == "Bot"


def may_write(client: Client, login: str) -> bool:
    """Whether somebody has write access; GitHub's triage role may label, but not write."""
    if client.dry_run:
        return True
    if not LOGIN.fullmatch(login):
        return False
    answer = client.get(f"collaborators/{login}/permission", default={})
    return answer.get("permission") in WRITERS


def accepted_by(client: Client, pull_request: int, head: str) -> str:
    """Who accepted the regressions of ``head``; empty where nobody did who may.

    The label counts for the commit it was set on: a push takes it off, and where that has not
    happened yet the pull request's head has moved on.
    """
    pull = client.get(f"pulls/{pull_request}", default={})
    names = {each.get("name") for each in pull.get("labels", []) if isinstance(each, dict)}
    if ACCEPTED not in names or pull.get("head", {}).get("sha") != head:
        return ""
    login = ""
    for event in client.pages(f"issues/{pull_request}/events"):
        label, actor = event.get("label") or {}, event.get("actor") or {}
        if event.get("event") == "labeled" and label.get("name") == ACCEPTED:
            login = str(actor.get("login", ""))
    return login if login and may_write(client, login) else ""
