"""The ladder: what each rung is expected to run, what is counted, and how it is shown."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import fused_mlp
from fused_mlp import __main__ as command
from fused_mlp.profiling import Setting, Traffic, copies, diff, ladder, measure, picture, table
from fused_mlp.profiling.counting import saved_bytes
from fused_mlp.profiling.fusing import trained
from fused_mlp.profiling.measure import _energy, _on_device, _without_chatter

SMALL = Setting(64, 256, 64, torch.float32)


@pytest.fixture(scope="module")
def part_2():
    return {r.rung.name: r for r in measure(ladder(SMALL), SMALL, repeats=1)}


@pytest.mark.parametrize(
    ("name", "operators", "gemms"),
    [
        ("linear", 1, 1),
        ("compiled linear", 1, 1),
        ("eager", 5, 3),
        ("inference mode", 5, 3),
        ("autocast", 10, 3),
        ("torchscript", 5, 3),
        ("compiled", 4, 3),
        ("packed", 4, 2),
    ],
)
def test_operators_of_a_rung(part_2, name, operators, gemms):
    measured = part_2[name]
    assert (measured.count, measured.gemms) == (operators, gemms)
    assert measured.rung.expected == operators
    assert measured.mismatches(SMALL) == []


def test_liger_is_expected_to_run_four(part_2):
    assert part_2["liger"].rung.expected == 4
    assert part_2["liger"].rung.missing == "liger-kernel is not installed"


def test_onednn_runs_three_operators_and_the_quantized_rung_three_gemms():
    setting = Setting(256, 512, 64, torch.float32)
    rungs = [r for r in ladder(setting) if r.name in ("fused", "quantized")]
    for measured in measure(rungs, setting, repeats=1):
        assert measured.gemms == 3
        assert measured.mismatches(setting) == []
        if "onednn" in measured.rung.text:
            assert measured.count == 3


def test_expectations_on_a_gpu_are_those_of_the_articles():
    from fused_mlp.profiling.fusing import EXPECTED

    assert [EXPECTED[path][0] for path in ("eager", "epilogue", "decode")] == [5, 2, 2]


def test_bytes_are_those_of_the_operators(part_2):
    """eager: 3 GEMMs read two and write one, the activation moves 2 mids, the product 3."""
    row, mid, weight = 64 * 64 * 4, 64 * 256 * 4, 64 * 256 * 4
    assert part_2["eager"].moved == 3 * (row + mid + weight) + 5 * mid
    assert part_2["eager"].rung.least_bytes == 3 * weight + 2 * row
    assert all(r.moved >= r.rung.least_bytes for r in part_2.values() if r.moved)


def test_autocast_pays_for_its_casts(part_2):
    """bf16 halves what eager moves; each of 3 weights and x, twice, is read in 4 bytes, written
    in 2."""
    eager, cast = part_2["eager"].moved, part_2["autocast"].moved
    assert cast == eager // 2 + (3 * 64 * 256 + 2 * 64 * 64) * (4 + 2)


def test_torchscript_is_called_historical(part_2):
    text = table(list(part_2.values()), SMALL)
    assert "torchscript: historical, deprecated" in text


def test_switches_that_a_setting_has_no_use_for_say_so():
    names = ("inference mode", "autocast", "torchscript")
    setting = Setting(64, 128, 8, torch.bfloat16, training=True)
    reasons = {r.name: r.missing for r in ladder(setting) if r.name in names}
    assert reasons == {
        "inference mode": "it has no backward",
        "autocast": "it is for weights in fp32",
        "torchscript": "frozen weights have no gradient",
    }


def test_a_rung_that_raises_leaves_the_others(part_2):
    def fail():
        raise RuntimeError("no compiler\nand a long story")

    bad = dataclasses.replace(part_2["compiled"].rung, call=fail)
    results = measure([bad, part_2["eager"].rung], SMALL, repeats=1)
    assert results[0].rung.missing == "failed: RuntimeError: no compiler"
    assert results[1].count == 5
    assert "failed: RuntimeError: no compiler" in table(results, SMALL)


def test_times_that_overlap_are_called_the_same(part_2):
    def timed(name, low, latency, high):
        return dataclasses.replace(part_2[name], low=low, latency=latency, high=high)

    eager = timed("eager", 0.9, 1.0, 1.2)
    for alike in (timed("packed", 1.05, 1.15, 1.2), timed("packed", 0.95, 1.3, 1.4)):
        assert "same " in table([eager, alike], SMALL).split("packed")[1]
    assert "2.00x slower" in table([eager, timed("packed", 1.9, 2.0, 2.1)], SMALL)


def test_the_profilers_own_lines_are_dropped_and_no_others(capfd):
    with _without_chatter():
        os.write(2, b"USDT:2026 profiler_start\nCUPTI is not permitted\n")
    assert capfd.readouterr().err == "CUPTI is not permitted\n"


def test_peak_memory_is_exact(part_2):
    # gate, act(gate) and up at once; the product frees none before it exists.
    assert part_2["eager"].peak == 3 * 64 * 256 * 4


def test_part_1():
    results = measure(ladder(SMALL, 1), SMALL, repeats=1)
    assert [r.count for r in results] == [2, 1, 1]
    assert all(r.mismatches(SMALL) == [] for r in results)
    with pytest.raises(ValueError, match="there is no part 3"):
        ladder(SMALL, 3)


# The plan leaves the smaller step to PyTorch's own autograd, which keeps what eager does.
@pytest.mark.parametrize(("tokens", "kept"), [(64, 4), (512, 2)])
def test_training_keeps_what_is_expected(tokens, kept):
    setting = Setting(64, 256, tokens, torch.float32, training=True)
    rungs = [r for r in ladder(setting) if r.name in ("eager", "fused")]
    eager, fused = measure(rungs, setting, repeats=1)
    assert eager.count == 15
    x = tokens * 64 * 4
    assert eager.saved == 4 * setting.mid + x
    assert fused.saved == kept * setting.mid + x
    assert eager.mismatches(setting) == fused.mismatches(setting) == []


@pytest.mark.parametrize("tokens", [64, 512])
def test_every_rung_that_trains_here_states_its_counts_and_keeps_to_them(tokens):
    setting = Setting(64, 256, tokens, torch.float32, training=True)
    found = {r.rung.name: r for r in measure(ladder(setting), setting, repeats=1)}
    ran = {name: r for name, r in found.items() if r.rung.missing is None}
    assert set(ran) == {
        "linear",
        "compiled linear",
        "eager",
        "autocast",
        "compiled",
        "packed",
        "fused",
    }
    for name, r in ran.items():
        assert r.mismatches(setting) == [], name
        assert r.saved is not None, name
        assert r.rung.expected is not None or name == "autocast", name
    linear = {k.name: k.count for k in ran["linear"].kernels}
    assert linear == {"aten::addmm": 1, "aten::mm": 2, "aten::sum": 1}
    text = table(list(found.values()), setting)
    assert "of forward alone" in text
    assert "not run: it has no backward" in text


@pytest.mark.parametrize("path", ["eager", "onednn"])
def test_in_training_forward_moves_what_it_keeps_as_well(path):
    """In inference onednn's epilogues spare these passes; backward needs what they would hide."""
    setting = Setting(64, 256, 512, torch.float32, training=True)
    with fused_mlp.use_path(path):
        rungs = [r for r in ladder(setting) if r.name in ("eager", "fused")]
        eager, fused = measure(rungs, setting, repeats=1)
    assert f"path {path}" in fused.rung.text
    assert fused.moved == eager.moved
    assert fused.mismatches(setting) == []


