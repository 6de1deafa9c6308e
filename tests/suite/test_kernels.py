"""Static metrics in the suite: which kernels, and what a missing one is."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.suite import kernels
from benchmarks.suite.harness import selection, specimens, static
from benchmarks.suite.harness.shapes import SIZES


@pytest.mark.parametrize("arch", specimens.ARCHITECTURES)
def test_the_list_is_what_the_package_ships(arch):
    shipped = pytest.importorskip("fused_mlp.kernels").specimens(arch=arch)
    assert set(specimens.KERNELS) == set(shipped)


def test_each_size_compiles_more():
    quick, default, full = (set(specimens.chosen(SIZES[name])) for name in SIZES)
    assert quick < default < full


def compiled(monkeypatch, tmp_path, answers):
    jobs = [("glu/silu/bf16", "sm90"), ("act_forward/silu/bf16", "sm80")]
    plan = tmp_path / "plan.json"
    selection.write_plan(plan, {"kernels.Static.track_registers": jobs})
    monkeypatch.setenv("FUSED_MLP_PLAN", str(plan))
    monkeypatch.setenv("FUSED_MLP_PROGRESS", "off")
    monkeypatch.setenv("FUSED_MLP_NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(
        static,
        "compile_all",
        lambda asked: [
            (*job, answer) for job, answer in zip(sorted(asked)[::-1], answers, strict=True)
        ],
    )
    return kernels.compile_all_kernels()


def test_a_kernel_this_commit_lacks_is_not_applicable_and_a_broken_one_fails(monkeypatch, tmp_path):
    answers = [static.Failure("KeyError: 'glu/silu/bf16'"), static.Failure("CompilationError: no")]
    cache = compiled(monkeypatch, tmp_path, answers)
    benchmark = kernels.Static()
    missing = benchmark.track_spills(cache, "glu/silu/bf16", "sm90")
    assert missing != missing
    with pytest.raises(RuntimeError, match="CompilationError"):
        benchmark.track_spills(cache, "act_forward/silu/bf16", "sm80")
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert [note["kind"] for note in notes] == ["absent", "failure"]


@pytest.mark.parametrize(
    ("error", "absent"), [("ImportError: no kernels", True), ("MemoryError", False)]
)
def test_a_commit_with_no_kernels_is_not_applicable(monkeypatch, error, absent):
    said = SimpleNamespace(stderr=f"Traceback\n{error}\n")
    monkeypatch.setattr(kernels.subprocess, "run", lambda *_, **__: said)
    kernels._missing.cache_clear()
    reason = kernels._not_applicable("glu/silu/bf16", "the compiler's process ended with 1")
    assert reason == (error if absent else None)
    kernels._missing.cache_clear()
    # A KeyError inside the compiler is not about the kernel's name.
    assert kernels._not_applicable("glu/silu/bf16", "KeyError: 'ttg.num-warps'") is None


def test_numbers_and_the_code_hash_are_kept(monkeypatch, tmp_path):
    metrics = static.StaticMetrics(96, 2, 65536, 0, 1200, {"tensor": 64}, "ab" * 32, True, "3.7.1")
    cache = compiled(monkeypatch, tmp_path, [metrics, metrics])
    benchmark = kernels.Static()
    at = ("glu/silu/bf16", "sm90")
    assert benchmark.track_registers(cache, *at) == 96
    assert benchmark.track_spills(cache, *at) == 2
    assert benchmark.track_shared_memory(cache, *at) == 65536
    assert benchmark.track_instructions(cache, *at) == 1200
    note = json.loads((tmp_path / "notes").read_text().splitlines()[0])
    assert note["classes"] == {"tensor": 64}
    assert note["sass_sha256"] == "ab" * 32


def test_a_commit_whose_kernels_say_less_is_not_applicable():
    asked = "'Specimen' object has no attribute 'registers'"
    assert asked in kernels._not_applicable("glu/silu/bf16", f"AttributeError: {asked}")
    assert kernels._not_applicable("glu/silu/bf16", "AttributeError: 'int' has no 'x'") is None
