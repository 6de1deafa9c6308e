"""Plain ``asv run``: no question, no installed torch, samples kept, nothing lost."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from .conftest import Project

TOY = "toy.Toy.track_latency"


def load(path: Path) -> dict:
    data = json.loads(path.read_text())
    columns = data["result_columns"]
    data["rows"] = {
        name: dict(zip(columns, row, strict=False)) for name, row in data["results"].items()
    }
    return data


@pytest.fixture(scope="session")
def result(project: Project) -> dict:
    (path,) = project.results()[:1]
    return load(path)


def test_run_asks_nothing_and_keeps_out_of_home(project: Project) -> None:
    first = project.first_run
    # `broken` is a combination that raises: asv says so with exit code 2 and keeps the others.
    assert first.returncode == 2, first.stdout + first.stderr
    assert not (project.home / ".asv-machine.json").exists()
    assert "python -m benchmarks report shows it" in first.stdout


def test_samples_are_kept_and_a_failure_costs_its_combination_alone(result: dict) -> None:
    row = result["rows"][TOY]
    assert row["samples"][:2] == [[1.0, 1.1, 1.2, 1.3], [2.0, 2.1, 2.2, 2.3]]
    assert math.isnan(row["result"][2]), "not applicable is NaN"
    assert row["result"][3] is None, "a failure is null"


def test_result_names_hardware_and_software(result: dict) -> None:
    params = result["params"]
    assert params["machine"] == "toy"
    assert params["torch"] == torch.__version__.split("+")[0]
    assert {"cpu", "gpu", "driver", "triton", "num_cpu", "clocks"} <= set(params)


def test_environment_shows_the_commits_package_over_the_interpreters_torch(
    project: Project,
) -> None:
    (path,) = project.results()[:1]
    records = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    (where,) = [record for record in records if record["kind"] == "where"]
    assert where["torch"] == torch.__version__
    assert str(project.folder / ".asv") in where["package"]
    installed = list((project.folder / ".asv/env").glob("*/lib/python*/site-packages/torch"))
    assert not installed, "torch must never be installed again"


def test_second_run_of_one_benchmark_keeps_the_others_side_records(project: Project) -> None:
    answer = project.asv("run", "--bench", "Waits", "HEAD^!")
    assert answer.returncode == 0, answer.stdout
    (path,) = project.results()[:1]
    assert TOY in load(path)["rows"]
    assert '"where"' in path.with_suffix(".jsonl").read_text()


def test_interrupted_run_keeps_what_was_measured(project: Project, tmp_path: Path) -> None:
    commit = project.commit("interrupted")
    flag = tmp_path / "waiting"
    process = subprocess.Popen(
        [sys.executable, "-m", "asv", "run"],
        cwd=project.folder,
        env=project.environ(TOY_WAITS=str(flag)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not flag.exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode != 0
    assert "KeyboardInterrupt" not in output
    assert "what was measured so far is kept" in output
    (path,) = project.machine_dir.glob(f"{commit[:8]}-*.json")
    assert load(path)["rows"][TOY]["samples"][0] == [1.0, 1.1, 1.2, 1.3]


def test_commit_that_does_not_build_is_said_and_costs_nothing_else(project: Project) -> None:
    pyproject = project.folder / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text("this is no TOML [")
    bad = project.commit("does not build")
    pyproject.write_text(text)
    project.commit("builds again")
    before = {path.name: path.read_bytes() for path in project.results()}
    answer = project.asv("run", f"{bad}^!")
    assert answer.returncode != 0
    assert "fail" in (answer.stdout + answer.stderr).lower()
    assert all((project.machine_dir / name).read_bytes() == old for name, old in before.items())


def test_results_of_other_hardware_under_the_same_name_are_refused(project: Project) -> None:
    path = project.machine_dir / "machine.json"
    kept = path.read_text()
    path.write_text(json.dumps({**json.loads(kept), "gpu": "NVIDIA Imaginary 9000"}))
    try:
        answer = project.asv("run", "--bench", "Waits")
    finally:
        path.write_text(kept)
    assert answer.returncode != 0
    assert "Imaginary 9000" in answer.stdout
    assert "FUSED_MLP_MACHINE" in answer.stdout


def test_results_folder_that_cannot_be_written_is_said_first(
    project: Project, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    conf = project.folder / "asv.conf.json"
    other = project.folder / "blocked.conf.json"
    other.write_text(conf.read_text().replace('"results"', json.dumps(str(blocked / "results"))))
    answer = project.asv("run", "--config", str(other))
    other.unlink()
    assert answer.returncode != 0
    assert "results cannot be written" in answer.stdout
    assert "Traceback" not in answer.stdout + answer.stderr
