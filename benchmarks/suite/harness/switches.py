"""PyTorch's own switches for a module: what a model author can turn on without a library."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .built import Built, NotApplicable, activation_of, called, parameters_of, plain_module
from .inputs import Inputs, torch_dtype
from .shapes import PROVIDERS, SHAPES

if TYPE_CHECKING:
    import torch
    from torch import nn


def inference_mode(inputs: Inputs) -> Built:
    import torch

    built = called(plain_module(inputs), inputs)
    built.context = torch.inference_mode
    return built


def autocast(inputs: Inputs) -> Built:
    return under_autocast(plain_module(inputs), inputs)


def under_autocast(module: nn.Module, inputs: Inputs) -> Built:
    """Forward alone is under it, as PyTorch asks for, and each call casts the weights anew."""
    import torch

    computes = torch_dtype(PROVIDERS[inputs.combination.provider].computes or "bf16")
    kind = inputs.x.device.type

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, computes):
            return module(x)

    return called(forward, inputs, parameters_of(module))


def _compiler_missing(device: str) -> str | None:
    if device == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if not (shutil.which(compiler) or shutil.which("clang++")):
            return f"torch.compile on a CPU needs a C++ compiler, and {compiler} is not installed"
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if not os.path.exists(header):
            return "torch.compile on a CPU needs Python.h, and Python's headers are not installed"
    return None


def compile(inputs: Inputs, mode: str | None = None) -> Built:
    return compiled(plain_module(inputs), inputs, mode)


def compiled(module: nn.Module, inputs: Inputs, mode: str | None = None) -> Built:
    import torch
    import torch._inductor.config as settings

    missing = _compiler_missing(inputs.x.device.type)
    if missing:
        raise NotApplicable(missing)
    # Without it a profiler sees nothing inside a compiled graph on a CPU; costs 50 ns a kernel.
    settings.cpp.enable_kernel_profile = True
    settings.compile_threads = 1
    parameters = parameters_of(module)
    return called(torch.compile(module, mode=mode, dynamic=False), inputs, parameters)


def compile_max_autotune(inputs: Inputs) -> Built:
    # Its CUDA graphs would own the output's memory and hide the launches that are counted here.
    return compile(inputs, "max-autotune-no-cudagraphs")


def aoti(inputs: Inputs) -> Built:
    return called(packaged(plain_module(inputs), inputs), inputs)


# The weights are handed over at loading, so one package serves a rotation of them.
_PACKAGE_SETTINGS = {
    "aot_inductor.package_constants_in_so": False,
    "cpp.enable_kernel_profile": True,
    "compile_threads": 1,
}


def packaged(module: nn.Module, inputs: Inputs) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module through torch.export, for any number of tokens, and an AOTInductor package.

    The package is kept beside torch.compile's own cache, under what decides it, so that it is made
    before any timing, as compiled graphs are; a cold start is its loading and the first call.
    """
    import torch
    from filelock import FileLock
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    missing = _compiler_missing(inputs.x.device.type)
    if missing:
        raise NotApplicable(missing.replace("torch.compile", "AOTInductor"))
    file = Path(cache_dir(), "fused_mlp_packages", f"{_key(module, inputs)}.pt2")
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        if not file.exists():
            _export(module.requires_grad_(False), inputs, file)
    loaded = torch._inductor.aoti_load_package(str(file))
    weights = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    loaded.load_constants(weights, check_full_update=True, user_managed=True)
    return loaded


def _export(module: nn.Module, inputs: Inputs, file: Path) -> None:
    import torch

    # As few as one token: an example with more keeps export from taking their number as given.
    tokens, example = torch.export.Dim("tokens", min=1), inputs.x[:1].expand(8, -1).contiguous()
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=({0: tokens},))
    partial = file.with_suffix(f".{os.getpid()}.pt2")
    settings = dict(_PACKAGE_SETTINGS)  # the compiler adds to it
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(partial), inductor_configs=settings
    )
    partial.replace(file)


def _key(module: nn.Module, inputs: Inputs) -> str:
    """Of all that decides what is in a package: versions, device, sizes, and the module's code."""
    import torch

    device = torch.backends.cpu.get_cpu_capability()
    if inputs.x.is_cuda:
        device = torch.cuda.get_device_name(inputs.x.device)
    shape = SHAPES[inputs.combination.shape]
    facts = (torch.__version__, torch.version.git_version, device, shape, inputs.x.dtype)
    digest = hashlib.sha256(repr((facts, _PACKAGE_SETTINGS)).encode())
    for source in sorted(Path(inspect.getfile(type(module))).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def torchscript(inputs: Inputs) -> Built:
    """What there was before torch.compile, deprecated since: traced, frozen, optimized."""
    import torch

    jit = getattr(torch, "jit", None)
    for name in ("trace", "freeze", "optimize_for_inference"):
        if not hasattr(jit, name):
            raise NotApplicable(f"torch {torch.__version__} has no torch.jit.{name} any more")
    module = plain_module(inputs).requires_grad_(False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        frozen = torch.jit.freeze(torch.jit.trace(module, inputs.x, check_trace=False))
        return called(torch.jit.optimize_for_inference(frozen), inputs)


def conv1x1(inputs: Inputs) -> Built:
    """As ConvNeXt's block may be written: convolutions of one pixel, on channels-last memory."""
    return _convolved(inputs, inputs.image)


def conv1x1_nchw(inputs: Inputs) -> Built:
    return _convolved(inputs, inputs.image.contiguous())


def _convolved(inputs: Inputs, image: torch.Tensor) -> Built:
    import torch
    from torch.nn import functional as F

    act = activation_of(SHAPES[inputs.combination.shape].activation)
    up, down = inputs.up_weight[:, :, None, None], inputs.down_weight[:, :, None, None]

    def forward() -> torch.Tensor:
        return F.conv2d(act(F.conv2d(image, up, inputs.up_bias)), down, inputs.down_bias)

    return Built(forward, {}, torch.no_grad)
