"""Convolutional baselines for small images: the nets that a transformer is compared with.

Every net takes ``(B, C, H, W)`` with any ``H, W`` of at least 8 pixels: the strides and pools round up or
stop at one pixel, and the head pools over whatever grid is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.layers.embed import pair
from vision_attn.layers.whitening import WhiteningConv
from vision_attn.models.registry import register_model

MIN_SIZE = 8  # pixels: the digit scans, and what the CIFAR nets (which divide by 4 to 8) still see as a grid


def _checked(img_size: int | tuple[int, int]) -> tuple[int, int]:
    """(H, W), unless that would leave nothing to pool.

    Raises:
        UserError: a side is shorter than 8 pixels.
    """
    sides = pair(img_size)
    if min(sides) < MIN_SIZE:
        raise UserError(f"img_size {list(sides)} is too small for this CNN: each side needs {MIN_SIZE} pixels or more.")
    return sides


def _conv3x3(in_chans: int, out_chans: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_chans, out_chans, 3, stride=stride, padding=1, bias=False)


def _pool2(x: Tensor) -> Tensor:
    """Halve the grid by its maxima; a side of one pixel stays as it is. ``(B, C, H, W)``."""
    return F.max_pool2d(x, (min(2, x.shape[-2]), min(2, x.shape[-1])))


class PadShortcut(nn.Module):
    """Option A of He et al.: take every other pixel and add channels of zeros. No parameters."""

    def __init__(self, in_chans: int, out_chans: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (out_chans - in_chans) // 2
        self.after = out_chans - in_chans - self.before

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016, figure 2).

    Args:
        in_chans: channels in.
        out_chans: channels out.
        stride: of the first convolution.
        shortcut: ``"pad"`` (option A, no parameters) or ``"conv"`` (option B, a 1x1 convolution) where the
            shape changes.
    """

    def __init__(self, in_chans: int, out_chans: int, *, stride: int = 1, shortcut: str = "pad") -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_chans, out_chans, stride)
        self.bn1 = nn.BatchNorm2d(out_chans)
        self.conv2 = _conv3x3(out_chans, out_chans)
        self.bn2 = nn.BatchNorm2d(out_chans)
        self.downsample: nn.Module
        if stride == 1 and in_chans == out_chans:
            self.downsample = nn.Identity()
        elif shortcut == "pad":
            self.downsample = PadShortcut(in_chans, out_chans, stride)
        else:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_chans, out_chans, 1, stride=stride, bias=False), nn.BatchNorm2d(out_chans)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class CifarResNet(nn.Module):
    """Residual net with a 3x3 stem and no early pooling, for images of 8 to 64 pixels.

    With the defaults it is section 4.2 of He et al., "Deep Residual Learning for Image Recognition" (2016,
    https://arxiv.org/abs/1512.03385): three stages of ``n`` blocks, ``6 n + 2`` layers, option A shortcuts.

    Args:
        num_classes: outputs.
        img_size: side(s) of the images; only checked, any size at least 8 works.
        in_chans: channels of the images.
        blocks: residual blocks in each stage; the grid halves between stages.
        width: channels of the first stage; they double with each stage.
        shortcut: ``"pad"`` (option A) or ``"conv"`` (option B).
        dropout: probability before the head.

    Raises:
        UserError: the image is too small or ``shortcut`` is unknown.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        blocks: Sequence[int] = (3, 3, 3),
        width: int = 16,
        shortcut: str = "pad",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.img_size = _checked(img_size)
        if shortcut not in ("pad", "conv"):
            raise UserError(f'shortcut must be "pad" (option A) or "conv" (option B), not {shortcut!r}.')
        self.conv1 = _conv3x3(in_chans, width)
        self.bn1 = nn.BatchNorm2d(width)
        chans = width
        self.stages: list[str] = []
        for i, count in enumerate(blocks):
            layers = []
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                layers.append(BasicBlock(chans, width * 2**i, stride=stride, shortcut=shortcut))
                chans = width * 2**i
            self.stages.append(f"layer{i + 1}")
            self.add_module(self.stages[-1], nn.Sequential(*layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(chans, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, C, H, W)`` to the last grid of features ``(B, D, h, w)``."""
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.forward_features(x).mean((2, 3))))


