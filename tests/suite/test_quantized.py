"""The data, the classifier and the tables behind the accuracy of quantized MLPs."""

import gzip
import json
import statistics
import struct
import subprocess

import numpy as np
import pytest
import torch

pytest.importorskip("torchao")
pytest.importorskip("sklearn")

from benchmarks import __main__ as command
from benchmarks.suite import quantization
from benchmarks.suite.harness import digits, quantized, quantized_jobs, quantized_report
from benchmarks.suite.harness.metrics import METRICS


@pytest.fixture(scope="module")
def data():
    return digits.digits()


def idx(array: np.ndarray, code: int) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(digits._TYPES[code]).tobytes()


@pytest.mark.parametrize("code", digits._TYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_idx_reads_what_was_written(tmp_path, code, packed):
    array = np.arange(24).reshape(2, 3, 4)
    raw = idx(array, code)
    file = tmp_path / "file"
    file.write_bytes(gzip.compress(raw) if packed else raw)
    assert (digits.read_idx(file) == array).all()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"PNG...", "is not an idx file"),
        (b"", "is not an idx file"),
        (idx(np.ones((2, 3)), 8)[:-1], "has 17 bytes; its header promises 18"),
        (idx(np.ones((2, 3)), 8)[:7], "its header promises"),
    ],
)
def test_broken_idx(tmp_path, raw, words):
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(ValueError, match=words):
        digits.read_idx(tmp_path / "file")


def test_idx_folder_reads_the_four_files(tmp_path):
    random = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 7)):
        pictures = idx(random.integers(0, 256, (count, 28, 28)), 8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(pictures))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count) % 10, 8))
    data = digits.idx_folder(tmp_path, "fashion")
    assert data.train_x.shape == (20, 784)
    assert data.test_y.tolist() == list(range(7))
    assert data.classes == 10
    assert data.train_x.abs().max() <= 1
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="has no t10k-labels-idx1-ubyte"):
        digits.idx_folder(tmp_path)


def test_digits_are_all_there_and_apart(data):
    assert len(data.train_y) + len(data.test_y) == 1797
    assert len(data.test_y) == 360
    assert data.test_y.bincount().min() >= 25


def test_both_classifiers_begin_alike(data):
    eager, fused = (digits.classifier(data, 3, fused) for fused in (False, True))
    torch.testing.assert_close(fused(data.test_x), eager(data.test_x), rtol=1e-4, atol=1e-5)


def test_stretching_changes_weights_and_no_answer(data):
    model = digits.classifier(data, 0, fused=True)
    with torch.no_grad():
        before, weight = model(data.test_x), model.mlps[0].down_proj.weight.clone()
        after = quantized.stretched(model, 0)(data.test_x)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
    assert model.mlps[0].down_proj.weight.abs().max() > 4 * weight.abs().max()


def test_eager_and_fused_learn_the_same(data):
    """One seed, two epochs: the same numbers but for rounding."""
    eager, fused = (
        digits.judge(digits.train(digits.classifier(data, 0, fused), data, 0, epochs=2), data)
        for fused in (False, True)
    )
    assert eager[0] > 0.85
    assert abs(eager[0] - fused[0]) <= 2 / len(data.test_y)
    assert abs(eager[1] - fused[1]) < 0.01


@pytest.mark.full
def test_accuracy_over_five_seeds(data):
    rows = list(quantized.accuracies(data))

    def over_seeds(mode: str, key: str = "accuracy") -> list[float]:
        return [row[key] for row in rows if row["mode"] == mode]

    eager, fused = over_seeds("eager"), over_seeds("fused")
    assert len(eager) == 5
    # Same accuracy within noise: their difference is far below the spread over seeds.
    gaps = [abs(a - b) for a, b in zip(eager, fused, strict=True)]
    assert statistics.mean(gaps) <= statistics.stdev(eager) / 2
    for mode in ("bf16", "int8_dynamic", "int8_weight", "fp8_dynamic"):
        assert statistics.mean(over_seeds(mode)) >= statistics.mean(fused) - 0.005
    # int4 loses; training for it wins at least three quarters of that back.
    longer, rounded, aware = (
        statistics.mean(over_seeds(mode, "loss")) for mode in ("longer", "longer, int4", "int4_qat")
    )
    assert rounded > longer + 0.05
    assert aware - longer < (rounded - longer) / 4


