"""How exact a kernel must be: twice eager's own error against float64, plus one rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Check = Callable[..., None]


def _check(
    name: str, result: Tensor, eager: Tensor, reference: Tensor, terms: Tensor | None = None
) -> None:
    """``terms`` are what a sum over rows adds: each may then be off by one rounding in fp32."""
    assert result.shape == reference.shape, f"{name}: {result.shape} is not {reference.shape}"
    error = (result.double() - reference).abs()
    allowed = 2 * (eager.double() - reference).abs().max()
    rounding = torch.finfo(result.dtype).eps / 2 * reference.abs()
    if terms is not None:
        rounding = rounding + torch.finfo(torch.float32).eps * terms.double().abs().sum(0)
    assert torch.isfinite(result).all(), f"{name}: not finite"
    excess = (error - rounding).max()
    assert excess <= allowed, (
        f"{name}: off by {error.max():.3e}, eager by {allowed / 2:.3e}; "
        f"at most twice that and one rounding are allowed"
    )


@pytest.fixture
def as_exact() -> Check:
    return _check


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a launcher gets is full of NaN: an element the kernel forgot cannot pass by
    luck.
    """
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *args: object, **options: object) -> Tensor:
        tensor = new_empty(self, *args, **options)
        return tensor if tensor.is_meta else tensor.fill_(float("nan"))

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
