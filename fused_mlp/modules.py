"""`FusedMLP`: the MLP as a module with real `nn.Linear` children."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import activations, functional, plan
from .roles import Roles

_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled
_PLAIN = nn.Parameter
_MOST_KINDS = 64


def _special(x: Tensor) -> bool:
    """Whether ``x`` is no plain tensor with a shape."""
    return type(x) is not Tensor or x.is_nested


class FusedMLP(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))``, or ``down_proj(act(up_proj(x)))`` with
    ``gated=False``.

    The children are ordinary `nn.Linear` modules, so checkpoints, optimizers, hooks, LoRA,
    quantization and sharding find what they expect; where a child is no longer a plain linear
    layer, the children are called one by one.

    Parameters may be changed, exchanged or converted between two calls in any way that PyTorch
    counts, and rows or columns also behind its back (``.data``, NumPy views). Only after single
    elements were written behind its back does CPU inference need `fused_mlp.onednn.clear`, since
    there it multiplies by a packed copy.

    Args:
        hidden_size: last size of the input and the output.
        intermediate_size: width in between.
        activation: as in `fused_mlp.fused_mlp`.
        gated: whether there is a ``gate_proj``.
        bias: whether the three projections have biases.
        recompute: as in `fused_mlp.fused_mlp`.
        device, dtype: of the parameters.

    Shapes: ``(..., hidden_size)`` to ``(..., hidden_size)``.

    Raises:
        ValueError: an unknown activation or recompute.

    >>> mlp = FusedMLP(8, 16)
    >>> sorted(mlp.state_dict())
    ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight']
    >>> mlp(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        recompute: str = "activation",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activations.get(activation).name
        functional.kept(recompute)
        gate = "gate_proj" if gated else None
        self._fused_mlp = Roles("up_proj", "down_proj", gate, self.activation, recompute=recompute)
        sizes = {"bias": bias, "device": device, "dtype": dtype}
        if gated:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, **sizes)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **sizes)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **sizes)

    # A fused module of another library inherits these names: they must not be any of its own.
    # Kinds of calls already met: the activation where PyTorch's own operators serve them best, else
    # None. Such a call takes microseconds, and to find that out again would cost some of them.
    _fused_settled: dict[tuple, Callable[[Tensor], Tensor] | None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or plan.forced() is not None or _special(x):
            return self._fused_run(x)
        # In inference mode an x that wants a gradient is refused.
        inference = _inference_mode() and 1 + x.requires_grad
        kind = (x.shape, x.dtype, x.device, _grad_enabled(), inference, self.activation)
        settled = self._fused_settled
        if settled is None or kind not in settled:
            settled = self._fused_settle(x, kind)
        act = settled[kind]
        # A quantized or parametrized weight is another matter, whatever was settled before.
        if act is None or type(self._modules["up_proj"]._parameters.get("weight")) is not _PLAIN:
            return self._fused_run(x)
        return self._fused_one_by_one(x, act)

    def _fused_settle(self, x: Tensor, kind: tuple) -> dict:
        """Before the first call of a kind, so that it is no different from the second."""
        settled = self._fused_settled
        if settled is None or len(settled) >= _MOST_KINDS:
            settled = self._fused_settled = {}
        act = self._fused_activation()
        roles = self._fused_mlp
        left = roles.obstacle(self) is None and functional.left_to_pytorch(
            x, roles.params(self._modules), act, roles.recompute
        )
        settled[kind] = act.eager if left else None
        return settled

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_fused_settled"}

    def _apply(self, fn: Callable, recurse: bool = True) -> FusedMLP:
        self._fused_settled = None  # another device or dtype
        return super()._apply(fn, recurse)

    def _fused_activation(self) -> activations.Activation:
        return activations.get(self.activation)  # it may have been set to another

    def _fused_run(self, x: Tensor) -> Tensor:
        roles = self._fused_mlp
        act = self._fused_activation()
        # What is no tensor may stand for one (torch.fx); if not, nn.Linear says what is wrong.
        if not isinstance(x, Tensor) or roles.obstacle(self) is not None:
            return self._fused_one_by_one(x, act.eager)
        return functional.run(x, roles.params(self._modules), act, roles.recompute)

    def _fused_one_by_one(self, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        children = self._modules
        if self._fused_mlp.gate is None:
            return children["down_proj"](act(children["up_proj"](x)))
        return children["down_proj"](act(children["gate_proj"](x)) * children["up_proj"](x))

    def extra_repr(self) -> str:
        return f"activation={self.activation}, recompute={self._fused_mlp.recompute}"

    @staticmethod
    def from_module(mlp: nn.Module, output: nn.Module | None = None) -> FusedMLP:
        """A fused module with the very parameters of ``mlp``; nothing is copied and ``mlp`` stays
        as it is.

        Args:
            mlp: a module that computes an MLP, whatever its class and its children's names
                (LlamaMLP, GPT2MLP, ``nn.Sequential(Linear, act, Linear)``,
                ``nn.TransformerEncoderLayer``, ...); it is recognised by what it computes. Its
                ``state_dict`` keys are kept.
            output: the second half, where a model splits its MLP over two modules (BERT's
                intermediate and output); the result is then the two linear layers alone, without
                dropout, residual or norm.

        Raises:
            ValueError: the module is not an MLP of this kind; the message says why.

        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> fused = FusedMLP.from_module(mlp)
        >>> fused[0].weight is mlp[0].weight
        True
        """
        from .integrations import from_module

        return from_module(mlp, output)
