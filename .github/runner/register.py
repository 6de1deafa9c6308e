"""Ask GitHub for one runner that takes one job; run as root before each start of the service.

usage: register.py FILE; writes the configuration that ``run.sh --jitconfig`` takes to FILE

The token that may register runners stays with root (systemd's LoadCredential): the runner's user
gets a configuration that is used up by the first job. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import urllib.error
import urllib.request
from pathlib import Path


def body(name: str, group: int) -> dict[str, object]:
    """What is asked for: a runner of the group, for one job, with its own work folder."""
    labels = ["self-hosted", "gpu", "linux", "x64"]
    return {"name": name, "runner_group_id": group, "labels": labels, "work_folder": "_work"}


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    organization, group = os.environ.get("ORGANIZATION", ""), os.environ.get("RUNNER_GROUP_ID", "")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,39}", organization) or not group.isdigit():
        print("register: set ORGANIZATION and RUNNER_GROUP_ID in /etc/fused-mlp/runner.env")
        return 2
    token = Path(os.environ["CREDENTIALS_DIRECTORY"], "token").read_text().strip()
    api = os.environ.get("GITHUB_API_URL", "https://api.github.com")
    request = urllib.request.Request(
        f"{api}/orgs/{organization}/actions/runners/generate-jitconfig",
        data=json.dumps(body(f"gpu-{secrets.token_hex(4)}", int(group))).encode(),
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {token}",
            "X-GitHub-Api-Version": "2022-11-28",
        },
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            configuration = json.load(answer)["encoded_jit_config"]
    except (OSError, ValueError, KeyError) as error:
        status = error.code if isinstance(error, urllib.error.HTTPError) else type(error).__name__
        print(f"register: GitHub gave no runner ({status}); systemd tries again")
        return 2
    file = Path(arguments[0])
    file.write_text(configuration)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
