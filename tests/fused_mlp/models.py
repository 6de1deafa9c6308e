"""Small models that tests fuse, and what they put into them."""

from collections.abc import Callable

from torch import Tensor, nn

from fused_mlp import FusedMLP, fuse

HIDDEN, WIDTH = 12, 20


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.act_fn: nn.Module | Callable[[Tensor], Tensor] = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


def own() -> FusedMLP:
    return FusedMLP(HIDDEN, WIDTH)


def adopted() -> nn.Module:
    module = Llama()
    fuse(module)
    return module


class Twofold(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def scaled(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
    return 1.5 * out
