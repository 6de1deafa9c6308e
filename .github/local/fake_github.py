"""GitHub's REST API as far as the CI uses it, on loopback: keeps what is sent, fails when told to.

Answers have the fields, headers and status codes that GitHub documents for these calls.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

BOT = {"login": "github-actions[bot]", "type": "Bot"}
TOKEN = "fake-token"
REPOSITORY = "owner/name"


@dataclass
class Fault:
    """What happens to the next ``times`` requests that match, in place of an answer.

    ``status`` 0 drops the connection; ``after`` lets the request take effect first.
    """

    match: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    times: int = 1
    after: bool = False


@dataclass
class State:
    comments: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    issues: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    dispatches: list[dict[str, Any]] = field(default_factory=list)
    pulls: dict[int, dict[str, Any]] = field(default_factory=dict)
    permissions: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    page_size: int = 100
    url: str = ""

    def label(self, number: int, name: str, login: str) -> None:
        """Somebody sets a label, as on the page of a pull request."""
        self.pulls[number]["labels"].append({"name": name})
        event = {"event": "labeled", "label": {"name": name}, "actor": {"login": login}}
        self.events.append({**event, "issue": number})

    def status(self, sha: str) -> str:
        """The state that counts: the newest of its commit."""
        return next((s["state"] for s in reversed(self.statuses) if s["sha"] == sha), "")


class _Handler(BaseHTTPRequestHandler):
    state: State
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def _do(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        path = address.path.removeprefix(f"/repos/{REPOSITORY}/")
        line = f"{self.command} {path}"
        self.state.requests.append(line)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"message": "Bad credentials"})
        for fault in self.state.faults:
            if fault.times and re.search(fault.match, line):
                fault.times -= 1
                if fault.after:
                    self._route(path, query, body)
                if not fault.status:
                    self.close_connection = True
                    return self.connection.close()
                return self._answer(fault.status, fault.body or {"message": "no"}, fault.headers)
        return self._answer(*self._route(path, query, body))

    do_GET = do_POST = do_PATCH = do_DELETE = _do

    def _route(
        self, path: str, query: dict[str, str], body: Any
    ) -> tuple[int, Any, dict[str, str]]:
        state, call = self.state, f"{self.command} {path}"
        nothing: dict[str, str] = {}
        if found := re.fullmatch(r"GET issues/(\d+)/comments", call):
            listed = [c for c in state.comments if c["issue"] == int(found[1])]
            return self._page(path, query, listed)
        if found := re.fullmatch(r"POST issues/(\d+)/comments", call):
            made = {"id": len(state.comments) + 1, "issue": int(found[1]), "user": BOT, **body}
            state.comments.append(made)
            return 201, made, nothing
        if found := re.fullmatch(r"PATCH issues/comments/(\d+)", call):
            made = state.comments[int(found[1]) - 1]
            made.update(body)
            return 200, made, nothing
        if found := re.fullmatch(r"POST statuses/([0-9a-f]{40})", call):
            state.statuses.append({"sha": found[1], **body})
            return 201, body, nothing
        if found := re.fullmatch(r"GET pulls/(\d+)", call):
            pull = state.pulls.get(int(found[1]))
            return (200, pull, nothing) if pull else (404, {"message": "Not Found"}, nothing)
        if found := re.fullmatch(r"GET issues/(\d+)/events", call):
            return self._page(path, query, [e for e in state.events if e["issue"] == int(found[1])])
        if found := re.fullmatch(r"GET collaborators/([^/]+)/permission", call):
            role = state.permissions.get(found[1], "read")
            rounded = {"maintain": "write", "triage": "read"}.get(role, role)
            return 200, {"permission": rounded, "role_name": role}, nothing
        if found := re.fullmatch(r"DELETE issues/(\d+)/labels/([^/]+)", call):
            labels = state.pulls[int(found[1])]["labels"]
            if {"name": found[2]} not in labels:
                return 404, {"message": "Label does not exist"}, nothing
            labels.remove({"name": found[2]})
            return 200, labels, nothing
        if call == "GET issues":
            wanted = [
                i
                for i in state.issues
                if query.get("state") in ("all", i["state"])
                and {"name": query.get("labels")} in i["labels"]
            ]
            return self._page(path, query, wanted)
        if call == "POST issues":
            labels = [{"name": name} for name in body["labels"]]
            made = {**body, "number": len(state.issues) + 1, "state": "open", "user": BOT}
            state.issues.append({**made, "labels": labels})
            return 201, made, nothing
        if found := re.fullmatch(r"PATCH issues/(\d+)", call):
            made = state.issues[int(found[1]) - 1]
            made.update(body)
            return 200, made, nothing
        if re.fullmatch(r"POST actions/workflows/[a-z-]+\.yml/dispatches", call):
            state.dispatches.append({"workflow": path.split("/")[2], **body})
            return 204, None, nothing
        return 404, {"message": "Not Found"}, nothing

    def _page(
        self, path: str, query: dict[str, str], listed: list[Any]
    ) -> tuple[int, Any, dict[str, str]]:
        size = min(int(query.get("per_page", 30)), self.state.page_size)
        page = int(query.get("page", 1))
        rest = {k: v for k, v in query.items() if k != "page"}
        headers = {}
        if page * size < len(listed):
            asked = "&".join(f"{k}={v}" for k, v in {**rest, "page": page + 1}.items())
            headers["Link"] = f'<{self.state.url}/repos/{REPOSITORY}/{path}?{asked}>; rel="next"'
        return 200, listed[(page - 1) * size : page * size], headers

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serve() -> Iterator[State]:
    """The server while the block runs; its state is what was sent to it."""
    state = State()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
