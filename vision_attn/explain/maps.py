"""Attention maps of any model that stands on the core."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision_attn.attention import record


@torch.no_grad()
def attention_maps(
    model: nn.Module,
    images: Tensor,
    *,
    layers: str | Sequence[str] = "all",
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """The attention weights of a model on a batch of images, whatever kernel it runs.

    Args:
        model: a model with attention layers; its outputs and mode are left as they are.
        images: (B, C, H, W), normalized as the model wants them.
        layers: ``"all"``, a shell wildcard such as ``"blocks.1*"``, or a list of names.
        heads: indices of heads, all by default.
        queries: indices of query tokens, all by default (0 is the class token of a ViT that has one).

    Returns:
        Layer name → (B, H, N, M) weights in float32; rows sum to 1.

    Raises:
        ValueError: no attention layer, head or query goes by what was asked for.
    """
    was_training = model.training
    model.eval()
    try:
        with record(model, layers=layers, heads=heads, queries=queries) as recorder:
            model(images)
    finally:
        model.train(was_training)
    return recorder.maps()
