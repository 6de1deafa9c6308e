"""python -m benchmarks.tracking.replay.peers FILE...: the gate's rule beside others'.

Every rule sees the same comparisons as `replay`: 50 values of history, head, and the ten values
after it, which stand in for re-runs where a rule looks again or later. Rules that fit a whole
window are asked about every n-th comparison, because they take milliseconds each; their hits on
labelled histories need the step to begin within two commits of the label.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np

from ..judging.decide import pairs_won
from ..judging.noise import measure, nan_median, nan_quantile
from ..judging.verdict import USAGE
from .command import Alarms, Gate, RuleFunction, replay
from .recorded import BadHistory, Comparisons, read


def _alarms(found: np.ndarray) -> Alarms:
    return Alarms(found, np.zeros(len(found), dtype=int))


def fixed(percent: float) -> RuleFunction:
    """One run against the median of the ten before it, a fixed limit."""
    limit = math.log1p(percent / 100)
    return lambda c, step: _alarms(c.head + step - nan_median(c.history[:, -10:]) > limit)


def asv_compare(c: Comparisons, step: float) -> Alarms:
    """asv compare: medians 10 % apart, Mann-Whitney p < 0.002; the ten last, the eleven new."""
    from scipy.stats import mannwhitneyu

    old = c.history[:, -10:]
    new = np.column_stack([c.head, c.reruns]) + step
    found = nan_median(new) - nan_median(old) > math.log(1.1)
    for i in np.flatnonzero(found):
        a, b = old[i][np.isfinite(old[i])], new[i][np.isfinite(new[i])]
        found[i] = mannwhitneyu(a, b).pvalue < 0.002
    return _alarms(found)


def conbench(c: Comparisons, step: float) -> Alarms:
    """conbench: z of one run against mean and deviation of its history, above 5."""
    mean, deviation = np.nanmean(c.history, axis=1), np.nanstd(c.history, axis=1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _alarms((c.head + step - mean) / deviation > 5)


def earlier_rule(c: Comparisons, step: float) -> Alarms:
    """This gate's first rule: screen z 1.5, five re-runs, rank z 3 on 20 values, 3 %, mode veto."""
    noise = measure(c.history)
    effect = c.head + step - noise.center
    effect = np.minimum(effect, effect - c.shift)
    flagged = (effect > 0.015) & (effect > 1.5 * noise.sigma)
    new = np.column_stack([c.head, c.reruns[:, :5]]) + step
    middle = nan_median(new)
    _, z = pairs_won(new, c.history[:, -20:])
    beyond = middle > nan_quantile(c.history, 0.95) + 0.005
    return _alarms(flagged & (middle - noise.center > 0.03) & (z > 3) & beyond)


def asv_steps(c: Comparisons, step: float) -> Alarms:
    """asv's step detection, five commits late: a step of 5 % begins about head."""
    from asv.step_detect import detect_regressions, detect_steps

    found = np.zeros(len(c), dtype=bool)
    for i, values in enumerate(_late(c, step)):
        *_, places = detect_regressions(detect_steps(list(values)), threshold=0.05)
        found[i] = any(p[1] is not None and p[1] >= len(values) - 8 for p in places or [])
    return _alarms(found)


def _late(c: Comparisons, step: float) -> list[np.ndarray]:
    rows = np.column_stack([c.history, c.head + step, c.reruns[:, :5] + step])
    return [np.exp(row[np.isfinite(row)]) for row in rows]


_OTAVA = """
import json, sys
from otava.analysis import compute_change_points
said = []
for values in json.load(sys.stdin):
    points, _ = compute_change_points(values, window_len=50, max_pvalue=0.001, min_magnitude=0.0)
    late = [p for p in points if p.index >= len(values) - 8]
    said.append(any(p.stats.mean_2 > 1.03 * p.stats.mean_1 for p in late))
json.dump(said, sys.stdout)
"""


def otava(python: str) -> RuleFunction:
    """Apache Otava's defaults, five commits late: an upward change point of 3 % about head."""

    def rule(c: Comparisons, step: float) -> Alarms:
        asked = json.dumps([list(v) for v in _late(c, step)])
        done = subprocess.run(
            [python, "-c", _OTAVA], input=asked, capture_output=True, text=True, check=True
        )
        return _alarms(np.array(json.loads(done.stdout), dtype=bool))

    return rule


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tracking.replay.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--every", type=int, default=20, help="for the slow rules (%(default)s)")
    parser.add_argument("--otava", metavar="PYTHON", help="interpreter that has apache-otava")
    args = parser.parse_args(argv)
    rules: dict[str, tuple[RuleFunction, int]] = {
        "fixed 5 %": (fixed(5), 1),
        "fixed 10 %": (fixed(10), 1),
        "asv compare 1.1": (asv_compare, 1),
        "conbench z > 5": (conbench, 1),
        "asv step detection, 5 commits late": (asv_steps, max(1, args.every)),
    }
    if args.otava:
        rules["Otava, 5 commits late"] = (otava(args.otava), max(1, args.every))
    rules["this gate's first rule"] = (earlier_rule, 1)
    rules["**this gate**"] = (Gate(), 1)
    for path in args.files:
        try:
            recorded = read(path)
        except BadHistory as error:
            print(f"peers: {error}", file=sys.stderr)
            return USAGE
        print(f"\n{path.name}: {len(recorded.comparisons)} comparisons\n")
        print("| rule | false alarms in 300 (95 %) | 5 % found | 10 % found | labelled |")
        print("|---|--:|--:|--:|--:|")
        for name, (rule, n) in rules.items():
            labelled = recorded.comparisons.label >= 0
            keep = labelled | (np.arange(len(labelled)) % n == 0)
            some = type(recorded)(
                recorded.layout,
                recorded.comparisons.rows(keep),
                recorded.labels,
                recorded.series,
                recorded.dropped,
            )
            out = replay(some, rule, [5.0, 10.0])
            low, high = out["fa_ci95"]
            hits = f"{out['hits']} of {out['labels']}" if out["labels"] else "–"
            power = [f"{100 * out['power'][s]:.0f} %" for s in ("5", "10")]
            rate = f"{out['fa_per_300']:.2f} ({low:.2f} to {high:.2f})"
            print(f"| {name} | {rate} | {power[0]} | {power[1]} | {hits} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
