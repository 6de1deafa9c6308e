"""Every quantization and precision mode: right answers on real pictures, time, bytes, operators.

A quantizer that loses accuracy is a regression too. On a CPU, whatever the device of the other
classes: there the int8 path is the package's own.
"""

from __future__ import annotations

import math
import os
from typing import Any

from .harness.metrics import METRICS
from .harness.notes import note
from .harness.quantized import MODES, SHAPE, TOKENS
from .harness.quantized_jobs import measure

_NO_ANSWERS = {"eager": "trained as fused, it answers alike: tests hold the two to each other"}
_NO_SPEED = {
    "int4_qat": "its weights are int4_weight's: so are their bytes and speed",
    "fp8_dynamic": "emulated on a CPU: its time means nothing; its bytes are counted",
}


def _say_why(benchmark: str, reasons: dict[str, str]) -> None:
    for mode, reason in reasons.items():
        note("absent", benchmark=benchmark, params=[mode], reason=reason)


class _Modes:
    params = (list(MODES),)
    param_names = ("mode",)
    timeout = 60.0

    def _look_up(self, cache: dict, metric: str, mode: str) -> Any:
        found = cache.get(mode)
        if found is None:
            return math.nan
        if metric not in found and "failure" in found:
            raise RuntimeError(found["failure"])
        return found.get(metric, math.nan)


class Digits(_Modes):
    """A classifier of scikit-learn's digits: the share of right answers over all seeds, which are
    always the same."""

    version = "2"

    def setup_cache(self) -> dict[str, dict[str, Any]]:
        if os.environ.get("FUSED_MLP_FILTER"):
            return {}
        modes = [mode for mode in MODES if mode not in _NO_ANSWERS]
        _say_why("quantization.Digits", _NO_ANSWERS)
        return measure(["accuracy"], modes, "quantization.Digits")

    setup_cache.timeout = 900.0  # type: ignore[attr-defined]

    def track_accuracy(self, cache: dict, mode: str) -> Any:
        return self._look_up(cache, "accuracy", mode)


class Llama(_Modes):
    version = "1; 5 samples/process"

    def setup_cache(self) -> dict[str, dict[str, Any]]:
        if os.environ.get("FUSED_MLP_FILTER"):
            return {}
        modes = [mode for mode in MODES if mode != "int4_qat"]
        _say_why("quantization.Llama", _NO_SPEED)
        return measure(["exact", "speed", "speed"], modes, "quantization.Llama")

    setup_cache.timeout = 900.0  # type: ignore[attr-defined]

    def track_latency(self, cache: dict, mode: str) -> Any:
        return self._look_up(cache, "latency", mode)

    def track_weight_bytes(self, cache: dict, mode: str) -> Any:
        return self._look_up(cache, "weight_bytes", mode)

    def track_peak_memory(self, cache: dict, mode: str) -> Any:
        return self._look_up(cache, "peak_memory", mode)

    def track_launches(self, cache: dict, mode: str) -> Any:
        return self._look_up(cache, "launches", mode)


Llama.__doc__ = (
    f"One gated silu MLP of {SHAPE[0]}/{SHAPE[1]}, a quarter of Llama-3-8B's, {TOKENS} tokens."
)
Digits.track_accuracy.unit = METRICS["accuracy"].unit  # type: ignore[attr-defined]
for _name in ("latency", "weight_bytes", "peak_memory", "launches"):
    getattr(Llama, f"track_{_name}").unit = METRICS[_name].unit
