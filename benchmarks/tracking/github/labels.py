"""What a label on a pull request sets off.

Only somebody with write access starts a measurement or accepts a regression. The event is GitHub's
own, so its numbers and hashes can be trusted; every text in it may be an attacker's and is used for
nothing.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from ..incoming import Refused
from . import pull as pulls
from .client import ApiError, Client
from .rights import ACCEPTED, full_hash, may_write

RUN = "perf-run"
# A push this close before the label may be one that the person who set it never saw.
SETTLED = 60.0


def read_event(path: Path | None) -> dict[str, Any]:
    """GitHub's event of this run."""
    try:
        event = json.loads(Path(path or "").read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"the event cannot be read ({type(error).__name__})") from None
    if not isinstance(event, dict) or not isinstance(event.get("pull_request"), dict):
        raise Refused("the event is not of a pull request")
    return event


def act(client: Client, event: dict[str, Any]) -> None:
    """Do what the event asks for; Refused where whoever caused it may not ask."""
    pull = event["pull_request"]
    pull_request, head = int(pull["number"]), full_hash(str(pull["head"]["sha"]))
    action, label = event.get("action"), (event.get("label") or {}).get("name")
    if action == "synchronize":
        # Whatever was said about the old commit says nothing about the new one.
        for each in (RUN, ACCEPTED):
            remove(client, pull_request, each)
    elif action == "labeled" and label in (RUN, ACCEPTED):
        if not may_write(client, str(event.get("sender", {}).get("login", ""))):
            remove(client, pull_request, label)
            raise Refused(f"{label} needs write access, which whoever set it lacks: taken off")
        if label == RUN:
            start(client, pull)
        else:
            pulls.republish(client, pull_request, head)
    elif action == "unlabeled" and label == ACCEPTED:
        pulls.republish(client, pull_request, head)


def start(client: Client, pull: dict[str, Any]) -> None:
    """Start bench.yml, as it is on main, for the commit that was labelled and for no other."""
    pull_request, head = int(pull["number"]), full_hash(str(pull["head"]["sha"]))
    base = full_hash(str(pull["base"]["sha"]))
    remove(client, pull_request, RUN)
    now = client.get(f"pulls/{pull_request}", default={"head": {"sha": head}})
    if not settled(pull) or now.get("head", {}).get("sha") != head:
        raise Refused("the branch moved around the time of the label: look again, label again")
    # The status first, so that a run that never starts does not leave an older one standing.
    pulls.set_status(client, head, "pending", "waiting for the runner")
    inputs = {"pull_request": str(pull_request), "head": head, "base": base}
    client.send("POST", "actions/workflows/bench.yml/dispatches", {"ref": "main", "inputs": inputs})
    print(f"bench.yml started for #{pull_request} at {head}")


def settled(pull: dict[str, Any]) -> bool:
    """Whether nothing was pushed to the branch's repository in the minute before the label."""
    head, base = pull["head"].get("repo"), pull["base"].get("repo")
    if not isinstance(head, dict):
        return False  # the fork is gone
    if isinstance(base, dict) and head.get("id") == base.get("id"):
        return True  # everybody who can push here may start a run anyway
    try:
        pushed, labelled = (
            datetime.fromisoformat(str(text)) for text in (head["pushed_at"], pull["updated_at"])
        )
        return (labelled - pushed).total_seconds() >= SETTLED
    except (KeyError, ValueError, TypeError):
        return False


def remove(client: Client, pull_request: int, label: str) -> None:
    """Take a label off; that it is not there is no error."""
    try:
        client.send("DELETE", f"issues/{pull_request}/labels/{label}")
    except ApiError as error:
        if error.status != 404:
            raise
