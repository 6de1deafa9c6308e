"""GitHub's rules of which jobs run, with which rights, computed from the workflow files themselves.

The part of the expression language and of the event rules that these workflows use; anything else
is an error here, so that a test never passes on a rule that it did not understand.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

WORKFLOWS = Path(__file__).resolve().parents[2] / ".github" / "workflows"


@cache
def workflow(name: str) -> dict[str, Any]:
    """A workflow file; ``on`` under its own name (YAML 1.1 reads it as true)."""
    data = yaml.safe_load((WORKFLOWS / name).read_text())
    data["on"] = data.pop(True, None) or data.pop("on")
    if isinstance(data["on"], str):
        data["on"] = {data["on"]: None}
    return data


def names() -> list[str]:
    return sorted(path.name for path in WORKFLOWS.glob("*.yml"))


@dataclass(frozen=True)
class Event:
    """Something that happened, as far as it decides what runs."""

    name: str
    action: str = ""
    label: str = ""
    ref: str = "refs/heads/main"
    paths: tuple[str, ...] = ("fused_mlp/ops.py",)
    inputs: dict[str, str] = field(default_factory=dict)
    from_fork: bool = False  # a pull request of somebody without write access
    in_fork: bool = False  # happened in a fork of the repository
    results: dict[str, str] = field(default_factory=dict)  # jobs that do not end in success

    def context(self) -> dict[str, Any]:
        event: dict[str, Any] = {
            "action": self.action,
            "label": {"name": self.label},
            "repository": {"fork": self.in_fork},
            "pull_request": {"number": 7, "head": {"sha": "head"}, "base": {"sha": "base"}},
        }
        if not self.name.startswith("pull_request"):
            del event["pull_request"], event["label"]
        github = {"event_name": self.name, "ref": self.ref, "event": event, "base_ref": "main"}
        return {"github": github, "inputs": self.inputs, "vars": {}, "needs": {}}


def triggered(data: dict[str, Any], event: Event) -> bool:
    """Whether the event starts the workflow at all."""
    if event.name not in data["on"]:
        return False
    rule = data["on"][event.name] or {}
    if event.name == "push":
        kind, _, short = event.ref.removeprefix("refs/").partition("/")
        wanted = rule.get("branches" if kind == "heads" else "tags")
        other = rule.get("tags" if kind == "heads" else "branches")
        if wanted is None:
            return other is None
        if not any(_matches(short, pattern) for pattern in wanted):
            return False
        paths = rule.get("paths")
        return paths is None or any(_matches(p, pattern) for p in event.paths for pattern in paths)
    if event.name.startswith("pull_request"):
        types = rule.get("types", ["opened", "synchronize", "reopened"])
        return event.action in types
    return True


def _matches(text: str, pattern: str) -> bool:
    # GitHub's `*` stops at a slash and `+` repeats, fnmatch's do neither.
    special = re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    special = re.sub(
        r"\\\[(.*?)\\\]\\?(\+?)", lambda m: f"[{m[1].replace(chr(92), '')}]{m[2]}", special
    )
    return bool(re.fullmatch(special, text)) or fnmatch.fnmatchcase(text, pattern)


def rights(data: dict[str, Any], job: dict[str, Any], event: Event) -> dict[str, str]:
    """The token's rights in a job; a fork's pull request never writes, whatever the file says."""
    declared = job.get("permissions", data.get("permissions"))
    assert isinstance(declared, dict), "rights that are not listed are the repository's default"
    if event.name == "pull_request" and event.from_fork:
        return {scope: "read" for scope, right in declared.items() if right != "none"}
    return dict(declared)


def jobs(name: str, event: Event) -> dict[str, dict[str, str]]:
    """The jobs of a workflow that an event runs, each with its token's rights."""
    data = workflow(name)
    if not triggered(data, event):
        return {}
    context, done = event.context(), {}
    running: dict[str, dict[str, str]] = {}
    left = dict(data["jobs"])
    while left:
        ready = [j for j, job in left.items() if all(n in done for n in needs(job))]
        assert ready, f"{name}: jobs that wait for each other"
        for job_name in ready:
            job = left.pop(job_name)
            before = [done[need] for need in needs(job)]
            context["needs"] = {n: {"result": done[n], "outputs": {}} for n in needs(job)}
            if _runs(job, context, before):
                running[job_name] = rights(data, job, event)
                done[job_name] = event.results.get(job_name, "success")
            else:
                done[job_name] = "skipped"
    return running


def needs(job: dict[str, Any]) -> list[str]:
    listed = job.get("needs", [])
    return [listed] if isinstance(listed, str) else listed


def _runs(job: dict[str, Any], context: dict[str, Any], before: list[str]) -> bool:
    text = str(job.get("if", "success()")).strip()
    text = text.removeprefix("${{").removesuffix("}}").strip()
    if not re.search(r"\b(always|cancelled|failure|success)\(\)", text):
        text = f"success() && ({text})"
    functions = {
        "always": lambda: True,
        "cancelled": lambda: False,
        "success": lambda: all(result == "success" for result in before),
        "failure": lambda: "failure" in before,
    }
    return bool(evaluate(text, context, functions))


_TOKEN = re.compile(r"\s*('(?:[^']|'')*'|\d+|[A-Za-z_][\w.-]*|&&|\|\||==|!=|[!(),])")


def evaluate(text: str, context: dict[str, Any], functions: dict[str, Any] | None = None) -> Any:
    """The value of an expression.

    >>> evaluate("!a.b && (c == 'X' || d)", {"a": {"b": False}, "c": "x", "d": None})
    True
    """
    tokens, place = [], 0
    while place < len(text.rstrip()):
        found = _TOKEN.match(text, place)
        if not found:
            raise ValueError(f"not understood: {text[place:]}")
        tokens.append(found[1])
        place = found.end()
    tokens.append("")

    def take(*expected: str) -> str:
        if expected and tokens[0] not in expected:
            raise ValueError(f"expected {expected}, found {tokens[0]!r}")
        return tokens.pop(0)

    def either() -> Any:
        value = both()
        while tokens[0] == "||":
            take()
            other = both()
            value = value or other
        return value

    def both() -> Any:
        value = compared()
        while tokens[0] == "&&":
            take()
            other = compared()
            value = value and other
        return value

    def compared() -> Any:
        value = single()
        while tokens[0] in ("==", "!="):
            same = take() == "=="
            value = _equal(value, single()) == same
        return value

    def single() -> Any:
        if tokens[0] == "!":
            take()
            return not single()
        if tokens[0] == "(":
            take()
            value = either()
            take(")")
            return value
        token = take()
        if token.startswith("'"):
            return token[1:-1].replace("''", "'")
        if token.isdigit():
            return int(token)
        if tokens[0] == "(":
            take()
            take(")")
            return (functions or {})[token]()
        value: Any = context
        for part in token.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    value = either()
    take("")
    return value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, str) and isinstance(right, str):
        return left.lower() == right.lower()  # GitHub ignores case
    return left == right
