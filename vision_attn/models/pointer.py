"""Pointer networks (Vinyals et al. 2015, arXiv 1506.03134): n images in, an order of them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, padding_mask, sinusoidal_1d
from vision_attn.errors import UserError
from vision_attn.layers.embed import pair
from vision_attn.layers.encoder import EncoderLayer
from vision_attn.layers.pointer import Pointer, PointerDecoder, RecurrentDecoder, TransformerDecoder
from vision_attn.models.registry import create_model, register_model


class PointerNetwork(nn.Module):
    """Images → one token each → encoder layers → decoder that points, n times. (B, n, C, H, W) → (B, n, n).

    Row t of the result holds the logarithms of the attention weights of step t over the n images: the attention
    distribution is the output, so the same parameters serve any n.

    Tensor legend: B sequences, n images in each, T = n steps, D ``embed_dim``.

    Args:
        img_size: pixels of the images.
        in_chans: C.
        embed_dim, depth, num_heads, mlp_ratio: width D, layers, heads and hidden width of the encoder over images.
        encoder: the classifier of the zoo (or CNN of timm) that makes a token of an image: its D outputs.
        encoder_args: its arguments, e.g. ``{"patch_size": 2, "depth": 2}`` for patches and encoder layers.
        decoder: ``lstm`` or ``transformer``.
        decoder_depth: layers of the transformer decoder.
        pointer_score: how the decoder is compared with an image; a name of ``vision_attn.attention.SCORES``.
        no_repeat: whether an image that was pointed at is out of reach afterwards; then the result is a permutation.
        position_range: R, the places that images can have. In training the n images lie at n random ones of them, in
            order, so that none is new in a longer sequence (Ruoss et al. 2023, arXiv 2305.16843).
        attention: mechanism of the encoder over images, see ``AttentionConfig``. Its ``position`` tells where an image
            stands in the input, which is needed to settle ties: ``sinusoidal`` (default), ``learned``, one inside the
            layers, or ``none``; then shuffling the images shuffles their tokens and nothing else.

    Raises:
        UserError: an unknown decoder or encoder.
        ValueError: a score that cannot point, or attention choices that make no sense together.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 8,
        in_chans: int = 3,
        embed_dim: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        encoder: str = "resnet8_cifar",
        encoder_args: Mapping[str, Any] | None = None,
        decoder: str = "lstm",
        decoder_depth: int = 2,
        pointer_score: str = "additive",
        no_repeat: bool = True,
        position_range: int = 64,
        attention: Mapping[str, Any] | AttentionConfig | None = None,
    ) -> None:
        super().__init__()
        if decoder not in ("lstm", "transformer"):
            raise UserError(f"decoder={decoder!r}: choose 'lstm' or 'transformer'")
        if position_range < 1:
            raise UserError(f"position_range={position_range}: at least 1")
        self.img_size, self.no_repeat, self.position_range = pair(img_size), no_repeat, position_range
        size = {"num_classes": embed_dim, "img_size": self.img_size, "in_chans": in_chans}
        self.image_encoder = create_model(encoder, **{**size, **(encoder_args or {})})
        config = AttentionConfig.of(attention)
        self._init_positions(config.for_tokens("sinusoidal"), embed_dim)
        self.input_norm = nn.LayerNorm(embed_dim)
        self.blocks = nn.ModuleList(
            EncoderLayer(embed_dim, num_heads, mlp_ratio=mlp_ratio, attention=config.for_layer()) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.start = nn.Parameter(torch.randn(embed_dim) * 0.02)  # what the decoder reads before it has pointed
        self.decoder: PointerDecoder = (
            RecurrentDecoder(embed_dim)
            if decoder == "lstm"
            else TransformerDecoder(embed_dim, num_heads, decoder_depth, mlp_ratio)
        )
        self.pointer = Pointer(embed_dim, score=pointer_score)

    def _init_positions(self, kind: str, dim: int) -> None:
        """``pos_embed``: (R, D), learned or by a formula, or None."""
        if kind == "learned":
            self.pos_embed = nn.Parameter(torch.randn(self.position_range, dim) * 0.02)
            return
        if kind not in ("none", "sinusoidal", "sinusoidal_1d"):
            raise UserError(f"position {kind!r} is none that a sequence of images has: sinusoidal, learned or none")
        table = None if kind == "none" else sinusoidal_1d(self.position_range, dim)
        self.register_buffer("pos_embed", table, persistent=False)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay must leave alone."""
        return {"pos_embed", "start"}

    # -- encoder --------------------------------------------------------------------------------------

    def encode(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Tokens of images that know of each other: (B, n, C, H, W) → (B, n, D).

        Args:
            images: a sequence per row.
            keep: (B, n) boolean, True = an image, False = padding, whose token means nothing.
        """
        x = self.input_norm(self._tokens(images, keep))
        if self.pos_embed is not None:
            x = x + self._positions(keep, *x.shape[:2])
        mask = None if keep is None else padding_mask(keep)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.norm(x)

    def _tokens(self, images: Tensor, keep: Tensor | None) -> Tensor:
        """One token per image, by itself. Padding is not looked at: it would count in a batch norm's statistics."""
        flat = images.flatten(0, 1)
        if keep is None:
            return self.image_encoder(flat).unflatten(0, images.shape[:2])
        tokens = self.image_encoder(flat[keep.flatten()])
        return tokens.new_zeros(*keep.shape, tokens.shape[-1]).masked_scatter(keep[..., None], tokens)

    def _positions(self, keep: Tensor | None, batch: int, n: int) -> Tensor:
        """(B or 1, n, D) of the images' places: random ones in training, evenly spread ones otherwise, always in order.

        Raises:
            UserError: more images than places.
        """
        places, table = self.position_range, self.pos_embed
        assert table is not None
        if n > places:
            raise UserError(f"{n} images do not fit position_range={places}: build the model with a larger one")
        if self.training:
            index = torch.rand(batch, places, device=table.device).topk(n).indices.sort().values
        else:
            length = torch.tensor([n], device=table.device) if keep is None else keep.sum(1).clamp_min(1)
            index = ((torch.arange(n, device=table.device) + 0.5) * (places / length[:, None])).long()
            index = index.clamp_max(places - 1)  # only padding lies beyond
        return table[index]

    # -- decoder --------------------------------------------------------------------------------------

    def forward(self, images: Tensor, mask: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        """Log-weights of every step over the images.

        Args:
            images: (B, n, C, H, W); or one sequence, (n, C, H, W).
            mask: (B, n) boolean, True = an image, False = padding at the end; or (B,) lengths. All are images without.
            target: (B, n) the right indices, −1 for steps beyond a sequence's end. The decoder is then told at each
                step what was right before (teacher forcing); without, it reads what it pointed at itself (greedy).

        Returns:
            (B, n, n): log of the weight that step t gives image j, −inf for padding and, with ``no_repeat``, for
            images pointed at before, and in all of a step beyond the end. (n, n) for one sequence.

        Raises:
            ValueError: naming the shapes that do not fit.
        """
        if images.dim() == 4:
            return self(images[None], None if mask is None else mask[None], None if target is None else target[None])[0]
        if images.dim() != 5:
            raise ValueError(f"images must be (B, n, C, H, W) or (n, C, H, W), got {tuple(images.shape)}")
        keep = self._keep(images, mask)
        elements = self.encode(images, None if mask is None else keep)
        if target is None:
            return self._greedy(elements, keep)
        if target.shape != keep.shape:
            raise ValueError(f"target {tuple(target.shape)} must be (B, n) = {tuple(keep.shape)}")
        chosen = F.one_hot(target.clamp_min(0), keep.shape[1]).bool() & (target >= 0)[..., None]  # (B, T, n)
        allowed = keep[:, None].expand_as(chosen)
        if self.no_repeat:
            allowed = allowed & (chosen.cumsum(1) - chosen.long() == 0)
        before = target[:, :-1].clamp_min(0)[..., None].expand(-1, -1, elements.shape[-1])
        inputs = torch.cat([self._start(elements)[:, None], elements.gather(1, before)], dim=1)
        return self.pointer(self.decoder(inputs, elements, keep), elements, allowed)

    def _start(self, elements: Tensor) -> Tensor:
        return self.start.to(elements.dtype).repeat(elements.shape[0], 1)

    @staticmethod
    def _keep(images: Tensor, mask: Tensor | None) -> Tensor:
        """(B, n) True = an image."""
        shape = (images.shape[0], images.shape[1])
        if mask is None:
            return torch.ones(shape, dtype=torch.bool, device=images.device)
        keep = padding_mask(mask, shape[1])[:, 0, 0]
        if keep.shape != shape:
            raise ValueError(f"mask {tuple(mask.shape)} must be (B, n) = {shape}, or (B,) lengths")
        if bool((~keep[:, :-1] & keep[:, 1:]).any()):
            raise ValueError("mask has an image behind padding: padding stands at the end of a sequence")
        return keep

    def _greedy(self, elements: Tensor, keep: Tensor) -> Tensor:
        allowed, x = keep, self._start(elements)
        rows, state = [], self.decoder.begin(elements, keep)
        n, lengths = keep.shape[1], keep.sum(1)
        for t in range(n):
            query, state = self.decoder.step(x, state)
            now = allowed & (t < lengths)[:, None]
            rows.append(self.pointer(query[:, None], elements, now[:, None])[:, 0])
            choice = rows[-1].detach().argmax(-1)  # (B,)
            x = elements.gather(1, choice[:, None, None].expand(-1, 1, elements.shape[-1]))[:, 0]
            if self.no_repeat:
                allowed = allowed & ~F.one_hot(choice, n).bool()
        return torch.stack(rows, dim=1)

    @torch.no_grad()
    def order(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """The indices pointed at, greedily: (B, n) int64, −1 beyond a sequence's end; (n,) for one sequence."""
        return pointed_at(self(images, mask))


def pointed_at(log_weights: Tensor) -> Tensor:
    """The image with the largest weight in every step: (…, T, n) log-weights → (…, T), −1 for steps beyond the end."""
    return log_weights.argmax(-1).masked_fill(log_weights.isneginf().all(-1), -1)


@register_model(task="sorting")
def pointer_lstm(**kwargs: Any) -> PointerNetwork:
    """Pointer network with an LSTM decoder and additive scores over ResNet-8 tokens (Vinyals et al. 2015)."""
    return PointerNetwork(**kwargs)


@register_model(task="sorting")
def pointer_transformer(**kwargs: Any) -> PointerNetwork:
    """Pointer network with a transformer decoder over patch tokens (after Vinyals et al. 2015, Vaswani et al. 2017)."""
    patches = {"patch_size": 2, "embed_dim": 64, "depth": 2, "num_heads": 4, "class_token": False, "global_pool": "avg"}
    defaults = {"decoder": "transformer", "encoder": "vit_tiny_patch16_224", "encoder_args": patches}
    return PointerNetwork(**{**defaults, **kwargs})
