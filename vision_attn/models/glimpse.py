"""A classifier that looks at a few patches of a large image: hard attention, drawn patch by patch.

Mnih et al. 2014 (arXiv 1406.6247) look with a recurrent net, one glimpse after the other; Xu et al. 2015 (arXiv
1502.03044) draw places of a feature map. Here all glimpses are chosen from one coarse view of the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, Layout, Watch, attention_weights
from vision_attn.attention.normalizers import make_normalizer
from vision_attn.attention.scores import make_score
from vision_attn.errors import UserError
from vision_attn.layers.embed import pair
from vision_attn.models.registry import register_model

TAKES = ("score", "temperature", "max_keys", "hidden", "normalizer")
ONE_PLACE = ("sampled", "straight_through", "hard")


def patches(images: Tensor, size: int, stride: int) -> Tensor:
    """Every square of ``size`` pixels, ``stride`` apart: (B, C, H, W) → (B, rows · columns, C · size · size)."""
    return F.unfold(images, size, stride=stride).transpose(1, 2)


class CoarseView(nn.Module):
    """What is seen before looking: (B, C, H, W) → (B, places, D), one key for each place a glimpse can be taken at.

    The image is averaged down; a key sees the coarse pixels under its place and those of its eight neighbours.
    """

    def __init__(self, in_chans: int, dim: int, glimpse_size: int, stride: int, coarse: int) -> None:
        super().__init__()
        self.coarse = coarse
        self.look = nn.Conv2d(in_chans, dim, glimpse_size // coarse, stride=stride // coarse)
        self.around = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm = nn.LayerNorm(dim)
        self.key = nn.Linear(dim, dim)

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(self.look(F.avg_pool2d(images, self.coarse)))
        x = F.gelu(self.around(x)).flatten(2).transpose(1, 2)
        return self.key(self.norm(x))


class GlimpseEncoder(nn.Module):
    """What was seen, and where: (B, K, C · size · size) pixels and (B, K, 2) places → (B, K, D)."""

    def __init__(self, in_chans: int, dim: int, glimpse_size: int) -> None:
        super().__init__()
        self.shape = (in_chans, glimpse_size, glimpse_size)
        self.conv1 = nn.Conv2d(in_chans, dim // 2, 3, padding=1)
        self.norm1 = nn.GroupNorm(1, dim // 2)
        self.conv2 = nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(1, dim)
        self.what = nn.Linear(dim * (-(-glimpse_size // 2)) ** 2, dim)
        self.where = nn.Linear(2, dim)

    def forward(self, pixels: Tensor, places: Tensor) -> Tensor:
        x = pixels.reshape(-1, *self.shape)
        x = F.gelu(self.norm1(self.conv1(x)))
        x = F.gelu(self.norm2(self.conv2(x)))
        x = self.what(x.flatten(1)).view(*pixels.shape[:2], -1)
        return F.gelu(x + self.where(places))


class GlimpseNet(nn.Module):
    """Draws K places of the image from a coarse view, looks there in full, and classifies from what it saw.

    One learned query per glimpse attends to the places; keys come from the coarse view, and the values are the pixels
    themselves, so that nothing but the drawn patches (and where they were) reaches the classifier. In training, places
    are drawn and learn by REINFORCE; in evaluation the most probable ones are looked at. No place is looked at twice.

    Args:
        num_classes: width of the head.
        img_size: pixels, for which the model is meant; others work too.
        in_chans: channels of the images.
        glimpse_size: side of a glimpse in pixels.
        stride: pixels between neighbouring places.
        coarse: side of a pixel of the coarse view; divides ``glimpse_size`` and ``stride``.
        num_glimpses: K.
        embed_dim: D.
        dropout: of what the head sees.
        attention: ``score``, ``normalizer`` and what belongs to them, see ``AttentionConfig``. ``softmax`` mixes
            the pixels of all places, ``straight_through`` learns without REINFORCE.

    Raises:
        UserError: sizes that do not fit, or an attention option that means nothing here.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        glimpse_size: int = 8,
        stride: int = 4,
        coarse: int = 2,
        num_glimpses: int = 3,
        embed_dim: int = 64,
        dropout: float = 0.0,
        attention: Mapping[str, Any] | AttentionConfig | None = None,
    ) -> None:
        super().__init__()
        self.img_size = pair(img_size)
        if min(self.img_size) < glimpse_size:
            raise UserError(f"glimpse_size={glimpse_size} is larger than the image {list(self.img_size)}")
        if glimpse_size % coarse or stride % coarse:
            raise UserError(f"coarse={coarse} must divide glimpse_size={glimpse_size} and stride={stride}")
        places = math.prod((side - glimpse_size) // stride + 1 for side in self.img_size)
        if not 1 <= num_glimpses <= places:
            raise UserError(f"num_glimpses={num_glimpses}: the image {list(self.img_size)} has 1 to {places} places")
        self.glimpse_size, self.stride, self.num_glimpses = glimpse_size, stride, num_glimpses
        words = {"score": "scaled_dot", "normalizer": "sampled"}
        words |= AttentionConfig.of(attention).chosen()
        foreign = [word for word in words if word not in TAKES]
        if foreign:
            raise UserError(
                f"this model chooses among places, so attention.{foreign[0]} means nothing to it; "
                f"it takes: {', '.join(TAKES)}"
            )
        self.one_place = words["normalizer"] in ONE_PLACE
        self.normalizer = make_normalizer(words.pop("normalizer"), 1)
        self.score = make_score(words.pop("score"), 1, embed_dim, embed_dim, **words)
        self.view = CoarseView(in_chans, embed_dim, glimpse_size, stride, coarse)
        self.query = nn.Parameter(0.02 * torch.randn(num_glimpses, embed_dim))
        self.glimpses = Watch()
        self.glimpse = GlimpseEncoder(in_chans, embed_dim, glimpse_size)
        self.hidden = nn.Linear(embed_dim, 2 * embed_dim)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(2 * embed_dim, num_classes)

    def no_weight_decay(self) -> set[str]:
        """Queries are no map between layers."""
        return {"query"}

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the places in an image of (H, W) pixels."""
        down, across = ((side - self.glimpse_size) // self.stride + 1 for side in size)
        return down, across

    def corners(self, size: tuple[int, int], device: torch.device | None = None) -> Tensor:
        """(places, 2) upper left corners (y, x) of the places, in pixels, row by row."""
        down, across = (torch.arange(n, device=device) * self.stride for n in self.grid(size))
        return torch.cartesian_prod(down, across).view(-1, 2)

    def weights(self, images: Tensor) -> Tensor:
        """(B, K, places) which places are looked at: drawn anew in training, the most probable in evaluation.

        A place is looked at once: each glimpse chooses among those that earlier ones left.
        """
        keys = self.view(images)[:, None]  # (B, 1, places, D)
        queries = self.query.to(keys.dtype).expand(len(images), 1, -1, -1)
        layout = Layout(0, self.grid((images.shape[-2], images.shape[-1])))
        left, chosen = None, []
        for query in queries.split(1, dim=2):
            self.glimpses(query, keys, score=self.score, normalizer=self.normalizer, mask=left, layout=layout)
            weights = attention_weights(query, keys, score=self.score, normalizer=self.normalizer, mask=left)
            chosen.append(weights[:, 0])
            if self.one_place:
                left = weights == 0 if left is None else left & (weights == 0)
        return torch.cat(chosen, dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, classes)."""
        height, width = images.shape[-2:]
        pixels = patches(images, self.glimpse_size, self.stride)  # (B, places, C · size²)
        corners = self.corners((height, width), images.device).to(pixels.dtype)
        scale = corners.new_tensor([height, width]) - self.glimpse_size
        places = 2 * corners / scale.clamp_min(1) - 1  # -1 ... 1
        values = torch.cat([pixels, places.expand(len(images), -1, -1)], dim=-1)
        seen = self.weights(images).to(values.dtype) @ values
        x = self.glimpse(seen[..., :-2], seen[..., -2:])  # (B, K, D)
        # The mean, and not weights for each glimpse: at first one glimpse in 16 hits, and all learn from it
        return self.head(self.drop(F.gelu(self.hidden(x)).mean(dim=1)))


@register_model
def glimpse_small_32(**kwargs: Any) -> GlimpseNet:
    """Three glimpses of 8 pixels, drawn from a coarse view and trained by REINFORCE (after Mnih et al. 2014)."""
    return GlimpseNet(**kwargs)
