"""The few calls to GitHub's REST API that the CI makes, each safe to repeat."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

TRIES = 6
# A rate limit resets within the hour; a job that waits longer holds its place for nothing.
LONGEST_WAIT = 900.0
TIMEOUT = 30.0
MOST_PAGES = 50
LARGEST_ANSWER = 32 * 2**20


class ApiError(RuntimeError):
    """GitHub answered no, or not at all; ``status`` is 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Uncertain(ApiError):
    """A request that must not be made twice failed in a way that may have worked: look before
    again.
    """


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    # urllib would carry the token along to wherever it is sent.
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Client:
    """One repository's API. ``dry_run`` prints what would be sent and reads nothing.

    Raises ApiError after ``TRIES`` tries or at the first answer that another try cannot change.
    """

    def __init__(
        self,
        repository: str,
        token: str,
        *,
        api: str = "https://api.github.com",
        dry_run: bool = False,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", repository):
            raise ApiError(f"GITHUB_REPOSITORY is {repository!r}, expected owner/name")
        address = urllib.parse.urlsplit(api)
        if address.scheme != "https" and address.hostname not in ("127.0.0.1", "localhost"):
            raise ApiError(f"the token is sent over https alone, not to {address.scheme}://")
        self.repository, self.dry_run = repository, dry_run
        self._api, self._token = api.rstrip("/"), token
        self._sleep, self._now = sleep, now
        self._opener = urllib.request.build_opener(_NoRedirect)

    @classmethod
    def from_environment(cls, *, dry_run: bool = False) -> Client:
        """The client of the job this runs in (GITHUB_REPOSITORY, GITHUB_TOKEN, GITHUB_API_URL)."""
        token = os.environ.get("GITHUB_TOKEN", "")
        if not token and not dry_run:
            raise ApiError("GITHUB_TOKEN is not set; give the step a token or use --dry-run")
        return cls(
            os.environ.get("GITHUB_REPOSITORY", "owner/name" if dry_run else ""),
            token,
            api=os.environ.get("GITHUB_API_URL", "https://api.github.com"),
            dry_run=dry_run,
        )

    def get(self, path: str, default: Any = None, **query: Any) -> Any:
        """The answer to one GET below /repos/owner/name; ``default`` where there is no such
        thing.
        """
        if self.dry_run:
            return default
        try:
            return self._request("GET", self._url(path, query))[0]
        except ApiError as error:
            if error.status == 404 and default is not None:
                return default
            raise

    def pages(self, path: str, **query: Any) -> Iterator[Any]:
        """Every entry of a list, page after page."""
        if self.dry_run:
            return
        url: str | None = self._url(path, {"per_page": 100, **query})
        for _ in range(MOST_PAGES):
            entries, headers = self._request("GET", url or "")
            yield from entries if isinstance(entries, list) else []
            found = re.search(r'<([^>]+)>;\s*rel="next"', headers.get("Link") or "")
            url = found[1] if found else None
            if url is None:
                return
            if not url.startswith(self._api + "/"):
                raise ApiError("the next page lies on another server: not followed")

    def send(self, method: str, path: str, body: Any = None, *, repeatable: bool = True) -> Any:
        """Change something. Not ``repeatable``: Uncertain rather than a second try that may
        double.
        """
        if self.dry_run:
            print(f"would {method} {path}")
            if body is not None:
                print(json.dumps(body, indent=2))
            return {}
        return self._request(method, self._url(path), body, repeatable=repeatable)[0]

    def _url(self, path: str, query: dict[str, Any] | None = None) -> str:
        asked = "?" + urllib.parse.urlencode(query) if query else ""
        return f"{self._api}/repos/{self.repository}/{path.lstrip('/')}{asked}"

    def _request(
        self, method: str, url: str, body: Any = None, *, repeatable: bool = True
    ) -> tuple[Any, Any]:
        what = f"{method} {urllib.parse.urlsplit(url).path}"
        waited = 0.0
        for attempt in range(1, TRIES + 1):
            try:
                return self._once(method, url, body)
            except urllib.error.HTTPError as error:
                problem, wait = self._problem(error), self._wait(error, attempt)
                if wait is None:
                    raise ApiError(f"{what}: {problem}", error.code) from None
                if error.code >= 500 and not repeatable:
                    raise Uncertain(f"{what}: {problem}", error.code) from None
                status = error.code
            except (OSError, http.client.HTTPException) as error:
                problem, status = f"no answer ({type(error).__name__})", 0
                if not repeatable and not _refused(error):
                    raise Uncertain(f"{what}: {problem}") from None
                wait = self._backoff(attempt)
            if attempt == TRIES or waited + wait > LONGEST_WAIT:
                raise ApiError(f"{what}: {problem}, after {attempt} tries", status)
            waited += wait
            self._sleep(wait)
        raise AssertionError("unreachable")

    def _once(self, method: str, url: str, body: Any) -> tuple[Any, Any]:
        headers = {
            "Accept": "application/vnd.github+json",
            "X-GitHub-Api-Version": "2022-11-28",
            "User-Agent": "fused_mlp-ci",
            "Authorization": f"Bearer {self._token}",
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        with self._opener.open(request, timeout=TIMEOUT) as answer:
            content = answer.read(LARGEST_ANSWER + 1)
            if len(content) > LARGEST_ANSWER:
                raise ApiError(f"an answer of more than {LARGEST_ANSWER >> 20} MB")
            try:
                return (json.loads(content) if content.strip() else {}), answer.headers
            except ValueError:
                # A proxy's page in place of the API's answer: like a server that is away.
                raise http.client.HTTPException("not JSON") from None

    def _problem(self, error: urllib.error.HTTPError) -> str:
        try:
            message = json.loads(error.read(65536)).get("message", "")
        except (ValueError, AttributeError, OSError):
            message = ""
        error.limited = "rate limit" in str(message).lower()  # type: ignore[attr-defined]
        return f"{error.code} {str(message or error.reason)[:200]}"

    def _wait(self, error: urllib.error.HTTPError, attempt: int) -> float | None:
        """Seconds until another try can do better; None where it never will."""
        headers = error.headers
        if error.code >= 500:
            return self._backoff(attempt)
        if error.code not in (403, 429):
            return None
        if (after := headers.get("Retry-After", "")).isdigit():
            return float(after)
        if headers.get("X-RateLimit-Remaining") == "0":
            reset = headers.get("X-RateLimit-Reset", "")
            return max(1.0, float(reset) - self._now()) if reset.isdigit() else 60.0
        # GitHub's secondary limit names no time; its documents ask for a minute at least.
        limited = error.code == 429 or getattr(error, "limited", False)
        return 60.0 * attempt if limited else None

    def _backoff(self, attempt: int) -> float:
        return 2.0**attempt * random.uniform(0.5, 1.0)


def _refused(error: BaseException) -> bool:
    # Nothing reached the server, so nothing can have been done there.
    return isinstance(getattr(error, "reason", error), ConnectionRefusedError)


def upsert(find: Callable[[], Any], create: Callable[[], Any], update: Callable[[Any], Any]) -> Any:
    """Update what ``find`` finds, else create it; after an uncertain creation it looks again
    first.
    """
    last: Uncertain | None = None
    for _ in range(TRIES):
        found = find()
        if found is not None:
            return update(found)
        try:
            return create()
        except Uncertain as error:
            last = error
    assert last is not None
    raise last
