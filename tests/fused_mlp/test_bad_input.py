"""Each mistake gets one clear exception."""

import pytest
import torch

from fused_mlp import FusedMLP, PathError, explain, fuse, fused_mlp, unfuse, use_path

X, UP, DOWN = torch.ones(2, 4), torch.ones(8, 4), torch.ones(4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 5)}, r"x is \(2, 5\) but up_weight is \(8, 4\)"),
        ({"x": torch.ones(())}, r"x is \(\) but up_weight"),
        (
            {"down_weight": torch.ones(8, 4)},
            r"down_weight is \(8, 4\) but up_weight is \(8, 4\); they must be",
        ),
        ({"up_weight": torch.ones(8, 4, 1)}, r"up_weight is \(8, 4, 1\)"),
        (
            {"gate_weight": torch.ones(7, 4)},
            r"gate_weight is \(7, 4\) but up_weight is \(8, 4\); both must be",
        ),
        ({"up_bias": torch.ones(4)}, r"up_bias is \(4,\) but up_weight is \(8, 4\)"),
        ({"down_bias": torch.ones(8)}, r"down_bias is \(8,\) but down_weight is \(4, 8\)"),
        (
            {"gate_weight": UP, "gate_bias": torch.ones(4)},
            r"gate_bias is \(4,\) but gate_weight is \(8, 4\)",
        ),
        ({"gate_bias": torch.ones(8)}, r"gate_bias is \(8,\) but there is no gate_weight"),
        ({"activation": "gleu"}, r"unknown activation 'gleu'; known are .*gelu.*silu"),
        ({"recompute": "some"}, r"unknown recompute 'some'; known are 'none', 'activation', 'all'"),
        ({"x": X.to("meta")}, r"up_weight is on cpu but x is on meta"),
    ],
)
def test_mismatches_name_both_shapes(change, message):
    args = {"x": X, "up_weight": UP, "down_weight": DOWN} | change
    with pytest.raises(ValueError, match=message):
        fused_mlp(**args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X.long()}, r"x is torch\.int64; an MLP needs a floating-point x"),
        ({"x": X.to(torch.complex64)}, r"x is torch\.complex64"),
        ({"x": X.half()}, r"up_weight is torch\.float32 but x is torch\.float16"),
        ({"down_weight": DOWN.double()}, r"down_weight is torch\.float64 but x is torch\.float32"),
        ({"up_bias": torch.ones(8).bfloat16()}, r"up_bias is torch\.bfloat16"),
    ],
)
def test_dtypes_that_differ_are_named(change, message):
    with pytest.raises(TypeError, match=message):
        fused_mlp(**({"x": X, "up_weight": UP, "down_weight": DOWN} | change))


def test_float64_is_not_cast_by_autocast():
    """`torch.nn.functional.linear` refuses the mixture as well."""
    with torch.autocast("cpu", torch.bfloat16):
        for args in ([X.double(), UP, DOWN], [X, UP.double(), DOWN], [X, UP, DOWN.double()]):
            with pytest.raises(TypeError, match=r"is torch\.float.*which casts all but float64"):
                fused_mlp(*args)
        assert fused_mlp(X.double(), UP.double(), DOWN.double()).dtype == torch.float64
        assert fused_mlp(X.half(), UP, DOWN.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["up_weight", "down_weight", "gate_weight", "up_bias"])
def test_a_layer_in_the_place_of_its_weight(name):
    args = {"up_weight": UP, "down_weight": DOWN, name: torch.nn.Linear(4, 8)}
    with pytest.raises(TypeError, match=f"{name} is a Linear; it must be a tensor"):
        fused_mlp(X, **args)
    with pytest.raises(TypeError, match="down_weight is a NoneType; it must be a tensor"):
        fused_mlp(X, UP, None)


def test_weights_on_meta():
    with pytest.raises(RuntimeError, match=r"up_weight is on the meta device.*to_empty"):
        FusedMLP(4, 8, device="meta")(X)


def test_a_gradient_wanted_in_inference_mode():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode records none"):
        FusedMLP(4, 8)(X.clone().requires_grad_())
    module = FusedMLP(4, 8)
    with torch.inference_mode():
        module(X)  # another call of the same shapes settles nothing
        with pytest.raises(RuntimeError, match="inference mode records none"):
            module(X.clone().requires_grad_())
        x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors cannot be saved for backward"):
        FusedMLP(4, 8)(x)


def test_unknown_arguments_of_the_module_fail_when_it_is_made():
    with pytest.raises(ValueError, match="unknown activation"):
        FusedMLP(4, 8, activation="gleu")
    with pytest.raises(ValueError, match="unknown recompute"):
        FusedMLP(4, 8, recompute="some")


def test_unknown_path():
    with (
        pytest.raises(ValueError, match=r"unknown path 'fast'; known are eager, packed"),
        use_path("fast"),
    ):
        pass


@pytest.mark.parametrize("path", ["packed", "epilogue", "decode", "onednn"])
def test_a_dtype_that_a_path_lacks(path):
    """By itself the plan falls back to eager; forced, the path refuses."""
    args = [t.double() for t in (X, UP, DOWN)]
    fused_mlp(*args)
    assert explain(*args).startswith("path    eager")
    with use_path(path), pytest.raises(PathError, match=f"{path} has no float64 kernels"):
        fused_mlp(*args)
    with use_path(path):
        assert "has no float64 kernels" in explain(*args)


def test_decode_refuses_what_it_does_not_serve():
    with use_path("decode"):
        with pytest.raises(PathError, match="at most 16 tokens, not 17"):
            fused_mlp(torch.ones(17, 4), UP, DOWN)
        with pytest.raises(PathError, match="keeps nothing for a backward pass"):
            fused_mlp(X, UP.clone().requires_grad_(), DOWN)


def test_explain_refuses_what_a_call_refuses():
    x = X.clone().requires_grad_()
    with torch.inference_mode(), pytest.raises(RuntimeError) as refused:
        fused_mlp(x, UP, DOWN)
    with torch.inference_mode():
        assert explain(x, UP, DOWN) == f"refused  {refused.value}"
    with use_path("onednn"):
        with pytest.raises(PathError) as refused:
            fused_mlp(X.to_sparse(), UP, DOWN)
        assert explain(X.to_sparse(), UP, DOWN) == f"refused  {refused.value}"


def test_a_forced_path_is_undone_after_an_exception():
    with pytest.raises(TypeError), use_path("onednn"):
        fused_mlp(X.long(), UP, DOWN)
    assert "forced" not in explain(X, UP, DOWN)


@pytest.mark.parametrize("call", [fuse, unfuse])
def test_what_is_no_module_is_named(call):
    with pytest.raises(TypeError, match=f"{call.__name__} takes a module, not a dict"):
        call({"mlp": FusedMLP(8, 16)})
