"""What is measured: one table of model shapes, and the rule that says what a machine leaves out.

No torch here: asv and the tracking side ask this file before anything is measured.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

# ChannelsLast is inference over the channels of an image, with no copy from one layout to another.
MODES = ("Inference", "Training", "ChannelsLast")
# A container that is given one card of several has no /dev/nvidia0, but always the control node.
DEVICE_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True)
class Shape:
    """One MLP of a real model, and the token counts it meets in use.

    `image` is the height and width of a picture whose pixels are the tokens: one picture is a
    prompt.
    """

    hidden: int
    intermediate: int
    activation: str
    gated: bool
    bias: bool
    prompt: int
    batch: int
    source: str
    image: tuple[int, int] | None = None

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def weights(self) -> int:
        """Elements of all weight matrices."""
        return self.matrices * self.hidden * self.intermediate


SHAPES = {
    "article": Shape(768, 3072, "gelu", True, False, 128, 8192, "Profiling in PyTorch, part 2"),
    "gpt2": Shape(768, 3072, "gelu_tanh", False, True, 128, 8192, "openai-community/gpt2"),
    "vit_l": Shape(1024, 4096, "gelu", False, True, 197, 6304, "google/vit-large-patch16-224"),
    "llama3_8b": Shape(4096, 14336, "silu", True, False, 512, 8192, "meta-llama/Llama-3.1-8B"),
    "qwen2_7b": Shape(3584, 18944, "silu", True, False, 512, 8192, "Qwen/Qwen2.5-7B"),
    # One expert's share of 8192 tokens: 8 of 128 experts, and 2 of 8.
    "qwen3_expert": Shape(2048, 768, "silu", True, False, 128, 512, "Qwen/Qwen3-30B-A3B"),
    "mixtral_expert": Shape(6144, 16384, "silu", True, False, 128, 2048, "Mixtral-8x22B"),
    # DLRM's towers are chains of linear and relu; these are the two-layer slices with equal ends.
    "dlrm_bottom": Shape(512, 256, "relu", False, True, 128, 2048, "MLPerf DLRM 13-512-256-128"),
    "dlrm_top": Shape(1024, 1024, "relu", False, True, 128, 2048, "MLPerf DLRM 479-1024-1024-512"),
    # Too small to work on: what is left is the host's overhead.
    "tiny": Shape(64, 128, "silu", True, False, 8, 128, "host overhead"),
    # The stage that half of ConvNeXt-T's blocks are in, at 224 × 224.
    "convnext_t": Shape(
        384, 1536, "gelu", False, True, 196, 6272, "facebook/convnext-tiny-224", (14, 14)
    ),
}
TOKENS = ("1", "16", "prompt", "batch")
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Provider:
    """One way to compute the MLP. `rank` is how early a suite size takes it in.

    A combination's dtype is that of weights and input. `computes` is the dtype of the arithmetic
    where that is another: there the provider is held to eager's error in this one, since rounding
    the weights to it is what was asked for.
    """

    rank: int
    text: str
    modes: tuple[str, ...] = ("Inference", "Training")
    devices: tuple[str, ...] = ("cpu", "cuda")
    path: str | None = None
    compiles: bool = False
    dtypes: tuple[str, ...] = tuple(ITEMSIZE)
    computes: str | None = None
    sampled: bool = False


_INFERENCE = ("Inference",)
_CUDA = ("cuda",)
_CHANNELS = ("ChannelsLast",)


def _autocast(text: str) -> Provider:
    return Provider(2, text, dtypes=("fp32",), computes="bf16", sampled=True)


PROVIDERS = {
    "eager": Provider(
        0, "nn.Linear modules under no_grad (training: with autograd)", MODES, sampled=True
    ),
    "fused": Provider(0, "fused_mlp.FusedMLP, path by its own plan", MODES, sampled=True),
    "compile": Provider(1, "torch.compile of eager", compiles=True),
    "inference_mode": Provider(2, "eager under inference_mode", _INFERENCE, sampled=True),
    "autocast": _autocast("eager under autocast to bf16"),
    "fused_autocast": _autocast("fused under autocast to bf16"),
    "aoti": Provider(
        2,
        "torch.export of eager for any number of tokens, as a loaded AOTInductor package",
        _INFERENCE,
        compiles=True,
        sampled=True,
    ),
    "torchscript": Provider(
        2, "historical: eager traced, frozen, optimize_for_inference", _INFERENCE, sampled=True
    ),
    "compile_max_autotune": Provider(3, "torch.compile, max-autotune", compiles=True),
    "fused_compile": Provider(2, "torch.compile of fused", compiles=True),
    "fused_aoti": Provider(2, "as aoti, of fused", _INFERENCE, compiles=True),
    "packed_vendor": Provider(2, "gate and up in one vendor GEMM, eager activation"),
    "addmm_activation": Provider(2, "torch._addmm_activation", _INFERENCE),
    "fused_packed": Provider(2, "fused_mlp, path packed", devices=_CUDA, path="packed"),
    "fused_epilogue": Provider(2, "fused_mlp, path epilogue", devices=_CUDA, path="epilogue"),
    "fused_decode": Provider(2, "fused_mlp, path decode", _INFERENCE, _CUDA, path="decode"),
    "fused_onednn": Provider(2, "fused_mlp, path onednn", _INFERENCE, ("cpu",), path="onednn"),
    "liger": Provider(2, "liger-kernel's MLP, where installed", devices=_CUDA),
    "quack": Provider(2, "QuACK's MLP, where installed", devices=_CUDA),
    "conv1x1": Provider(0, "two 1×1 convolutions, channels-last memory", _CHANNELS),
    "conv1x1_nchw": Provider(2, "two 1×1 convolutions, plain NCHW memory", _CHANNELS),
}
# Each dtype's rank, added to the provider's. On a GPU fp16 runs the kernels bf16 runs and would
# be two fifths of a default suite, for little.
DTYPES = {
    "cpu": {"fp32": 0, "bf16": 1, "fp16": 2},
    "cuda": {"bf16": 0, "fp16": 2, "fp32": 3},
}


@dataclass(frozen=True)
class Size:
    """How much of the table one run may cost.

    `reach` bounds a combination's rank: its provider's plus its dtype's. `cpu_flop` and
    `cpu_bytes` bound one call on a CPU; a GPU is bounded by its memory alone.
    """

    name: str
    processes: int
    reach: int
    cpu_flop: float
    cpu_bytes: float

    @property
    def samples(self) -> bool:
        """Whether providers out of reach are taken in at one combination each, see `SAMPLE`."""
        return self.reach > 0


# What a default suite measures of each sampled provider, in the device's first dtype and in fp32.
SAMPLE = {"Inference": ("article", "16"), "Training": ("dlrm_top", "prompt")}
SIZES = {
    "quick": Size("quick", 3, 0, 1.0e9, 40e6),
    "default": Size("default", 5, 1, 4.0e9, 40e6),
    "full": Size("full", 7, 9, 130e9, 1.3e9),
}
# Not a size's business: results of two sizes must stay comparable, and asv compares by version.
SAMPLES_PER_PROCESS = 5


@dataclass(frozen=True, order=True)
class Combination:
    """One thing to measure."""

    mode: str
    shape: str
    tokens: str
    dtype: str
    provider: str

    @property
    def params(self) -> tuple[str, str, str, str]:
        return self.shape, self.tokens, self.dtype, self.provider

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Combinations of one group share inputs and the float64 reference."""
        return self.mode, self.shape, self.tokens, self.dtype

    @property
    def count(self) -> int:
        """Tokens in one call."""
        shape = SHAPES[self.shape]
        named = {"prompt": shape.prompt, "batch": shape.batch}
        return named[self.tokens] if self.tokens in named else int(self.tokens)

    @property
    def computes(self) -> str:
        """The dtype of the arithmetic."""
        return PROVIDERS[self.provider].computes or self.dtype

    @property
    def flop(self) -> int:
        """Floating-point operations of the GEMMs in one call; backward is two forwards."""
        forward = 2 * SHAPES[self.shape].weights * self.count
        return 3 * forward if self.mode == "Training" else forward

    @property
    def least_bytes(self) -> int:
        """Bytes one call must move if every tensor moves once.

        Forward reads weights and x, writes y; backward reads weights, x and dy, writes dx and the
        weights' gradients.
        """
        shape = SHAPES[self.shape]
        row = self.count * shape.hidden
        elements = shape.weights + 2 * row
        if self.mode == "Training":
            elements += 2 * shape.weights + 3 * row
        return elements * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.mode} {self.shape} {self.tokens} {self.dtype} {self.provider}"


