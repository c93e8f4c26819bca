"""Tokens from a few convolutions instead of one cut into patches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.layers import mlp
from vision_attn.layers.whitening import WhiteningConv

ACTIVATIONS: dict[str, type[nn.Module]] = {**mlp.ACTIVATIONS, "none": nn.Identity}
POOLS = ("max", "none")


class ConvTokenizer(nn.Module):
    """Convolution, (norm,) activation, max pool, ``n_layers`` times; the last grid becomes the tokens.

    Hassani et al., "Escaping the Big Data Paradigm with Compact Transformers" (2021, arXiv 2104.05704).
    Overlapping patches and the locality of convolutions are what lets a transformer learn from 50,000 images.

    Tensor legend: B batch, C channels, N tokens = h * w, D ``embed_dim``.

    Args:
        in_chans: channels of the images.
        embed_dim: width of a token.
        n_layers: number of convolution stages, each of which may pool.
        stage_depth: convolutions per stage; those after the first keep width and grid, and begin as the identity.
        channels: widths of the stages before the last (which has ``embed_dim``): one number for all, or a list
            of ``n_layers - 1``.
        kernel_size: side of the convolutions, in pixels.
        stride: of the convolutions.
        padding: of the convolutions; ``None`` means ``kernel_size // 2``.
        pool: ``"max"`` (3x3, stride ``pool_stride``) or ``"none"``.
        pool_size: side of the pooling window.
        pool_stride: stride of the pooling window.
        pool_first: pool before norm and activation, which then work on a quarter of the pixels.
        norm: batch norm after each convolution; the paper has none.
        whiten: a frozen whitening layer before the first convolution; see ``WhiteningConv``.
        act: ``relu``, ``gelu``, ``silu`` or ``none``.
        bias: bias of the convolutions.

    Raises:
        UserError: an unknown activation or pool, or a wrong number of channels.
    """

    def __init__(
        self,
        *,
        in_chans: int = 3,
        embed_dim: int = 128,
        n_layers: int = 2,
        stage_depth: int = 1,
        channels: int | Sequence[int] = 64,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int | None = None,
        pool: str = "max",
        pool_size: int = 3,
        pool_stride: int = 2,
        pool_first: bool = False,
        norm: bool = False,
        whiten: bool = False,
        act: str = "relu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        if act not in ACTIVATIONS:
            raise UserError(f"tokenizer act {act!r} is unknown; choose from {', '.join(ACTIVATIONS)}.")
        if pool not in POOLS:
            raise UserError(f"tokenizer pool {pool!r} is unknown; choose from {', '.join(POOLS)}.")
        hidden = [channels] * (n_layers - 1) if isinstance(channels, int) else list(channels)
        if n_layers < 1 or len(hidden) != n_layers - 1:
            raise UserError(
                f"tokenizer channels {channels} do not fit n_layers={n_layers}: the last stage has embed_dim channels, "
                f"so give {max(n_layers - 1, 0)} numbers."
            )
        self.kernel_size, self.stride = kernel_size, stride
        self.padding = kernel_size // 2 if padding is None else padding
        self.pool_size, self.pool_stride = (pool_size, pool_stride) if pool == "max" else (1, 1)
        self.pool_padding = (self.pool_size - 1) // 2  # none for windows of 2
        self.pool_first = pool_first
        self.whiten = WhiteningConv(in_chans) if whiten else None
        widths = [self.whiten.out_channels if self.whiten is not None else in_chans, *hidden, embed_dim]
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        self.refine = nn.ModuleList()  # per stage: what follows its first convolution
        for a, b in pairwise(widths):
            conv = nn.Conv2d(a, b, kernel_size, stride=stride, padding=self.padding, bias=bias)
            nn.init.kaiming_normal_(conv.weight)
            self.convs.append(conv)
            self.norms.append(nn.BatchNorm2d(b) if norm else nn.Identity())
            self.refine.append(nn.Sequential(*(_same_width(b, norm, act) for _ in range(stage_depth - 1))))
        self.act = ACTIVATIONS[act]()

    def grid(self, img_size: Sequence[int]) -> tuple[int, int]:
        """Tokens down and across for an image of ``(H, W)`` pixels.

        Raises:
            UserError: the image is smaller than the kernels need.
        """

        def side(n: int) -> int:
            n -= 0 if self.whiten is None else 1
            for _ in self.convs:
                n = (n + 2 * self.padding - self.kernel_size) // self.stride + 1
                n = (n + 2 * self.pool_padding - self.pool_size) // self.pool_stride + 1
            return n

        rows, columns = side(img_size[0]), side(img_size[1])
        if min(rows, columns) < 1:
            raise UserError(f"img_size {list(img_size)} is too small for the tokenizer ({len(self.convs)} stages).")
        return rows, columns

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(B, C, H, W)`` to tokens ``(B, N, D)``, row by row."""
        if self.whiten is not None:
            x = self.act(self.whiten(x))
        for conv, norm, refine in zip(self.convs, self.norms, self.refine, strict=True):
            x = conv(x)
            x = self.act(norm(self._pool(x))) if self.pool_first else self._pool(self.act(norm(x)))
            x = refine(x)
        return x.flatten(2).transpose(1, 2)  # (B, D, h, w) -> (B, N, D)

    def _pool(self, x: Tensor) -> Tensor:
        if self.pool_stride == self.pool_size == 1:
            return x
        return F.max_pool2d(x, self.pool_size, self.pool_stride, self.pool_padding)


def _same_width(channels: int, norm: bool, act: str) -> nn.Sequential:
    """3×3 convolution, norm, activation on (B, C, H, W); its filters begin near the identity."""
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
    nn.init.dirac_(conv.weight)
    return nn.Sequential(conv, nn.BatchNorm2d(channels) if norm else nn.Identity(), ACTIVATIONS[act]())
