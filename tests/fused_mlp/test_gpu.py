"""On a GPU: each path and dtype against float64 at a few shapes, and a captured CUDA graph."""

import pytest
import torch

from fused_mlp import FusedMLP, use_path

from .problems import assert_as_exact_as_eager, problem, results

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", ["eager", "packed", "epilogue", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"), [(16, 256, 512), (7, 72, 431), (300, 512, 1024)]
)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_error_is_at_most_twice_eagers(path, dtype, tokens, hidden, intermediate, gated):
    if path == "decode" and tokens > 16:
        pytest.skip("decode serves at most 16 tokens")
    p = problem(tokens, hidden, intermediate, gated=gated, dtype=dtype).map(lambda t: t.cuda())
    exact = p.to(torch.float64)
    dy = torch.randn(tokens, hidden, device="cuda").to(dtype)
    want, eager = results(exact, exact.reference(), dy), results(p, p.reference(), dy)
    with torch.no_grad(), use_path(path):
        assert_as_exact_as_eager([p.fused()], eager[:1], want[:1], want[:1])
    if path != "decode":
        with use_path(path):
            assert_as_exact_as_eager(results(p, p.fused(), dy), eager, want, want)


@pytest.mark.parametrize("path", ["eager", "packed", "epilogue", "decode"])
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
