"""What a run may hand over: files from a machine that ran somebody else's code are data, and only
data.

Everything here holds for a folder unpacked from a hostile artifact. Names, sizes, counts and shapes
are checked before one byte is kept, and whatever is not asv's own is refused, never repaired.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

Tree = dict[str, bytes]  # path below results/ -> content

LARGEST_FILE = 16 * 2**20  # asv's file for 300 series with samples takes about 0.2 MB
LARGEST_TREE = 256 * 2**20
MOST_FILES = 2_000
LONGEST_NAME = 300
DEEPEST = 12  # asv nests five deep

MACHINE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}"
ENVIRONMENT = r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,150}"
RESULT = re.compile(rf"({MACHINE})/([0-9a-f]{{8}})-({ENVIRONMENT})\.json(l?)")
KNOWN = (
    re.compile(r"benchmarks\.json"),
    re.compile(rf"{MACHINE}/(machine\.json|ceilings\.jsonl)"),
    RESULT,
)
# A benchmark's name reaches web pages, comments and command lines: nothing in it may mean anything
# there.
BENCHMARK = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,200}")
PARAMETER = re.compile(r"[\w .,:;+*/=×'\"()\[\]-]{0,200}")


class Refused(ValueError):
    """Something that will not be taken, with the reason in one line."""


def shown(text: object, most: int = 80) -> str:
    """``text`` safe to print anywhere: ASCII, one line, no markup, cut."""
    plain = re.sub(r"[^A-Za-z0-9 _.,:;+=/()'-]", "?", str(text))
    return plain if len(plain) <= most else plain[: most - 1] + "~"


def known(path: str) -> bool:
    """Whether results/ has a place for a file of this name (so: no way out of the folder).

    >>> known("gpu/machine.json"), known("gpu/../x.json"), known("/etc/passwd"), known("a/b/c.json")
    (True, False, False, False)
    """
    return ".." not in path and any(pattern.fullmatch(path) for pattern in KNOWN)


def is_result(path: str) -> bool:
    """Whether the path names one commit's result (not its side file, not a machine)."""
    found = RESULT.fullmatch(path)
    return bool(found and not found.group(4))


def read_tree(folder: Path) -> Tree:
    """Every file below ``folder``, checked; Refused at the first that does not belong.

    Paths are relative to ``folder`` with forward slashes. Links, devices and files with several
    names are refused rather than followed: each could show the reader a file of its own machine.
    """
    if not folder.is_dir() or folder.is_symlink():
        raise Refused(f"{shown(folder)}: not a folder")
    tree: Tree = {}
    total = 0
    for path in _walk(folder):
        name = PurePosixPath(path.relative_to(folder).as_posix()).as_posix()
        if not known(name):
            raise Refused(f"{shown(name)}: results have no file of that name")
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise Refused(f"{shown(name)}: not a plain file")
        total += status.st_size
        if status.st_size > LARGEST_FILE:
            raise Refused(
                f"{shown(name)}: {status.st_size / 2**20:.0f} MB is more than the "
                f"{LARGEST_FILE >> 20} MB a result may have"
            )
        if total > LARGEST_TREE or len(tree) >= MOST_FILES:
            raise Refused(
                f"more than {MOST_FILES} files or {LARGEST_TREE >> 20} MB together: not one run"
            )
        tree[name] = path.read_bytes()
    for name, content in tree.items():
        check(name, content)
    return tree


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder, followlinks=False):
        folders.sort()
        for name in [*sorted(files), *(f for f in folders if (Path(root) / f).is_symlink())]:
            yield Path(root) / name


def parse(name: str, content: bytes) -> Any:
    """The JSON in ``content``, or Refused naming ``name``."""
    try:
        text = content.decode("utf-8")
        if _depth(text) > DEEPEST:
            raise Refused(f"{shown(name)}: nested deeper than {DEEPEST}")
        return json.loads(text)
    except UnicodeDecodeError:
        raise Refused(f"{shown(name)}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{shown(name)}: not valid JSON") from None


