"""Names of commits to hashes, by git; one clear line where a name does not mean one commit."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Usage(ValueError):
    """The command was used wrongly, or what it needs is not there: one line, exit code 2."""


def git(repo: Path, *args: str) -> tuple[int, str, str]:
    """Exit code, output and complaint of one git command."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repo), *args],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except FileNotFoundError:
        raise Usage(
            "git is not installed, and commit names cannot be resolved without it"
        ) from None
    except subprocess.TimeoutExpired:
        raise Usage(f"git {args[0]} did not answer in 120 s") from None
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def resolve(repo: Path, name: str) -> str:
    """The full hash of the commit that `name` means, or Usage."""
    if not name or name.startswith("-") or "\0" in name or "\n" in name:
        raise Usage(f"{name!r} is no name of a commit")
    code, out, err = git(repo, "rev-parse", "--verify", f"{name}^{{commit}}")
    if code == 0:
        return out
    if "ambiguous" in err:
        raise Usage(f"{name!r} is ambiguous: more than one commit starts so; give more digits")
    if "not a git repository" in err:
        raise Usage(f"{repo} is not a git repository")
    raise Usage(f"{name!r} is not a commit known here (is it fetched?)")


def ancestors(repo: Path, commit: str) -> list[str]:
    """Full hashes of the first-parent line up to and with `commit`, oldest first."""
    code, out, err = git(repo, "rev-list", "--first-parent", "--reverse", commit)
    if code:
        raise Usage(
            f"git cannot list the history of {commit[:8]}: {err.splitlines()[-1] if err else code}"
        )
    return out.split()


def require_ancestor(repo: Path, base: str, head: str) -> None:
    """Usage unless `base` is an ancestor of `head` (or the same commit)."""
    if git(repo, "merge-base", "--is-ancestor", base, head)[0] == 0:
        return
    common = git(repo, "merge-base", base, head)[1]
    hint = f"their common ancestor is {common[:12]}" if common else "they share no history"
    raise Usage(
        f"base {base[:8]} is not an ancestor of head {head[:8]}; {hint} (or give --unrelated)"
    )


def between(repo: Path, base: str, head: str) -> list[str]:
    """First-parent commits from `base` to `head`, both included, oldest first."""
    code, out, err = git(repo, "rev-list", "--first-parent", "--reverse", f"{base}..{head}")
    if code:
        raise Usage(f"git cannot list {base[:8]}..{head[:8]}: {err[:200]}")
    return [base, *out.split()]
