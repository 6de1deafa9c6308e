"""An asv environment a commit builds in seconds: a small virtual environment over a prebuilt
interpreter.

torch and triton are gigabytes and pinned; what changes from commit to commit is this package. So
the environment holds the package alone, and a ``.pth`` file shows it the packages of the
interpreter below: the one that runs asv, or one named on the command line (``asv run -E
overlay:PATH_TO_PYTHON``), which is how one commit is measured under two releases of torch or
triton.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from asv import environment, util
from asv.console import log

# Found in the interpreter below, named in every result, and so told apart in the report.
PINNED = ("torch", "triton")
PTH = "interpreter_below.pth"

_INSPECT = """
import importlib.metadata as m, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "versions": {name: version(name) for name in sys.argv[1:]},
    "path": [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))],
}))
"""


@cache
def inspect_interpreter(python: str) -> dict:
    """Version, site folders and pinned packages of an interpreter, asked of it without importing
    torch.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _INSPECT, *PINNED],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise util.UserError(f"{python} is not a Python interpreter that runs: {error}") from error
    return json.loads(answer.stdout)


class Overlay(environment.Environment):
    """One commit of the package over an interpreter that already has torch."""

    tool_name = "overlay"

    def __init__(self, conf, python, requirements, tagged_env_vars):
        current = f"{sys.version_info[0]}.{sys.version_info[1]}"
        self._below = sys.executable if python in (current, "same") else python
        found = inspect_interpreter(self._below)
        missing = [name for name in PINNED if found["versions"][name] is None]
        if "torch" in missing:
            raise util.UserError(
                "the interpreter that runs asv has no torch, and none is ever installed for you. "
                'Install it first: pip install -c constraints.txt -e ".[bench]"'
            )
        versions = {name: found["versions"][name] for name in PINNED if name not in missing}
        # A local tag (2.13.0+cpu) is dropped from file names: the device is in the machine's
        # identity.
        pinned = {name: version.split("+")[0] for name, version in versions.items()}
        for name, wanted in requirements.items():
            if wanted and pinned.get(name) != wanted:
                raise environment.EnvironmentUnavailable(
                    f"asv.conf.json asks for {name} {wanted}, the interpreter has "
                    f"{pinned.get(name, 'none')}"
                )
        self._python = found["python"]
        # asv names the environment after these while it initializes.
        self._requirements = {**requirements, **pinned}
        super().__init__(conf, self._python, self._requirements, tagged_env_vars)
        self._base_requirements = {}
        self._site_folders = found["path"]

    @classmethod
    def matches(cls, python: str) -> bool:
        return bool(re.fullmatch(r"\d+\.\d+|same", python)) or os.access(python, os.X_OK)

    @property
    def _pth(self) -> Path:
        folder = f"python{self._python}"
        return Path(self._path, "lib", folder, "site-packages", PTH)

    def _pth_text(self) -> str:
        return "".join(f"{folder}\n" for folder in self._site_folders)

    def check_presence(self) -> bool:
        """Whether the environment exists and still lies over the same interpreter."""
        if not super().check_presence():
            return False
        try:
            return self._pth.read_text() == self._pth_text()
        except OSError:
            return False

    def _setup(self) -> None:
        log.info(f"Creating {self.name}")
        util.check_call(
            [
                *(sys.executable, "-m", "virtualenv", "--quiet", "--no-periodic-update"),
                *("--python", self._below, self._path),
            ],
            env=dict(os.environ),
        )
        self._pth.write_text(self._pth_text())
        self._verify()

    def _verify(self) -> None:
        """Refuse to measure anything but the pinned torch: a path may shadow another."""
        found = inspect_interpreter.__wrapped__(self.find_executable("python"))["versions"]
        for name in PINNED:
            wanted = self._requirements.get(name)
            seen = (found[name] or "none").split("+")[0]
            if wanted and seen != wanted:
                raise util.UserError(f"the environment sees {name} {seen}, expected {wanted}")

    def run(self, args, **kwargs):
        return self.run_executable("python", args, **kwargs)
