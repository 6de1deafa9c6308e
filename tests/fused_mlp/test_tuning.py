"""The tuner, the comparison and the GPU check: their logic, with stand-ins for time and device."""

import dataclasses
import functools
import io
import itertools
import json
import os
import sys

import pytest
import torch

from fused_mlp import comparing, gpu_check, machine, measuring, ops, plan, tables, tuning
from fused_mlp.__main__ import main
from fused_mlp.measuring import Case
from fused_mlp.tiles import Tile, math_of, problem_of

CPU = torch.device("cpu")
CASES = [Case(32, 64, t) for t in (4, 16)]


@pytest.fixture(autouse=True)
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    plan.forget()
    yield tmp_path
    monkeypatch.undo()
    plan.forget()


def stand_in(case, device, seconds):
    return {"eager": 100.0, "onednn": 50.0}, {}


def test_tune_writes_a_table_that_the_plan_then_reads(own_tables):
    out = io.StringIO()
    file = tuning.tune(CASES, CPU, own_tables, out=out, measure=stand_in)
    assert (
        "[2/2] gated 32/64 float32 inference 16 tokens: onednn 50.0 µs, 2.00x faster than eager"
        in out.getvalue()
    )
    assert json.loads(file.read_text())["architecture"] == machine.architecture(CPU)
    assert plan.decide(measuring.query(CASES[0], CPU)).path == "onednn"


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"eager": 100.0, "onednn": 125.0}, "eager 100.0 µs; onednn 1.25x slower"),
        ({"eager": 100.0, "onednn": 100.1}, "eager 100.0 µs; onednn the same"),
        ({"eager": 100.0}, "eager 100.0 µs, nothing else runs here"),
    ],
)
def test_tune_says_what_eager_won_against(own_tables, times, words):
    out = io.StringIO()
    tuning.tune(CASES[:1], CPU, own_tables, out=out, measure=lambda *_: (times, {}))
    assert out.getvalue().endswith(f"4 tokens: {words}\n")


def test_tune_keeps_tf32_apart(own_tables, monkeypatch):
    monkeypatch.setattr(machine, "architecture", lambda device: "sm90")
    for setting in ("ieee", "tf32"):
        monkeypatch.setattr(machine, "fp32_setting", lambda setting=setting: setting)
        file = tuning.tune(CASES[:1], CPU, own_tables, out=io.StringIO(), measure=stand_in)
    assert [e["dtype"] for e in json.loads(file.read_text())["entries"]] == ["float32", "tf32"]


def test_tune_stopped_goes_on_where_it_was(own_tables):
    done = []

    def stopped(case, device, seconds):
        if done:
            raise KeyboardInterrupt
        done.append(case)
        return stand_in(case, device, seconds)

    with pytest.raises(KeyboardInterrupt):
        tuning.tune(CASES, CPU, own_tables, out=io.StringIO(), measure=stopped)
    seen = []

    def rest(case, device, seconds):
        seen.append(case)
        return stand_in(case, device, seconds)

    out = io.StringIO()
    tuning.tune(CASES, CPU, own_tables, out=out, measure=rest)
    assert seen == CASES[1:]
    assert "measured before" in out.getvalue()
    tuning.tune(CASES, CPU, own_tables, again=True, out=io.StringIO(), measure=rest)
    assert seen == [*CASES[1:], *CASES]


def test_tune_refuses_to_overwrite_a_damaged_table(own_tables):
    (own_tables / f"{machine.architecture(CPU)}.json").write_text("{")
    with pytest.raises(SystemExit, match="is damaged"):
        tuning.tune(CASES, CPU, own_tables, out=io.StringIO(), measure=stand_in)


def test_tune_times_no_tile_that_spills_or_exceeds_shared_memory(monkeypatch):
    for arch in ("sm80", "sm90", "sm100", "gfx942"):
        monkeypatch.setattr(machine, "architecture", lambda device, arch=arch: arch)
        for gated, backward in itertools.product((True, False), repeat=2):
            case = Case(4096, 14336, 512, "bfloat16", gated=gated, training=backward)
            tiles = tuning.tiles_worth_timing(case, CPU, backward)
            assert tiles
            math, problem = math_of(torch.bfloat16, "ieee", arch), problem_of(gated, backward)
            assert all(t.refusal(arch, math, problem) is None for t in tiles)


SMALL, NARROW = Tile(32, 32, 32, 4, 1), Tile(32, 16, 16, 4, 1)