def test_the_suite_tracks_known_metrics_and_modes():
    for cls in (quantization.Digits, quantization.Llama):
        names = [name.removeprefix("track_") for name in dir(cls) if name.startswith("track_")]
        assert names
        for name in names:
            assert getattr(cls, f"track_{name}").unit == METRICS[name].unit
        assert cls.params == (list(quantized.MODES),)
    assert METRICS["accuracy"].better == "higher"


def answer(stdout: str, stderr: str = "", code: int = 0):
    return lambda *args, **kwargs: subprocess.CompletedProcess(args, code, stdout, stderr)


EXACT = '{"what": "exact", "mode": "a", "weight_bytes": 3, "peak_memory": 2, "launches": 1}\n'


def test_jobs_keep_what_was_printed(monkeypatch):
    lines = EXACT + 'noise\n{"what": "speed", "mode": "a", "samples": [1.0, 2.0]}\n'
    monkeypatch.setattr(quantized_jobs.subprocess, "run", answer(lines))
    found = quantized_jobs.measure(["exact", "speed"], ["a"])
    assert found["a"]["weight_bytes"] == 3
    assert found["a"]["latency"] == {"samples": [1.0, 2.0, 1.0, 2.0], "number": 1}


def test_a_job_that_dies_costs_only_what_it_did_not_come_to(monkeypatch):
    monkeypatch.setattr(quantized_jobs.subprocess, "run", answer(EXACT, "x\nSegfault", -11))
    found = quantized_jobs.measure(["exact"], ["a", "b"])
    assert found["a"]["launches"] == 1
    assert "Segfault" in found["b"]["failure"]
    llama = quantization.Llama()
    assert llama.track_launches(found, "a") == 1
    with pytest.raises(RuntimeError, match="Segfault"):
        llama.track_launches(found, "b")


def test_a_missing_package_is_not_a_failure(monkeypatch):
    error = "ModuleNotFoundError: No module named 'sklearn'"
    monkeypatch.setattr(quantized_jobs.subprocess, "run", answer("", error, 1))
    found = quantized_jobs.measure(["accuracy"], ["a"])
    assert found == {}
    assert np.isnan(quantization.Digits().track_accuracy(found, "a"))


def test_tables():
    rows = [
        {"what": "accuracy", "mode": m, "seed": s, "accuracy": 0.9, "loss": 0.1, "bytes": b}
        for m, b in (("fused", 400), ("int8_dynamic", 104))
        for s in (0, 1)
    ]
    speed = {128: {"eager": 0.2, "fused": 0.1, "int8_dynamic": 0.05}}
    models = [{"model": "Llama", "mode": "bf16", "error": 0.01, "kl": 1e-6}]
    text = quantized_report.tables(
        {"accuracy": rows, "data": "digits", "speed": speed, "shape": "8/16", "models": models}
    )
    assert "26.0%" in text
    assert "4.00×" in text
    assert "50.00 (4.00×)" in text
    assert "1.0e-02 1.0e-06" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "speed", "--shape", "12"], "is not hidden/intermediate"),
        (["--only", "speed", "--shape", "12/x"], "is not whole numbers above zero"),
        (["--tokens", "16,many"], "'16,many' is not whole numbers above zero"),
        (["--tokens", "0"], "is not whole numbers above zero"),
        (["--seeds", "0"], "must be at least 1"),
        (["--only", "accuracy", "--idx", "nowhere"], "has no train-images-idx3-ubyte"),
    ],
)
def test_bad_usage(arguments, words, capsys):
    assert command.main(["quantized", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_progress_goes_to_stderr_and_leaves_json_alone(capsys):
    arguments = ["--only", "speed", "--shape", "256/128", "--tokens", "1,2", "--rounds", "1"]
    assert command.main(["quantized", *arguments, "--json"]) == 0
    said = capsys.readouterr()
    assert set(json.loads(said.out)["speed"]) == {"1", "2"}
    assert "256/128, 2 tokens ..." in said.err


def test_divergence_of_one_model(monkeypatch):
    pytest.importorskip("transformers")
    build = {"Llama": quantized.language_models()["Llama"]}
    monkeypatch.setattr(quantized, "language_models", lambda: build)
    rows = {row["mode"]: row for row in quantized.divergences()}
    assert rows["fused"]["error"] < 1e-5
    assert rows["int8_dynamic"]["error"] < 0.02
    assert rows["int8_dynamic"]["kl"] < rows["int4_weight"]["kl"] < 1e-3