@pytest.mark.parametrize(
    ("path", "tokens", "kernels", "gemms"),
    [
        # Forward 2 GEMMs, kernel, GEMM; backward dH, kernel, dx (of both weights side by side: a
        # copy and a GEMM, else 2 GEMMs), 3 weights.
        ("packed", 8192, 4 + 1 + 1 + 2 + 3, 3 + 1 + 1 + 3),
        ("packed", 64, 4 + 1 + 1 + 2 + 3, 3 + 1 + 2 + 3),
        # The same with dH and the derivatives in one kernel.
        ("epilogue", 8192, 2 + 1 + 2 + 3, 2 + 1 + 1 + 3),
        ("epilogue", 64, 2 + 1 + 2 + 3, 2 + 1 + 2 + 3),
    ],
)
def test_what_a_gpu_is_expected_to_run_in_training(path, tokens, kernels, gemms):
    assert trained(path, tokens, False)[:2] == (kernels, gemms)


def test_what_was_not_measured_is_called_so(part_2):
    text = " ".join(table(list(part_2.values()), SMALL).split())
    assert (
        "Not measured: device time, launches (a CPU has neither), saved bytes (inference keeps "
        "nothing), energy (no energy counter is read on a CPU)." in text
    )
    assert "host" not in text.split("On a CPU")[0], "a CPU's time is the host's"
    assert "not run: liger-kernel is not installed" in text


