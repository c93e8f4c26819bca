"""Swin Transformers (Liu et al. 2021, arXiv 2103.14030) and their second version (arXiv 2111.09883).

In timm's names and sizes, and sizes for small images. Windows and their shift are a pattern of the one attention core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, Layout
from vision_attn.attention.config import PATTERN_OPTIONS
from vision_attn.attention.positions import TOKEN_POSITIONS
from vision_attn.errors import UserError
from vision_attn.layers.embed import pair
from vision_attn.layers.encoder import drop_path_rates
from vision_attn.layers.positions import GridPositions
from vision_attn.layers.windows import (
    NormedPatchEmbed,
    PatchMerging,
    WindowPadding,
    WindowStage,
    pad_to_patches,
    start_as_identity,
    to_map,
)
from vision_attn.models.registry import register_model


class SwinTransformer(GridPositions):
    """Stages of attention in shifted windows, each on half the grid of the one before: (B, C, H, W) → (B, num_classes).

    Any image size will do at any time: images are filled up to whole patches and grids to whole windows with zeros, a
    window larger than the grid shrinks to it, and relative positions follow (Liu et al. 2021, arXiv 2103.14030).

    Args:
        img_size: pixels the tables of relative positions are laid out for.
        patch_size: pixels per patch.
        in_chans, num_classes: channels in, classes out.
        embed_dim: width of the first stage; it doubles from stage to stage.
        depths, num_heads: layers and heads of each stage.
        window_size: side of a window in patches.
        version: 2 for Swin V2: cosine scores with a learned temperature, continuous relative positions, no bias of
            keys, and layers that normalize what they add (Liu et al. 2021, arXiv 2111.09883).
        pretrained_window_sizes: of version 2, the windows of each stage that the relative positions were trained with,
            where they are now others; 0 for the same.
        mlp_ratio: hidden width of the MLP over the width.
        qkv_bias: whether queries, keys and values have biases.
        drop_rate: dropout of the pooled features.
        proj_drop: dropout after each projection.
        drop_path: stochastic depth of the last layer, growing linearly from 0.
        norm_eps: ε of the layer norms.
        borders: whom to follow where windows or patches do not fit: ``original``, ``timm`` or ``torchvision``; see
            ``WindowPadding``. It makes no difference at the size that a model is named after.
        features_only: no head; the model then gives the maps of all stages, as ``forward_feature_maps``.
        attention: mechanism choices, see ``AttentionConfig``; all but the pattern. A position that is added to the
            tokens takes the place of the relative one.

    Raises:
        UserError: depths and heads of different numbers of stages, a width that heads do not divide, or another
            pattern.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 7,
        version: int = 1,
        pretrained_window_sizes: Sequence[int] | None = None,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
        borders: str = "original",
        features_only: bool = False,
        attention: Mapping[str, Any] | AttentionConfig | None = None,
    ) -> None:
        super().__init__()
        config = AttentionConfig.of(attention)
        _check(version, embed_dim, depths, num_heads, pretrained_window_sizes, window_size, config)
        self.img_size, self.borders, self.features_only = pair(img_size), borders, features_only
        self.num_prefix_tokens = 0
        self.patch_embed = NormedPatchEmbed(patch_size, in_chans, embed_dim, norm_eps)
        grid = self._grid(self.img_size)
        self.init_positions(config.for_tokens("none"), 0, grid, embed_dim)
        self.pos_drop = nn.Dropout(proj_drop)
        self.feature_channels = [embed_dim * 2**i for i in range(len(depths))]
        self.feature_strides = [max(self.patch_embed.patch_size) * 2**i for i in range(len(depths))]
        rates = iter(drop_path_rates(drop_path, sum(depths)))
        references = pretrained_window_sizes or [0] * len(depths)
        self.layers = nn.ModuleList()
        for i, (dim, depth, heads) in enumerate(zip(self.feature_channels, depths, num_heads, strict=True)):
            grid = PatchMerging.grid(grid) if i else grid
            layout = Layout(0, WindowPadding(window_size, 0, borders).sides(grid))
            layer = {
                "num_heads": heads,
                "window": window_size,
                "borders": borders,
                "res_post_norm": version == 2,
                "mlp_ratio": mlp_ratio,
                "dropout": proj_drop,
                "norm_eps": norm_eps,
                "attention": {"qkv_bias": qkv_bias, "layout": layout, **_mechanisms(version, config)},
            }
            # Only where there is more than one window is there a shift; the pattern finds that out at each size.
            layers = [{**layer, "shift": window_size // 2 * (j % 2), "drop_path": next(rates)} for j in range(depth)]
            merging = {"norm_last": version == 2, "norm_eps": norm_eps}
            stage = WindowStage(dim, merge=i > 0, layers=layers, merging=merging)
            stage.set_reference(references[i])
            self.layers.append(stage)
        width = self.feature_channels[-1]
        self.norm = nn.Identity() if features_only else nn.LayerNorm(width, eps=norm_eps)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Identity() if features_only else nn.Linear(width, num_classes)
        init_weights(self)

    def _grid(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patches of an image of any size."""
        rows, columns = (
            side // patch if self.borders == "torchvision" else -(-side // patch)
            for side, patch in zip(img_size, self.patch_embed.patch_size, strict=True)
        )
        if min(rows, columns) < 1:
            raise UserError(f"an image of {img_size[0]}×{img_size[1]} holds no patch of {self.patch_embed.patch_size}")
        return rows, columns

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay must leave alone: positions and temperatures, as in the original."""
        alone = ("pos_embed", ".position.", "logit_scale")
        return {name for name, _ in self.named_parameters() if any(part in name for part in alone)}

    def _stages(self, x: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
        """Tokens (B, R · C, D) and grid (R, C) after every stage."""
        grid = self._grid((x.shape[-2], x.shape[-1]))
        position = self.position_at(grid)
        x = self.patch_embed(pad_to_patches(x, self.patch_embed.patch_size, self.borders))
        x = self.pos_drop(x if position is None else x + position)
        after = []
        for stage in self.layers:
            x, grid = stage(x, grid)
            after.append((x, grid))
        return after

    def forward_feature_maps(self, x: Tensor) -> list[Tensor]:
        """(B, C, H, W) → maps (B, D_i, R_i, C_i) after every stage, not normalized, for dense prediction.

        ``feature_channels`` and ``feature_strides`` say how wide and how coarse they are.
        """
        return [to_map(tokens, grid) for tokens, grid in self._stages(x)]

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, R · C, D) normalized tokens after the last stage."""
        return self.norm(self._stages(x)[-1][0])

    def forward_head(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """(B, R · C, D) → (B, num_classes); the grid does not matter to a mean."""
        return self.head(self.head_drop(x.mean(dim=1)))

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:  # type: ignore[override]
        """(B, C, H, W) → (B, num_classes); with ``features_only`` the maps of all stages."""
        return self.forward_feature_maps(x) if self.features_only else self.forward_head(self.forward_features(x))


def _check(
    version: int,
    embed_dim: int,
    depths: Sequence[int],
    num_heads: Sequence[int],
    references: Sequence[int] | None,
    window_size: int,
    config: AttentionConfig,
) -> None:
    if version not in (1, 2):
        raise UserError(f"version={version!r}: there are Swin 1 and Swin 2")
    if not len(depths) == len(num_heads) > 0 or (references is not None and len(references) != len(depths)):
        raise UserError(
            f"depths={list(depths)}, num_heads={list(num_heads)} and pretrained_window_sizes must have one number for "
            "every stage"
        )
    if window_size < 1:
        raise UserError(f"window_size={window_size!r} must be a whole number of patches, 1 or more")
    for i, heads in enumerate(num_heads):
        width = embed_dim * 2**i
        if width % heads:
            raise UserError(f"num_heads={list(num_heads)}: {heads} heads do not divide the {width} of stage {i + 1}")
    given = [key for key in config.chosen() if key == "pattern" or key in PATTERN_OPTIONS]
    if given:
        raise UserError(
            f"attention {given[0]}={getattr(config, given[0])!r}: a Swin's pattern is its windows; "
            "their side is window_size=…"
        )


def _mechanisms(version: int, config: AttentionConfig) -> dict[str, Any]:
    """What the layers take: the version's own, and over it what was chosen."""
    own: dict[str, Any] = {"position": "relative_bias"}
    if version == 2:
        own = {"position": "cpb", "key_bias": False}
        if config.score in (None, "cosine"):
            own |= {"score": "cosine", "temperature": "learned"}
    if config.position in TOKEN_POSITIONS:
        own["position"] = "none"
    return {**own, **config.for_layer()}


def init_weights(model: nn.Module) -> None:
    """Truncated normal of deviation 0.02 and zero biases; Swin V2's layers begin as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    start_as_identity(model)


def _size(embed_dim: int, deep: int, heads: int, window: int, img_size: int, **more: Any) -> dict[str, Any]:
    return {
        "embed_dim": embed_dim,
        "depths": (2, 2, deep, 2),
        "num_heads": tuple(heads * 2**i for i in range(4)),
        "window_size": window,
        "img_size": img_size,
        **more,
    }


def _small(embed_dim: int, depths: tuple[int, ...], heads: int, **more: Any) -> dict[str, Any]:
    """For images of 32 × 32: patches of 2, grids of 16, 8 and 4."""
    return {
        "embed_dim": embed_dim,
        "depths": depths,
        "num_heads": tuple(heads * 2**i for i in range(len(depths))),
        "window_size": 4,
        "patch_size": 2,
        "img_size": 32,
        **more,
    }


_SIZES: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": _size(96, 6, 3, 7, 224),
    "swin_small_patch4_window7_224": _size(96, 18, 3, 7, 224),
    "swin_base_patch4_window7_224": _size(128, 18, 4, 7, 224),
    "swin_base_patch4_window12_384": _size(128, 18, 4, 12, 384),
    "swin_large_patch4_window7_224": _size(192, 18, 6, 7, 224),
    "swin_large_patch4_window12_384": _size(192, 18, 6, 12, 384),
    "swinv2_tiny_window8_256": _size(96, 6, 3, 8, 256, version=2),
    "swinv2_tiny_window16_256": _size(96, 6, 3, 16, 256, version=2),
    "swinv2_small_window8_256": _size(96, 18, 3, 8, 256, version=2),
    "swinv2_small_window16_256": _size(96, 18, 3, 16, 256, version=2),
    "swinv2_base_window8_256": _size(128, 18, 4, 8, 256, version=2),
    "swinv2_base_window16_256": _size(128, 18, 4, 16, 256, version=2),
    "swin_cifar_tiny": _small(48, (2, 4, 2), 3),
    "swin_cifar_small": _small(96, (2, 6, 2), 3),
    "swinv2_cifar_tiny": _small(48, (2, 4, 2), 3, version=2),
}


def _register(name: str, size: dict[str, Any]) -> None:
    def build(**kwargs: Any) -> SwinTransformer:
        return SwinTransformer(**{**size, **kwargs})

    build.__name__ = build.__qualname__ = name
    version = " V2" if size.get("version") == 2 else ""
    build.__doc__ = (
        f"Swin{version}, width {size['embed_dim']}, {'+'.join(map(str, size['depths']))} layers, windows of "
        f"{size['window_size']}, patch {size.get('patch_size', 4)}, {size['img_size']} px."
    )
    register_model(build)


for _name, _arguments in _SIZES.items():
    _register(_name, _arguments)
