"""A small project with a history of its own, measured by the real asv through the real plugin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SUITE = '''
import json, os

class Toy:
    """Stands in for the suite: numbers that are known, in place of a measurement."""
    params = [["fast", "slow", "absent", "broken"]]
    param_names = ["case"]
    version = "1; 2 samples/process"

    def setup_cache(self):
        import fused_mlp, torch
        record = {"kind": "where", "benchmark": "toy.Toy.track_latency",
                  "package": fused_mlp.__file__, "torch": torch.__version__,
                  "conf": os.environ["FUSED_MLP_MACHINE_DIR"]}
        with open(os.environ["FUSED_MLP_NOTES"], "a") as notes:
            notes.write(json.dumps(record) + "\\n")
        return {"fast": [1.0, 1.1, 1.2, 1.3], "slow": [2.0, 2.1, 2.2, 2.3]}

    def track_latency(self, cache, case):
        if case == "absent":
            return float("nan")
        return {"samples": cache[case], "number": 1}

    track_latency.unit = "seconds"

class Waits:
    version = "1"

    def track_launches(self):
        import time
        print("waiting", flush=True)
        while os.environ.get("TOY_WAITS") and not os.path.exists(os.environ["FUSED_MLP_STOP"]):
            open(os.environ["TOY_WAITS"], "w").close()
            time.sleep(0.05)
        return 5
'''


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    command = ["git", "-C", str(folder), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Project:
    """A copy of this project's asv side over a package and a suite of a few lines."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.home = folder / "home"
        for name in ("asv.conf.json", "pyproject.toml", "LICENSE", "README.md", ".gitignore"):
            shutil.copy(ROOT / name, folder / name)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=ignore)
        suite = folder / "benchmarks/suite"
        for module in suite.glob("*.py"):
            module.unlink()
        (suite / "__init__.py").touch()
        (suite / "toy.py").write_text(SUITE)
        package = folder / "fused_mlp"
        package.mkdir()
        (package / "__init__.py").write_text("COMMIT = 1\n")
        (package / "py.typed").touch()
        self.home.mkdir()
        git(folder, "init", "-q", "-b", "main")
        self.commit("first")

    def commit(self, message: str) -> str:
        git(self.folder, "add", "-A", ":!home", ":!results")
        git(self.folder, "commit", "-q", "--allow-empty", "-m", message)
        return git(self.folder, "rev-parse", "HEAD")

    def environ(self, **extra: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FUSED_MLP", "TRITON"))}
        return {**kept, "HOME": str(self.home), "FUSED_MLP_MACHINE": "toy", **extra}

    def asv(self, *args: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "asv", *args],
            cwd=self.folder,
            env=self.environ(**extra),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def machine_dir(self) -> Path:
        return self.folder / "results" / "toy"

    def results(self) -> list[Path]:
        return sorted(self.machine_dir.glob("*-*.json"))


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One commit, measured once by ``asv run``."""
    made = Project(tmp_path_factory.mktemp("project"))
    made.first_run = made.asv("run")  # type: ignore[attr-defined]
    return made


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium on this machine")
    return found
