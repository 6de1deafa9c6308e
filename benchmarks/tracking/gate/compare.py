"""One comparison from end to end: results and commits in, a report out."""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from .. import commits
from ..commits import Usage
from ..judging.case import Case
from ..judging.judge import judge
from ..judging.rule import DEFAULT, Rule
from ..judging.suite import assemble
from ..judging.verdict import Report, Verdict
from ..results import Run, load
from . import accepted, past
from .cases import Pair, cases, pairs, results_folder, units, unlike
from .explain import explain
from .rerun import Asv, Runner, rerun


def compare(args: argparse.Namespace, runner: Runner | None = None) -> Report:
    """The report that the arguments ask for; Usage where the question makes no sense."""
    _check(args)
    folder = args.results or results_folder(args.repo / "asv.conf.json")
    if not folder.is_dir():
        raise Usage(f"there is no results folder {folder.name}; run asv first")
    reviewed = accepted.read(folder)
    keep = _selector(args.bench)
    if args.history:
        head = commits.resolve(args.repo, args.base or "HEAD")
        line = commits.ancestors(args.repo, head)
        runs, problems = load(folder, machine=args.machine)
        return past.judge_history(
            runs, line, units(folder), keep, reviewed, [str(p) for p in problems]
        )
    if args.env:
        base = head = commits.resolve(args.repo, args.base or "HEAD")
    else:
        base, head = (commits.resolve(args.repo, c) for c in (args.base, args.head or "HEAD"))
        if not args.unrelated:
            commits.require_ancestor(args.repo, base, head)
    line = commits.ancestors(args.repo, base)
    runs, problems = load(folder, machine=args.machine)
    notes = [str(p) for p in problems]
    if base == head and not args.env:
        notes.append("base and head are the same commit: a result compared with itself")
    found = env_pairs(runs, head, line, *args.env) if args.env else pairs(runs, base, head, line)
    if not found:
        missing = [c[:8] for c in dict.fromkeys((base, head))]
        where = f" of machine {args.machine}" if args.machine else ""
        first = " && ".join(f"asv run {c}^!" for c in missing)
        notes.append(
            f"no results{where} for {' or '.join(missing)} in {folder.name}; first {first}"
        )
    if args.rerun and runner is None:
        if args.env:
            raise Usage("--rerun measures commits, not environments; leave out --env")
        runner = Asv(args.repo)
    changed = set(commits.ancestors(args.repo, head)) - (set(line) if base != head else set())
    within = _within(changed)
    old = _within(set(line))
    all_cases: list[Case] = []
    verdicts: list[Verdict] = []
    for pair in found:
        notes += _complaints(pair, base, head, bool(args.env))
        if pair.base is None or pair.head is None:
            continue
        if not args.env and unlike(pair.base, pair.head):
            continue
        known = units(folder)
        theirs = _cases(pair, known, keep, reviewed, line, old)
        judged = judge(theirs)
        if runner is not None:
            pair, said = _again(pair, judged, runner, base, head)
            notes += said
            theirs = _cases(pair, known, keep, reviewed, line, old)
            judged = judge(theirs)
        judged = explain(judged, pair, base, head)
        today = datetime.date.today()
        verdicts += [reviewed.apply(v, within, today) for v in judged]
        all_cases += theirs
    if isinstance(runner, Asv):
        notes += runner.log
    if args.bench and any(p.base and p.head for p in found) and not verdicts:
        notes.append(f"no benchmark's name matches --bench {args.bench}")
    return assemble(base, head, all_cases, verdicts, notes)


