"""On a GPU: each path and dtype against float64 at a few shapes, quantized weights, activations past
2^31 elements, and a captured CUDA graph.
"""

import pytest
import torch
from torch import Tensor

from fused_mlp import FusedMLP, reference, use_path

from .problems import Problem, assert_as_exact_as_eager, problem, results

pytestmark = pytest.mark.gpu

PATHS = ["eager", "packed", "epilogue", "decode"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(p: Problem, path: str, **kwargs) -> None:
    """Forward, and backward where the path has one, of ``p`` on ``path``."""
    exact = p.to(torch.float64)
    dy = torch.randn(p.x.shape, device=p.x.device).to(p.x.dtype)
    want, eager = results(exact, exact.reference(), dy), results(p, p.reference(), dy)
    with torch.no_grad(), use_path(path):
        assert_as_exact_as_eager([p.fused(**kwargs)], eager[:1], want[:1], want[:1])
    if path != "decode":
        with use_path(path):
            assert_as_exact_as_eager(results(p, p.fused(**kwargs), dy), eager, want, want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"), [(16, 256, 512), (7, 72, 431), (300, 512, 1024)]
)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_error_is_at_most_twice_eagers(path, dtype, tokens, hidden, intermediate, gated):
    if path == "decode" and tokens > 16:
        pytest.skip("decode serves at most 16 tokens")
    check(problem(tokens, hidden, intermediate, gated=gated, dtype=dtype).map(Tensor.cuda), path)


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_tf32_is_rounded_as_eagers(path, gated, tf32):
    check(problem(16, 512, 1024, gated=gated).map(Tensor.cuda), path)


@pytest.mark.parametrize("path", ["packed", "epilogue"])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_transposed_weights_and_every_second_row_of_x(path, recompute):
    p = problem(64, 256, 512, dtype=torch.bfloat16).map(Tensor.cuda)

    def transposed(t: Tensor) -> Tensor:
        return t.t().contiguous().t() if t.dim() == 2 else t

    strided = p.map(transposed)
    strided.x = torch.stack([p.x, p.x], 1).flatten(0, 1).detach()[::2].requires_grad_()
    assert not strided.x.is_contiguous()
    check(strided, path, recompute=recompute)


def _integers(bits: int, out: int, width: int, dtype: torch.dtype) -> tuple:
    """Random quantized weights and what they stand for, in float64."""
    from fused_mlp.kernels.int_gemm import QuantWeight

    generator = torch.Generator().manual_seed(out + width)
    group = width if bits == 8 else 64
    values = torch.randint(-128, 128, (out, width * bits // 8), generator=generator).to(torch.int8)
    scale = torch.rand(width // group, out, generator=generator).add_(0.5).div_(2**bits * 8)
    scale = scale.to(torch.float32 if bits == 8 else dtype)
    zero = None if bits == 8 else torch.randn(scale.shape, generator=generator).div_(64).to(dtype)
    # Two int4 a byte, the even column in the low half.
    numbers = values if bits == 8 else torch.stack([values << 4 >> 4, values >> 4], -1).flatten(1)
    exact = numbers.double() * scale.double().t().repeat_interleave(group, 1)
    if zero is not None:
        exact += zero.double().t().repeat_interleave(group, 1)
    on_gpu = (None if t is None else t.cuda() for t in (values, scale, zero))
    return QuantWeight(*on_gpu, group), exact.cuda()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_quantized_weights_are_read_as_what_they_stand_for(dtype, bits, gated):
    from fused_mlp.kernels.int_gemm import quant_mlp

    hidden, intermediate = 256, 512
    up, up_64 = _integers(bits, intermediate, hidden, dtype)
    gate, gate_64 = _integers(bits, intermediate, hidden, dtype) if gated else (None, None)
    down, down_64 = _integers(bits, hidden, intermediate, dtype)
    x = torch.randn(5, hidden, device="cuda").to(dtype)

    def mlp(kind: torch.dtype) -> Tensor:
        weights = [None if w is None else w.to(kind) for w in (up_64, down_64, gate_64)]
        return reference.mlp(
            x.to(kind), weights[0], weights[1], gate_weight=weights[2], activation="silu"
        )

    got = quant_mlp(x, up, down, gate, None, None, None, "silu")
    want = mlp(torch.float64)
    assert_as_exact_as_eager([got], [mlp(dtype)], [want], [want])


@pytest.mark.parametrize("path", ["packed", "epilogue"])
def test_activations_past_2_31_elements(path):
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of free GPU memory")
    tokens, hidden, intermediate = 140_000, 64, 16_384
    assert tokens * intermediate > 2**31
    p = problem(tokens, hidden, intermediate, dtype=torch.bfloat16, bias=False).map(Tensor.cuda)
    dy = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    with use_path(path):
        y = p.fused()
        (dx,) = torch.autograd.grad(y, p.x, dy)
    # The last rows, which depend on no others.
    last = Problem(p.x.detach()[-256:].requires_grad_(), p.weights, p.activation)
    exact = last.to(torch.float64)
    eager = results(last, last.reference(), dy[-256:])[:2]
    want = results(exact, exact.reference(), dy[-256:])[:2]
    assert_as_exact_as_eager([y.detach()[-256:], dx[-256:]], eager, want, want)


@pytest.mark.parametrize("path", PATHS)
def test_a_cuda_graph_replays_with_new_inputs(path):
    module = FusedMLP(64, 128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), use_path(path):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            module(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, module(x))
