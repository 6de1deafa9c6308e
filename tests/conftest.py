"""Settings that every test relies on, made before torch or triton is imported."""

import os

# Kernels run on CPU tensors through Triton's interpreter; the flag is read when triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Two busy cores swing results of shared machines; one thread also makes CPU arithmetic repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="no GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)
