"""What the tests of the CI share: the fake GitHub, and the tools that they need."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """A module that lies outside any package, by its path in the repository."""
    file = ROOT / path
    name = f"ci_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def tool(name: str) -> str:
    """Where a tool of the extra ``ci`` lies; the test is skipped where it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        reason = f"{name} is missing: .github/scripts/install.sh workflows installs it"
        if os.environ.get("NO_SKIP"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture
def github() -> Iterator[Any]:
    with load(".github/local/fake_github.py").serve() as state:
        yield state


@pytest.fixture
def client(github: Any) -> Any:
    """A client of the fake, which never waits but remembers how long it would have."""
    from benchmarks.tracking.github.client import Client

    fake = load(".github/local/fake_github.py")
    waits: list[float] = []
    made = Client(
        fake.REPOSITORY, fake.TOKEN, api=github.url, sleep=waits.append, now=lambda: 1_000.0
    )
    made.waits = waits  # type: ignore[attr-defined]
    return made
