"""The report's own page: what changed between the two newest measured commits of each machine."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2
from asv.publishing import OutputPublisher

from . import commits
from .gate import command as gate
from .gate.compare import compare
from .gate.render import amount, change, detectable, summary, why
from .judging.verdict import Outcome, Report, Verdict
from .results import Problem, Run, load

PAGE = "what_changed.html"
_SHOWN = (Outcome.REGRESSED, Outcome.INCONCLUSIVE, Outcome.IMPROVED)
_FOLDED = (Outcome.NOT_MEASURED, Outcome.PASS)
_HARDWARE = ("gpu", "driver", "clocks", "cpu", "num_cpu", "torch", "triton", "python")


@dataclass(frozen=True)
class Page:
    """One machine × environment: its newest commit against the one before."""

    machine: str
    hardware: str
    report: Report
    base_subject: str = ""
    head_subject: str = ""

    @property
    def worst(self) -> list[Verdict]:
        return [v for outcome in _SHOWN for v in self.report.of(outcome)]

    @property
    def folded(self) -> list[tuple[str, list[Verdict]]]:
        found = [(outcome.value, self.report.of(outcome)) for outcome in _FOLDED]
        return [(name, verdicts) for name, verdicts in found if verdicts]

    @property
    def counts(self) -> str:
        return summary(self.report).partition(": ")[2]


def newest_pairs(runs: Sequence[Run], line: Sequence[str]) -> list[tuple[str, str, str]]:
    """(machine, base, head): the two newest commits on `line` each machine has measured, the machine
    with the newest first.
    """
    place = {commit: i for i, commit in enumerate(line)}
    homes: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        if run.commit in place:
            homes[run.machine].add(run.commit)
    ordered = {home: sorted(found, key=place.__getitem__) for home, found in homes.items()}
    pairs = [(home, found[-2], found[-1]) for home, found in ordered.items() if len(found) > 1]
    return sorted(pairs, key=lambda pair: place[pair[2]], reverse=True)


def _hardware(run: Run) -> str:
    named = [(key, run.params[key]) for key in _HARDWARE if run.params.get(key, "none") != "none"]
    return " · ".join(f"{key} {value}" for key, value in named)


def collect(results: Path, repo: Path) -> tuple[list[Page], list[Problem]]:
    """Judge each machine's two newest measured commits on this line, as the gate does."""
    runs, problems = load(results)
    line = commits.ancestors(repo, commits.resolve(repo, "HEAD"))
    parser = argparse.ArgumentParser()
    gate.add_arguments(parser)
    places = ["--results", str(results), "--repo", str(repo)]
    pages = []
    for machine, base, head in newest_pairs(runs, line):
        report = compare(parser.parse_args([base, head, "--machine", machine, *places]))
        # Skipped files are the whole page's business, and listed below the last machine.
        skipped = {str(problem) for problem in problems}
        report = replace(report, notes=tuple(n for n in report.notes if n not in skipped))
        measured = [run for run in runs if (run.machine, run.commit) == (machine, head)]
        subjects = [commits.git(repo, "log", "-1", "--format=%s", c)[1] for c in (base, head)]
        pages.append(Page(machine, _hardware(measured[-1]), report, *subjects))
    return pages, problems


def render(project: str, pages: Sequence[Page], problems: Sequence[Problem] = ()) -> str:
    """The page as HTML; every name is escaped, no script and no asset from elsewhere."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        Path(__file__).with_name("what_changed.html.j2").read_text(encoding="utf-8")
    )

    return template.render(
        project=project,
        pages=pages,
        problems=problems,
        amount=amount,
        change=change,
        why=why,
        detectable=detectable,
    )


class WhatChanged(OutputPublisher):
    """Lets ``asv publish`` write the page among its own."""

    name = "what_changed"
    button_label = "What changed"
    description = "Verdicts of the newest commit, worst first"
    order = 10

    @classmethod
    def publish(cls, conf, repo, benchmarks, graphs, revisions) -> None:
        try:
            pages, problems = collect(Path(conf.results_dir), Path(conf.repo))
        except commits.Usage as error:
            pages, problems = [], [Problem(conf.repo, str(error))]
        Path(conf.html_dir, PAGE).write_text(
            render(conf.project, pages, problems), encoding="utf-8"
        )
