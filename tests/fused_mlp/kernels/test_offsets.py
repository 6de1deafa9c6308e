"""Offsets past 2^31 elements, with no big tensor: memory that is never touched costs nothing.

Of 288 rows that are 2^23 elements apart, the last block of 16 starts past 2^31. 32-bit arithmetic
wraps under the interpreter exactly as on a GPU, and then reads what is not there.
"""

import pytest
import torch
from torch import Tensor

from fused_mlp.kernels import activation, common, dact_gemm, decode, glu_gemm

ROWS, COLUMNS = 288, 8
STRIDE = common.MAX_STRIDE  # 2^23 - 1


@pytest.fixture
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The poison of conftest would touch all of it."""
    monkeypatch.undo()


def far(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """(rows, columns) of random numbers, spread over more than 2^31 elements (4.5 GB of address
    space).
    """
    storage = torch.empty((rows - 1) * STRIDE + columns, dtype=torch.float16)
    assert storage.numel() > 2**31
    spread = storage.as_strided((rows, columns), (STRIDE, 1))
    spread.copy_(torch.randn(rows, columns))
    return spread


def launch(kernel, grid, *args, **meta) -> None:
    common.launch(kernel, grid, *args, **meta, warps=4, stages=1)


@pytest.mark.usefixtures("_clean")
def test_activation_reads_and_writes_far_rows() -> None:
    gate, hidden = far(), far()
    launch(
        activation.act_forward_kernel, (18, 1), gate, None, None, None, hidden, ROWS, COLUMNS,
        STRIDE, 0, STRIDE, ACTIVATION="relu", BLOCK_M=16, BLOCK_N=8,
    )  # fmt: skip
    assert torch.equal(hidden, gate.relu())
    d_gate, grad = far(), torch.randn(ROWS, COLUMNS).half()
    launch(
        activation.act_backward_kernel, (18, 1), grad, gate, None, None, None, d_gate, None, None,
        None, ROWS, COLUMNS, COLUMNS, STRIDE, 0, STRIDE, 0, 0,
        ACTIVATION="relu", STRIP=1, BLOCK_M=16, BLOCK_N=8,
    )  # fmt: skip
    assert torch.equal(d_gate, torch.where(gate > 0, grad, 0.0))


@pytest.mark.usefixtures("_clean")
def test_gemms_read_and_write_far_rows() -> None:
    x, hidden = far(), far()
    weight = torch.eye(16, COLUMNS).half()[:COLUMNS]
    launch(
        glu_gemm.glu_gemm_kernel, (18,), x, weight, None, None, None, hidden, None, None,
        ROWS, COLUMNS, COLUMNS, STRIDE, 1, *weight.stride(), 0, 0, STRIDE, 0,
        ACTIVATION="relu", PRECISION="ieee", EVEN_N=False, EVEN_K=False,
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP=8, STRIPS=1,
    )  # fmt: skip
    assert torch.equal(hidden, x.relu())
    gate, d_gate = far(), far()
    launch(
        dact_gemm.dact_gemm_kernel, (18,), x, weight, gate, None, d_gate, None, None, None,
        ROWS, COLUMNS, COLUMNS, STRIDE, 1, *weight.stride(), STRIDE, 0, STRIDE,
        ACTIVATION="relu", PRECISION="ieee", EVEN_N=False, EVEN_K=False,
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP=8, STRIPS=1,
    )  # fmt: skip
    assert torch.equal(d_gate, torch.where(gate > 0, x, 0.0))


def test_far_columns_of_a_weight() -> None:
    # Row 256 of the weight (its 257th output column) starts past 2^31.
    weight = far()
    x = torch.eye(COLUMNS).half()
    assert torch.equal(
        glu_gemm.gemm_act(x, weight, None, None, None, "relu").hidden, weight.relu().T
    )
    assert torch.equal(decode.split_gemm(x, weight, None), weight.T)


def test_longer_strides_are_copied_and_longer_rows_refused() -> None:
    storage = torch.zeros(2**24 + 4, dtype=torch.float16)
    spread = storage.as_strided((2, 4), (2**24, 1))
    assert common.tame(spread).stride() == (4, 1)
    assert common.tame(storage[:4][None]) is not None
    with pytest.raises(ValueError, match="rows of 8388608 elements; kernels take at most 8388607"):
        common.tame(storage.as_strided((2, 2**23), (2**23, 1)))