def test_what_a_gpu_tells_has_columns_of_its_own(part_2):
    setting = dataclasses.replace(SMALL, device="cuda", dtype=torch.bfloat16)
    seen = {"device": 2e-3, "launches": 5, "energy": 0.125, "host": 1e-3}
    eager = dataclasses.replace(part_2["eager"], **seen)
    text = table([eager], setting)
    header = " ".join(text.splitlines()[2:4])
    assert all(word in header for word in ("kernels", "host", "device", "launches", "energy"))
    assert {"2.00", "1.00", "0.125"} <= set(text.split())
    assert "On a CPU" not in text
    change = diff(eager, dataclasses.replace(eager, energy=0.25), setting)
    assert ["energy,", "J", "0.125", "0.250"] in [line.split() for line in change.splitlines()]


def test_a_profiler_that_sees_nothing_has_not_counted_none(part_2):
    setting = dataclasses.replace(SMALL, device="cuda")
    blind = dataclasses.replace(part_2["eager"], kernels=[])
    text = table([blind], setting)
    assert "✗ eager: the profiler saw no kernels: CUPTI is missing or not permitted" in text
    assert text.splitlines()[4].split()[:3] == ["eager", "–", "5"]
    assert "Not measured: device time, launches (no CUPTI)" in text


@pytest.mark.parametrize("training", [False, True])
def test_table_is_no_wider_than_a_terminal(training):
    setting = dataclasses.replace(SMALL, training=training)
    results = measure(ladder(setting), setting, repeats=1)
    assert max(map(len, table(results, setting).splitlines())) <= 108


def test_a_mismatch_is_marked_and_explained(part_2):
    wrong = dataclasses.replace(part_2["eager"].rung, expected=2)
    text = table([dataclasses.replace(part_2["eager"], rung=wrong)], SMALL)
    assert "✗ eager: 5 operators, expected 2" in text
    assert "aten::gelu" in text
    assert "✗" not in table([part_2["eager"]], SMALL)


def test_table_and_diff_and_picture(part_2):
    text = table(list(part_2.values()), SMALL)
    assert "64 tokens, 64/256, gelu, float32, cpu, 1 thread, inference" in text
    assert "operators that compute are counted in the place of kernels" in text
    change = diff(part_2["eager"], part_2["packed"], SMALL)
    assert "all operators" in change
    assert "changed" in change  # one GEMM fewer
    svg = ElementTree.fromstring(picture(list(part_2.values()), SMALL))
    assert len(svg.findall(".//{*}rect")) == 1 + sum(len(r.kernels) for r in part_2.values())


def test_picture_names_colours_and_what_did_not_run_and_cuts_no_text(part_2):
    svg = ElementTree.fromstring(picture(list(part_2.values()), SMALL))
    texts = [t.text for t in svg.findall(".//{*}text")]
    assert "not run: liger-kernel is not installed" in texts
    names = {k.name for r in part_2.values() for k in r.kernels}
    assert names <= set(texts), "a legend of every colour"
    assert any("1 operator" in text and "operators" not in text for text in texts)
    width = float(svg.get("viewBox").split()[2])
    for t in svg.findall(".//{*}text"):
        if t.get("text-anchor") != "end":
            assert float(t.get("x")) + 7 * len(t.text) < width, t.text


def test_diff_shows_what_was_measured_alone(part_2):
    change = diff(part_2["eager"], part_2["packed"], SMALL)
    assert "moved, MB" in change
    assert not {"saved", "device", "launches", "energy"} & set(change.split())


