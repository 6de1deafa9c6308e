"""Vision: a ViT block, and ConvNeXt's MLP over the channels of an image in channels-last memory,
without a copy."""

import torch
from torch import Tensor, nn

import fused_mlp
from fused_mlp.profiling import copies

from .measuring import gradients, operators


class ViTBlock(nn.Module):
    """Pre-norm attention and MLP, as in timm (https://arxiv.org/abs/2010.11929)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ConvNeXtBlock(nn.Module):
    """ConvNeXt's block (https://arxiv.org/abs/2201.03545): a depthwise convolution, then an MLP
    over channels.

    The two 1×1 convolutions are linear layers over the last dimension of NHWC. In channels-last
    memory that is only another view of an NCHW tensor.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.mlp(y).permute(0, 3, 1, 2)


def test_vit_block_says_the_same_with_fewer_operators():
    torch.manual_seed(0)
    block, x = ViTBlock(128, 4).eval(), torch.randn(2, 50, 128)
    with torch.no_grad():
        before = block(x)
    eager = operators(lambda: block(x))
    assert fused_mlp.fuse(block) == ["mlp"]
    with torch.no_grad():
        torch.testing.assert_close(block(x), before, rtol=1e-4, atol=1e-5)
    assert operators(lambda: block(x)) == eager - 1  # gelu is in the first GEMM's epilogue


def test_convnext_block_trains_the_same():
    torch.manual_seed(0)
    block = ConvNeXtBlock(64).to(memory_format=torch.channels_last)
    x = torch.randn(2, 64, 14, 14).to(memory_format=torch.channels_last)

    def loss() -> Tensor:
        return block(x).square().mean()

    want = gradients(block, loss)
    assert fused_mlp.fuse(block) == ["mlp"]
    for name, gradient in gradients(block, loss).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-3, atol=1e-6)


def test_mlp_over_channels_copies_nothing():
    """The image goes in as NCHW in channels-last memory, and comes out as such."""
    torch.manual_seed(0)
    mlp = fused_mlp.FusedMLP(64, 256, activation="gelu", gated=False, bias=True)
    image = torch.randn(2, 64, 14, 14)
    last = image.to(memory_format=torch.channels_last)

    def over_channels(x: Tensor) -> Tensor:
        return mlp(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    assert copies(lambda: over_channels(last)) == []
    with torch.no_grad():
        y = over_channels(last)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert y.untyped_storage().nbytes() == last.untyped_storage().nbytes()
        # The same as two 1×1 convolutions, which are what it stands for.
        up = nn.functional.conv2d(image, mlp.up_proj.weight[:, :, None, None], mlp.up_proj.bias)
        down = mlp.down_proj
        want = nn.functional.conv2d(
            nn.functional.gelu(up), down.weight[:, :, None, None], down.bias
        )
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    # The test can see a copy: from plain NCHW memory there has to be one.
    assert copies(lambda: over_channels(image)) != []


def test_convnext_block_copies_nothing():
    torch.manual_seed(0)
    block = ConvNeXtBlock(64).eval().to(memory_format=torch.channels_last)
    x = torch.randn(1, 64, 14, 14).to(memory_format=torch.channels_last)
    fused_mlp.fuse(block)
    before = copies(lambda: block.depthwise(x))  # oneDNN may reorder inside: not ours
    assert copies(lambda: block(x)) == before
