"""One branch of a remote repository as a folder of files, read and written without any working
tree.
"""

from __future__ import annotations

import base64
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .incoming import Tree

TOKEN = "HISTORY_TOKEN"
TIMEOUT = 600.0


class GitError(RuntimeError):
    """Git did not do what was asked; the message is its own last line, without credentials."""


def git(
    arguments: list[str],
    folder: Path,
    *,
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
) -> str:
    """Git's output as text; GitError with its complaint otherwise."""
    return _run(arguments, folder, stdin, env).decode("utf-8", "replace")


def _run(
    arguments: list[str], folder: Path, stdin: bytes | None, env: dict[str, str] | None
) -> bytes:
    # A question for a password would wait for ever on a runner; hooks and aliases are not ours to
    # run.
    quiet = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **quiet, **(env or {})},
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]}: no answer in {TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = [
            line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()
        ]
        telling = [line for line in lines if not line.startswith("hint:")]
        raise GitError(f"git {arguments[0]}: {(telling or lines or ['failed'])[-1].strip()}")
    return done.stdout


def remote_url(root: Path, name: str = "origin") -> str:
    """The address of the checkout's remote ``name``."""
    return git(["remote", "get-url", name], root).strip()


def credentials() -> dict[str, str]:
    """Settings that let git push with the token in the environment, for its own server alone.

    They travel in the environment: on a command line every process of the machine could read them,
    and in .git/config whatever runs next could.
    """
    token = os.environ.get(TOKEN)
    if not token:
        return {}
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    basic = base64.b64encode(f"x-access-token:{token}".encode()).decode()
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"http.{server}/.extraheader",
        "GIT_CONFIG_VALUE_0": f"AUTHORIZATION: basic {basic}",
    }


class Store:
    """The newest state of ``branch`` at ``remote``, in a private repository that is thrown away."""

    def __init__(self, remote: str, branch: str, folder: Path) -> None:
        # Git runs in the private folder, where a relative path would mean something else.
        self.remote = str(Path(remote).resolve()) if Path(remote).exists() else remote
        self.branch, self.folder = branch, folder
        self.tip: str | None = None
        self._env = credentials()
        # No templates: a hook in the user's template folder would run with the token in its
        # environment.
        self._git(["init", "--quiet", "--bare", "--template="])

    @classmethod
    @contextmanager
    def open(cls, remote: str, branch: str) -> Iterator[Store]:
        with tempfile.TemporaryDirectory(prefix="history-") as folder:
            yield cls(remote, branch, Path(folder))

    def _git(
        self, arguments: list[str], stdin: bytes | None = None, env: dict[str, str] | None = None
    ) -> str:
        return git(arguments, self.folder, stdin=stdin, env={**self._env, **(env or {})})

    def fetch(self) -> str | None:
        """The branch's newest commit, fetched without its past; None where there is no such
        branch.
        """
        ref = f"refs/heads/{self.branch}"
        if not self._git(["ls-remote", "--", self.remote, ref]).strip():
            self.tip = None
            return None
        self._git(["fetch", "--quiet", "--no-tags", "--depth=1", self.remote, f"+{ref}:refs/tip"])
        self.tip = self._git(["rev-parse", "refs/tip"]).strip()
        return self.tip

    def _entries(self) -> dict[str, str]:
        if self.tip is None:
            return {}
        listed = self._git(["ls-tree", "-r", "-z", self.tip])
        entries = {}
        for line in filter(None, listed.split("\0")):
            details, name = line.split("\t", 1)
            mode, kind, blob = details.split()
            if kind == "blob" and mode in ("100644", "100755"):
                entries[name] = blob
        return entries

    def files(self) -> Tree:
        """Every plain file of the branch."""
        entries = self._entries()
        asked = "".join(f"{blob}\n" for blob in entries.values()).encode()
        answer = _run(["cat-file", "--batch"], self.folder, asked, self._env)
        tree: Tree = {}
        place = 0
        for name in entries:
            end = answer.index(b"\n", place)
            size = int(answer[place:end].split()[2])
            tree[name] = answer[end + 1 : end + 1 + size]
            place = end + 1 + size + 1
        return tree

    def read(self, name: str) -> bytes | None:
        """One file of the branch, or None."""
        if self.tip is None or not self._git(["ls-tree", self.tip, "--", name]).strip():
            return None
        return _run(["cat-file", "blob", f"{self.tip}:{name}"], self.folder, None, self._env)

    def push(self, files: Tree, message: str) -> str:
        """One new commit with ``files`` over the tip, pushed as a fast-forward; GitError if
        rejected.
        """
        index = {"GIT_INDEX_FILE": str(self.folder / "index.new")}
        if self.tip:
            self._git(["read-tree", self.tip], env=index)
        lines = []
        for name, body in files.items():
            blob = self._git(["hash-object", "-w", "--stdin"], body).strip()
            lines.append(f"100644 {blob}\t{name}\n")
        self._git(["update-index", "--add", "--index-info"], "".join(lines).encode(), env=index)
        tree = self._git(["write-tree"], env=index).strip()
        author = {
            f"GIT_{role}_{field}": value
            for role in ("AUTHOR", "COMMITTER")
            for field, value in (("NAME", "fused_mlp history"), ("EMAIL", "history@invalid"))
        }
        parent = ["-p", self.tip] if self.tip else []
        commit = self._git(["commit-tree", tree, *parent], message.encode(), env=author).strip()
        # No force: whoever pushed meanwhile makes this one a rejected, never a lost, update.
        self._git(["push", "--quiet", self.remote, f"{commit}:refs/heads/{self.branch}"])
        return commit
