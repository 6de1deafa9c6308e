"""The switches PyTorch has for inference, each with a fused MLP inside: what comes out is the
same."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import fused_mlp

# Minutes of g++ on a busy machine; in every run, the profile's ladder holds a compiled MLP to
# eager.
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


@pytest.fixture
def block():
    torch.manual_seed(0)
    mlp = fused_mlp.FusedMLP(64, 128, bias=True).eval().requires_grad_(False)
    return nn.Sequential(nn.LayerNorm(64), mlp).eval()


def test_inference_mode(block):
    x = torch.randn(3, 5, 64)
    want = block(x)
    with torch.inference_mode():
        got = block(x)
    assert got.is_inference()
    torch.testing.assert_close(got.clone(), want, rtol=1e-5, atol=1e-6)


def test_autocast(block):
    x = torch.randn(3, 5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        got = block(x)
    assert got.dtype == torch.bfloat16
    error = (got.double() - block(x).double()).norm() / block(x).norm()
    assert error < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.full
@needs_compiler
def test_compile(block):
    x = torch.randn(7, 64)
    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@needs_compiler
def test_export_and_ahead_of_time_package(block, tmp_path):
    """Packaged once, loaded in a process that imports torch and fused_mlp's operators, equal for
    every batch."""
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(block, (torch.randn(8, 64),), dynamic_shapes=({0: tokens},))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "mlp.pt2")
    )
    inputs = [torch.randn(n, 64) for n in (2, 8, 33)]
    torch.save([inputs, [block(x) for x in inputs]], tmp_path / "cases.pt")
    code = (
        "import sys, torch, fused_mlp.ops\n"
        "run = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "inputs, outputs = torch.load(sys.argv[2])\n"
        "for x, y in zip(inputs, outputs): torch.testing.assert_close(run(x), y, rtol=1e-5, "
        "atol=1e-5)\n"
        "print('equal')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, package, str(tmp_path / "cases.pt")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert result.stdout.strip() == "equal", result.stderr[-2000:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_only_on_the_unfused_module():
    """A historical rung: it is traced from the plain operators, and fused_mlp is not in it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval()
    x = torch.randn(4, 64)
    with torch.no_grad():
        frozen = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(plain, x)))
        torch.testing.assert_close(frozen(x), plain(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            fused_mlp.FusedMLP.from_module(plain)(x), plain(x), rtol=1e-4, atol=1e-5
        )