class ConvNormAct(nn.Sequential):
    """3x3 convolution, optional 2x2 max pool, batch norm, activation."""

    def __init__(self, in_chans: int, out_chans: int, *, pool: bool = False, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.pool = pool
        self.conv = _conv3x3(in_chans, out_chans)
        self.norm = nn.BatchNorm2d(out_chans)
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        # pooling before the norm costs the norm and the activation a quarter of the pixels
        return self.act(self.norm(_pool2(x) if self.pool else x))


class ResNet9(nn.Module):
    """Nine-layer residual net that learns CIFAR-10 in a few epochs.

    The design that won DAWNBench in 2018 (Page, "How to train your ResNet",
    https://myrtle.ai/learn/how-to-train-your-resnet/): four widths, residual blocks in the second and fourth.

    Args:
        num_classes: outputs.
        img_size: side(s) of the images; only checked.
        in_chans: channels of the images.
        width: channels of the stem; the stages have 2, 4 and 8 times as many.
        head_scale: logits are multiplied by it, which tames the first steps at a high learning rate.

    Raises:
        UserError: the image is too small.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        width: int = 64,
        head_scale: float = 0.125,
    ) -> None:
        super().__init__()
        self.img_size = _checked(img_size)
        self.head_scale = head_scale
        self.stem = ConvNormAct(in_chans, width)
        self.layer1 = ConvNormAct(width, 2 * width, pool=True)
        self.residual1 = nn.Sequential(ConvNormAct(2 * width, 2 * width), ConvNormAct(2 * width, 2 * width))
        self.layer2 = ConvNormAct(2 * width, 4 * width, pool=True)
        self.layer3 = ConvNormAct(4 * width, 8 * width, pool=True)
        self.residual3 = nn.Sequential(ConvNormAct(8 * width, 8 * width), ConvNormAct(8 * width, 8 * width))
        self.head = nn.Linear(8 * width, num_classes, bias=False)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, C, H, W)`` to the last grid of features ``(B, 8 width, h, w)``."""
        x = self.layer1(self.stem(x))
        x = x + self.residual1(x)
        x = self.layer3(self.layer2(x))
        return x + self.residual3(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x).amax((2, 3))) * self.head_scale


class AirbenchBlock(nn.Module):
    """conv - max pool - norm - GELU - conv - norm - GELU; with ``depth=3`` a third, residual convolution."""

    def __init__(self, in_chans: int, out_chans: int, *, depth: int, bn_momentum: float) -> None:
        super().__init__()
        convs = [_conv3x3(in_chans if i == 0 else out_chans, out_chans) for i in range(depth)]
        norms = [nn.BatchNorm2d(out_chans, momentum=bn_momentum) for _ in range(depth)]
        for conv in convs:
            nn.init.kaiming_uniform_(conv.weight, a=math.sqrt(5))
            # the first filters begin as the identity, so that the signal reaches the head from step one
            nn.init.dirac_(conv.weight[: conv.weight.shape[1]])
        for norm in norms:
            norm.weight.requires_grad_(False)  # the next convolution scales anyway: only the shift is learned
        self.convs, self.norms = nn.ModuleList(convs), nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norms[0](_pool2(self.convs[0](x))))
        for i in range(1, len(self.convs)):
            y = self.norms[i](self.convs[i](x))
            x = F.gelu(y + x if i == 2 else y)
        return x


