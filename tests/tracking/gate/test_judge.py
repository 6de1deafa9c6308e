"""The judge: exact metrics exactly, sampled ones by their noise, and never a pass for no number."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tracking.judging.case import Case, Side
from benchmarks.tracking.judging.judge import judge
from benchmarks.tracking.judging.rule import DEFAULT
from benchmarks.tracking.judging.suite import assemble, common_shift
from benchmarks.tracking.judging.verdict import Outcome, Report, Series, Verdict

from .made import case, noisy

QUIET = noisy(50, 0.005)
AGAIN = noisy(DEFAULT.reruns, 0.005, seed=7)


def one(c: Case) -> Verdict:
    (verdict,) = judge([c])
    return verdict


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        (3, 3, Outcome.PASS),
        (3, 4, Outcome.REGRESSED),
        (4, 3, Outcome.IMPROVED),
        (0, 1, Outcome.REGRESSED),
        (0, 0, Outcome.PASS),
        (1, 0, Outcome.IMPROVED),
        (1e9, 1e9 + 1, Outcome.REGRESSED),
        (1e-300, 1e300, Outcome.REGRESSED),
    ],
)
def test_exact_metrics_change_or_they_do_not(old, new, outcome) -> None:
    verdict = one(case(base=old, head=new, name="x.Y.track_spills", kind="exact"))
    assert verdict.outcome is outcome
    assert verdict.gating
    assert not verdict.percent < 0 or outcome is Outcome.IMPROVED


def test_derived_metrics_are_never_judged() -> None:
    assert judge([case(head=0.5, name="x.Y.track_throughput", kind="derived")]) == []


def test_noise_passes_and_states_what_it_can_see() -> None:
    verdict = one(case(QUIET, head=1.004))
    assert verdict.outcome is Outcome.PASS
    assert 0.03 < verdict.detectable < 0.12
    assert "noise from its history of 50" in verdict.flags


def test_one_look_is_enough_only_beyond_what_any_history_explains() -> None:
    assert one(case(QUIET, head=1.20)).outcome is Outcome.REGRESSED
    doubt = one(case(QUIET, head=1.05))
    assert doubt.outcome is Outcome.INCONCLUSIVE
    assert doubt.rerun
    assert one(case(QUIET, head=0.8)).outcome is Outcome.IMPROVED


def test_processes_that_overlap_are_no_clear_case() -> None:
    assert one(case(QUIET, head=1.20, spread=0.15)).outcome is Outcome.INCONCLUSIVE


def test_reruns_confirm_a_five_percent_step() -> None:
    verdict = one(case(QUIET, head=1.05, base_reruns=AGAIN, head_reruns=1.05 * AGAIN))
    assert verdict.outcome is Outcome.REGRESSED
    assert verdict.gating
    assert math.isclose(verdict.percent, 5, abs_tol=1)
    assert "10 re-runs" in verdict.reason


def test_reruns_clear_an_outlier() -> None:
    verdict = one(case(QUIET, head=1.05, base_reruns=AGAIN, head_reruns=AGAIN))
    assert verdict.outcome is Outcome.PASS


def test_a_machine_that_moved_since_the_history_is_no_regression() -> None:
    verdict = one(case(QUIET, head=1.05, base_reruns=1.05 * AGAIN, head_reruns=1.05 * AGAIN))
    assert verdict.outcome is Outcome.PASS


def test_five_reruns_settle_only_what_clearly_did_not_change() -> None:
    few = AGAIN[:5]
    assert one(case(QUIET, head=1.05, base_reruns=few, head_reruns=few)).outcome is Outcome.PASS
    more = one(case(QUIET, head=1.05, base_reruns=few, head_reruns=1.05 * few))
    assert more.outcome is Outcome.INCONCLUSIVE
    assert more.rerun


def test_improvements_are_judged_by_the_mirrored_rule() -> None:
    verdict = one(case(QUIET, head=0.95, base_reruns=AGAIN, head_reruns=0.95 * AGAIN))
    assert verdict.outcome is Outcome.IMPROVED


def test_higher_is_better_turns_everything_round() -> None:
    worse = case(QUIET, head=0.95, better="higher", base_reruns=AGAIN, head_reruns=0.95 * AGAIN)
    assert one(worse).outcome is Outcome.REGRESSED
    assert one(worse).percent > 0
    assert math.isclose(one(worse).new, 0.95, abs_tol=0.01)


def test_a_base_off_its_history_is_compared_with_base() -> None:
    slow_before = noisy(50, 0.005, level=1.10)
    verdict = one(
        case(slow_before, base=1.0, head=1.08, base_reruns=AGAIN, head_reruns=1.08 * AGAIN)
    )
    assert verdict.outcome is Outcome.REGRESSED
    assert "base lies off its history" in verdict.flags


def test_an_old_slow_level_does_not_hide_a_regression_back_to_it() -> None:
    stepped = np.r_[noisy(25, 0.005, 1.10), noisy(25, 0.005, 1.0, seed=3)]
    verdict = one(case(stepped, head=1.08, base_reruns=AGAIN, head_reruns=1.08 * AGAIN))
    assert verdict.outcome is Outcome.REGRESSED


def test_the_slow_mode_of_a_two_mode_benchmark_is_no_regression() -> None:
    modes = noisy(50, 0.003) * np.where(np.arange(50) // 4 % 2, 1.08, 1.0)
    verdict = one(case(modes, head=1.08, base_reruns=AGAIN, head_reruns=1.08 * AGAIN))
    assert verdict.outcome in (Outcome.INCONCLUSIVE, Outcome.PASS)
    assert not (verdict.outcome is Outcome.INCONCLUSIVE and verdict.gating)
    assert "multi-modal" in verdict.flags


def test_a_slow_mode_seen_now_and_then_is_no_regression_either() -> None:
    # Eight of fifty: too few to be called a mode, enough to win most pairs by being slow again.
    seldom = noisy(50, 0.003) * np.where(np.arange(50) % 6 == 2, 1.08, 1.0)
    verdict = one(case(seldom, head=1.08, base_reruns=AGAIN, head_reruns=1.08 * AGAIN))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert not verdict.gating
    assert "slow mode" in verdict.reason


@pytest.mark.parametrize("base", [1.043 * np.r_[AGAIN[:5], AGAIN[:5]], np.r_[[1.0] * 6, [1.2] * 4]])
def test_base_run_again_must_agree_in_size_and_in_pairs(base) -> None:
    c = case(QUIET, head=1.05, base_reruns=base, head_reruns=1.05 * np.r_[AGAIN[:5], AGAIN[:5]])
    assert one(c).outcome is not Outcome.REGRESSED


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (noisy(50, 0.08), "too noisy for small changes"),
        (noisy(50, 0.03), "noisy"),
        (noisy(50, 0.003) * np.exp(0.002 * np.arange(50)), "drifting"),
    ],
)
def test_what_cannot_gate_is_named(values, name) -> None:
    assert name in one(case(values, base=float(values[-1]), head=float(values[-1]))).flags


def test_a_named_benchmark_is_reported_and_does_not_fail_the_run() -> None:
    drifting = noisy(50, 0.003) * np.exp(0.0015 * np.arange(50))
    level = float(drifting[-1])
    c = case(
        drifting,
        base=level,
        head=level * 1.055,
        base_reruns=level * AGAIN,
        head_reruns=level * 1.055 * AGAIN,
    )
    verdict = one(c)
    assert verdict.outcome is Outcome.REGRESSED
    assert not verdict.gating
    assert Report("a", "b", (verdict,)).exit_code == 0


def test_a_short_history_borrows_noise_and_says_from_whom() -> None:
    kin = [case(noisy(50, 0.02, seed=i), params=(str(i),)) for i in range(4)]
    new = case([], base=1.0, head=1.03, params=("new",), spread=0.0)
    verdict = judge([*kin, new])[-1]
    assert verdict.outcome is Outcome.PASS
    assert "noise from 4 neighbours" in verdict.flags


@pytest.mark.parametrize("points", [0, 1, 5])
def test_short_histories_give_a_verdict_with_its_noise_from_processes(points) -> None:
    assert one(case(noisy(points, 0.005), head=1.30)).outcome is Outcome.REGRESSED
    assert one(case(noisy(points, 0.005), head=1.004)).outcome is Outcome.PASS


def test_one_look_without_a_history_doubts_what_one_with_it_calls_a_regression() -> None:
    young, old = one(case(head=1.09)), one(case(QUIET, head=1.09))
    assert (young.outcome, old.outcome) == (Outcome.INCONCLUSIVE, Outcome.REGRESSED)
    assert young.rerun
    assert young.detectable > old.detectable
    assert one(case(head=1.20)).outcome is Outcome.REGRESSED


def test_nothing_known_of_the_noise_is_inconclusive() -> None:
    side = Side(1.0, np.array([1.0]), "ok", "1")
    verdict = one(case(base_side=side, head_side=side))
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_all_equal_samples_have_the_least_noise() -> None:
    verdict = one(case([1.0] * 50, head=1.0, spread=0.0))
    assert verdict.outcome is Outcome.PASS
    assert verdict.noise == DEFAULT.least_noise


@pytest.mark.parametrize("which", ["base_side", "head_side"])
def test_a_clock_that_stands_still_never_passes_but_may_fail(which) -> None:
    stuck = Side(1.0, np.array([1.0, 1.0]), "ok", "1", still=True)
    assert one(case(QUIET, **{which: stuck})).outcome is Outcome.NOT_MEASURED
    slow = Side(1.5, np.array([1.5, 1.5]), "ok", "1", still=True)
    assert one(case(QUIET, head_side=slow)).outcome is Outcome.REGRESSED


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, math.inf])
@pytest.mark.parametrize("which", ["base_side", "head_side"])
def test_no_number_is_not_measured(value, which) -> None:
    side = Side(value, np.empty(0), "ok", "1")
    assert one(case(QUIET, **{which: side})).outcome is Outcome.NOT_MEASURED


def test_a_benchmark_that_fails_now_is_a_regression() -> None:
    assert one(case(head_side=Side(state="failed", version="1"))).outcome is Outcome.REGRESSED
    assert one(case(base_side=Side(state="failed", version="1"))).outcome is Outcome.NOT_MEASURED


def test_a_changed_version_is_not_compared() -> None:
    changed = Side(2.0, np.array([2.0]), "ok", "2")
    assert one(case(QUIET, head_side=changed)).outcome is Outcome.NOT_MEASURED


def test_a_common_shift_is_an_invalid_run_not_many_regressions() -> None:
    cases = [
        case(noisy(50, 0.005, seed=i), head=1.2, params=(str(i),), spread=0.001) for i in range(20)
    ]
    verdicts = judge(cases)
    assert sum(v.outcome is Outcome.REGRESSED for v in verdicts) > 15
    report = assemble("a", "b", cases, verdicts)
    assert "invalid" in report.invalid
    assert report.exit_code == 3
    # A slower half is a change of code: the other half, measured in between, did not move.
    mixed = judge([*cases[:10], *(case(noisy(50, 0.005, seed=i)) for i in range(10))])
    assert common_shift(mixed) == []


def test_an_exact_regression_stays_one_in_an_invalid_run() -> None:
    exact = one(case(base=3, head=4, name="x.Y.track_launches", kind="exact"))
    assert Report("a", "b", (exact,), invalid="machine").exit_code == 1


def test_many_regressions_without_an_improvement_are_doubted() -> None:
    cases = [
        case(noisy(50, 0.005, seed=i), head=1.1 + 0.1 * i, params=(str(i),)) for i in range(12)
    ]
    cases += [case(noisy(50, 0.005, seed=i), params=(f"q{i}",)) for i in range(12)]
    assert any("doubtful" in n for n in assemble("a", "b", cases, judge(cases)).notes)


def test_what_cannot_be_compared_stands_apart() -> None:
    gone, fresh = Side(state="absent"), Side(state="absent")
    cases = [
        case(params=("gone",), head_side=gone),
        case(params=("new",), base_side=fresh),
        case(params=("both",), base_side=Side(state="failed"), head_side=Side(state="failed")),
    ]
    apart = assemble("a", "b", cases, judge(cases)).apart
    assert set(apart) == {"removed", "new", "failing on both"}


def test_nothing_measured_is_not_a_pass() -> None:
    assert Report("a", "b", ()).exit_code == 4
    assert Report("a", "b", tuple(judge([case(head_side=Side(state="absent"))]))).exit_code == 4


number = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(
    [0.0, -1.0, 1e-308, 1e308]
)
values = st.lists(number, max_size=60)


@settings(max_examples=80, deadline=None)
@given(values, values, values, number, number, st.sampled_from(["sampled", "exact"]), values)
def test_any_numbers_give_a_verdict_and_bad_ones_never_a_pass(
    past, again_a, again_b, old, new, kind, processes
) -> None:
    finite = np.array([p for p in processes if math.isfinite(p)])
    c = Case(
        Series("m", "e", "b.C.track_latency"),
        "latency",
        "seconds",
        kind,
        "lower",
        Side(old, finite),
        Side(new, finite),
        np.array(past),
        np.array(again_a),
        np.array(again_b),
    )
    with np.errstate(all="raise", under="ignore"):
        verdict = one(c)
    if not (math.isfinite(old) and math.isfinite(new)) or old < 0 or new < 0:
        assert verdict.outcome is Outcome.NOT_MEASURED
    assert isinstance(Report("a", "b", (verdict,)).exit_code, int)
    assert verdict.percent is not None


def test_what_neither_side_could_measure_is_not_listed() -> None:
    idle = replace(case(noisy(50, 0.01)), base=Side(state="skipped"), head=Side(state="skipped"))
    real = case(noisy(50, 0.01), params=("p",))
    report = assemble("a", "b", [idle, real], judge([idle, real]))
    assert [v.series for v in report.verdicts] == [real.series]
    assert not report.apart