def params_of(mode: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """The parameter lists of an asv class: the same on every machine, or asv drops results."""
    tokens = list(TOKENS) if mode == "Inference" else ["prompt", "batch"]
    providers = [name for name, provider in PROVIDERS.items() if mode in provider.modes]
    images = mode == "ChannelsLast"
    models = [name for name, shape in SHAPES.items() if (shape.image is not None) == images]
    return models, tokens, list(ITEMSIZE), providers


PARAM_NAMES = ["shape", "tokens", "dtype", "provider"]


def combinations(mode: str) -> Iterator[Combination]:
    """Every combination of one mode, in asv's order."""
    for params in itertools.product(*params_of(mode)):
        yield Combination(mode, *params)


def size_of(name: str | None = None) -> Size:
    """The suite's size: by name, else from FUSED_MLP_SUITE, else the default one."""
    name = name or os.environ.get("FUSED_MLP_SUITE") or "default"
    if name not in SIZES:
        raise ValueError(f"unknown suite size {name!r}; known: {', '.join(SIZES)}")
    return SIZES[name]


def device_kind() -> str:
    """ "cuda" or "cpu": FUSED_MLP_DEVICE, else what torch can use where a device node shows a GPU.

    torch is asked in a process of its own, once, and only there: a node proves too little (a CPU
    build of torch, a card that another user's container holds).
    """
    kind = os.environ.get("FUSED_MLP_DEVICE", "")
    if kind:
        if kind not in DTYPES:
            raise ValueError(f"unknown device {kind!r} in FUSED_MLP_DEVICE; known: cpu, cuda")
        return kind
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return "cpu"
    return "cuda" if any(map(os.path.exists, DEVICE_NODES)) and _torch_sees_gpu() else "cpu"


@functools.cache
def _torch_sees_gpu() -> bool:
    command = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.stdout.strip().endswith("True")


def rank_of(combination: Combination, kind: str) -> int:
    """How early a suite size takes a combination in: its provider's rank plus its dtype's."""
    rank = PROVIDERS[combination.provider].rank + DTYPES[kind][combination.dtype]
    return rank + (combination.mode == "ChannelsLast")  # the quick suite looks at no image


def _is_sample(combination: Combination, kind: str) -> bool:
    here = (combination.shape, combination.tokens) == SAMPLE.get(combination.mode)
    first = min(DTYPES[kind], key=DTYPES[kind].__getitem__)
    dtypes = (first, "fp32")
    return here and PROVIDERS[combination.provider].sampled and combination.dtype in dtypes


def left_out(combination: Combination, kind: str, size: Size) -> str | None:
    """Why this device and size leave a combination out; None where it is measured."""
    provider = PROVIDERS[combination.provider]
    if kind not in provider.devices:
        return f"{combination.provider} runs on {' and '.join(provider.devices)} only"
    if combination.dtype not in provider.dtypes:
        return f"{combination.provider} is for weights in {' and '.join(provider.dtypes)}"
    rank = rank_of(combination, kind)
    if rank > size.reach and not (size.samples and _is_sample(combination, kind)):
        return (
            f"{combination.provider} in {combination.dtype} has rank {rank} on a {kind}; "
            f"the {size.name} suite reaches {size.reach}"
        )
    if kind == "cpu":
        if combination.flop > size.cpu_flop:
            return (
                f"{combination.flop / 1e9:.1f} GFLOP a call; on a CPU the {size.name} suite "
                f"measures up to {size.cpu_flop / 1e9:.1f}"
            )
        if combination.least_bytes > size.cpu_bytes:
            return (
                f"{combination.least_bytes / 1e6:.0f} MB a call; on a CPU the {size.name} suite "
                f"measures up to {size.cpu_bytes / 1e6:.0f}"
            )
    return None


@functools.lru_cache(maxsize=32)
def chosen(mode: str, kind: str, size: Size) -> tuple[Combination, ...]:
    """The combinations of one mode that this device and size measure."""
    return tuple(c for c in combinations(mode) if left_out(c, kind, size) is None)