class AirbenchNet(nn.Module):
    """Plain net of Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024, arXiv 2404.00498).

    A frozen 2x2 convolution that whitens patches, three blocks of two convolutions, a max pool, a scaled
    linear head. Call :meth:`init_whitening` with training images before training; until then the first
    layer holds the cosine basis of the patch, which keeps all information but does not equalise it.

    Args:
        num_classes: outputs.
        img_size: side(s) of the images; only checked.
        in_chans: channels of the images.
        widths: channels of the three blocks.
        depth: convolutions per block; 2 as in airbench94, 3 with a residual as in airbench96.
        bn_momentum: weight of the new batch in the running statistics (0.4 there: trainings are short).
        head_scale: logits are multiplied by it.

    Raises:
        UserError: the image is too small.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        widths: Sequence[int] = (64, 256, 256),
        depth: int = 2,
        bn_momentum: float = 0.4,
        head_scale: float = 1 / 9,
    ) -> None:
        super().__init__()
        self.img_size = _checked(img_size)
        self.head_scale = head_scale
        self.whiten = WhiteningConv(in_chans)
        chans = (self.whiten.out_channels, *widths)
        self.blocks = nn.Sequential(
            *(AirbenchBlock(a, b, depth=depth, bn_momentum=bn_momentum) for a, b in pairwise(chans))
        )
        self.head = nn.Linear(chans[-1], num_classes, bias=False)

    def init_whitening(self, images: Tensor, eps: float = 5e-4) -> None:
        """Sets the first layer by normalized training images (N, C, H, W); see ``WhiteningConv.init_from``."""
        self.whiten.init_from(images, eps)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, C, H, W)`` to the last grid of features ``(B, D, h, w)``."""
        # the weight is frozen but the bias is not, and autograd spends nothing on the former
        return self.blocks(F.gelu(self.whiten(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x).amax((2, 3))) * self.head_scale


@register_model
def resnet8_cifar(**kwargs: Any) -> CifarResNet:
    """ResNet-8 for small images: one block per stage, enough for digits."""
    return CifarResNet(**{"blocks": (1, 1, 1), **kwargs})


@register_model
def resnet20_cifar(**kwargs: Any) -> CifarResNet:
    """ResNet-20 for CIFAR with option A shortcuts (He et al. 2016)."""
    return CifarResNet(**{"blocks": (3, 3, 3), **kwargs})


@register_model
def resnet32_cifar(**kwargs: Any) -> CifarResNet:
    """ResNet-32 for CIFAR with option A shortcuts (He et al. 2016)."""
    return CifarResNet(**{"blocks": (5, 5, 5), **kwargs})


@register_model
def resnet44_cifar(**kwargs: Any) -> CifarResNet:
    """ResNet-44 for CIFAR with option A shortcuts (He et al. 2016)."""
    return CifarResNet(**{"blocks": (7, 7, 7), **kwargs})


@register_model
def resnet56_cifar(**kwargs: Any) -> CifarResNet:
    """ResNet-56 for CIFAR with option A shortcuts (He et al. 2016)."""
    return CifarResNet(**{"blocks": (9, 9, 9), **kwargs})


@register_model
def resnet110_cifar(**kwargs: Any) -> CifarResNet:
    """ResNet-110 for CIFAR with option A shortcuts (He et al. 2016)."""
    return CifarResNet(**{"blocks": (18, 18, 18), **kwargs})


@register_model
def resnet18_cifar(**kwargs: Any) -> CifarResNet:
    """ResNet-18 with a 3x3 stem and no max pool: the usual adaptation of He et al. to 32 pixels."""
    return CifarResNet(**{"blocks": (2, 2, 2, 2), "width": 64, "shortcut": "conv", **kwargs})


@register_model
def resnet9_cifar(**kwargs: Any) -> ResNet9:
    """ResNet-9 (Page 2018): strong after few epochs, for short budgets."""
    return ResNet9(**kwargs)


@register_model
def airbench_cifar(**kwargs: Any) -> AirbenchNet:
    """Plain whitening net (Jordan 2024): 94 % on CIFAR-10 for 0.29 PFLOP."""
    return AirbenchNet(**kwargs)
