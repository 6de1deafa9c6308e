"""Static metrics, and with them every shipped kernel: compiled for real, in processes without the
interpreter.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_mlp
from benchmarks.suite.harness import machine_code, static
from benchmarks.suite.harness.static import Failure, StaticMetrics
from fused_mlp import tiles
from fused_mlp.kernels import specimens

# One of each family in its heaviest form, and the two ways that fp32 multiplies.
CORE = (
    "glu_saved/silu/bf16",
    "plain/gelu_tanh/bf16",
    "glu_backward_bias/silu/bf16",
    "act_backward/silu/bf16",
    "decode/glu/silu/bf16",
    "decode/plain/gelu_tanh/bf16/split_gemm",
    "int8/glu/silu/bf16",
    "int4/glu/silu/bf16",
    "glu_backward/silu/fp32",
)


def check(name: str, arch: str, metrics: StaticMetrics | Failure) -> None:
    assert isinstance(metrics, StaticMetrics), f"{name} on {arch}: {metrics}"
    assert metrics.spills == 0, f"{name} on {arch} spills {metrics.spills} times"
    limit = tiles.describe(arch).shared_memory
    assert metrics.shared_memory <= limit, f"{name} on {arch}: {metrics.shared_memory} > {limit}"
    assert 0 < metrics.registers <= (512 if arch.startswith("gfx") else 255)
    assert sum(metrics.instruction_classes.values()) == metrics.instructions > 0
    assert metrics.fp_fusion


TUNED = re.compile(
    r"(?P<problem>\w+?)_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_(?P<warps>\d+)_warps_(?P<stages>\d+)_stages"
    r"/\w+/(?P<kind>\w+)"
)


def check_rule(name: str, arch: str, metrics: StaticMetrics) -> None:
    """A tile of the tuner takes no more shared memory than `tiles` predicts before compiling."""
    found = TUNED.fullmatch(name)
    if found is None:
        return
    sizes = {key: int(found[key]) for key in ("m", "n", "k", "warps", "stages")}
    half = {"bf16": (torch.bfloat16, "ieee"), "tf32": (torch.float32, "tf32")}
    math = tiles.math_of(*half.get(found["kind"], (torch.float32, "ieee")), arch)
    predicted = tiles.Tile(**sizes).shared_memory(arch, math, found["problem"])
    assert metrics.shared_memory <= predicted, f"{name} on {arch}: {metrics} > {predicted}"


@pytest.fixture(scope="module")
def core() -> dict[tuple[str, str], StaticMetrics | Failure]:
    jobs = [(name, arch) for arch in static.ARCHITECTURES for name in CORE]
    return {(name, arch): m for name, arch, m in static.compile_all(jobs, workers=2)}


def test_the_core_set_compiles_without_spills_on_every_architecture(core) -> None:
    assert len(core) == len(CORE) * len(static.ARCHITECTURES)
    for (name, arch), metrics in core.items():
        check(name, arch, metrics)


def test_tensor_cores_are_used_and_fp32_is_not_rounded_to_tf32(core) -> None:
    for arch in static.ARCHITECTURES:
        for name in (*CORE[:3], "int8/glu/silu/bf16", "int4/glu/silu/bf16"):
            assert core[name, arch].instruction_classes["tensor"] > 0, (name, arch)
        if arch.startswith("sm"):
            assert core["glu_backward/silu/fp32", arch].instruction_classes["tensor"] == 0


def test_shared_memory_is_what_the_rule_predicts(core) -> None:
    for arch in static.ARCHITECTURES:
        for name, problem in zip(CORE[:3], ("glu", "plain", "glu_backward"), strict=True):
            tile = tiles.default_tile(arch, torch.bfloat16, problem, 8192, 14336)
            assert core[name, arch].shared_memory <= tile.shared_memory(arch, "half", problem)


@pytest.mark.full
@pytest.mark.parametrize("arch", static.ARCHITECTURES)
def test_the_full_set(arch: str) -> None:
    jobs = [(name, arch) for name in specimens(full=True, arch=arch)]
    wrong = []
    for name, _, metrics in static.compile_all(jobs, workers=2, full=True):
        try:
            check(name, arch, metrics)
            check_rule(name, arch, metrics)
        except AssertionError as error:  # all of them are worth knowing: it takes minutes
            wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join(wrong)


def test_names_are_the_same_everywhere_and_need_no_gpu() -> None:
    names = list(specimens(arch="sm80"))
    assert names == list(specimens(arch="gfx942"))
    assert set(CORE) <= set(names)
    full = specimens(full=True)
    assert set(names) < set(full)
    assert {found["kind"] for found in map(TUNED.fullmatch, full) if found} == {
        "bf16",
        "fp32",
        "tf32",
    }
    for name, specimen in specimens().items():
        assert specimen.name == name
        assert set(specimen.signature) == set(specimen.kernel.arg_names)


PROBE = """
from benchmarks.suite.harness import static
{source}
"""

KERNEL = """
import triton, triton.language as tl
from fused_mlp.kernels.common import Specimen
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < n) * {factor}, at < n)
"""

MEASURE = """
from probe_kernel import kernel, Specimen
signature = {'x': '*fp32', 'n': 'i32', 'BLOCK': 'constexpr'}
specimen = Specimen('probe', kernel, signature, {'BLOCK': 128}, {}, 4, 1)
print(static.compile_specimen(specimen, 'sm90', cache=False).sass_sha256)
"""


def run(code: str, folder: Path, **more: str) -> str:
    environment = (
        static.worker_environment()
        | more
        | {
            "PYTHONPATH": f"{folder}:{Path(fused_mlp.__file__).parent.parent}",
            "TRITON_CACHE_DIR": str(folder / "cache"),
        }
    )
    source = PROBE.format(source=code)
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_hash_sees_the_code_and_not_its_lines(tmp_path: Path) -> None:
    (tmp_path / "probe_kernel.py").write_text(KERNEL.format(factor="2.5"))
    first = run(MEASURE, tmp_path)
    (tmp_path / "probe_kernel.py").write_text("# moved\n\n\n" + KERNEL.format(factor="2.5"))
    assert run(MEASURE, tmp_path) == first
    (tmp_path / "probe_kernel.py").write_text(KERNEL.format(factor="2.75"))
    assert run(MEASURE, tmp_path) != first
    assert len(first) == 64


def test_what_is_kept_is_kept_for_one_setting_of_the_assembler(tmp_path: Path) -> None:
    (tmp_path / "probe_kernel.py").write_text(KERNEL.format(factor="2.5"))
    kept = MEASURE.replace(", cache=False", "")
    first = run(kept, tmp_path)
    assert run(kept, tmp_path, DISABLE_PTXAS_OPT="1") != first == run(kept, tmp_path)
    assert len(list((tmp_path / "fused_mlp_static").iterdir())) == 2


PRODUCTS = """
import triton
from fused_mlp.kernels import specimens
from triton.compiler import ASTSource
found = specimens(full=True, arch="sm80")
for name in ("glu/silu", "plain_backward/silu", "decode/glu/silu", "int4/glu/silu"):
    s = found[name + "/tf32"]
    source = ASTSource(s.kernel, dict(s.signature), dict(s.constexprs), dict(s.attrs))
    print(triton.compile(source, target=static._target("sm80")).asm["ttir"])
