"""Compact transformers (Hassani et al. 2021, arXiv 2104.05704): attention that learns from small data sets.

Three steps from ViT to CCT, all built by one class: ViT-Lite (small, small patches), CVT (sequence pooling in
place of the class token), CCT (a convolutional tokenizer in place of patches).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, Layout
from vision_attn.errors import UserError, closest
from vision_attn.layers.embed import pair
from vision_attn.layers.encoder import EncoderLayer, drop_path_rates
from vision_attn.layers.pooling import make_pool, refuse_blind_token
from vision_attn.layers.positions import GridPositions
from vision_attn.layers.tokenizer import ConvTokenizer
from vision_attn.models.registry import model_arguments, register_model

POOLS = ("seq", "avg", "token", "attention", "hierarchical")


class CompactTransformer(GridPositions):
    """Convolutional tokens → encoder layers → pooled → logits. (B, C, H, W) → (B, num_classes).

    Pre-norm layers as in the paper's text. Its code also normalises the residual stream itself between the
    two halves of a layer: ``norm_stream=True``. Weights trained with one are no use to the other.

    Args:
        img_size: pixels the positions are laid out for; other sizes are taken at any time, and the positions
            resampled.
        in_chans, num_classes: channels in, classes out.
        embed_dim, depth, num_heads, mlp_ratio: width D, layers, heads, hidden width of the MLP over D.
        tokenizer: arguments of ``ConvTokenizer``: ``n_layers``, ``channels``, ``kernel_size``, ``stride``, ``pool``,
            ``norm``, ``act`` …; what is not given stays as the named model has it.
        global_pool: ``seq`` (sequence pooling), ``avg`` (mean of the tokens), ``token`` (class token), ``attention`` (a
            weighted mean with a hidden layer) or ``hierarchical`` (tokens → regions → image, by attention).
        pool_region: tokens on a side of a region, for ``hierarchical``.
        init_values: initial layer scale, None for none.
        norm_stream: normalise the residual stream in the middle of each layer, as the authors' code does.
        qkv_bias: whether queries, keys and values have biases.
        drop_rate: dropout of the tokens, after positions are added.
        proj_drop: dropout after each projection.
        drop_path: stochastic depth of the last layer, growing linearly from 0. The paper uses 0.1.
        attention: mechanism choices, see ``AttentionConfig``. The paper drops 0.1 of the weights.

    Raises:
        UserError: an unknown pooling or tokenizer argument, or an image too small for the tokenizer.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        num_classes: int = 10,
        embed_dim: int = 256,
        depth: int = 7,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        tokenizer: Mapping[str, Any] | None = None,
        global_pool: str = "seq",
        pool_region: int = 4,
        init_values: float | None = None,
        norm_stream: bool = False,
        qkv_bias: bool = False,
        drop_rate: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        attention: Mapping[str, Any] | AttentionConfig | None = None,
    ) -> None:
        super().__init__()
        if global_pool not in POOLS:
            raise UserError(f"global_pool={global_pool!r}: choose {', '.join(POOLS)}.")
        config = AttentionConfig.of(attention)
        refuse_blind_token(config, global_pool)
        self.img_size = pair(img_size)
        self.global_pool = global_pool
        self.patch_embed = _tokenizer(in_chans, embed_dim, tokenizer or {})
        self.num_prefix_tokens = int(global_pool == "token")
        grid = self.patch_embed.grid(self.img_size)
        self.init_positions(config.for_tokens("learned"), self.num_prefix_tokens, grid, embed_dim)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.trunc_normal_(self.pos_embed, std=0.2)  # as the authors do
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02) if global_pool == "token" else None
        self.pos_drop = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList(
            EncoderLayer(
                embed_dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                norm_stream=norm_stream,
                init_values=init_values,
                drop_path=rate,
                dropout=proj_drop,
                norm_eps=1e-5,
                attention={"qkv_bias": qkv_bias, "layout": Layout(self.num_prefix_tokens, grid), **config.for_layer()},
            )
            for rate in drop_path_rates(drop_path, depth)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.pool = make_pool(global_pool, embed_dim, pool_region)
        self.head = nn.Linear(embed_dim, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def init_whitening(self, images: Tensor, eps: float = 5e-4) -> None:
        """Sets the tokenizer's whitening layer, if it has one, by normalized training images (N, C, H, W)."""
        if self.patch_embed.whiten is not None:
            self.patch_embed.whiten.init_from(images, eps)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay must leave alone."""
        return {"pos_embed", "cls_token", "pool.query"}

    def embed(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, prefix + N, D) tokens with positions."""
        position = self.position_at(self.patch_embed.grid((x.shape[-2], x.shape[-1])))
        tokens = self.patch_embed(x)
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.to(tokens.dtype).expand(x.shape[0], -1, -1), tokens], dim=1)
        return self.pos_drop(tokens if position is None else tokens + position)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, prefix + N, D) after the last layer."""
        layout = Layout(self.num_prefix_tokens, self.patch_embed.grid((x.shape[-2], x.shape[-1])))
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, layout=layout)
        return self.norm(x)

    def forward_head(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """(B, prefix + N, D) of a grid of tokens, by default the model's own → (B, num_classes)."""
        if self.pool is not None:
            hierarchical = self.global_pool == "hierarchical"
            return self.head(self.pool(x, grid or self.grid_size) if hierarchical else self.pool(x))
        return self.head(x[:, 0] if self.global_pool == "token" else x.mean(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        grid = self.patch_embed.grid((x.shape[-2], x.shape[-1]))
        return self.forward_head(self.forward_features(x), grid)


def _tokenizer(in_chans: int, embed_dim: int, arguments: Mapping[str, Any]) -> ConvTokenizer:
    takes = [key for key in model_arguments(ConvTokenizer) if key not in ("in_chans", "embed_dim")]
    for key in arguments:
        if key not in takes:
            raise UserError(f"tokenizer takes no {key!r}.{closest(key, takes)} It takes: {', '.join(takes)}.")
    return ConvTokenizer(in_chans=in_chans, embed_dim=embed_dim, **arguments)


def _size(depth: int, num_heads: int, mlp_ratio: float, embed_dim: int, img_size: int = 32) -> dict[str, Any]:
    return {
        "depth": depth,
        "num_heads": num_heads,
        "mlp_ratio": mlp_ratio,
        "embed_dim": embed_dim,
        "img_size": img_size,
    }


_PATCHES_OF_4 = {
    "n_layers": 1,
    "kernel_size": 4,
    "stride": 4,
    "padding": 0,
    "pool": "none",
    "act": "none",
    "bias": True,
}

# cct_{layers}_{kernel}x{convolutions}_{image size}, table 1 and appendix of the paper
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cct_2_3x2_32": (_size(2, 2, 1.0, 128), {"n_layers": 2, "kernel_size": 3}),
    "cct_4_3x2_32": (_size(4, 2, 1.0, 128), {"n_layers": 2, "kernel_size": 3}),
    "cct_6_3x1_32": (_size(6, 4, 2.0, 256), {"n_layers": 1, "kernel_size": 3}),
    "cct_6_3x2_32": (_size(6, 4, 2.0, 256), {"n_layers": 2, "kernel_size": 3}),
    "cct_7_3x1_32": (_size(7, 4, 2.0, 256), {"n_layers": 1, "kernel_size": 3}),
    "cct_7_3x2_32": (_size(7, 4, 2.0, 256), {"n_layers": 2, "kernel_size": 3}),
    "cct_7_7x2_224": (_size(7, 4, 2.0, 256, 224), {"n_layers": 2, "kernel_size": 7, "stride": 2}),
    "cct_14_7x2_224": (_size(14, 6, 3.0, 384, 224), {"n_layers": 2, "kernel_size": 7, "stride": 2}),
    "cvt_7_4_32": (_size(7, 4, 2.0, 256), _PATCHES_OF_4),
    "vit_lite_7_4_32": ({**_size(7, 4, 2.0, 256), "global_pool": "token"}, _PATCHES_OF_4),
}

_KINDS = {
    "cct": "Compact convolutional transformer",
    "cvt": "Compact transformer with patches of 4 pixels and sequence pooling",
    "vit": "ViT-Lite with patches of 4 pixels and a class token",
}


def _register(name: str, size: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    def build(**kwargs: Any) -> CompactTransformer:
        merged = {**tokenizer, **(kwargs.pop("tokenizer", None) or {})}
        return CompactTransformer(**{**size, **kwargs, "tokenizer": merged})

    build.__name__ = build.__qualname__ = name
    side = tokenizer["kernel_size"]
    convs = f" after {tokenizer['n_layers']} conv {side}x{side}" if name.startswith("cct") else ""
    build.__doc__ = (
        f"{_KINDS[name[:3]]}: {size['depth']} layers of width {size['embed_dim']}{convs}, "
        f"{size['img_size']} px (Hassani et al. 2021)."
    )
    register_model(build)


for _name, (_given, _tokens) in _SIZES.items():
    _register(_name, _given, _tokens)
