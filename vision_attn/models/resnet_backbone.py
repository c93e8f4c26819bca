"""torchvision's ResNets as backbones whose batch norms are frozen, folded into the convolutions before them.

Apart from the zoo's list of files because torchvision takes two seconds to import.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet

LAYERS: dict[str, tuple[type[nn.Module], list[int]]] = {
    "resnet18": (resnet.BasicBlock, [2, 2, 2, 2]),
    "resnet34": (resnet.BasicBlock, [3, 4, 6, 3]),
    "resnet50": (resnet.Bottleneck, [3, 4, 6, 3]),
    "resnet101": (resnet.Bottleneck, [3, 4, 23, 3]),
}


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

    def after(self, conv: nn.Module, x: Tensor) -> Tensor:
        """The norm of a convolution of ``x``, as one convolution: no pass over the maps, forward or backward."""
        assert isinstance(conv, nn.Conv2d)
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        weight = conv.weight * scale[:, None, None, None]
        return F.conv2d(x, weight, shift, conv.stride, conv.padding, conv.dilation, conv.groups)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


def _norm_after(norm: nn.Module, conv: nn.Module, x: Tensor) -> Tensor:
    return norm.after(conv, x) if isinstance(norm, FrozenBatchNorm) else norm(conv(x))


class ResNetBackbone(nn.Module):
    """The last map of a ResNet: (B, 3, H, W) → (B, C, H / 32, W / 32), rounded up (He et al. 2015, arXiv 1512.03385).

    Args:
        name: a key of ``LAYERS``.
        in_chans: channels of the images.
        dilation: the last stage dilates its filters and does not halve the map (DC5): H / 16.
        norm: ``frozen``: batch norms that never change, and neither do the stem and the first stage, as DETR has it
            for pretrained weights; or ``batch``.
    """

    def __init__(self, name: str, *, in_chans: int = 3, dilation: bool = False, norm: str = "frozen") -> None:
        super().__init__()
        block, layers = LAYERS[name]
        frozen = norm == "frozen"
        self.body: Any = resnet.ResNet(
            block,  # type: ignore[arg-type]
            layers,
            replace_stride_with_dilation=[False, False, dilation],
            norm_layer=FrozenBatchNorm if frozen else None,
        )
        self.channels: int = self.body.fc.in_features
        self.stride = 16 if dilation else 32
        self.body.fc = nn.Identity()
        if in_chans != 3:
            self.body.conv1 = nn.Conv2d(in_chans, 64, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(self.body.conv1.weight, mode="fan_out", nonlinearity="relu")
        if frozen:
            for part in (self.body.conv1, self.body.layer1):
                part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, channels, h, w)."""
        body = self.body
        x = body.maxpool(_norm_after(body.bn1, body.conv1, x).relu_())
        for layer in (body.layer1, body.layer2, body.layer3, body.layer4):
            for block in layer:
                x = _block(block, x)
        return x


def _block(block: Any, x: Tensor) -> Tensor:
    """A residual block of torchvision, basic or with a bottleneck, each norm with the convolution before it."""
    out = _norm_after(block.bn1, block.conv1, x).relu_()
    out = _norm_after(block.bn2, block.conv2, out)
    if hasattr(block, "conv3"):
        out = _norm_after(block.bn3, block.conv3, out.relu_())
    skip = x if block.downsample is None else _norm_after(block.downsample[1], block.downsample[0], x)
    return out.add_(skip).relu_()
