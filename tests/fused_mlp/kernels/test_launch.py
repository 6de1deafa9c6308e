"""What launchers hand to Triton: on which device, how precise, and that `record` says the same."""

import contextlib
import subprocess
import sys
import textwrap

import pytest
import torch

from fused_mlp.activations import get
from fused_mlp.kernels import common
from fused_mlp.kernels.activation import act_backward, act_forward
from fused_mlp.kernels.decode import decode_mlp
from fused_mlp.kernels.glu_gemm import gemm_act


@pytest.mark.parametrize("layout", ["slice", "expanded"])
def test_biases_of_any_stride(layout) -> None:
    x, up, gate, down = (torch.randn(s) for s in ((5, 24), (40, 24), (40, 24), (24, 40)))

    def bias(size: int) -> torch.Tensor:
        return torch.randn(2 * size)[::2] if layout == "slice" else torch.randn(1).expand(size)

    up_bias, gate_bias, down_bias = bias(40), bias(40), bias(24)
    linear, act = torch.nn.functional.linear, get("silu").eager
    want_gate, want_up = linear(x, gate, gate_bias), linear(x, up, up_bias)
    want = act(want_gate) * want_up

    hidden = gemm_act(x, up, gate, up_bias, gate_bias, "silu").hidden
    torch.testing.assert_close(hidden, want, rtol=1e-4, atol=1e-4)
    y = decode_mlp(x, up, gate, down, up_bias, gate_bias, down_bias, "silu")
    torch.testing.assert_close(y, linear(want, down, down_bias), rtol=1e-4, atol=1e-4)

    biases = {"gate_bias": gate_bias, "up_bias": up_bias}
    hidden = act_forward(linear(x, gate), linear(x, up), "silu", **biases)
    torch.testing.assert_close(hidden, want, rtol=1e-4, atol=1e-4)
    grads = act_backward(want, linear(x, gate), linear(x, up), "silu", **biases)
    plain = act_backward(want, want_gate, want_up, "silu")
    torch.testing.assert_close(grads.packed, plain.packed, rtol=1e-4, atol=1e-4)


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch) -> None:
    entered = []

    @contextlib.contextmanager
    def device(of):
        entered.append(of)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1):
        with common._on(torch.device("cuda", index)):
            pass
    assert entered == [torch.device("cuda", 1)]


PRECISIONS = """
import torch
from fused_mlp.kernels.common import input_precision
for arch in ("sm90", "sm75", "gfx942"):
    print(input_precision(torch.float32, arch), end=" ")
print(input_precision(torch.bfloat16, "sm90"))
"""


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("", "ieee"),
        ("torch.set_float32_matmul_precision('high')", "tf32"),
        ("torch.set_float32_matmul_precision('medium')", "tf32"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "ieee"),
        ("torch.backends.fp32_precision = 'tf32'", "tf32"),
    ],
)
def test_fp32_products_follow_every_interface_of_torch(setting, wanted, compiled) -> None:
    assert compiled(f"import torch\n{setting}\n{PRECISIONS}").split() == [wanted] + ["ieee"] * 3


@pytest.fixture
def compiled(monkeypatch):
    """Run a program in a process of its own, with compiled kernels instead of interpreted ones."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    def run(program: str) -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    return run


BINDER = textwrap.dedent(
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver
    from fused_mlp.kernels import activation, common, dact_gemm, decode, glu_gemm

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)

    driver.set_active(Driver())
    sources = set()

    def launch(kernel, grid, *args, warps, stages, registers=None, **meta):
        assert all(size <= 65535 for size in grid[1:])
        *_, bind = kernel.device_caches[0]
        options = meta | {"num_warps": warps, "num_stages": stages, "debug": False}
        options["instrumentation_mode"] = ""
        bound, specialization, parsed = bind(*args, **options)
        backend = kernel.device_caches[0][3]
        _, signature, constants, attrs = kernel._pack_args(
            backend, options, bound, specialization, parsed
        )
        attrs = {key: value for key, value in attrs.items() if value}
        ours = common._specialize(
            kernel, dict(zip(kernel.arg_names, args)) | meta, warps, stages
        )
        constants = {kernel.arg_names[key[0]]: value for key, value in constants.items()}
        assert signature == ours.signature, (kernel, signature, ours.signature)
        assert constants == ours.constexprs, (kernel, constants, ours.constexprs)
        assert attrs == ours.attrs, (kernel, attrs, ours.attrs)
        sources.add((kernel.__name__, str(signature), str(constants), str(attrs)))

    for module in (activation, dact_gemm, decode, glu_gemm):
        module.launch = launch
    for module in (dact_gemm, decode, glu_gemm):
        module.architecture = lambda device: "sm90"

    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    for H, I in ((256, 512), (72, 431), (3, 1)):
        counts = []
        for tokens in (100, 112, 128, 255, 4096):
            x, w, d, wide = empty(tokens, H), empty(I, H), empty(H, I), empty(tokens, 2 * I)
            gate, up = wide[:, :I], wide[:, I:]
            glu_gemm.gemm_act(x, w, w, None, empty(I), "silu", save=True)
            glu_gemm.gemm_act(x, w.t().contiguous().t(), None, empty(I), None, "silu")
            dact_gemm.gemm_dact(
                x, d, gate, up, "silu", recompute_hidden=True, bias_grads=True
            )
            activation.act_forward(gate, up, "silu")
            activation.act_backward(
                up, gate, up, "silu", recompute_hidden=True, bias_grads=True
            )
            few = min(tokens, 16)
            decode.decode_mlp(x[:few], w, w, d, None, None, empty(H), "silu")
            counts.append(len(sources))
        print(*counts)
    """
)


def test_what_is_compiled_offline_is_what_triton_would_compile(compiled) -> None:
    """And no token count asks for a kernel of its own."""
    for line in compiled(BINDER).splitlines():
        assert len(set(line.split())) == 1


def test_aligned_is_what_triton_can_know() -> None:
    """16 bytes are 8 elements of bf16, but Triton asks a stride only whether 16 divides it."""

    def rows(width: int, offset: int = 0) -> torch.Tensor:
        return torch.empty(4 * width + offset, dtype=torch.bfloat16)[offset:].view(4, width)

    assert common.aligned(rows(32), rows(48).t(), rows(16, offset=8))
    assert not common.aligned(rows(24))
    assert not common.aligned(rows(32), rows(32, offset=1))
    assert not common.aligned(rows(64)[:, ::2])
