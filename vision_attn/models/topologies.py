"""Three topologies of language models on sequences of patches: who may look at whom, and nothing else of them.

Bidirectional as in BERT (Devlin et al. 2018, arXiv 1810.04805), causal as in GPT (Radford et al. 2018; on pixels: Chen
et al. 2020), encoder-decoder as in T5 (Raffel et al. 2020, arXiv 1910.10683). Width, depth and the rest are alike in
all three, so that a comparison of them compares the topology. BERT's needs no class of its own: it is a ViT's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, Layout, causal_mask
from vision_attn.attention.config import LOW_RANK, PATTERN_OPTIONS
from vision_attn.errors import UserError
from vision_attn.layers.decoder import Decoder, causal_choice
from vision_attn.models.registry import register_model
from vision_attn.models.vit import VisionTransformer, init_weights


class CausalTransformer(VisionTransformer):
    """Each patch attends to itself and to those before it, row by row. (B, C, H, W) → (B, num_classes).

    The topology of GPT (Radford et al. 2018) on patches, as iGPT had it on pixels (Chen et al. 2020,
    https://proceedings.mlr.press/v119/chen20s.html).

    Args:
        img_size: pixels the positions are laid out for; other sizes are taken at any time, and the positions resampled.
        patch_size: pixels per patch; must divide the image size.
        in_chans, num_classes: channels in, classes out.
        embed_dim, depth, num_heads, mlp_ratio: width D, layers, heads, hidden width of the MLP over D.
        global_pool: ``avg`` (mean of the tokens, as iGPT) or ``last`` (the last token, which alone has seen all).
        init_values: initial layer scale, None for none.
        qkv_bias: whether queries, keys and values have biases.
        drop_rate: dropout of the pooled features.
        proj_drop: dropout after each projection.
        drop_path: stochastic depth of the last layer, growing linearly from 0.
        attention: mechanism choices, see ``AttentionConfig``. Another pattern than ``causal`` is cut to the past.

    Raises:
        UserError: image and patch size that do not fit, or an unknown pooling.
        ValueError: a pattern that cannot be causal.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 4,
        in_chans: int = 3,
        num_classes: int = 10,
        embed_dim: int = 192,
        depth: int = 6,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        global_pool: str = "avg",
        init_values: float | None = None,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        attention: Mapping[str, Any] | AttentionConfig | None = None,
    ) -> None:
        if global_pool not in ("avg", "last"):
            raise UserError(f"global_pool={global_pool!r}: choose 'avg' or 'last'")
        words, masks_future = causal_choice(AttentionConfig.of(attention).chosen())
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            class_token=False,  # at the front it would see nothing but itself
            global_pool="avg",
            fc_norm=False,
            init_values=init_values,
            qkv_bias=qkv_bias,
            drop_rate=drop_rate,
            proj_drop=proj_drop,
            drop_path=drop_path,
            attention=words,
        )
        self.masks_future, self.global_pool = masks_future, global_pool

    def forward_features(self, x: Tensor, *, first: int | None = None) -> Tensor:
        """(B, C, H, W) → (B, N, D) after the last layer, or only the ``first`` tokens of it."""
        layout = self.layout(self.patch_embed.grid((x.shape[-2], x.shape[-1])))
        x = self.embed(x)
        mask = causal_mask(x.shape[1], device=x.device) if self.masks_future else None
        for block in self.blocks:
            x = block(x, mask=mask, layout=layout)
        return self.norm(x if first is None else x[:, :first])

    def forward_head(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """(B, N, D) → (B, num_classes)."""
        return self.head(self.head_drop(x[:, -1] if self.global_pool == "last" else x.mean(dim=1)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, num_classes)."""
        return self.forward_head(self.forward_features(x))


class EncoderDecoder(VisionTransformer):
    """Patches are encoded, and learned queries decode them. (B, C, H, W) → (B, num_classes).

    The topology of T5 (Raffel et al. 2020, arXiv 1910.10683): an encoder in which all patches see each other, and a
    causal decoder that attends to what it has produced and to all that was encoded. In the place of words the decoder
    begins with learned queries; the mean of what they become is classified. By default positions are T5's relative
    ones, in encoder and decoder but not between them; where a pattern has no pairs, they are added to the patches.

    Args:
        img_size: pixels the positions are laid out for; other sizes are taken at any time.
        patch_size: pixels per patch; must divide the image size.
        in_chans, num_classes: channels in, classes out.
        embed_dim, num_heads, mlp_ratio: width D, heads, hidden width of the MLP over D.
        depth: layers of the encoder, and as many of the decoder.
        num_queries: tokens that are decoded.
        init_values: initial layer scale, None for none.
        qkv_bias: whether queries, keys and values have biases.
        drop_rate: dropout of the pooled features.
        proj_drop: dropout after each projection.
        drop_path: stochastic depth of the last layer of encoder and of decoder, growing linearly from 0.
        attention: mechanism choices, see ``AttentionConfig``. A pattern is one of the patches, so the encoder has it
            and the decoder does not; a kernel that was named for its sake neither.

    Raises:
        UserError: image and patch size that do not fit, or no query.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 4,
        in_chans: int = 3,
        num_classes: int = 10,
        embed_dim: int = 192,
        depth: int = 3,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        num_queries: int = 8,
        init_values: float | None = None,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        attention: Mapping[str, Any] | AttentionConfig | None = None,
    ) -> None:
        if num_queries < 1:
            raise UserError(f"num_queries={num_queries}: the decoder needs at least one")
        config = AttentionConfig.of(attention)
        # without pairs of queries and keys there is nothing to add a relative position to
        default = "learned" if config.pattern in LOW_RANK else "t5"
        config = dataclasses.replace(config, position=config.position or default)
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            class_token=False,
            global_pool="avg",
            fc_norm=False,
            init_values=init_values,
            qkv_bias=qkv_bias,
            drop_rate=drop_rate,
            proj_drop=proj_drop,
            drop_path=drop_path,
            attention=config,
        )
        own, cross = _decoder_words(config)
        self.queries = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, num_queries, embed_dim), std=0.02))
        self.decoder = Decoder(
            embed_dim,
            num_heads,
            depth,
            mlp_ratio=mlp_ratio,
            causal=True,
            init_values=init_values,
            drop_path=drop_path,
            dropout=proj_drop,
            attention={"qkv_bias": qkv_bias, "layout": Layout(), **own},
            cross_attention={"qkv_bias": qkv_bias, **cross},
        )
        init_weights(self.decoder)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay must leave alone."""
        return {"pos_embed", "queries"}

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, num_classes)."""
        encoded = self.forward_features(x)
        # repeated and not expanded: a view of a parameter asks for gradients even where none are wanted, and PyTorch's
        # counter of operations stumbles over it
        queries = self.queries.to(encoded.dtype).repeat(x.shape[0], 1, 1)
        return self.forward_head(self.decoder(queries, encoded))  # the mean of the queries

    def forward_head(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """(B, num_queries, D) → (B, num_classes)."""
        return self.head(self.head_drop(x.mean(dim=1)))


def _decoder_words(config: AttentionConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a choice the decoder's self-attention and its cross-attention take over."""
    words = config.for_layer()
    dropped = {"pattern", *PATTERN_OPTIONS}
    if words.get("pattern", "full") not in ("full", "causal"):
        dropped.add("kernel")
    own = {key: value for key, value in words.items() if key not in dropped}
    if own.get("position") == "rope":
        own["position"] = "rope_1d"  # the queries are no grid
    return own, {key: value for key, value in own.items() if key != "position"}


@register_model
def bert_tiny_patch4_32(**kwargs: Any) -> VisionTransformer:
    """BERT's topology on patches: 6 layers of width 192, all see all, class token (Devlin et al. 2018)."""
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 6, "num_heads": 3}
    return VisionTransformer(**{**small, **kwargs})


@register_model
def gpt_tiny_patch4_32(**kwargs: Any) -> CausalTransformer:
    """GPT's topology on patches: 6 causal layers of width 192, mean of the tokens (Radford et al. 2018)."""
    return CausalTransformer(**kwargs)


@register_model
def t5_tiny_patch4_32(**kwargs: Any) -> EncoderDecoder:
    """T5's topology on patches: encoder and decoder, 3 layers each of width 192, 8 queries (Raffel et al. 2020)."""
    return EncoderDecoder(**kwargs)
