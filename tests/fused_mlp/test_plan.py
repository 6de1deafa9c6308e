"""What the plan picks and how it says so."""

import json

import pytest
import torch

from fused_mlp import FusedMLP, explain, machine, plan, quantize, tables
from fused_mlp.plan import Query

CPU = torch.device("cpu")


def query(
    tokens=128,
    hidden=768,
    intermediate=3072,
    *,
    dtype=torch.float32,
    device=CPU,
    training=False,
    gated=True,
):
    return Query(device, dtype, tokens, hidden, intermediate, gated, "silu", training)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes the only table there is."""

    def write(entries, device=CPU):
        file = tmp_path / f"{machine.architecture(device)}.json"
        file.write_text(entries if isinstance(entries, str) else json.dumps({"entries": entries}))
        plan.forget()

    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    plan.forget()
    yield write
    monkeypatch.undo()
    plan.forget()


def entry(
    tokens=128,
    hidden=768,
    intermediate=3072,
    dtype="float32",
    gated=True,
    training=False,
    **microseconds,
):
    return {
        "dtype": dtype, "gated": gated, "training": training, "hidden": hidden,
        "intermediate": intermediate, "tokens": tokens, "microseconds": microseconds,
    }  # fmt: skip


def test_the_fastest_measured_path_is_taken(table):
    table([entry(eager=100.0, onednn=80.0), entry(tokens=8, eager=10.0, onednn=20.0)])
    assert plan.decide(query()).path == "onednn"
    assert plan.decide(query(tokens=9)).path == "eager"


def test_a_gain_within_the_noise_is_not_taken(table):
    table([entry(eager=100.0, onednn=99.0)])
    assert plan.decide(query()).path == "eager"


def test_a_table_speaks_for_its_neighbourhood_alone(table):
    table([entry(eager=100.0, onednn=80.0)])
    assert "fastest of 2 measured" in plan.decide(query(tokens=300)).reason
    for far in (
        query(tokens=1024),
        query(hidden=64),
        query(training=True),
        query(gated=False),
        query(dtype=torch.bfloat16),
    ):
        assert "no table" in plan.decide(far).reason


def test_on_a_gpu_sizes_that_16_divides_say_nothing_of_others(table, monkeypatch):
    monkeypatch.setattr(tables, "load", lambda architecture: [entry(eager=100.0, packed=50.0)])
    cuda = torch.device("cuda", 0)
    assert tables.nearest("sm90", query(device=cuda)) is not None
    assert tables.nearest("sm90", query(device=cuda, hidden=770)) is None
    assert tables.nearest("sm90", query(hidden=770)) is not None


def test_what_was_measured_in_fp32_says_nothing_of_tf32(table, monkeypatch, request):
    monkeypatch.setattr(machine, "architecture", lambda device: "sm90")
    cuda = torch.device("cuda")
    table([entry(eager=100.0, packed=80.0), entry(dtype="tf32", eager=70.0, packed=90.0)], cuda)
    monkeypatch.setattr(plan, "obstacle", lambda path, q: None)
    assert plan.decide(query(device=cuda)).path == "packed"
    request.getfixturevalue("tf32")
    assert plan.decide(query(device=cuda)).path == "eager"
    assert (
        tables.arithmetic("float32", "sm75") == tables.arithmetic("float32", "gfx942") == "float32"
    )
    assert tables.nearest("sm90", query(device=cuda, dtype=torch.bfloat16)) is None


def test_a_measured_path_that_cannot_run_here_is_named_and_passed_over(table):
    table([entry(eager=100.0, onednn=80.0)])
    with torch.backends.mkldnn.flags(enabled=False):
        chosen = plan.decide(query())
    assert chosen.path == "eager"
    assert "onednn can't" in chosen.reason


def test_a_damaged_table_is_named_and_skipped(table):
    table("{")
    with pytest.warns(UserWarning, match=r"table .*\.json is damaged and was skipped"):
        assert "no table" in plan.decide(query()).reason


def test_a_users_own_tables_come_over_the_packages(table, tmp_path, monkeypatch):
    table([entry(eager=100.0, onednn=80.0)])
    own = tmp_path / "own"
    own.mkdir()
    (own / f"{machine.architecture(CPU)}.json").write_text(
        json.dumps({"entries": [entry(eager=1.0, onednn=2.0)]})
    )
    monkeypatch.setenv("FUSED_MLP_TABLES", str(own))
    plan.forget()
    assert plan.decide(query()).path == "eager"


@pytest.mark.parametrize(
    ("tokens", "hidden", "path"),
    [(1, 768, "eager"), (16, 768, "onednn"), (0, 768, "eager"), (128, 16, "eager")],
)
def test_the_rule_for_a_cpu_without_a_table(table, tokens, hidden, path):
    assert plan.decide(query(tokens=tokens, hidden=hidden)).path == path


@pytest.mark.parametrize(
    "file", sorted(tables.FOLDER.glob("cpu-*.json")), ids=lambda file: file.stem
)
def test_the_rule_loses_little_wherever_a_cpu_was_measured(file):
    entries = json.loads(file.read_text())["entries"]
    lost = []
    for e in entries:
        shape = query(
            e["tokens"], e["hidden"], e["intermediate"], dtype=getattr(torch, e["dtype"]),
            training=e["training"], gated=e["gated"],
        )  # fmt: skip
        times = e["microseconds"]
        if times.get(plan.rule(shape)[0], times["eager"]) > times["eager"] / 0.95:
            lost.append(e)
    assert entries
    assert not lost


def test_the_rule_for_a_gpu_without_a_table():
    """No device is asked: a plan is a function of the query."""
    cuda = torch.device("cuda", 0)
    assert plan.rule(query(tokens=8192, device=cuda))[0] == "packed"
    assert plan.rule(query(tokens=64, device=cuda))[0] == "eager"
    assert plan.rule(query(device=torch.device("xpu")))[0] == "eager"


def test_explain_prints_the_tables_entry_in_words(table):
    table([entry(eager=100.0, onednn=80.0)])
    text = str(plan.decide(query()))
    assert text.splitlines()[0] == "path    onednn"
    assert "1.25x faster" in text
    assert "80.0 µs" in text


def test_explain_takes_arguments_a_module_or_a_model():
    module = FusedMLP(64, 2048)
    assert explain(module, torch.randn(4, 64)).startswith("path ")
    assert [line.split()[0] for line in explain(module).splitlines()] == ["1", "16", "128", "1024"]
    assert "no MLP found" in explain(torch.nn.Linear(3, 3))
    assert explain(torch.nn.ModuleDict({"ffn": module})).startswith("ffn  fused")
    with pytest.raises(TypeError, match="not a str"):
        explain("mlp")


def test_paths_can_be_forced_within_each_other():
    with plan.use_path("eager"):
        with plan.use_path("onednn"):
            assert plan.decide(query()).path == "onednn"
        assert plan.decide(query()).path == "eager"
    assert plan.forced() is None


def test_shipped_tables_are_well_formed():
    for file in tables.FOLDER.glob("*.json"):
        table = json.loads(file.read_text())
        assert table["architecture"] == file.stem
        assert table["measured"]["torch"]
        keys = [tables.identity(e) for e in table["entries"]]
        assert len(set(keys)) == len(keys)
        for e in table["entries"]:
            assert set(e["microseconds"]) <= set(plan.PATHS)
            assert e["microseconds"]["eager"] > 0


def test_explain_says_what_a_forced_path_refuses_and_names_what_is_no_tensor():
    with plan.use_path("decode"):
        lines = explain(FusedMLP(8, 16), training=True).splitlines()
    assert len(lines) == 4
    assert all("tokens  refused     path 'decode' was forced but cannot run" in x for x in lines)
    for what in (FusedMLP(8, 16), torch.nn.Sequential(FusedMLP(8, 16))):
        with pytest.raises(TypeError, match="x is a list; it must be a tensor"):
            explain(what, [1])


def test_quantized_weights_are_explained_as_what_they_run():
    pytest.importorskip("torchao")
    module = quantize(FusedMLP(64, 128), "int8_dynamic")
    for said in (explain(module, torch.randn(4, 64)), explain(module)):
        assert "quantized" in said
        assert "Int8Tensor" in said
        assert "eager" not in said
