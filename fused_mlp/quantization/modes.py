"""Every mode once: what it does to weights and activations, and its memory. No torchao here."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Mode:
    """One way to quantize.

    Attributes:
        weight_bits: of one weight, scales apart.
        activation: how x and the hidden activation are quantized; "none" leaves them as they are.
        grouped: whether a scale serves a group of one row's weights, instead of the row.
        calibrated: whether it needs data before.
        trainable: whether `prepare_qat` can imitate it while training.
    """

    name: str
    weight_bits: int
    activation: str
    text: str
    grouped: bool = False
    calibrated: bool = False
    trainable: bool = True

    def bytes_per_weight(self, in_features: int, group_size: int = 128) -> float:
        """Bytes of one weight in a row of ``in_features``, scales and zero points included.

        int4 keeps a bf16 scale and a bf16 zero point a group; int8 an fp32 scale and an int8 zero
        point a row (torchao keeps the latter although it is always 0); fp8 an fp32 scale a row.

        >>> round(MODES["int4_weight"].bytes_per_weight(4096), 2)
        0.53
        """
        if self.grouped:
            return self.weight_bits / 8 + 4 / group_size
        return self.weight_bits / 8 + (5 if self.name.startswith("int8") else 4) / in_features


MODES = {
    m.name: m
    for m in (
        Mode(
            "int8_dynamic", 8, "int8, one scale a token, found as it passes",
            "int8 GEMMs, no data needed",
        ),
        Mode(
            "int8_static", 8, "int8, one scale, fixed by calibration",
            "int8 GEMMs, nothing to find at run time", calibrated=True, trainable=False,
        ),
        Mode("int8_weight", 8, "none", "half the bytes of bf16 weights: for decode"),
        Mode("int4_weight", 4, "none", "a quarter of the bytes of bf16 weights: for decode",
             grouped=True),
        Mode(
            "fp8_dynamic", 8, "float8_e4m3fn, one scale a token",
            "fp8 GEMMs on sm89 and later; emulated on a CPU", trainable=False,
        ),
    )
}  # fmt: skip


def get(mode: str) -> Mode:
    """The mode called ``mode``; ValueError names all of them."""
    try:
        return MODES[mode]
    except (KeyError, TypeError):
        raise ValueError(f"unknown mode {mode!r}; known are {', '.join(MODES)}") from None
