"""Results reach the disk whole or not at all, and what was measured is never lost to a full one."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

from asv import util
from asv.benchmarks import Benchmarks
from asv.machine import Machine


def check_writable(results_dir: Path) -> None:
    """Say that results cannot be kept before ten minutes of measuring, not after."""
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
        probe = results_dir / f".writable-{os.getpid()}"
        probe.write_bytes(b"\0" * 65536)
        probe.unlink()
    except OSError as error:
        raise util.UserError(f"results cannot be written: {error}") from error


def check_format(results_dir: Path, machine: str) -> None:
    """Refuse a folder of a newer asv: this one would overwrite what it cannot read."""
    for path, newest in (
        (results_dir / "benchmarks.json", Benchmarks.api_version),
        (results_dir / machine / "machine.json", Machine.api_version),
    ):
        if not path.is_file():
            continue
        try:
            data = json.loads(path.read_text())
            version = int(data.get("version", newest))
        except (ValueError, TypeError, AttributeError, OSError) as error:
            raise util.UserError(f"{path} cannot be read ({error}): restore it") from error
        if version > newest:
            raise util.UserError(
                f"{path} has format {version}, this asv knows up to {newest}: "
                'install a newer one, pip install -c constraints.txt -e ".[bench]"'
            )


def whole_or_not_at_all(original):
    """Wrap ``Results.save``: asv truncates the old file first; a full disk would cost both."""

    @functools.wraps(original)
    def save(self, result_dir) -> None:
        partial = Path(result_dir) / f".partial-{os.getpid()}"
        target = Path(result_dir) / self._filename
        try:
            original(self, str(partial))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / self._filename, target)
        except OSError as error:
            kept = Path(tempfile.mkdtemp(prefix="fused_mlp-results-"))
            original(self, str(kept))
            raise util.UserError(
                f"{target} cannot be written ({error.strerror or error}). What was measured is"
                f" kept: copy {kept / self._filename} there when it can be"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    return save
