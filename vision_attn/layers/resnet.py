"""ResNets as backbones (He et al. 2015, arXiv 1512.03385), in torchvision's names and of any widths and depths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenBatchNorm(nn.Module):
    """A batch norm that never changes: the statistics and the affine map of somebody's training (B, C, h, w).

    Args:
        channels: C.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def after(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        """The norm of a convolution of ``x``, as one convolution: no pass over the maps, forward or backward."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        weight, shift = conv.weight * scale[:, None, None, None], self.bias - self.running_mean * scale
        return F.conv2d(x, weight, shift, conv.stride, conv.padding, conv.dilation)


def _conv(in_chans: int, out_chans: int, side: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(in_chans, out_chans, side, stride, dilation * (side // 2), dilation, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _normalized(conv: nn.Conv2d, norm: nn.Module, x: Tensor) -> Tensor:
    return norm.after(conv, x) if isinstance(norm, FrozenBatchNorm) else norm(conv(x))


class Block(nn.Module):
    """Convolutions of 3 and 3, or of 1, 3 and 1, beside a shortcut: (B, C, h, w) → (B, D, h / stride, w / stride).

    Args:
        in_chans, out_chans: C and D.
        bottleneck: three convolutions, the middle one of D / 4 channels.
        stride, dilation: of the first convolution of 3.
        last_dilation: of the second one, where there are two.
        norm: class of the norms.
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        *,
        bottleneck: bool,
        stride: int,
        dilation: int,
        last_dilation: int,
        norm: type[nn.Module],
    ) -> None:
        super().__init__()
        if bottleneck:
            width = out_chans // 4
            self.conv1, self.bn1 = _conv(in_chans, width, 1), norm(width)
            self.conv2, self.bn2 = _conv(width, width, 3, stride, dilation), norm(width)
            self.conv3, self.bn3 = _conv(width, out_chans, 1), norm(out_chans)
        else:
            self.conv1, self.bn1 = _conv(in_chans, out_chans, 3, stride, dilation), norm(out_chans)
            self.conv2, self.bn2 = _conv(out_chans, out_chans, 3, 1, last_dilation), norm(out_chans)
        self.bottleneck = bottleneck
        self.downsample: nn.Sequential | None = None
        if stride > 1 or in_chans != out_chans:
            self.downsample = nn.Sequential(_conv(in_chans, out_chans, 1, stride), norm(out_chans))

    def forward(self, x: Tensor) -> Tensor:
        out = _normalized(self.conv1, self.bn1, x).relu_()
        out = _normalized(self.conv2, self.bn2, out)
        if self.bottleneck:
            out = _normalized(self.conv3, self.bn3, out.relu_())
        if self.downsample is not None:
            conv, norm = self.downsample
            assert isinstance(conv, nn.Conv2d)
            x = _normalized(conv, norm, x)
        return out.add_(x).relu_()


class ResNet(nn.Module):
    """A convolution of 7, then stages of residual blocks: (B, C, H, W) → (B, channels, H / 32, W / 32), rounded up.

    Args:
        depths, widths: blocks and channels of each stage.
        bottleneck: kind of the blocks, see ``Block``.
        stem_width: channels of the first convolution.
        in_chans: channels of the images.
        dilation: the last stage dilates its filters and does not halve the map (DC5): H / 16.
        norm: ``frozen``: batch norms that never change, nor do the stem and the first stage, as DETR has it with
            pretrained weights; or ``batch``, for training from nothing.

    Raises:
        ValueError: another norm.
    """

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        *,
        bottleneck: bool = True,
        stem_width: int = 64,
        in_chans: int = 3,
        dilation: bool = False,
        norm: str = "frozen",
    ) -> None:
        super().__init__()
        norms: dict[str, type[nn.Module]] = {"frozen": FrozenBatchNorm, "batch": nn.BatchNorm2d}
        if norm not in norms:
            raise ValueError(f"norm={norm!r}: choose frozen or batch")
        self.conv1, self.bn1 = _conv(in_chans, stem_width, 7, 2), norms[norm](stem_width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.stages = [f"layer{i}" for i in range(1, len(depths) + 1)]
        self.channels, self.stride, width = widths[-1], 4, stem_width
        for i, (name, depth, out) in enumerate(zip(self.stages, depths, widths, strict=True)):
            dilates = dilation and i == len(depths) - 1
            stride = 1 if i == 0 or dilates else 2
            self.stride *= stride
            blocks = [
                Block(
                    width if j == 0 else out,
                    out,
                    bottleneck=bottleneck,
                    stride=stride if j == 0 else 1,
                    dilation=2 if dilates and j > 0 else 1,
                    last_dilation=2 if dilates else 1,
                    norm=norms[norm],
                )
                for j in range(depth)
            ]
            self.add_module(name, nn.Sequential(*blocks))
            width = out
        if norm == "frozen":
            for part in (self.conv1, self.layer1):
                part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, channels, h, w)."""
        x = self.maxpool(_normalized(self.conv1, self.bn1, x).relu_())
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return x
