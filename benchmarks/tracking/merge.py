"""The union of two sets of results: the same identity merges, anything else is refused.

A union loses nothing and doubles nothing, in whatever order and however often runs are added: that
is what lets several machines, a retried job and a half-finished one write to the same history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from .incoming import Refused, Tree, is_result, parse, shown
from .machine import conflicts

# What must agree before two files are the same point. asv writes more (dates, memory size, the
# kernel's release), which moves with a reboot.
IDENTITY = ("commit_hash", "env_name", "python", "requirements", "env_vars")
VOLATILE = frozenset({"ram", "os", "load"})

Lookup = Callable[[str], "bytes | None"]


def union(old: Lookup, new: Tree) -> Tree:
    """The files of ``new`` as they must be stored over ``old``; those that change nothing are left
    out.

    Refused where a file of the same name stands for something else: another machine, another
    commit.
    """
    changed: Tree = {}
    for name, content in sorted(new.items()):
        known = old(name)
        if is_result(name):
            _same_hardware(name, content, old, new)
        merged = content if known is None else merge(name, known, content)
        if merged != known:
            changed[name] = merged
    return changed


def _same_hardware(name: str, content: bytes, old: Lookup, new: Tree) -> None:
    # A result carries its machine along: it is held to the one that the folder's name stands for,
    # also where no description of a machine came with it.
    path = f"{name.split('/')[0]}/machine.json"
    described = old(path) or new.get(path)
    if described is not None:
        differing = conflicts(parse(path, described), parse(name, content)["params"])
        if differing:
            raise Refused(f"{shown(name)}: of another machine: {shown('; '.join(differing), 300)}")


def merge(name: str, old: bytes, new: bytes) -> bytes:
    """Two files of one name as one."""
    if old == new:
        return old
    if name.endswith(".jsonl"):
        lines = old.splitlines()
        seen = set(lines)
        fresh = [line for line in new.splitlines() if line not in seen]
        return b"".join(line + b"\n" for line in [*lines, *fresh]) if fresh else old
    before, after = parse(name, old), parse(name, new)
    if name == "benchmarks.json":
        merged = {**before, **after}
    elif name.endswith("/machine.json"):
        differing = conflicts(before, after)
        if differing:
            machine = shown(name.split("/")[0])
            raise Refused(
                f"{machine}: two machines with one name: {shown('; '.join(differing), 300)}"
            )
        merged = {**before, **after}
    else:
        merged = merge_results(name, before, after)
    return old if merged == before else dump(merged)


def dump(data: Any) -> bytes:
    """JSON as it is stored: one benchmark a line, so that git packs and people read it."""
    text = json.dumps(data, separators=(", ", ": "), ensure_ascii=True)
    if isinstance(data, dict) and isinstance(data.get("results"), dict):
        head = {key: value for key, value in data.items() if key not in ("results", "version")}
        rows = ",\n".join(
            f"{json.dumps(key)}: {json.dumps(row)}" for key, row in data["results"].items()
        )
        text = json.dumps(head)[:-1] + ', "results": {\n' + rows + "\n}"
        text += f', "version": {json.dumps(data["version"])}}}' if "version" in data else "}"
    return text.encode() + b"\n"


def merge_results(name: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Two measurements of one commit in one environment on one machine as one file."""
    for key in IDENTITY:
        if old.get(key) != new.get(key):
            raise Refused(
                f"{shown(name)}: {key} is {shown(new.get(key))} here and "
                f"{shown(old.get(key))} in the history: not the same point"
            )
    ours, theirs = old.get("params", {}), new.get("params", {})
    for key in sorted({*ours, *theirs} - VOLATILE):
        if ours.get(key) != theirs.get(key):
            raise Refused(
                f"{shown(name)}: {shown(key)} is {shown(theirs.get(key))} here and "
                f"{shown(ours.get(key))} in the history: not the same machine"
            )
    columns = list(dict.fromkeys([*old["result_columns"], *new["result_columns"]]))
    rows: dict[str, list[Any]] = {}
    for benchmark in sorted({*old["results"], *new["results"]}):
        cells = [
            dict(zip(data["result_columns"], data["results"][benchmark], strict=False))
            for data in (old, new)
            if benchmark in data["results"]
        ]
        row = cells[0] if len(cells) == 1 else merge_row(*cells)
        values = [row.get(column) for column in columns]
        while values and values[-1] is None:
            values.pop()
        rows[benchmark] = values
    stored = {benchmark: _trimmed(row) for benchmark, row in old["results"].items()}
    if columns == old["result_columns"] and _same(rows, stored):
        return old
    return {**old, "result_columns": columns, "results": rows}


def _trimmed(row: list[Any]) -> list[Any]:
    end = len(row)
    while end and row[end - 1] is None:
        end -= 1
    return row[:end]


def _same(left: Any, right: Any) -> bool:
    # NaN differs from itself, so == would call every file with a skipped combination changed.
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def merge_row(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """One benchmark measured twice: samples join, the later number wins, a failure never hides a
    number.
    """
    later, earlier = (
        (old, new) if (old.get("started_at") or 0) > (new.get("started_at") or 0) else (new, old)
    )
    same = all(old.get(key) == new.get(key) for key in ("version", "params"))
    if not same or _same(old, new):
        return later
    merged = {**earlier, **{key: value for key, value in later.items() if value is not None}}
    if not isinstance(later.get("result"), list) or not isinstance(earlier.get("result"), list):
        with_list = [row for row in (later, earlier) if isinstance(row.get("result"), list)]
        return with_list[0] if with_list else later
    if len(later["result"]) != len(earlier["result"]):
        return later
    per_value = [
        key for key in merged if key == "result" or key == "samples" or key.startswith("stats_")
    ]
    size = len(later["result"])
    table: dict[str, list[Any]] = {key: [None] * size for key in per_value}
    for index in range(size):
        for key, value in _merge_value(earlier, later, index, per_value).items():
            table.setdefault(key, [None] * size)[index] = value
    for key, values in table.items():
        merged[key] = None if all(v is None for v in values) else values
    return merged


def _merge_value(
    earlier: dict[str, Any], later: dict[str, Any], index: int, keys: list[str]
) -> dict[str, Any]:
    def at(row: dict[str, Any], key: str) -> Any:
        values = row.get(key)
        return values[index] if isinstance(values, list) and index < len(values) else None

    def whole(row: dict[str, Any]) -> dict[str, Any]:
        return {key: at(row, key) for key in keys}

    def number(row: dict[str, Any]) -> bool:
        value = at(row, "result")
        return isinstance(value, (int, float)) and not math.isnan(value)

    if number(earlier) != number(later):
        return whole(later if number(later) else earlier)
    first, second = at(earlier, "samples"), at(later, "samples")
    if not (first and second):
        return whole(later if second or not first else earlier)
    # A run that already holds the other's samples (it began from the history, or is sent again)
    # adds none.
    if _holds(second, first):
        return whole(later)
    if _holds(first, second):
        return whole(earlier)
    samples = [*first, *second]
    from asv_runner.statistics import compute_stats  # only here: most merges need no statistics

    result, stats = compute_stats(samples, at(later, "stats_number") or 1)
    return {"result": result, "samples": samples, **{f"stats_{k}": v for k, v in stats.items()}}


def _holds(whole: list[Any], part: list[Any]) -> bool:
    return any(
        whole[start : start + len(part)] == part for start in range(len(whole) - len(part) + 1)
    )
