"""Vision transformers (Dosovitskiy et al. 2020, arXiv 2010.11929), in timm's names and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, Layout
from vision_attn.errors import UserError
from vision_attn.layers.embed import PatchEmbed, pair
from vision_attn.layers.encoder import EncoderLayer, drop_path_rates
from vision_attn.layers.pooling import make_pool, refuse_blind_token
from vision_attn.layers.positions import GridPositions
from vision_attn.models.registry import register_model

POOLS = ("token", "avg", "attention", "hierarchical")


class VisionTransformer(GridPositions):
    """Patches → tokens → encoder layers → pooled → logits. (B, C, H, W) → (B, num_classes).

    Args:
        img_size: pixels the positions are laid out for; other sizes are taken at any time, and the positions
            resampled.
        patch_size: pixels per patch; must divide the image size.
        in_chans, num_classes: channels in, classes out.
        embed_dim, depth, num_heads, mlp_ratio: width D, layers, heads, hidden width of the MLP over D.
        class_token: whether a learned token collects the image.
        reg_tokens: registers, learned tokens that only take part (Darcet et al. 2023, arXiv 2309.16588).
        no_embed_class: positions for patches only, none for class and register tokens.
        global_pool: ``token`` (class token), ``avg`` (mean of the patches), ``attention`` (a learned weighted mean)
            or ``hierarchical`` (patches → regions → image, by attention).
        pool_region: patches on a side of a region, for ``hierarchical``.
        fc_norm: normalize after pooling instead of before; default: for all but ``token``.
        distilled: a second token beside the class token, with a head of its own; the logits are the mean of the two
            (DeiT: Touvron et al. 2020, arXiv 2012.12877).
        pre_norm: normalize the tokens before the first layer too, and leave out the bias of the patches (CLIP: Radford
            et al. 2021, arXiv 2103.00020).
        norm_eps: ε of the layer norms.
        mlp: ``mlp``, or ``swiglu`` (DINOv2's largest: Oquab et al. 2023, arXiv 2304.07193).
        act: activation of the MLP: ``gelu``, ``gelu_tanh``, ``quick_gelu``, ``relu`` or ``silu``.
        init_values: initial layer scale, None for none.
        qkv_bias: whether queries, keys and values have biases.
        drop_rate: dropout of the pooled features.
        proj_drop: dropout after each projection.
        drop_path: stochastic depth of the last layer, growing linearly from 0.
        attention: mechanism choices, see ``AttentionConfig``.

    Raises:
        UserError: image and patch size that do not fit, or a pooling that needs a token that is not there.
    """

    head_names = ("head", "head_dist")  # what is replaced for another number of classes

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        class_token: bool = True,
        reg_tokens: int = 0,
        no_embed_class: bool = False,
        global_pool: str = "token",
        pool_region: int = 4,
        fc_norm: bool | None = None,
        distilled: bool = False,
        pre_norm: bool = False,
        norm_eps: float = 1e-6,
        mlp: str = "mlp",
        act: str = "gelu",
        init_values: float | None = None,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        attention: Mapping[str, Any] | AttentionConfig | None = None,
    ) -> None:
        super().__init__()
        if global_pool not in POOLS:
            raise UserError(f"global_pool={global_pool!r}: choose {', '.join(POOLS)}.")
        if global_pool == "token" and not class_token:
            raise UserError("global_pool='token' needs class_token=True; or choose global_pool='avg'")
        if distilled and global_pool != "token":
            raise UserError(f"distilled=True needs global_pool='token', not {global_pool!r}: its heads read two tokens")
        config = AttentionConfig.of(attention)
        refuse_blind_token(config, global_pool)
        self.img_size = pair(img_size)
        self.global_pool = global_pool
        self.all_tokens = False  # for those who look at the last layer's other tokens, which the head may not read
        self.distilled = distilled
        self.num_prefix_tokens = int(class_token) + int(distilled) + reg_tokens
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, bias=not pre_norm)
        grid = self.patch_embed.grid(self.img_size)
        self.init_positions(
            config.for_tokens("learned"), 0 if no_embed_class else self.num_prefix_tokens, grid, embed_dim
        )
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 1e-6) if class_token else None
        self.dist_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02) if distilled else None
        self.reg_token = nn.Parameter(torch.randn(1, reg_tokens, embed_dim) * 1e-6) if reg_tokens else None
        self.norm_pre = nn.LayerNorm(embed_dim, eps=norm_eps) if pre_norm else nn.Identity()
        layer = {"qkv_bias": qkv_bias, "layout": self.layout(grid), **config.for_layer()}
        self.blocks = nn.ModuleList(
            EncoderLayer(
                embed_dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                init_values=init_values,
                drop_path=rate,
                dropout=proj_drop,
                mlp=mlp,
                act=act,
                norm_eps=norm_eps,
                attention=layer,
            )
            for rate in drop_path_rates(drop_path, depth)
        )
        self.pool = make_pool(global_pool, embed_dim, pool_region)
        after_pool = global_pool != "token" if fc_norm is None else fc_norm
        self.norm = nn.Identity() if after_pool else nn.LayerNorm(embed_dim, eps=norm_eps)
        self.fc_norm = nn.LayerNorm(embed_dim, eps=norm_eps) if after_pool else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes)
        self.head_dist = nn.Linear(embed_dim, num_classes) if distilled else None
        init_weights(self)
        for block in self.blocks:  # as in timm, queries and keys are normalized with the ε of the other norms
            for norm in (block.attn.q_norm, block.attn.k_norm):  # type: ignore[union-attr]
                if isinstance(norm, nn.LayerNorm):
                    norm.eps = norm_eps

    def layout(self, grid: tuple[int, int]) -> Layout:
        """How the tokens of such a grid of patches lie."""
        return Layout(self.num_prefix_tokens, grid)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay must leave alone."""
        return {"pos_embed", "cls_token", "dist_token", "reg_token"}

    def embed(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, prefix + patches, D) tokens with positions."""
        position = self.position_at(self.patch_embed.grid((x.shape[-2], x.shape[-1])))
        tokens = self.patch_embed(x)
        learned = (self.cls_token, self.dist_token, self.reg_token)
        prefix = [t.expand(x.shape[0], -1, -1) for t in learned if t is not None]
        if position is not None and not self.embedded_prefix:
            tokens = tokens + position
        if prefix:
            tokens = torch.cat([*(t.to(tokens.dtype) for t in prefix), tokens], dim=1)
        return self.norm_pre(tokens + position if position is not None and self.embedded_prefix else tokens)

    def forward_features(self, x: Tensor, *, first: int | None = None) -> Tensor:
        """(B, C, H, W) → (B, prefix + patches, D) after the last layer, or only the ``first`` tokens of it."""
        layout = self.layout(self.patch_embed.grid((x.shape[-2], x.shape[-1])))
        x = self.embed(x)
        for i, block in enumerate(self.blocks, start=1):
            x = block(x, layout=layout, first=first if i == len(self.blocks) else None)
        return self.norm(x if first is None else x[:, :first])

    def forward_head(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """(B, prefix + patches, D) of a grid of patches, by default the model's own → (B, num_classes)."""
        if self.head_dist is not None:
            return (self.head(self.head_drop(x[:, 0])) + self.head_dist(self.head_drop(x[:, 1]))) / 2
        patches = x[:, self.num_prefix_tokens :]
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = patches.mean(dim=1)
        elif self.pool is not None:
            hierarchical = self.global_pool == "hierarchical"
            x = self.pool(patches, grid or self.grid_size) if hierarchical else self.pool(patches)
        return self.head(self.head_drop(self.fc_norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, num_classes).

        A head on the class token reads one token, so the last layer computes that one alone: 7 % less work in twelve
        layers. It computes all of them while attention is recorded, or where ``all_tokens`` is set.
        """
        watched = self.all_tokens or any(block.attn.recorder is not None for block in self.blocks)  # type: ignore[union-attr]
        first = None if watched or self.global_pool != "token" else 1 + self.distilled
        grid = self.patch_embed.grid((x.shape[-2], x.shape[-1]))
        return self.forward_head(self.forward_features(x, first=first), grid)


def init_weights(model: nn.Module) -> None:
    """Truncated normal of deviation 0.02 for linear layers, zero biases, LeCun normal for convolutions."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.trunc_normal_(module.weight, std=math.sqrt(1 / fan_in))
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _size(embed_dim: int, num_heads: int, patch_size: int, img_size: int = 224, **more: Any) -> dict[str, Any]:
    return {"embed_dim": embed_dim, "num_heads": num_heads, "patch_size": patch_size, "img_size": img_size, **more}


def _average_pooled(embed_dim: int, num_heads: int, registers: int, **more: Any) -> dict[str, Any]:
    pooled = {"class_token": False, "no_embed_class": True, "global_pool": "avg", "reg_tokens": registers}
    return _size(embed_dim, num_heads, 16, 256, **pooled, **more)


_SIZES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _size(192, 3, 16),
    "vit_tiny_patch16_384": _size(192, 3, 16, 384),
    "vit_small_patch32_224": _size(384, 6, 32),
    "vit_small_patch16_224": _size(384, 6, 16),
    "vit_small_patch16_384": _size(384, 6, 16, 384),
    "vit_small_patch8_224": _size(384, 6, 8),
    "vit_base_patch32_224": _size(768, 12, 32),
    "vit_base_patch32_384": _size(768, 12, 32, 384),
    "vit_base_patch16_224": _size(768, 12, 16),
    "vit_base_patch16_384": _size(768, 12, 16, 384),
    "vit_base_patch8_224": _size(768, 12, 8),
    "vit_large_patch16_224": _size(1024, 16, 16, depth=24),
    "vit_large_patch16_384": _size(1024, 16, 16, 384, depth=24),
    "vit_wee_patch16_reg1_gap_256": _average_pooled(256, 4, 1, depth=14, init_values=1e-5, mlp_ratio=5.0),
    "vit_little_patch16_reg4_gap_256": _average_pooled(320, 5, 4, depth=14, init_values=1e-5, mlp_ratio=5.6),
    "vit_medium_patch16_reg4_gap_256": _average_pooled(512, 8, 4, init_values=1e-5),
    "vit_betwixt_patch16_reg4_gap_256": _average_pooled(640, 10, 4, init_values=1e-5),
    "vit_base_patch16_reg4_gap_256": _average_pooled(768, 12, 4),
}


def _register(name: str, size: dict[str, Any]) -> None:
    def build(**kwargs: Any) -> VisionTransformer:
        return VisionTransformer(**{**size, **kwargs})

    build.__name__ = build.__qualname__ = name
    registers = f", {size['reg_tokens']} registers" if size.get("reg_tokens") else ""
    pool = "average pooling" if size.get("global_pool") == "avg" else "class token"
    build.__doc__ = (
        f"ViT, width {size['embed_dim']}, {size.get('depth', 12)} layers of {size['num_heads']} heads, "
        f"patch {size['patch_size']}, {pool}{registers}."
    )
    register_model(build)


for _name, _arguments in _SIZES.items():
    _register(_name, _arguments)
