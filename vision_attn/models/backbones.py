"""What gives a detector its map of features: a light CNN, a ViT or a Swin of this zoo, a ResNet, any net of timm.

A backbone maps images (B, C, H, W) to one map (B, channels, h, w) and says how wide and how coarse it is: ``channels``
and ``stride``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vision_attn.errors import UserError, closest, first_line
from vision_attn.layers.resnet import ResNet
from vision_attn.models.registry import create_model, list_models

RESNETS: dict[str, dict[str, Any]] = {
    "resnet18": {"depths": (2, 2, 2, 2), "widths": (64, 128, 256, 512), "bottleneck": False},
    "resnet34": {"depths": (3, 4, 6, 3), "widths": (64, 128, 256, 512), "bottleneck": False},
    "resnet50": {"depths": (3, 4, 6, 3), "widths": (256, 512, 1024, 2048)},
    "resnet101": {"depths": (3, 4, 23, 3), "widths": (256, 512, 1024, 2048)},
}
"""Arguments of ``ResNet``."""

LIGHT: dict[str, tuple[int, ...]] = {"light_cnn": (32, 64, 128), "light_cnn_small": (48, 96, 192)}
"""Widths of the halvings of the light CNNs."""


class Residual(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut: (B, C, h, w) → (B, D, h / stride, w / stride), rounded up."""

    def __init__(self, in_chans: int, out_chans: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, out_chans, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_chans)
        self.conv2 = nn.Conv2d(out_chans, out_chans, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_chans)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_chans != out_chans:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_chans, out_chans, 1, stride, bias=False), nn.BatchNorm2d(out_chans)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu_()))
        return out.add_(self.shortcut(x)).relu_()


class LightCNN(nn.Module):
    """A convolution and residual blocks, each halving the image: (B, C, H, W) → (B, channels, H / 8, W / 8).

    Small enough to be trained from nothing in minutes. Its norms are batch norms: in evaluation they look at no other
    image and no other place, so padding does not move them, as it would the statistics of a group norm.

    Args:
        widths: channels after every halving.
        in_chans: channels of the images.
    """

    def __init__(self, widths: Sequence[int], *, in_chans: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(Residual(a, b, 2) for a, b in pairwise(widths)))
        self.channels, self.stride = widths[-1], 2 ** len(widths)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, channels, h, w), sides rounded up."""
        return self.blocks(self.stem(x))


class ZooBackbone(nn.Module):
    """The tokens of a ViT or the last map of a Swin of this zoo as a map.

    Args:
        body: of this zoo, without a head.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.swin = hasattr(body, "feature_channels")
        self.channels: int = body.feature_channels[-1] if self.swin else body.norm.normalized_shape[0]
        self.stride: int = body.feature_strides[-1] if self.swin else max(body.patch_embed.patch_size)
        self.norm = nn.LayerNorm(self.channels) if self.swin else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, channels, h, w). Images of a ViT are filled up to whole patches with zeros."""
        if self.swin:
            found = self.body.forward_feature_maps(x)[-1]
            return self.norm(found.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        rows, columns = self.body.patch_embed.patch_size
        x = nn.functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
        grid = self.body.patch_embed.grid((x.shape[-2], x.shape[-1]))
        tokens = self.body.forward_features(x)[:, self.body.num_prefix_tokens :]
        return tokens.transpose(1, 2).unflatten(2, grid)


ANY_SIZE: tuple[dict[str, Any], ...] = (
    {"dynamic_img_size": True, "dynamic_img_pad": True},
    {"strict_img_size": False},
    {},
)
"""What lets timm's ViTs, its Swins and all others take images of any size; at their own size nothing changes."""


