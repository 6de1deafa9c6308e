"""The figures that `compare` draws from its rows."""

from fused_mlp import comparing
from fused_mlp.comparing import Row
from fused_mlp.measuring import Case


def summary(*rows: tuple[Case, float]) -> list[str]:
    return comparing.summary([Row(case, "eager", 100.0, 100.0 / speedup) for case, speedup in rows])


def test_only_the_tiny_shape_is_overhead_and_all_others_count():
    small = Case(384, 1536, 32, gated=False)
    lines = summary(
        (Case(64, 128, 8), 0.5),
        (Case(64, 128, 8, gated=False, dtype="bfloat16"), 0.25),
        (Case(768, 3072, 16), 2.0),
        (small, 0.9),
        (Case(768, 3072, 16, training=True), 1.5),
        (Case(64, 128, 16, training=True), 1.25),
    )
    assert lines == [
        f"inference: worst 0.90x of eager's speed ({small})",
        "training: worst 1.25x of eager's speed (gated 64/128 float32 training 16 tokens)",
        "inference, 16-197 tokens: geometric mean 1.34x eager's speed",
        "host overhead, gated 64/128 float32 inference 8 tokens: 2.00x eager's time",
        "host overhead, plain 64/128 bfloat16 inference 8 tokens: 4.00x eager's time",
    ]


def test_tiny_in_another_way_is_an_ordinary_row():
    for case in (Case(64, 128, 9), Case(64, 128, 8, training=True), Case(64, 256, 8)):
        (line,) = summary((case, 1.5))[:1]
        assert "worst 1.50x" in line
        assert not any("overhead" in text for text in summary((case, 1.5)))


def test_nothing_measured_is_no_figure():
    assert summary() == []
    assert summary((comparing.OVERHEAD, 1.0)) == [
        "host overhead, gated 64/128 float32 inference 8 tokens: 1.00x eager's time"
    ]
