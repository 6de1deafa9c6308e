"""Quantized MLPs against float64 and torchao's own layers, their memory, their files, and what is
refused."""

import copy
import io
import logging
import subprocess
import sys
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

import fused_mlp
from fused_mlp import reference

pytest.importorskip("torchao")

from fused_mlp import quantization as Q
from fused_mlp.quantization import library, weights

D, H = 128, 256


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32, **kwargs) -> fused_mlp.FusedMLP:
    torch.manual_seed(seed)
    return fused_mlp.FusedMLP(D, H, dtype=dtype, **{"bias": True, **kwargs})


def quantized(module: nn.Module, mode: str, **kwargs) -> nn.Module:
    if mode == "int8_static":
        kwargs["calibration"] = [torch.randn(64, D).to(next(module.parameters()).dtype)]
    return fused_mlp.quantize(copy.deepcopy(module), mode, group_size=64, **kwargs)


def projections(module: nn.Module) -> list[nn.Linear]:
    names = ("gate_proj", "up_proj", "down_proj")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def exact(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The MLP in float64 on the weights that the quantized ones stand for."""
    w = {layer: getattr(module, f"{layer}_proj", None) for layer in ("gate", "up", "down")}
    values = {k: None if m is None else Q.dequantize(m.weight, torch.float64) for k, m in w.items()}
    biases = {k: None if m is None or m.bias is None else m.bias.double() for k, m in w.items()}
    return reference.mlp(
        x.double(), values["up"], values["down"], gate_weight=values["gate"],
        activation=module.activation, up_bias=biases["up"], gate_bias=biases["gate"],
        down_bias=biases["down"],
    )  # fmt: skip


# Relative error that rounding x and the hidden activation may add. A step of s gives an error of s
# over the root of 12; with the largest of a token at 3.5 times its rms for x, 8 for the product of
# act(gate) and up, int8 adds 0.8 % and 1.8 %. One fixed scale serves the largest of all tokens: up
# to twice as coarse. bf16 has 8 bits, fp8 has 3.
ADDED = {
    "int8_dynamic": 0.025,
    "int8_static": 0.05,
    "int8_weight": 0.008,
    "int4_weight": 0.008,
    "fp8_dynamic": 0.075,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("mode", Q.MODES)
@torch.no_grad()
def test_result_is_that_of_the_rounded_weights(mode, gated, dtype):
    module = quantized(mlp(dtype=dtype, gated=gated), mode)
    for shape in ((D,), (3, D), (2, 33, D), (0, D)):
        x = torch.randn(shape).to(dtype)
        y = module(x)
        assert y.shape == x.shape
        assert y.dtype == dtype
        if y.numel():
            want = exact(module, x)
            rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0
            assert (y - want).norm() / want.norm() <= ADDED[mode] + rounding, mode


@pytest.mark.parametrize("mode", ["int8_dynamic", "int8_static"])
@torch.no_grad()
def test_int8_is_torchaos_bit_for_bit(mode):
    """Sharing one quantization of x and working in blocks of rows changes no number."""
    module, x = quantized(mlp(), mode), torch.randn(700, D)
    gate, up, down = projections(module)
    hidden = silu(linear(x, gate.weight, gate.bias)) * linear(x, up.weight, up.bias)
    assert torch.equal(module(x), linear(hidden, down.weight, down.bias))


@pytest.mark.parametrize("mode", Q.MODES)
def test_weights_are_rounded_to_the_nearest(mode):
    module = mlp()
    for before, after in zip(
        projections(module), projections(quantized(module, mode)), strict=True
    ):
        w, got = before.weight.detach(), Q.dequantize(after.weight)
        if mode == "fp8_dynamic":
            bound = w.abs() / 16 + after.weight.scale * 2.0**-10  # 3 bits, and the subnormals
        elif mode == "int4_weight":
            groups = w.view(w.shape[0], -1, 64)
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
            # Half a step, and at the ends what scale and zero lost when rounded to bf16.
            bound = (step * (0.5 + 16 / 256)).expand_as(groups).reshape(w.shape)
        else:
            bound = after.weight.scale / 2
        assert ((got - w).abs() <= bound * (1 + 1e-4)).all()


@pytest.mark.parametrize("mode", Q.MODES)
def test_memory_is_as_computed(mode):
    module = quantized(mlp(bias=False), mode)
    expected = sum(
        layer.weight.numel() * Q.MODES[mode].bytes_per_weight(layer.in_features, 64)
        for layer in projections(module)
    )
    # torchao leaves a zero point out where a scale is given; nothing else may differ.
    slack = 4 * 3 if mode == "int8_static" else 0
    assert Q.bytes_of(module) <= expected + slack
    assert Q.bytes_of(module) >= expected - sum(layer.out_features for layer in projections(module))


def test_int4_takes_half_a_byte_and_its_scales():
    assert Q.MODES["int4_weight"].bytes_per_weight(4096, 128) == 0.53125
    module = fused_mlp.quantize(mlp(bias=False), "int4_weight", group_size=128)
    assert Q.bytes_of(module) == 0.53125 * 3 * D * H


@pytest.mark.parametrize("mode", Q.MODES)
@torch.no_grad()
def test_state_dict_saves_and_loads(mode):
    module, x = quantized(mlp(), mode), torch.randn(5, D)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for fresh in (mlp(seed=1).eval(), quantized(mlp(seed=1), mode)):
        fresh.load_state_dict(saved, assign=True)
        assert torch.equal(fresh(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_packing_is_exact():
    """Every pair of values there is, through both layouts and back."""
    values = torch.arange(-8, 8, dtype=torch.int8)
    q = torch.cartesian_prod(values, values).flatten().view(16, 32)
    assert torch.equal(weights.unpack(weights.pack(q)), q)
    assert torch.equal(weights.unpack_cpu(weights.pack_cpu(q), q.shape), q)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_of_int4_is_itself(group):
    """A weight that is representable comes back bit for bit: nothing is lost twice."""
    torch.manual_seed(0)
    q, scale, zero = weights.int4_values(torch.randn(48, 256), group)
    w = q.view(48, -1, group).float() * scale.float()[..., None] + zero.float()[..., None]
    again = weights.int4_values(w.view(48, 256), group)
    back = (
        again[0].view(48, -1, group).float() * again[1].float()[..., None]
        + again[2].float()[..., None]
    )
    assert (back - w).abs().max() <= w.abs().max() * 2.0**-7  # scale and zero are bf16


@torch.no_grad()
def test_plain_int4_layout_serves_odd_sizes():
    """The CPU's layout needs 16 rows at a time; others keep torchao's plain one."""
    weight = weights.make(torch.randn(72, 64), Q.MODES["int4_weight"], 32)
    assert isinstance(weight, weights.Int4Tensor)
    q, scale, zero = weights.unpack(weight.qdata), weight.scale.t(), weight.zero_point.t()
    assert q.shape == (72, 64)
    assert scale.shape == zero.shape == (72, 2)
    module, x = fused_mlp.FusedMLP(64, 96, activation="gelu"), torch.randn(3, 64)
    for layer in projections(module):
        made = weights.make(layer.weight, Q.MODES["int4_weight"], 32)
        q, scale, zero = weights.int4_values(layer.weight, 32)
        plain = weights.Int4Tensor(
            weights.pack(q), scale.t().contiguous(), zero.t().contiguous(), [1, 32], made.shape
        )
        assert torch.equal(Q.dequantize(plain), Q.dequantize(made))
        layer.weight = nn.Parameter(plain, requires_grad=False)
    torch.testing.assert_close(module(x).double(), exact(module, x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_only_the_mlps_of_a_model_change():
    model = nn.Sequential(nn.Linear(D, D), mlp(), nn.LayerNorm(D), mlp(seed=1))
    fused_mlp.quantize(
        model, "int8_static", calibration=[(torch.randn(20, D),), {"input": torch.randn(3, D)}]
    )
    assert type(model[0].weight) is nn.Parameter
    assert all(
        Q.is_quantized(layer.weight) for m in (model[1], model[3]) for layer in projections(m)
    )
    assert model(torch.randn(2, D)).isfinite().all()
    # Each MLP got its own scale, from what really reached it.
    scales = [float(m.up_proj.weight.act_quant_scale) for m in (model[1], model[3])]
    assert scales[0] != scales[1]


@torch.no_grad()
def test_calibration_sees_the_largest_value_of_all_batches():
    module, batches = mlp(), [torch.randn(4, D), 10 * torch.ones(1, D), torch.randn(4, D)]
    fused_mlp.quantize(module, "int8_static", calibration=iter(batches))
    assert float(module.up_proj.weight.act_quant_scale) == pytest.approx(10 / 127.5)


@torch.no_grad()
def test_under_inference_mode_and_autocast():
    module, x = quantized(mlp(), "int8_dynamic"), torch.randn(4, D)
    with torch.inference_mode():
        assert torch.equal(module(x), module(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.bfloat16


# ---------------------------------------------------------------- what is refused


def refused(error: type[Exception], words: str):
    return pytest.raises(error, match=words)


@pytest.mark.parametrize("batches", [None, [], iter(())])
def test_calibrating_with_no_data(batches):
    with refused(ValueError, "calibration"):
        fused_mlp.quantize(mlp(), "int8_static", calibration=batches)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_calibration(bad):
    x = torch.randn(4, D)
    x[2, 3] = bad
    module = mlp()
    with refused(ValueError, "calibration: the input of FusedMLP holds NaN or infinity"):
        fused_mlp.quantize(module, "int8_static", calibration=[torch.randn(4, D), x])
    assert not Q.is_quantized(module.up_proj.weight)
    assert not module._forward_pre_hooks


def test_int4_group_that_does_not_divide():
    module = fused_mlp.FusedMLP(96, 256)
    with refused(ValueError, "rows of 96 do not divide into groups of 128; use group_size 32"):
        fused_mlp.quantize(module, "int4_weight")
    assert not any(Q.is_quantized(layer.weight) for layer in projections(module))
    with refused(ValueError, "no group size divides"):
        fused_mlp.quantize(fused_mlp.FusedMLP(40, 256), "int4_weight")
    with refused(ValueError, "must be one of"):
        fused_mlp.quantize(module, "int4_weight", group_size=48)


@pytest.mark.parametrize("mode", Q.MODES)
def test_quantizing_twice(mode):
    module = quantized(mlp(), mode)
    with refused(ValueError, f"already quantized \\({mode}\\)"):
        quantized(module, "int8_weight")
    with refused(ValueError, "already quantized"):
        Q.prepare_qat(module, "int8_weight")


@pytest.mark.parametrize("mode", Q.MODES)
def test_training_a_converted_module(mode):
    module = quantized(mlp(), mode)
    with refused(RuntimeError, f"converted to {mode} and cannot be trained"):
        module.train()(torch.randn(2, D))
    with torch.no_grad():
        module(torch.randn(2, D))  # measuring in training mode is not training
    with refused(RuntimeError, "requires a gradient, but quantized weights pass none on"):
        module.eval()(torch.randn(2, D, requires_grad=True))


def test_other_bad_input():
    with refused(ValueError, "unknown mode 'int7'; known are int8_dynamic"):
        fused_mlp.quantize(mlp(), "int7")
    with refused(ValueError, "holds no FusedMLP"):
        fused_mlp.quantize(nn.Linear(4, 4), "int8_dynamic")
    with refused(ValueError, "takes no calibration"):
        fused_mlp.quantize(mlp(), "int8_dynamic", calibration=[torch.randn(1, D)])
    with refused(ValueError, "meta device"):
        fused_mlp.quantize(fused_mlp.FusedMLP(D, H, device="meta"), "int8_dynamic")
    broken = mlp()
    with torch.no_grad():
        broken.down_proj.weight[0, 0] = float("nan")
    with refused(ValueError, "down_proj.weight cannot become int8_dynamic: it holds NaN"):
        fused_mlp.quantize(broken, "int8_dynamic")
    assert not Q.is_quantized(broken.up_proj.weight)
    with refused(ValueError, "multiples of 16"):
        fused_mlp.quantize(fused_mlp.FusedMLP(D, 100), "fp8_dynamic")


# ---------------------------------------------------------------- unusual sizes, dtypes, values


@pytest.mark.parametrize("mode", ["int8_dynamic", "int8_static", "int8_weight"])
@pytest.mark.parametrize("sizes", [(3, 431), (40, 33), (128, 7)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@torch.no_grad()
def test_odd_sizes(mode, sizes, tokens):
    """PyTorch's own int8 GEMM crashes on rows that are no multiple of 16."""
    torch.manual_seed(0)
    module, x = fused_mlp.FusedMLP(*sizes), torch.randn(tokens, sizes[0])
    calibration = [x] if mode == "int8_static" else None
    fused_mlp.quantize(module, mode, calibration=calibration)
    want = exact(module, x)
    # A few numbers do not average their rounding: twice what wide rows get.
    assert (module(x) - want).norm() / want.norm() <= 2 * ADDED[mode]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("mode", Q.MODES)
@torch.no_grad()
def test_fp64_and_fp16_modules(mode, dtype):
    module, x = quantized(mlp(dtype=dtype), mode), torch.randn(5, D).to(dtype)
    y, want = module(x), exact(module, x)
    assert y.dtype == dtype
    assert (y - want).norm() / want.norm() <= ADDED[mode] + torch.finfo(dtype).eps


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", Q.MODES)
@torch.no_grad()
def test_what_is_not_finite_shows_and_stays_in_its_row(mode, bad):
    """A fixed int8 scale would round it to a number that looks right."""
    module, x = quantized(mlp(), mode), torch.randn(5, D)
    broken = x.clone()
    broken[2, 3], others = bad, [0, 1, 3, 4]
    y = module(broken)
    assert not y[2].isfinite().any()
    assert torch.equal(y[others], module(x)[others])


@pytest.mark.parametrize("mode", Q.MODES)
@torch.no_grad()
def test_rows_of_zeros_and_huge_rows_keep_to_themselves(mode):
    module, x = quantized(mlp(), mode), torch.randn(5, D)
    extreme = x.clone()
    extreme[1], extreme[3] = 0, 1e30
    y = module(extreme)
    assert torch.equal(y[[0, 2, 4]], module(x)[[0, 2, 4]])
    torch.testing.assert_close(
        y[1].double(), exact(module, extreme[1]), rtol=0.05, atol=0.05 * float(y[1].abs().max())
    )


@pytest.mark.parametrize("mode", Q.MODES)
def test_an_x_that_does_not_fit(mode):
    module = quantized(mlp(), mode)
    with refused(TypeError, "x is torch.int64; quantized weights take floating point"):
        module(torch.ones(5, D, dtype=torch.int64))
    for shape in ((5, D // 2), ()):
        with refused(ValueError, "its last size must be hidden_size, 128"):
            module(torch.randn(shape))


def test_packed_and_transposed_projections_say_what_to_do():
    """Of Phi3 and GPT2; and what they say works."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    phi = Phi3MLP(transformers.Phi3Config(hidden_size=D, intermediate_size=H)).eval()
    gpt = GPT2MLP(H, transformers.GPT2Config(n_embd=D)).eval()
    models = nn.ModuleList([phi, gpt])
    fused_mlp.fuse(models)
    with refused(ValueError, "0 packs gate and up in gate_up_proj; .* copy the upper half"):
        fused_mlp.quantize(models, "int8_dynamic")
    with refused(ValueError, "c_fc is a Conv1D; .* with the transposed weight in its place"):
        fused_mlp.quantize(models[1], "int8_dynamic")
    x = torch.randn(5, D)
    with torch.no_grad():
        want = [phi(x), gpt(x)]
        split = fused_mlp.FusedMLP(D, H)
        gate, up = phi.gate_up_proj.weight.chunk(2)
        split.gate_proj.weight.copy_(gate)
        split.up_proj.weight.copy_(up)
        split.down_proj.weight.copy_(phi.down_proj.weight)
        fused_mlp.unfuse(gpt)
        for name in ("c_fc", "c_proj"):
            conv = getattr(gpt, name)
            layer = nn.Linear(conv.nx, conv.nf)
            layer.weight.copy_(conv.weight.t())
            layer.bias.copy_(conv.bias)
            setattr(gpt, name, layer)
        for module, y in zip((split, fused_mlp.FusedMLP.from_module(gpt)), want, strict=True):
            got = fused_mlp.quantize(module.eval(), "int8_dynamic")(x)
            # Weights rounded to 8 bits, and both activations.
            assert (got - y).norm() / y.norm() <= 2 * ADDED["int8_dynamic"]


# ---------------------------------------------------------------- files

LOAD = """
import sys, torch, fused_mlp, fused_mlp.quantization
for state, x, y in torch.load(sys.argv[1], weights_only=True):
    module = fused_mlp.FusedMLP(128, 256, bias=True).eval()
    module.load_state_dict(state, assign=True)
    with torch.no_grad():
        assert torch.equal(module(x), y)
print("loaded")
"""


@torch.no_grad()
def test_a_fresh_process_loads_every_mode(tmp_path):
    x = torch.randn(5, D)
    modules = [quantized(mlp(), mode) for mode in Q.MODES]
    torch.save([(m.state_dict(), x, m(x)) for m in modules], tmp_path / "file")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("loaded\n"), done.stderr


@pytest.mark.parametrize("mode", [mode for mode in Q.MODES if mode != "int4_weight"])
@torch.no_grad()
def test_safetensors(mode):
    """Through torchao's own flattening, which does not know the int4 layout for CPUs."""
    files = pytest.importorskip("safetensors.torch")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    module, x = quantized(mlp(), mode), torch.randn(5, D)
    plain, metadata = support.flatten_tensor_state_dict(module.state_dict())
    loaded = files.load(files.save(plain))
    state, left = support.unflatten_tensor_state_dict(loaded, metadata)
    fresh = mlp(seed=1).eval()
    fresh.load_state_dict(state, assign=True)
    assert not left
    assert torch.equal(fresh(x), module(x))


@pytest.mark.parametrize("mode", ["int8_dynamic", "int8_static", "int8_weight"])
@torch.no_grad()
def test_compiled_and_exported(mode):
    module, x = quantized(mlp(), mode), torch.randn(5, D)
    want = exact(module, x)
    for traced in (
        torch.compile(module, backend="aot_eager", fullgraph=True),
        torch.export.export(module, (x,)).module(),
    ):
        assert (traced(x) - want).norm() / want.norm() <= ADDED[mode]


@pytest.mark.parametrize("mode", ["int8_dynamic", "int4_weight"])
def test_tied_weights_stay_tied(mode):
    first, second = mlp(), mlp(seed=1)
    second.up_proj.weight = first.up_proj.weight
    model = fused_mlp.quantize(nn.Sequential(first, second), mode, group_size=64)
    assert first.up_proj.weight is second.up_proj.weight
    kinds = {id(layer.weight) for module in model for layer in projections(module)}
    assert len(kinds) == 5


def test_tied_weights_have_their_own_fixed_scales():
    first, second = mlp(), mlp(seed=1)
    second.up_proj.weight = first.up_proj.weight
    model = nn.Sequential(first, second)
    fused_mlp.quantize(model, "int8_static", calibration=[torch.randn(20, D)])
    scales = [float(module.up_proj.weight.act_quant_scale) for module in model]
    assert scales[0] != scales[1]


def test_calibration_takes_any_mapping_and_refuses_lists():
    x = torch.randn(20, D)
    module = fused_mlp.quantize(mlp(), "int8_static", calibration=[UserDict(x=x)])
    assert float(module.up_proj.weight.act_quant_scale) == pytest.approx(
        float(x.abs().max()) / 127.5
    )
    with refused(TypeError, "a calibration input is a list; make it a tuple"):
        fused_mlp.quantize(mlp(), "int8_static", calibration=[[x]])


def test_a_fused_block_is_no_fused_mlp():
    block = nn.TransformerEncoderLayer(D, 4, H)
    fused_mlp.fuse(block)
    with refused(ValueError, "it is a fused block, whose two layers quantize does not take"):
        fused_mlp.quantize(block, "int8_dynamic")


def test_biases_of_a_loaded_module_do_not_train():
    """A state_dict brings no refusal along; the gradient would miss all but the last bias."""
    module = mlp().train()
    module.load_state_dict(quantized(mlp(), "int8_dynamic").state_dict(), assign=True)
    with refused(RuntimeError, "a bias requires a gradient, but quantized weights pass none on"):
        module(torch.randn(2, D))
    module.requires_grad_(False)
    assert not module(torch.randn(2, D)).requires_grad


def test_without_torchao_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['torchao'] = None; import fused_mlp\n"
        "try: fused_mlp.quantize\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'fused_mlp[quant]'" in done.stdout


def test_preparing_says_nothing_of_what_torchao_imports_for_it():
    code = (
        "import fused_mlp; from fused_mlp.quantization import prepare_qat\n"
        "prepare_qat(fused_mlp.FusedMLP(64, 64), 'int4_weight', group_size=32)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is an Enum subclass" not in done.stderr


@pytest.mark.parametrize(
    ("text", "cuda", "said"),
    [
        ("Failed to load _C.so: no CUDA", None, False),
        ("Failed to load _C.so: no CUDA", "13.0", True),
        ("<enum 'K'> is an Enum subclass and is now natively supported", "13.0", False),
        ("Skipping import of cpp extensions due to incompatible torch version", None, True),
    ],
)
def test_torchaos_import_says_what_can_be_acted_on(monkeypatch, text, cuda, said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    record = logging.LogRecord("torchao", logging.WARNING, "", 0, text, (), None)
    assert library.news(record) == said


@pytest.mark.parametrize("mode", Q.MODES)
def test_explain_says_what_the_call_does(mode):
    module = quantized(mlp().requires_grad_(False), mode)
    x = torch.randn(4, D)
    module(x)
    assert fused_mlp.explain(module, x).startswith("path    quantized")
    wrong = torch.randn(4, D - 1)
    with pytest.raises(ValueError, match="its last size must be") as error:
        module(wrong)
    assert fused_mlp.explain(module, wrong) == f"refused  {error.value}"
