"""Results on disk: whole, or the old ones untouched and the new ones kept elsewhere."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from asv import util

from benchmarks.tracking import saving


class Result:
    _filename = "toy/abc.json"

    def __init__(self, full: Path | None = None):
        self.full = full

    def save(self, folder: str) -> None:
        if self.full is not None and Path(folder).is_relative_to(self.full):
            raise OSError(errno.ENOSPC, "No space left on device")
        path = Path(folder, self._filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("new")


def test_a_full_disk_loses_neither_the_old_result_nor_the_new(tmp_path: Path) -> None:
    old = tmp_path / Result._filename
    old.parent.mkdir()
    old.write_text("old")
    with pytest.raises(util.UserError, match="No space left") as caught:
        saving.whole_or_not_at_all(Result.save)(Result(full=tmp_path), str(tmp_path))
    assert old.read_text() == "old"
    kept = str(caught.value).split("copy ")[1].split(" there")[0]
    assert Path(kept).read_text() == "new"


def test_a_saved_result_leaves_nothing_else_behind(tmp_path: Path) -> None:
    saving.whole_or_not_at_all(Result.save)(Result(), str(tmp_path))
    assert (tmp_path / Result._filename).read_text() == "new"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["abc.json", "toy"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("benchmarks.json", json.dumps({"version": 99}), "format 99"),
        ("toy/machine.json", json.dumps({"version": 99}), "format 99"),
        ("toy/machine.json", "{", "cannot be read"),
        ("benchmarks.json", "[1]", "cannot be read"),
    ],
)
def test_a_newer_or_broken_folder_is_named_before_anything_runs(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(util.UserError, match=words) as caught:
        saving.check_format(tmp_path, "toy")
    assert str(path) in str(caught.value)


def test_a_folder_of_this_format_passes(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.json").write_text(json.dumps({"version": 2}))
    saving.check_format(tmp_path, "toy")