"""


def test_operands_of_tf32_products_are_rounded_as_cublas_does(tmp_path: Path) -> None:
    """Tensor cores would cut them off: cuBLAS multiplies 1024.5 by 1 as 1025, to nearest, ties away
    from zero.
    """
    text = run(PRODUCTS, tmp_path)
    rounded = set(
        re.findall(r'(%\w+) = tt.elementwise_inline_asm "cvt.rna.tf32.f32 \$0, \$1;"', text)
    )
    products = re.findall(r"tt\.dot (%\w+), (%\w+), .*?inputPrecision = (\w+)", text)
    assert len(products) >= 4
    for left, right, precision in products:
        assert precision == "tf32"
        assert {left, right} <= rounded


def test_the_interpreter_is_refused() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        static.compile_specimen(next(iter(specimens().values())), "sm90")


def test_an_unknown_architecture_or_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'hopper'"):
        static.compile_specimen(next(iter(specimens().values())), "hopper")
    ((_, _, failure),) = static.compile_all([("no/such/kernel", "sm90")], workers=1)
    assert isinstance(failure, Failure)
    assert "no/such/kernel" in failure.reason


@pytest.mark.parametrize(
    ("opcode", "wanted"),
    [
        ("HMMA", "tensor"),
        ("HGMMA", "tensor"),
        ("UTCHMMA", "tensor"),
        ("UTCOMMA", "tensor"),
        ("LDGSTS", "global"),
        ("UTMALDG", "global"),
        ("LDL", "local"),
        ("STL", "local"),
        ("LDSM", "shared"),
        ("STS", "shared"),
        ("LDTM", "tensor_memory"),
        ("MUFU", "special"),
        ("BAR", "control"),
        ("LDGDEPBAR", "control"),
        ("WARPGROUP", "control"),
        ("F2FP", "convert"),
        ("FFMA", "float"),
        ("HFMA2", "float"),
        ("UMOV", "move"),
        ("LDC", "move"),
        ("IMAD", "integer"),
        ("LOP3", "integer"),
        ("ISETP", "integer"),
        ("v_mfma_f32_32x32x8_bf16_1k", "tensor"),
        ("buffer_load_dwordx4", "global"),
        ("ds_read_b128", "shared"),
        ("scratch_store_dword", "local"),
        ("v_exp_f32", "special"),
        ("v_fma_f32", "float"),
        ("s_waitcnt", "control"),
        ("v_add_u32", "integer"),
        ("s_add_u32", "integer"),
    ],
)
def test_classes(opcode: str, wanted: str) -> None:
    assert machine_code.classify(opcode) == wanted


def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", static.__name__, "nothing"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "no kernel's name contains 'nothing'\n")
