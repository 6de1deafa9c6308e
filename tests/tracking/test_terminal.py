"""The tables that `asv run` prints: only what was measured, with its unit."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from benchmarks.tracking.terminal import measured_table


def table(unit: str, *values: float | None) -> tuple[str, str | None]:
    axes = [["'tiny'", "'gpt2'"], ["'eager'", "'fused'"]]
    benchmark = {"name": "b", "params": axes, "param_names": ["shape", "provider"], "unit": unit}
    results = SimpleNamespace(get_result_value=lambda name, axes: list(values), stderr={})
    return measured_table(results, benchmark)


@pytest.mark.parametrize(
    ("unit", "status", "cell"),
    [("GB/s", "ok (GB/s)", "12.5"), ("seconds", "ok", "12.5s"), ("bytes", "ok", "12.5")],
)
def test_the_unit_stands_in_the_cells_or_beside_the_status(unit, status, cell) -> None:
    said, details = table(unit, 12.5, 3.0, math.nan, math.nan)
    assert said == status
    assert cell in details.split()
    assert "gpt2" not in details, "nothing was measured there"


def test_what_failed_is_counted_and_what_is_not_applicable_has_no_table() -> None:
    assert table("GB/s", 1.0, None, math.nan, math.nan)[0] == "1 failed (GB/s)"
    assert table("GB/s", *[math.nan] * 4) == ("n/a", None)