@pytest.mark.parametrize("training", [False, True])
def test_tune_keeps_the_fastest_tile_of_each_direction(training, own_tables, monkeypatch):
    """Every kernel runs, through the interpreter; the time is a stand-in that favours one tile."""
    pytest.importorskip("triton")
    case = Case(16, 32, 4, training=training)
    monkeypatch.setattr(tuning, "tiles_worth_timing", lambda *_: [SMALL, NARROW])
    asked = []

    def times(calls, device, seconds):
        asked.append(list(calls))
        for call in calls.values():
            call()
        return {n: 3.0 - (n.count(SMALL) if isinstance(n, plan.Tiles) else 0) for n in calls}

    monkeypatch.setattr(measuring, "interleaved", times)
    monkeypatch.setattr(measuring, "able_paths", lambda *_: ["eager", "epilogue"])
    file = tuning.tune([case], CPU, own_tables, out=io.StringIO(), measure=tuning.measured)
    (entry,) = json.loads(file.read_text())["entries"]
    directions = ["epilogue", "epilogue_backward"][: 1 + training]
    assert entry["tiles"] == {name: dataclasses.asdict(SMALL) for name in directions}
    tiles = [set(names) for names in asked[:-1]]
    assert tiles[0] == {plan.Tiles(), plan.Tiles(SMALL), plan.Tiles(NARROW)}
    if training:
        backward = {plan.Tiles(SMALL, t) for t in (None, SMALL, NARROW)}
        assert tiles[1] == backward
    with plan.use_path("epilogue"):
        found = plan.decide(measuring.query(case, CPU))
        assert found.tiles == plan.Tiles(SMALL, SMALL if training else None)
        assert str(found).count("Tile(m=32") == 1 + training
        with plan.use_tiles():
            assert plan.decide(measuring.query(case, CPU)).tiles == plan.Tiles()


def test_backward_tiles_are_compiled_in_the_threads_that_ask_for_them(own_tables, monkeypatch):
    """Not in autograd's one thread of a GPU; and gradients that threads share are left alone."""
    pytest.importorskip("triton")
    case, seen, real = Case(16, 32, 4, training=True), [], ops.backward.gradients

    def gradients(plan_, *args):
        seen.append((plan_.tiles.backward, torch._C._is_multithreading_enabled()))
        return real(plan_, *args)

    monkeypatch.setattr(ops.backward, "gradients", gradients)
    monkeypatch.setattr(tuning, "tiles_worth_timing", lambda *_: [SMALL, NARROW])
    monkeypatch.setattr(measuring, "interleaved", lambda calls, *_: dict.fromkeys(calls, 1.0))
    module, x, dy = measuring.build(case, CPU)
    tuning.best_tiles(case, CPU, module, x, dy, 0.01)
    assert seen == [(SMALL, False), (NARROW, False)]
    assert all(t.grad is None for t in (x, *module.parameters()))


