"""Settings that every test relies on, made before torch or triton is imported."""

import os
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

# Two busy cores swing results of shared machines; one thread also makes CPU arithmetic repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)
TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    # Kernels run on CPU tensors through Triton's interpreter, and on a GPU without it. The flag is
    # read when triton is imported, so one run can do only one of the two.
    compiled = config.option.markexpr == "gpu" or config.getoption("benchmark_only", False)
    os.environ.setdefault("TRITON_INTERPRET", "0" if compiled else "1")


def _broken_interpreter() -> bool:
    """Triton 3.6's takes ``int()`` of an array of one element, which numpy refuses from 2.4 on."""

    def installed(name: str) -> tuple[int, ...]:
        return tuple(int(part) for part in metadata.version(name).split(".")[:2])

    try:
        return installed("triton") < (3, 7) and installed("numpy") >= (2, 4)
    except metadata.PackageNotFoundError:
        return False


def _needs_gpu(item: pytest.Item) -> bool:
    # A mark, not a keyword: those hold also the name of the folder of the checkout.
    return item.get_closest_marker("gpu") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interpreted = os.environ["TRITON_INTERPRET"] == "1"
    if not torch.cuda.is_available():
        _skip(items, "no GPU on this machine", _needs_gpu)
    elif interpreted:
        why = "kernels are interpreted in this run; on a GPU: pytest -m gpu"
        _skip(items, why, _needs_gpu)
    if interpreted and _broken_interpreter():
        why = "Triton 3.6's interpreter needs numpy<2.4"
        _skip(items, why, lambda item: "fused_mlp" in item.path.parts[len(TESTS.parts) :])


@pytest.fixture
def tf32() -> Iterator[None]:
    """torch multiplies fp32 through tf32 on GPUs."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def _skip(items: list[pytest.Item], why: str, which: Callable[[pytest.Item], bool]) -> None:
    for item in filter(which, items):
        item.add_marker(pytest.mark.skip(reason=why))
