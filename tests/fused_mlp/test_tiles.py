"""The rules for tiles, without compiling anything (tests/suite/test_static.py compiles them)."""

import pytest
import torch

from fused_mlp import tiles
from fused_mlp.tiles import Tile

GPUS = [a for a in tiles.ARCHITECTURES if a != "interpreter"]


@pytest.mark.parametrize("arch", [*GPUS, "sm75", "gfx90a"])
@pytest.mark.parametrize("problem", tiles.PROBLEMS)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.bfloat16, "ieee"),
        (torch.float16, "ieee"),
        (torch.float32, "tf32"),
        (torch.float32, "ieee"),
    ],
)
def test_every_default_keeps_the_rules(arch, problem, dtype, precision) -> None:
    math = tiles.math_of(dtype, precision, arch)
    for tokens in (1, 16, 65, 512, 8192):
        for intermediate in (3, 431, 3072, 14336):
            for aligned in (True, False):
                tile = tiles.default_tile(
                    arch, dtype, problem, tokens, intermediate, precision, aligned
                )
                assert tile.refusal(arch, math, problem) is None


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("math", ["half", "tf32", "fp32"])
@pytest.mark.parametrize("problem", tiles.PROBLEMS)
def test_candidates_keep_the_rules_and_start_with_the_default(arch, math, problem) -> None:
    found = list(tiles.candidates(arch, math, problem))
    assert 2 <= len(found) <= 16
    assert len(set(found)) == len(found)
    assert all(tile.fits(arch, math, problem) for tile in found)
    if arch in ("sm80", "sm90", "sm100", "gfx942"):
        dtype = torch.bfloat16 if math == "half" else torch.float32
        if tiles.math_of(dtype, "tf32" if math == "tf32" else "ieee", arch) == math:
            default = tiles.default_tile(
                arch, dtype, problem, 8192, 14336, "tf32" if math == "tf32" else "ieee"
            )
            assert found[0] == default


def test_refusals_say_what_was_needed_and_what_there_is() -> None:
    assert Tile(128, 128, 64, 8, 4).refusal("sm90", "half", "glu") is None
    assert "needs 245760 bytes of shared memory, sm90 has 232448" in str(
        Tile(128, 128, 64, 8, 5).refusal("sm90", "half", "glu")
    )
    assert "needs 256 registers a thread for sums; above 128" in str(
        Tile(128, 256, 32, 8, 2).refusal("sm90", "half", "glu")
    )
    assert "at least 64 rows, not 32" in str(Tile(32, 64, 64, 4, 2).refusal("sm90", "half", "glu"))
    assert Tile(32, 64, 64, 4, 2).fits("sm80", "half", "glu")


def test_few_blocks_get_smaller_tiles() -> None:
    def tile(tokens: int, intermediate: int) -> Tile:
        return tiles.default_tile("sm90", torch.bfloat16, "glu", tokens, intermediate)

    large = tile(8192, 14336)
    assert tile(64, 14336).m < large.m
    assert tile(197, 4096).m * tile(197, 4096).n < large.m * large.n  # 64 blocks for 132 processors


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "gfx942"])
def test_strips_divide_the_columns(arch: str) -> None:
    for itemsize in (2, 4):
        for m in (16, 32, 64, 128, 256):
            for n in (16, 32, 64, 128, 256):
                for warps in (2, 4, 8):
                    strips = Tile(m, n, 32, warps).strips(arch, itemsize)
                    assert n % strips == 0
                    assert n // strips >= 16
    assert Tile(128, 128, 64, 8).strips("sm90", 2) == 4


def test_an_unknown_architecture_gets_the_smallest_limits() -> None:
    assert tiles.describe("sm75").shared_memory == 101376
    assert tiles.describe("gfx1100").shared_memory == 65536
    assert tiles.describe("gfx1100").lanes == 64


def test_a_tile_is_hashable_and_frozen() -> None:
    assert len({Tile(), Tile(), Tile(m=64)}) == 2
    with pytest.raises(AttributeError):
        Tile().m = 1  # type: ignore[misc]