def test_tune_and_compare_for_real_on_this_cpu(own_tables, capsys):
    arguments = [
        "--shapes",
        "32/64",
        "--tokens",
        "4",
        "--seconds",
        "0.01",
        "--dtypes",
        "fp32",
        "--device",
        "cpu",
    ]
    assert main(["tune", *arguments, "--folder", str(own_tables)]) == 0
    (file,) = own_tables.glob("*.json")
    entries = json.loads(file.read_text())["entries"]
    assert len(entries) == 4
    assert all(e["microseconds"]["eager"] > 0 for e in entries)
    capsys.readouterr()
    assert main(["compare", *arguments]) == 0
    text, progress = capsys.readouterr()
    assert progress.splitlines()[-1].startswith("[5/5] "), "four cases and the host's overhead"
    assert "host overhead" in text
    assert "0.0 MiB" in text
    assert main(["compare", *arguments, "--json"]) == 0
    assert {r["path"] for r in json.loads(capsys.readouterr().out)} <= set(plan.PATHS)
    del arguments[4:6]  # explain measures nothing, so takes no --seconds
    assert main(["explain", *arguments]) == 0
    assert "path    " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "--shapes", "768"],
        ["tune", "--dtypes", "fp99"],
        ["tune", "--shapes", "768/none"],
        ["tune", "--tokens", "1,-3"],
        ["tune", "--device", "tpu"],
        ["tune", "--modes", "traning"],
        ["compare", "--forms", "plain,gatd"],
        ["tune", "--seconds", "0"],
        ["compare", "--seconds", "nan"],
        ["explain", "--seconds", "1"],
        ["melt"],
        [],
    ],
    ids=str,
)
def test_bad_usage_is_2(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


def test_bad_activation_is_one_line_and_2(capsys):
    assert main(["explain", "--activation", "gleu", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("fused_mlp: unknown activation 'gleu'")


def test_compare_counts_bytes_and_says_faster_or_slower():
    row = comparing.Row(
        Case(768, 3072, 16, training=True), "onednn", 200.0, 100.0, 4 * 2**20, 2 * 2**20
    )
    text = comparing.table([row])
    assert "2.00x faster" in text
    assert "2.0 MiB, eager 4.0 MiB" in text
    slow = comparing.table([comparing.Row(Case(768, 3072, 16), "eager", 100.0, 125.0)])
    assert "1.25x slower" in slow


def test_gpu_check_says_that_there_is_no_gpu(own_tables, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu-check"]) == 4
    assert "nothing was checked" in capsys.readouterr().err


def test_gpu_check_goes_through_on_a_stand_in(own_tables, capsys, monkeypatch):
    """A CPU in the GPU's place: every step runs, a case that fails costs itself alone."""
    core = [Case(32, 64, 4), Case(32, 64, 4, training=True), Case(32, 64, 4, "float64")]
    monkeypatch.setattr(gpu_check, "CORE", core)
    monkeypatch.setattr(gpu_check, "run_tests", lambda seconds: "passed")
    monkeypatch.setattr(torch, "compile", lambda module: module)
    small = gpu_check.measure_peaks
    monkeypatch.setattr(
        gpu_check, "measure_peaks", lambda device, dtypes: small(device, dtypes, size=64)
    )
    real = gpu_check.measure

    def measure(case, *args, **kwargs):
        if case.dtype == "float64":
            raise RuntimeError("out of memory")
        return real(case, *args, **kwargs | {"seconds": 0.01})

    monkeypatch.setattr(gpu_check, "measure", measure)
    assert gpu_check.main(own_tables, device=CPU) == gpu_check.FAILED
    text = capsys.readouterr().out
    assert text.count("32/64 gated") == 2
    assert "against liger" in text
    assert "not measured  gated 32/64 float64 inference 4 tokens: out of memory" in text


def test_gpu_check_compiles_each_case_for_its_own_sizes(monkeypatch):
    """Torch compiles one forward for symbolic sizes from the third shape on, and none after the eighth."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(any(isinstance(i, torch.SymInt) for i in inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    peaks = gpu_check.Peaks({"float32": 1e12}, 1e11)
    for i in range(1, 11):
        gpu_check.measure(Case(8 * i, 32, 4 * i), CPU, peaks, seconds=0.001)
    assert graphs == 10 * [False]


def test_gpu_check_verdicts():
    line = gpu_check.Line(
        Case(32, 64, 4), "packed", 10.0, 0.5, 1.0, {"eager": 20.0, "compile": None, "liger": 9.0}
    )
    assert gpu_check.verdict("passed", [line], []) == 0
    assert gpu_check.verdict("passed", [line], ["x: left out, the time was up"]) == 0
    assert gpu_check.verdict("failed (1)", [line], []) == 1
    assert gpu_check.verdict("passed", [line], ["x: out of memory"]) == 1
    wrong = gpu_check.Line(line.case, "packed", 10.0, 0.5, float("nan"), line.others)
    assert gpu_check.verdict("passed", [line, wrong], []) == 1
    assert gpu_check.verdict("passed", [], []) == 4
    row = gpu_check.table([line]).splitlines()[1]
    assert "50%" in row
    assert "2.00x faster" in row
    assert "1.11x slower" in row


def test_gpu_check_reads_the_tests_result():
    def exits(code):
        return [sys.executable, "-c", f"raise SystemExit({code})"]

    assert gpu_check.run_tests(60, exits(0)) == "passed"
    assert gpu_check.run_tests(60, exits(1)) == "failed (1)"
    assert gpu_check.run_tests(60, exits(5)) == "none were collected"
    assert "not done after" in gpu_check.run_tests(
        0.5, [sys.executable, "-c", "import time; time.sleep(30)"]
    )


def test_workers_of_the_gpu_tests_end_with_them(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    worker = (
        "import sys, time; held = open(sys.argv[1], 'w'); print(flush=True);"
        "time.sleep(10); held.write('still there')"
    )
    tests = (
        "import subprocess, sys; command = [sys.executable, '-c', *sys.argv[1:]];"
        "subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()"
    )
    assert gpu_check.run_tests(60, [sys.executable, "-c", tests, worker, str(pipe)]) == "passed"
    os.set_blocking(reader, True)
    assert os.read(reader, 20) == b""  # nobody holds it, nor wrote to it
    os.close(reader)


def test_events_are_recorded_on_the_device_that_works(monkeypatch):
    """With GPUs that are not there: an event knows only the current device, and on another is no time."""
    current = [0]
    recorded = []

    class On:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            recorded.append(current[-1])

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = measuring.interleaved({"call": lambda: None}, torch.device("cuda:1"), 1e-6)
    assert times == {"call": 1000.0}
    assert set(recorded) == {1}


def test_roofline_takes_the_larger_bound():
    peaks = gpu_check.Peaks({"bfloat16": 1e15}, 4e12)
    decode, batch = Case(4096, 14336, 1, "bfloat16"), Case(4096, 14336, 8192, "bfloat16")
    assert peaks.roofline_us(decode) == pytest.approx(1e6 * decode.least_bytes / 4e12)
    assert peaks.roofline_us(batch) == pytest.approx(1e6 * batch.flop / 1e15)
