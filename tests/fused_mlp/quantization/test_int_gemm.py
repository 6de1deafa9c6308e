"""The Triton kernels that read int8 and int4 weights, interpreted, against float64."""

import pytest
import torch

pytest.importorskip("torchao")
pytest.importorskip("triton")

from fused_mlp import activations
from fused_mlp.kernels.int_gemm import QuantWeight, quant_gemm_act, quant_mlp
from fused_mlp.quantization import MODES, dequantize, run, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["int8_weight", "int4_weight/32", "int4_weight/128"]


def make(kind: str, out: int, width: int) -> tuple[QuantWeight, torch.Tensor]:
    mode, _, group = kind.partition("/")
    w = torch.randn(out, width)
    if mode == "int8_weight":
        quantized = weights.make(w, MODES[mode], 0)
    else:
        q, scale, zero = weights.int4_values(w, int(group))
        quantized = weights.Int4Tensor(
            weights.pack(q), scale.t().contiguous(), zero.t().contiguous(), [1, int(group)], w.shape
        )
    return run.plain(quantized), dequantize(quantized, torch.float32).double()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(dtype, kind, gated):
    """Error at most twice that of PyTorch's GEMMs in the same dtype, over weights that are exact,
    plus one rounding."""
    torch.manual_seed(0)
    width, out = 256, 136
    up, up_64 = make(kind, out, width)
    gate, gate_64 = make(kind, out, width)
    x, bias = torch.randn(5, width).to(dtype), torch.randn(out).to(dtype)
    got = quant_gemm_act(x, up, gate if gated else None, bias, bias if gated else None, "silu")

    def reference(kind):
        u = x.to(kind) @ up_64.to(kind).t() + bias.to(kind)
        if not gated:
            return torch.nn.functional.silu(u)
        return torch.nn.functional.silu(x.to(kind) @ gate_64.to(kind).t() + bias.to(kind)) * u

    want = reference(torch.float64)
    eager = (reference(dtype).double() - want).abs().max()
    rounding = torch.finfo(dtype).eps * want.abs().max()
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= 2 * eager + rounding


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_every_activation(name):
    torch.manual_seed(0)
    up, up_64 = make("int4_weight/32", 72, 64)
    x = torch.randn(3, 64)
    want = activations.get(name).eager(x.double() @ up_64.t())
    got = quant_gemm_act(x, up, None, None, None, name)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def test_whole_mlp_rows_do_not_mix():
    """Each token's result is the same bits whatever its company, NaN included.

    At the same place in the block: the interpreter's products are numpy's, whose last bit may
    depend on it.
    """
    torch.manual_seed(0)
    up, gate, down = (make(KINDS[1], *size)[0] for size in ((96, 64), (96, 64), (64, 96)))

    def run(x):
        return quant_mlp(x, up, down, gate, None, None, None, "gelu")

    x = torch.randn(16, 64)
    together = run(x)
    for i, row in enumerate(x):
        company = torch.full_like(x, torch.nan)
        company[i] = row
        assert torch.equal(run(company)[i], together[i])
    assert torch.equal(run(x[:1]), together[:1])


def test_too_many_tokens():
    up, _ = make("int8_weight", 32, 64)
    with pytest.raises(ValueError, match="at most 16"):
        quant_gemm_act(torch.randn(17, 64), up, None, None, None, "silu")