class TimmBackbone(nn.Module):
    """The last map of a net of timm (``features_only``).

    Args:
        name: timm's name.
        in_chans: channels of the images.
        norm: ``frozen``: batch norms that never change, for pretrained weights; or ``batch``.
        weights: True for timm's pretrained ones, or a file of them.
        **options: for ``timm.create_model``.

    Raises:
        UserError: timm has no such model, or not as a backbone, or takes no such option; weights that cannot be had or
            do not fit.
    """

    def __init__(
        self,
        name: str,
        *,
        in_chans: int = 3,
        norm: str = "batch",
        weights: bool | str | Path | None = None,
        **options: Any,
    ) -> None:
        from timm.layers import freeze_batch_norm_2d

        super().__init__()
        self.name = name
        self.body: Any = _timm_body(name, in_chans, weights is True, options)
        if weights and weights is not True:
            from vision_attn.models.backbone_weights import load_timm_weights

            load_timm_weights(self.body, name, weights, in_chans, options)
        info: Any = self.body.feature_info
        self.channels: int = info.channels()[-1]
        self.stride: int = info.reduction()[-1]
        # Swins pad their windows, but not their patches; ViTs do so themselves
        self.patch: tuple[int, int] = getattr(getattr(self.body, "patch_embed", None), "patch_size", (1, 1))
        self.channels_last = getattr(self.body, "output_fmt", None) == "NHWC"  # timm's Swins
        if norm == "frozen":
            self.body = freeze_batch_norm_2d(self.body)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, channels, h, w). Images of a Swin are filled up to whole patches with zeros.

        Raises:
            UserError: the net takes images of another size only.
        """
        rows, columns = self.patch
        x = nn.functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
        try:
            found = self.body(x)[-1]
        except AssertionError as error:
            raise UserError(
                f"timm's {self.name} does not take images of {x.shape[-2]} × {x.shape[-1]}: {error} Take another "
                "backbone, or backbone_options img_size with images of that one size."
            ) from error
        return found.permute(0, 3, 1, 2) if self.channels_last else found


def _timm_body(name: str, in_chans: int, pretrained: bool, options: Mapping[str, Any]) -> Any:
    import timm

    settings: dict[str, Any] = {"out_indices": (-1,), "in_chans": in_chans, **options, "pretrained": pretrained}
    for flexible in ANY_SIZE:
        try:
            return timm.create_model(name, features_only=True, **{**flexible, **settings})
        except TypeError as error:
            if not any(word in str(error) for word in flexible):
                raise UserError(f"timm's {name} is no backbone with {dict(options)}: {error}") from error
        except OSError as error:
            if not pretrained:
                raise
            raise UserError(
                f"timm's weights of {name} cannot be downloaded ({first_line(error)}); "
                "give a file: backbone_weights=PATH"
            ) from error
        except (RuntimeError, AssertionError, ValueError) as error:
            with_what = dict(options) or "these settings"
            raise UserError(f"timm's {name} is no backbone with {with_what}: {error}") from error
    raise AssertionError("the last of ANY_SIZE asks for nothing")


def make_backbone(
    name: str,
    *,
    in_chans: int = 3,
    img_size: Sequence[int] | None = None,
    weights: bool | str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A backbone by name.

    Args:
        name: one of ``LIGHT`` or ``RESNETS``, a ``vit…`` or ``swin…`` of this zoo, or a model of timm, which may be
            written ``timm:name`` where a name is both.
        in_chans: channels of the images.
        img_size: (height, width), for those that lay out positions.
        weights: True for the library's pretrained ones (needs the network), or a checkpoint file.
        options: of the backbone: the arguments of ``ResNet`` (``dilation``, ``norm``, …), of ``LightCNN``, of the model
            of the zoo, or ``norm`` and what timm takes.

    Raises:
        UserError: unknown name, option or weights.
    """
    given = dict(options or {})
    timms = name.removeprefix("timm:")
    own = _is_own(name)
    if not own and not is_timm(timms):
        known = [*LIGHT, *RESNETS, *list_models("vit*"), *list_models("swin*")]
        raise UserError(f"unknown backbone {name!r}.{closest(name, known)} It may be one of timm's, too.")
    try:
        if not own:
            given = {"norm": "batch", **with_norm(name, weights, given)}
            return TimmBackbone(timms, in_chans=in_chans, weights=weights, **given)
        backbone = _build(name, in_chans, img_size, given)
    except TypeError as error:
        raise UserError(f"backbone {name} does not take these options ({', '.join(given)}): {error}") from error
    if weights:
        from vision_attn.models.backbone_weights import load_weights

        load_weights(backbone, name, weights)
    return backbone


def with_norm(name: str, weights: bool | str | Path | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """``options`` with the norm that comes with ``weights``: a frozen one for timm's nets, unless they name another.

    With it the backbone can be built again without the weights.
    """
    return {**({"norm": "frozen"} if weights and not _is_own(name) else {}), **(options or {})}


def _is_own(name: str) -> bool:
    return name in LIGHT or name in RESNETS or _in_zoo(name)


def _in_zoo(name: str) -> bool:
    return name.startswith(("vit", "swin")) and name in list_models(task="classification")


def is_timm(name: str) -> bool:
    """Whether timm has a model of exactly this name, a tag of weights after a dot aside."""
    import timm

    return timm.is_model(name.split(".")[0])


def _build(name: str, in_chans: int, img_size: Sequence[int] | None, options: dict[str, Any]) -> nn.Module:
    if name in LIGHT:
        return LightCNN(**{"widths": LIGHT[name], **options}, in_chans=in_chans)
    if name in RESNETS:
        return ResNet(**{**RESNETS[name], **options}, in_chans=in_chans)
    if name.startswith("swin"):
        options = {"features_only": True, **options}
    model: Any = create_model(name, num_classes=1, in_chans=in_chans, img_size=_plain(img_size), **options)
    if name.startswith("vit"):
        drop_heads(model)
    return ZooBackbone(model)


def _plain(img_size: Sequence[int] | None) -> list[int] | None:
    return None if img_size is None else [int(side) for side in img_size]


def preprocessing(name: str, in_chans: int) -> dict[str, Any]:
    """Mean and deviation of the pixels that a backbone of this name was pretrained with, where that is ImageNet's."""
    if name in LIGHT or in_chans != 3 or name in list_models(task="classification"):
        return {}
    return {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def drop_heads(model: Any) -> None:
    """Takes what follows the tokens out of a ViT, and lets it normalize all of them."""
    width = model.head.in_features
    if isinstance(model.norm, nn.Identity):
        model.norm = nn.LayerNorm(width, eps=1e-6)
    for name in ("fc_norm", "head", "head_dist", "pool"):
        setattr(model, name, nn.Identity())
