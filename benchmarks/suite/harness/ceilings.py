"""Measures a machine's ceilings: ``python -m ...harness.ceilings KIND THREADS NAME...``, as JSON.

The best of many tries, not the middle: a ceiling is what the machine can do when nothing disturbs.
"""

from __future__ import annotations

import json
import platform
import sys

from . import devices
from .clock import Clock, Settings


def main(kind: str, threads: int, names: list[str]) -> dict:
    import torch

    from .inputs import torch_dtype

    torch.set_num_threads(threads)
    # Long enough to be past the caches and the launch, short enough that a CPU takes a second.
    side, elements = (8192, 2**28) if kind == "cuda" else (1024, 2**25)
    clock = Clock(devices.timeline_of(kind), Settings(10, 1e-3, 0.2, 0.5))
    found: dict[str, float] = {}
    for name in names:
        if name == "bandwidth":
            source = torch.ones(elements, device=kind)
            target = torch.empty_like(source)
            seconds = min(clock.measure([lambda t=target, s=source: t.copy_(s)]).latency)  # type: ignore[misc]
            found[name] = 2 * source.nbytes / seconds
            continue
        a = torch.randn(side, side, device=kind).to(torch_dtype(name))
        b = torch.randn(side, side, device=kind).to(torch_dtype(name))
        seconds = min(clock.measure([lambda a=a, b=b: a @ b]).latency)  # type: ignore[misc]
        found[name] = 2 * side**3 / seconds
    device = torch.cuda.get_device_name(0) if kind == "cuda" else platform.machine()
    return {"ceilings": found, "identity": {"device": device, "torch": torch.__version__}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
