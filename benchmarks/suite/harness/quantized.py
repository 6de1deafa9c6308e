"""What every quantization and precision mode costs in right answers and saves in bytes and seconds.

Also a worker, ``python -m suite.harness.quantized JOB``: it prints one JSON line a result.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .exact import live_bytes
from .shapes import SAMPLES_PER_PROCESS

if TYPE_CHECKING:
    from torch import nn

    from .digits import Data

SEEDS = 5
SUITE_SEEDS = 3  # of every asv run, where each costs 4 s
# fp32 and bf16 are the precisions; the rest are modes of fused_mlp.quantize; int4_qat is trained
# for int4.
MODES = (
    "eager", "fused", "bf16", "int8_dynamic", "int8_static", "int8_weight", "int4_weight",
    "int4_qat", "fp8_dynamic",
)  # fmt: skip
GROUP = 32
# A quarter of Llama-3-8B's sizes each way, so that a CPU is done in milliseconds; 128 tokens are a
# short prompt.
SHAPE, TOKENS = (1024, 3584), 128


def with_mode(model: nn.Module, mode: str, calibration: list[Any], group: int = GROUP) -> nn.Module:
    """A model with fused MLPs in one mode: a copy, unless nothing is to be rounded."""
    import torch

    import fused_mlp

    if mode in ("eager", "fused"):
        return model.eval()
    model = copy.deepcopy(model).eval()
    if mode == "bf16":
        return model.to(torch.bfloat16)
    return fused_mlp.quantize(
        model, mode, group_size=group, calibration=calibration if mode == "int8_static" else None
    )


def stretched(model: nn.Module, seed: int) -> nn.Module:
    """The same function with uneven weights, as large language models have and small ones do not.

    Each row of up is multiplied by a random factor and its column of down divided by it: nothing
    changes in fp32, but in a group of down's weights a few are far larger than the rest, and these
    set the scale for all (the reverse of SmoothQuant, https://arxiv.org/abs/2211.10438).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for mlp in model.mlps:
            up, down = mlp.up_proj, mlp.down_proj
            factor = torch.randn(up.weight.shape[0], generator=generator).mul(1.2).exp()
            up.weight.mul_(factor[:, None])
            up.bias.mul_(factor)
            down.weight.div_(factor)
    return model


def fused_kernels() -> contextlib.AbstractContextManager:
    """What the plan leaves to PyTorch, as it does where MLPs are this small, computes fused too."""
    import torch

    import fused_mlp

    return fused_mlp.use_path("onednn" if torch.backends.mkldnn.is_available() else "eager")


def accuracies(
    data: Data, seeds: int = SEEDS, comparisons: bool = True
) -> Iterator[dict[str, Any]]:
    """Per seed and mode: share of right answers, cross-entropy, and bytes of the MLPs' weights.

    ``comparisons``: also what the rounded models are compared with, trained for it alone: the eager
    classifier, and one that trained as long as int4_qat did, before and after rounding to int4.
    """
    import torch

    import fused_mlp
    from fused_mlp.quantization import bytes_of, prepare_qat

    from .digits import classifier, judge, train

    for seed in range(seeds):
        with fused_kernels():
            fused = stretched(train(classifier(data, seed, fused=True), data, seed), seed)
        models = {
            mode: with_mode(fused, mode, [data.train_x])
            for mode in MODES
            if mode not in ("eager", "int4_qat")
        }
        aware = prepare_qat(copy.deepcopy(fused), "int4_weight", group_size=GROUP)
        train(aware, data, seed + 100, epochs=2, rate=3e-4)
        models["int4_qat"] = fused_mlp.quantize(aware, "int4_weight", group_size=GROUP)
        if comparisons:
            models["eager"] = train(classifier(data, seed, fused=False), data, seed)
            longer = train(copy.deepcopy(fused), data, seed + 100, epochs=2, rate=3e-4)
            models["longer"] = longer
            models["longer, int4"] = with_mode(longer, "int4_weight", [])
        for mode in (*MODES, "longer", "longer, int4"):
            if mode in models:
                model = models[mode]
                with fused_kernels() if mode == "fused" else contextlib.nullcontext():
                    right, loss = judge(model, data, torch.bfloat16 if mode == "bf16" else None)
                size = sum(bytes_of(mlp) for mlp in model.mlps)
                yield {
                    "what": "accuracy", "mode": mode, "seed": seed, "accuracy": right,
                    "loss": loss, "bytes": size,
                }  # fmt: skip


def llama_like(shape: tuple[int, int] = SHAPE) -> dict[str, nn.Module]:
    """One gated silu MLP with random weights in every mode that has a speed of its own."""
    import torch

    import fused_mlp

    torch.manual_seed(0)
    mlp = fused_mlp.FusedMLP(*shape, activation="silu").requires_grad_(False)
    modes = [m for m in MODES if m != "int4_qat"]
    return {mode: with_mode(mlp, mode, [torch.randn(64, shape[0])], 128) for mode in modes}


def _path(mode: str) -> contextlib.AbstractContextManager:
    """Eager is PyTorch's own operators, whatever the plan would take."""
    import fused_mlp

    return fused_mlp.use_path("eager") if mode == "eager" else contextlib.nullcontext()


def speeds(
    modules: dict[str, nn.Module], tokens: int, rounds: int, limit: float = math.inf
) -> dict[str, list[float]]:
    """Seconds of one call, in turn; a mode that takes longer than ``limit`` is left out."""
    import torch

    hidden = next(iter(modules.values())).up_proj.weight.shape[1]
    x = torch.randn(tokens, hidden)
    taken: dict[str, list[float]] = {mode: [] for mode in modules}

    def call(mode: str) -> float:
        given = x.bfloat16() if mode == "bf16" else x
        with _path(mode):
            start = time.perf_counter()
            modules[mode](given)
            return time.perf_counter() - start

    with torch.inference_mode():
        for mode in list(modules):
            if min(call(mode), call(mode)) > limit:
                del taken[mode]
        for _ in range(rounds):
            for mode, samples in taken.items():
                samples.append(call(mode))
    return taken


def exact(modules: dict[str, nn.Module], tokens: int = TOKENS) -> Iterator[dict[str, Any]]:
    """Bytes of the weights, peak of the activations and operators (kernels on a GPU) of one call,
    a mode.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from fused_mlp.profiling import counted
    from fused_mlp.quantization import bytes_of

    for mode, module in modules.items():
        x = torch.randn(tokens, SHAPE[0])
        x = x.bfloat16() if mode == "bf16" else x
        with torch.inference_mode(), _path(mode):
            for _ in range(3):
                module(x)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
                module(x)
        yield {
            "what": "exact", "mode": mode, "weight_bytes": bytes_of(module), "peak_memory":
            live_bytes(prof)[0], "launches": len(counted(prof.events())),
        }  # fmt: skip


def language_models() -> dict[str, Callable[[], Any]]:
    """Small models of real architectures, from a config, with random weights."""
    import transformers

    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers":
    3,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    return {
        "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)),
        "Gemma": lambda: transformers.GemmaForCausalLM(
            transformers.GemmaConfig(**sizes, head_dim=32, hidden_activation="gelu_pytorch_tanh")
        ),
    }


def divergences() -> Iterator[dict[str, Any]]:
    """Per model and mode: relative error of the scores, and KL from fp32's in nats a token."""
    import torch
    from torch.nn import functional as F

    import fused_mlp
    from fused_mlp.quantization.library import only_news

    for name, build in language_models().items():
        torch.manual_seed(0)
        with only_news():  # transformers imports torchao's prototypes
            model = build().eval()
        tokens = torch.randint(0, 256, (4, 64))
        with torch.inference_mode():
            want = model(tokens).logits.float()
        fused_mlp.fuse(model)
        for mode in MODES:
            if mode in ("eager", "int4_qat"):
                continue
            rounded = with_mode(model, mode, [(tokens,)])
            with (
                torch.inference_mode(),
                fused_kernels() if mode == "fused" else contextlib.nullcontext(),
            ):
                got = rounded(tokens).logits.float()
            said, meant = got.log_softmax(-1), want.log_softmax(-1)
            kl = F.kl_div(said, meant, log_target=True, reduction="none")
            yield {
                "what": "divergence", "model": name, "mode": mode,
                "error": float((got - want).norm() / want.norm()), "kl": float(kl.sum(-1).mean()),
            }  # fmt: skip


def worker(job: str, out: Callable[[dict[str, Any]], None]) -> None:
    """``accuracy``, ``speed``, or ``exact`` and then speed: give one result at a time."""
    import torch

    torch.set_num_threads(1)
    if job == "accuracy":
        from .digits import digits

        for result in accuracies(digits(), SUITE_SEEDS, comparisons=False):
            out(result)
        return
    modules = llama_like()
    if job == "exact":
        for result in exact(modules):
            out(result)
    del modules["fp8_dynamic"]  # emulated on a CPU: its time means nothing
    for mode, samples in speeds(modules, TOKENS, SAMPLES_PER_PROCESS).items():
        out({"what": "speed", "mode": mode, "samples": samples})


if __name__ == "__main__":
    worker(sys.argv[1], lambda result: print(json.dumps(result), flush=True))