def _depth(text: str) -> int:
    # Counted before parsing (brackets inside strings apart): a parser's own limit is a stack
    # overflow.
    depth = deepest = 0
    for mark in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text):
        if mark[0][0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark[0][0] in "]}":
            depth -= 1
    return deepest


def check(name: str, content: bytes) -> None:
    """Refused unless ``content`` is what a file of this name holds."""
    if name.endswith(".jsonl"):
        for line in content.splitlines():
            if line.strip() and not isinstance(parse(name, line), dict):
                raise Refused(f"{shown(name)}: a line is not an object")
        return
    data = parse(name, content)
    if not isinstance(data, dict):
        raise Refused(f"{shown(name)}: not an object")
    if name == "benchmarks.json":
        for key in data:
            if key != "version":
                _benchmark(name, key)
    elif name.endswith("/machine.json"):
        if data.get("machine") != name.split("/")[0]:
            raise Refused(f"{shown(name)}: names another machine, {shown(data.get('machine'))}")
        _strings(name, data)
    else:
        _result(name, data)


def _strings(name: str, data: dict[str, Any]) -> None:
    for key, value in data.items():
        if not isinstance(value, (str, int)) or len(key) > 100 or len(str(value)) > LONGEST_NAME:
            raise Refused(f"{shown(name)}: {shown(key)} is not a short text")


def _benchmark(name: str, key: object) -> None:
    if not isinstance(key, str) or not BENCHMARK.fullmatch(key):
        raise Refused(f"{shown(name)}: {shown(key)} is no benchmark's name")


def _result(name: str, data: dict[str, Any]) -> None:
    machine, short, environment, _ = _parts(name)
    for key, kind in (
        ("commit_hash", str),
        ("env_name", str),
        ("params", dict),
        ("result_columns", list),
        ("results", dict),
    ):
        if not isinstance(data.get(key), kind):
            raise Refused(f"{shown(name)}: {key} is missing or not a {kind.__name__}")
    commit = data["commit_hash"]
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit) or not commit.startswith(short):
        raise Refused(f"{shown(name)}: commit_hash is {shown(commit)}, not the one in its name")
    if data["env_name"] != environment:
        raise Refused(f"{shown(name)}: env_name is {shown(data['env_name'])}")
    if data["params"].get("machine") != machine:
        raise Refused(
            f"{shown(name)}: measured on {shown(data['params'].get('machine'))}, filed elsewhere"
        )
    _strings(name, data["params"])
    columns = data["result_columns"]
    if len(set(map(str, columns))) != len(columns) or "result" not in columns:
        raise Refused(f"{shown(name)}: result_columns are not asv's")
    for benchmark, row in data["results"].items():
        _benchmark(name, benchmark)
        if not isinstance(row, list) or len(row) > len(columns):
            raise Refused(f"{shown(name)}: {shown(benchmark)} is not a row of result_columns")
        cells = dict(zip(columns, row, strict=False))
        if not isinstance(cells["result"] if row else None, (list, type(None))):
            raise Refused(f"{shown(name)}: the results of {shown(benchmark)} are not a list")
        for value in cells.get("result") or []:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            # NaN is asv's word for "skipped"; infinity is nobody's measurement.
            if value is not None and (not number or math.isinf(value)):
                raise Refused(f"{shown(name)}: {shown(benchmark)} has a result that is no number")
        for values in cells.get("params") or []:
            for value in values if isinstance(values, list) else [None]:
                if not isinstance(value, str) or not PARAMETER.fullmatch(value):
                    raise Refused(
                        f"{shown(name)}: {shown(benchmark)} has the parameter {shown(value)}"
                    )


def _parts(name: str) -> tuple[str, str, str, str]:
    found = RESULT.fullmatch(name)
    if not found:
        raise Refused(f"{shown(name)}: not a result's name")
    return found.group(1), found.group(2), found.group(3), found.group(4)


def numbers(data: dict[str, Any]) -> list[float]:
    """Every finite number among a result file's values."""
    columns = data["result_columns"]
    found: list[float] = []
    for row in data["results"].values():
        values = dict(zip(columns, row, strict=False)).get("result") or []
        found += [float(v) for v in values if v is not None and math.isfinite(v)]
    return found


def check_measured(tree: Tree) -> int:
    """How many numbers were measured; Refused where a run ended with nothing that can be judged.

    A run with no results, or with nothing but NaN, failures or zeros, says that the machine is
    broken. Judged as numbers it would read as a regression, or as a very large improvement. One
    commit that does not build, beside others that were measured, is a fact and is kept.
    """
    results = {name: parse(name, body) for name, body in tree.items() if is_result(name)}
    if not results:
        raise Refused("the run left no result: the measurement broke, nothing is judged")
    found = {name: numbers(data) for name, data in results.items()}
    for name, values in found.items():
        if values and not any(values):
            raise Refused(f"{shown(name)}: every result is zero: the measurement broke")
    if not any(found.values()):
        raise Refused(f"{shown(min(found))}: every result is missing or NaN: the measurement broke")
    return sum(map(len, found.values()))
