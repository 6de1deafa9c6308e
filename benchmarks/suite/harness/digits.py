"""Real pictures and a small classifier for them: what rounding an MLP costs in right answers.

The pictures are scikit-learn's digits, which come in its package: 1797 of 8×8. Whoever has files in
idx format (MNIST, Fashion-MNIST, https://github.com/zalandoresearch/fashion-mnist) names their
folder instead.
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from torch import Tensor, nn

WIDTH, INNER = 128, 256
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class Data:
    """Pictures ``(count, features)`` in fp32, each feature near unit scale, and their classes."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def classes(self) -> int:
        return int(self.train_y.max()) + 1


def digits() -> Data:
    """scikit-learn's digits, shuffled: 1437 to learn from and 360 to be asked about."""
    import torch
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(x, dtype=torch.float32) / 8 - 1, torch.tensor(y)
    # The file is sorted by writer and, within, nearly by digit.
    asked = torch.zeros(len(labels), dtype=torch.bool)
    asked[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:360]] = True
    return Data("digits", pixels[~asked], labels[~asked], pixels[asked], labels[asked])


def read_idx(path: Path) -> numpy.ndarray:
    """An array from a file in idx format, plain or gzipped (http://yann.lecun.com/exdb/mnist).

    Raises:
        ValueError: the file is not idx, or shorter than its header says.
    """
    import numpy as np

    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise ValueError(f"{path.name} is not an idx file: it begins with {raw[:4].hex(' ')}")
    kind, rank = np.dtype(_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * rank
    shape = struct.unpack(f">{rank}I", raw[4:start]) if len(raw) >= start else ()
    size = int(np.prod(shape)) * kind.itemsize
    if len(raw) != start + size:
        raise ValueError(f"{path.name} has {len(raw)} bytes; its header promises {start + size}")
    return np.frombuffer(raw, kind, offset=start).reshape(shape)


def idx_folder(folder: Path, name: str = "") -> Data:
    """The four files of MNIST or Fashion-MNIST: ``train-images-idx3-ubyte`` and so on, or .gz."""
    import torch

    def part(words: str) -> Tensor:
        found = [p for p in (folder / words, folder / f"{words}.gz") if p.exists()]
        if not found:
            raise ValueError(f"{folder} has no {words} and no {words}.gz")
        return torch.from_numpy(read_idx(found[0]).copy())

    pictures = [
        part(f"{p}-images-idx3-ubyte").flatten(1).float() / 128 - 1 for p in ("train", "t10k")
    ]
    labels = [part(f"{p}-labels-idx1-ubyte").long() for p in ("train", "t10k")]
    return Data(name or folder.name, pictures[0], labels[0], pictures[1], labels[1])


def classifier(data: Data, seed: int, fused: bool) -> nn.Module:
    """A linear layer, two gated MLPs with residuals, a linear layer; the same weights, fused or
    not.
    """
    import torch
    from torch import nn
    from torch.nn import functional as F

    import fused_mlp

    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(WIDTH, INNER)
            self.up_proj = nn.Linear(WIDTH, INNER)
            self.down_proj = nn.Linear(INNER, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(data.train_x.shape[1], WIDTH)
            self.mlps = nn.ModuleList([Eager(), Eager()])
            self.last = nn.Linear(WIDTH, data.classes)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for mlp in self.mlps:
                x = x + mlp(x)
            return self.last(x)

    torch.manual_seed(seed)
    model = Classifier()
    if fused:
        for i, eager in enumerate(model.mlps):
            twin = fused_mlp.FusedMLP(WIDTH, INNER, activation="silu", bias=True)
            twin.load_state_dict(eager.state_dict())
            model.mlps[i] = twin
    return model


def train(
    model: nn.Module, data: Data, seed: int, epochs: int = 8, rate: float = 2e-3
) -> nn.Module:
    """Adam over batches of 64 in an order that the seed fixes."""
    import torch
    from torch.nn import functional as F

    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(data.train_y), generator=order).split(64):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(data.train_x[batch]), data.train_y[batch]).backward()
            optimizer.step()
    return model.eval()


def judge(model: nn.Module, data: Data, dtype: Any = None) -> tuple[float, float]:
    """Share of right answers, and cross-entropy in nats, on pictures not learnt from."""
    import torch
    from torch.nn import functional as F

    x = data.test_x if dtype is None else data.test_x.to(dtype)
    with torch.inference_mode():
        scores = model(x).float()
    right = (scores.argmax(-1) == data.test_y).float().mean()
    return float(right), float(F.cross_entropy(scores, data.test_y))