def test_command_writes_traces_picture_and_json(tmp_path, capsys):
    out = tmp_path / "new" / "traces"
    arguments = [
        "profile",
        "--shape",
        "64/128",
        "--tokens",
        "32",
        "--rungs",
        "eager,packed",
        "--repeats",
        "1",
    ]
    assert command.main([*arguments, "--device", "cpu", "--dtype", "fp32", "--out", str(out)]) == 0
    assert "eager" in capsys.readouterr().out
    names = sorted(path.name for path in out.iterdir())
    assert names == ["03-eager.json", "09-packed.json", "ladder.json", "ladder.svg"]
    trace = json.loads((out / "03-eager.json").read_text())
    assert {"aten::mm", "aten::gelu", "aten::mul"} <= {e.get("name") for e in trace["traceEvents"]}
    assert command.main([*arguments, "--device", "cpu", "--dtype", "fp32", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [r["count"] for r in seen["rungs"]] == [5, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "big"], "is not a shape"),
        (["--tokens", "0"], "at least 1"),
        (["--rungs", "nothing"], "there is no rung 'nothing'; known are linear"),
    ],
)
def test_bad_usage(arguments, words, capsys):
    assert command.main(["profile", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_trace_folder_that_cannot_be_written(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        assert command.main(["profile", "--device", "cpu", "--out", str(folder)]) == 2
        error = capsys.readouterr().err
        assert "traces cannot be written to" in error
        assert error.count("\n") == 1


def test_help_has_an_example():
    result = subprocess.run(
        [sys.executable, "-m", "fused_mlp", "profile", "--help"],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=True,
    )  # fmt: skip
    assert "python -m fused_mlp profile" in result.stdout


def test_traffic_counts_a_broadcast_once():
    with Traffic() as traffic:
        torch.ones(8, 4) + torch.ones(4).expand(8, 4)
    assert traffic.bytes_by_operator["aten::add"] == 4 * (32 + 4 + 32)


def test_traffic_of_what_is_written_in_place():
    """Read and written, unless it is only filled."""
    a, b = torch.ones(10), torch.ones(10)
    with Traffic() as traffic:
        a.mul_(b)
        a.copy_(b)
        a.fill_(2)
        torch.add(a, b, out=a)
        a.mul_(a)
    moved = {name.removeprefix("aten::"): n for name, n in traffic.bytes_by_operator.items()}
    assert moved == {"mul_": 120 + 80, "copy_": 80, "fill_": 40, "add": 120}


def test_saved_bytes_counts_a_storage_once():
    layer, x = nn.Linear(4, 4), torch.randn(8, 4, requires_grad=True)
    with saved_bytes(layer.parameters()) as total:
        y = layer(x)
        y * y
    assert total[0] == 2 * 8 * 4 * 4


def test_copies_finds_what_copies_and_nothing_else():
    x = torch.randn(4, 6)
    assert copies(lambda: x.t().reshape(3, 8)) != []
    assert copies(lambda: torch.relu(x).t().view(2, 3, 4)) == []


def test_rungs_compute_the_same():
    """The ladder's rungs share weights: none changes another's result."""
    torch.manual_seed(0)
    rungs = {r.name: r for r in ladder(Setting(64, 128, 16, torch.float32)) if r.missing is None}
    with torch.no_grad():
        want = rungs["eager"].call()
        for name in ("inference mode", "torchscript", "compiled", "packed", "fused"):
            torch.testing.assert_close(rungs[name].call(), want, rtol=1e-4, atol=1e-5)
        assert (rungs["autocast"].call() - want).norm() < 0.01 * want.norm()
        assert (rungs["quantized"].call() - want).norm() < 0.05 * want.norm()


def test_a_span_around_kernels_is_no_kernel():
    def event(name, **kwargs):
        return FunctionEvent(0, name, 0, 0, 10, device_type=DeviceType.CUDA, **kwargs)

    kernel, span = event("gemm"), event("## Call CompiledFxGraph ##", is_user_annotation=True)
    host = FunctionEvent(0, "aten::mm", 0, 0, 10)
    assert _on_device([host, span, kernel]) == [kernel]


def test_energy_is_of_the_gpu_that_torch_uses(monkeypatch):
    """torch's first GPU is the machine's fourth: a stand-in for NVML, which knows them by UUID."""
    joules = {"GPU-three": iter((1000, 7000)), "GPU-zero": iter((0, 0))}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: "GPU-zero",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(joules[handle]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="three")
    )
    measured = SimpleNamespace(latency=0.1, rung=SimpleNamespace(call=lambda: None))
    assert _energy(measured, seconds=0.3) == pytest.approx(6.0 / 2)
