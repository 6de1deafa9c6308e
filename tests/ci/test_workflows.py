"""The workflow files hold what their checkers ask: schema, zizmor, GitHub's language server,
shellcheck.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from . import actions
from .conftest import ROOT, tool

# Each release's commit, seen in several public repositories. Another hash is another program.
PINNED = {
    "actions/checkout": ("3d3c42e5aac5ba805825da76410c181273ba90b1", "v7.0.1"),
    "actions/setup-python": ("5fda3b95a4ea91299a34e894583c3862153e4b97", "v7.0.0"),
    "actions/upload-artifact": ("043fb46d1a93c77aae656e7c1c64a875d1fc6a0a", "v7.0.1"),
    "actions/download-artifact": ("3e5f45b2cfb9172054b4087a40e8e0b5a5461e7c", "v8.0.1"),
    "actions/upload-pages-artifact": ("fc324d3547104276b827a68afc52ff2a11cc49c9", "v5.0.0"),
    "actions/deploy-pages": ("cd2ce8fcbc39b97be8ca5fce6e763baed58fa128", "v5.0.0"),
    "pypa/gh-action-pypi-publish": ("dc37677b2e1c63e2034f94d8a5b11f265b73ba33", "v1.14.2"),
}
FILES = sorted(actions.WORKFLOWS.glob("*.yml"))
USES = re.compile(r"^\s*(?:- )?uses: ([\w/.-]+)@([0-9a-f]{40}) # (v[\d.]+)$")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_action_is_pinned_by_its_commit_with_its_version_beside_it() -> None:
    found = [
        (path.name, line)
        for path in FILES
        for line in path.read_text().splitlines()
        if re.match(r"\s*(- )?uses:", line)
    ]
    assert found
    for name, line in found:
        match = USES.match(line)
        assert match, f"{name}: {line.strip()}"
        assert PINNED[match[1]] == (match[2], match[3]), f"{name}: {line.strip()}"


def test_schemas() -> None:
    checker = tool("check-jsonschema")
    done = run(checker, "--builtin-schema", "vendor.github-workflows", *map(str, FILES))
    assert done.returncode == 0, done.stdout + done.stderr
    dependabot = str(ROOT / ".github" / "dependabot.yml")
    done = run(checker, "--builtin-schema", "vendor.dependabot", dependabot)
    assert done.returncode == 0, done.stdout + done.stderr


def zizmor(*paths: Path) -> list[dict[str, Any]]:
    done = run(
        *(tool("zizmor"), "--offline", "--no-progress", "--format=json"),
        *("--persona=auditor", "--no-exit-codes", *map(str, paths)),
    )
    # Whether a job has a title is the one thing of the strictest persona that is not about safety.
    return [f for f in json.loads(done.stdout) if f["ident"] != "anonymous-definition"]


def test_zizmor_finds_nothing_that_is_not_justified_in_place() -> None:
    found = zizmor(ROOT / ".github")
    assert [f["ident"] for f in found if not f["ignored"]] == []
    ignored = [
        line for path in FILES for line in path.read_text().splitlines() if "zizmor: ignore" in line
    ]
    assert len(ignored) == 2
    for line in ignored:
        assert re.search(r"# zizmor: ignore\[[a-z-]+\] \S+ \S+ \S+", line), (
            f"without a reason: {line}"
        )


def test_zizmor_is_awake(tmp_path: Path) -> None:
    path = tmp_path / ".github" / "workflows" / "bad.yml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "on: pull_request_target\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    steps:\n"
        "      - uses: actions/checkout@v4\n"
        "      - run: echo ${{ github.event.pull_request.title }}\n"
    )
    found = {f["ident"] for f in zizmor(path)}
    assert {"template-injection", "dangerous-triggers", "unpinned-uses"} <= found


class LanguageServer:
    """GitHub's own check of workflow files, spoken to as an editor does."""

    def __init__(self, command: str) -> None:
        self.process = subprocess.Popen(
            [command, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout
        size = 0
        while line := self.process.stdout.readline().strip():
            key, value = line.split(b":")
            size = int(value) if key.lower() == b"content-length" else size
        return json.loads(self.process.stdout.read(size))

    def diagnose(self, uri: str, text: str) -> list[str]:
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self.send(method="textDocument/didOpen", params={"textDocument": document})
        while True:
            answer = self.receive()
            if answer.get("method") == "textDocument/publishDiagnostics":
                return [each["message"] for each in answer["params"]["diagnostics"]]


def test_the_language_server_of_github_has_nothing_to_say() -> None:
    server = LanguageServer(tool("actions-languageserver"))
    try:
        server.send(id=1, method="initialize", params={"processId": None, "capabilities": {}})
        server.receive()
        server.send(method="initialized", params={})
        for path in FILES:
            assert server.diagnose(path.as_uri(), path.read_text()) == [], path.name
        wrong = FILES[0].read_text().replace("runs-on:", "runs_on:", 1)
        assert server.diagnose("file:///w/.github/workflows/wrong.yml", wrong)
    finally:
        server.process.kill()
        server.process.communicate()


def test_shellcheck() -> None:
    scripts = [*(ROOT / ".github").rglob("*.sh"), ROOT / ".ci" / "run"]
    assert len(scripts) > 5
    done = run(tool("shellcheck"), "--shell=bash", *map(str, scripts))
    assert done.returncode == 0, done.stdout
    checked = tool("shellcheck")
    for name in actions.names():
        for job in actions.workflow(name)["jobs"].values():
            for step in job.get("steps", []):
                if "run" in step:
                    text = step["run"]
                    done = subprocess.run(
                        [checked, "--shell=bash", "-"],
                        input=text,
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    assert done.returncode == 0, f"{name}: {text}\n{done.stdout}"


def test_every_script_that_a_workflow_runs_is_there_and_runnable() -> None:
    for path in FILES:
        for script in re.findall(r"\.github/[\w/.-]+\.(?:sh|py)", path.read_text()):
            assert (ROOT / script).is_file(), f"{path.name}: {script}"
            if script.endswith(".sh"):
                assert (ROOT / script).stat().st_mode & 0o111, script


@pytest.mark.parametrize("name", ["record", "report", "workflows"])
def test_install_names_what_each_job_needs(name: str, tmp_path: Path) -> None:
    for command in ("python", "npm"):
        (tmp_path / command).write_text(f'#!/bin/sh\necho "{command} $*"\n')
        (tmp_path / command).chmod(0o755)
    done = subprocess.run(
        ["bash", ".github/scripts/install.sh", name],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-c constraints.txt" in done.stdout
    assert ("torch" in done.stdout) is False
    assert run("bash", ".github/scripts/install.sh", "all").returncode == 2