def env_pairs(
    runs: Sequence[Run], commit: str, line: Sequence[str], old: str, new: str
) -> list[Pair]:
    """The same commit in two environments of a machine, each named by a part of its name."""
    here = [r for r in runs if r.commit == commit]
    names = sorted({r.env for r in here})
    chosen = []
    for wanted in (old, new):
        part = re.sub(r"[\s=]+", "", wanted)
        exact = [n for n in names if n == part]
        matching = exact or [n for n in names if re.search(rf"{re.escape(part)}(?=$|[-.+_])", n)]
        if len(matching) != 1:
            listed = ", ".join(names)[:300] or "none"
            what = "no environment" if not matching else "more than one environment"
            raise Usage(f"{what} of {commit[:8]} is named {wanted!r}; measured in: {listed}")
        chosen.append(matching[0])
    if chosen[0] == chosen[1]:
        raise Usage(f"{old!r} and {new!r} both name the environment {chosen[0]}")
    found = []
    for machine in sorted({r.machine for r in here}):
        sides = [
            max(
                (r for r in here if (r.machine, r.env) == (machine, env)),
                key=lambda r: r.date,
                default=None,
            )
            for env in chosen
        ]
        if sides == [None, None]:
            continue
        base = sides[0]
        place = {c: i for i, c in enumerate(line)}
        before = [
            r
            for r in runs
            if base
            and r.commit in place
            and (r.machine, r.env) == (machine, base.env)
            and not unlike(r, base)
        ]
        before.sort(key=lambda r: place[r.commit])
        found.append(Pair(base, sides[1], tuple(before)))
    return found


def _check(args: argparse.Namespace) -> None:
    if args.history and (args.env or args.rerun or args.head):
        raise Usage("--history takes one commit at most, and neither --env nor --rerun")
    if args.env and args.head:
        raise Usage("--env compares environments at one commit; two were given")
    if not (args.history or args.env or args.base):
        raise Usage("which commit to compare with? (gate BASE HEAD, or --history)")


def _selector(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda name: True
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise Usage(f"--bench {pattern[:60]!r} is no regular expression ({error})") from None
    return lambda name: compiled.search(name) is not None


def _within(hashes: set[str]) -> Callable[[str], bool]:
    return lambda commit: any(h.startswith(commit) for h in hashes)


def _complaints(pair: Pair, base: str, head: str, environments: bool) -> list[str]:
    lines = [
        f"{pair.machine}: no result for {name} {commit[:8]}; on that machine: asv run {commit[:8]}^!"
        for side, name, commit in ((pair.base, "base", base), (pair.head, "head", head))
        if side is None
    ]
    if pair.base and pair.head and not environments and (why := unlike(pair.base, pair.head)):
        lines.append(f"{pair.machine}: not compared, unlike systems: {', '.join(why)}")
    return lines


def _cases(
    pair: Pair,
    known: dict[str, str],
    keep: Callable[[str], bool],
    reviewed: accepted.Reviewed,
    line: Sequence[str],
    old: Callable[[str], bool],
) -> list[Case]:
    """The pair's cases with what people have reviewed: own thresholds, new baselines."""
    found = []
    since: dict[str, list[Case]] = {}
    for case in cases(pair, known):
        if not keep(case.series.name):
            continue
        own = reviewed.threshold(case.series)
        if own is not None:
            case = replace(case, least_effect=own.least_effect, may_gate=own.gating)
        start = reviewed.baseline(case.series, old)
        if start:
            if start not in since:
                at = next(i for i, c in enumerate(line) if c.startswith(start))
                newer = set(line[at:])
                kept = tuple(r for r in pair.before if r.commit in newer)
                since[start] = cases(replace(pair, before=kept), known)
            again = next(c for c in since[start] if c.series == case.series)
            case = replace(case, history=again.history)
        found.append(case)
    return found


def _again(
    pair: Pair,
    judged: Sequence[Verdict],
    runner: Runner,
    base: str,
    head: str,
    rule: Rule = DEFAULT,
) -> tuple[Pair, list[str]]:
    """The pair with what was flagged measured again: five looks each, five more if need be."""
    env = pair.head.env if pair.head else ""
    notes: list[str] = []
    flagged = [v.series for v in judged if v.rerun and v.kind == "sampled"]
    for rounds in (rule.first_reruns, rule.reruns - rule.first_reruns):
        if not flagged:
            break
        bases, heads = rerun(runner, base, head, flagged, rounds)
        like = pair.head or pair.base
        kept = [
            [r for r in side if r.env == env and like is not None and not unlike(r, like)]
            for side in (bases, heads)
        ]
        lost = 2 * rounds - len(kept[0]) - len(kept[1])
        if lost:
            notes.append(f"{pair.machine} {env}: {lost} of {2 * rounds} re-runs brought nothing")
        pair = replace(
            pair,
            base_reruns=(*pair.base_reruns, *kept[0]),
            head_reruns=(*pair.head_reruns, *kept[1]),
        )
        settled = judge(cases(pair))
        flagged = [v.series for v in settled if v.rerun and v.series in set(flagged)]
    return pair, notes
