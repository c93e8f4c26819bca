"""Digit scans somewhere on a larger canvas, among pieces of others: where one looks matters."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_attn.data.randomness import Stream, uniforms
from vision_attn.data.sets import MemorySet
from vision_attn.data.sources import Digits, SourceOptions, Split, register_source, resize

SIDE, DIGIT, PIECE, PIECES = 32, 8, 4, 8  # pixels; and how many pieces lie on a canvas
COPIES = {"train": 8, "val": 4, "test": 4}  # canvases made of each scan
_Y, _X, _SCAN, _CUT_Y, _CUT_X = range(Stream.CANVAS, Stream.CANVAS + 5)


@register_source("digits_canvas")
class DigitsCanvas(Digits):
    """One real digit scan (8x8) at a random place of a black 32x32 canvas, its class the canvas's.

    Beside it lie eight 4x4 pieces cut at random out of other scans of the same split, as in the cluttered digits of
    Mnih et al. 2014 (arXiv 1406.6247); the digit lies on top. The scans of a split are those of ``digits``, eight
    canvases of each for training and four for validation and test: 10,056, 1,080 and 1,080, the same for every seed.
    """

    mean, std = (0.0640,) * 3, (0.2138,) * 3

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self.size = options.img_size or (SIDE, SIDE)

    def load(self, split: Split) -> MemorySet | None:
        scans = self.scans(split)
        if scans is None:
            return None
        copies = COPIES[split]
        which = torch.arange(len(scans)).repeat_interleave(copies)
        ids = scans.ids[which] * max(COPIES.values()) + torch.arange(copies).repeat(len(scans))
        images = compose(scans.images[:, 0], which, ids)[:, None].repeat(1, 3, 1, 1)
        return MemorySet(resize(images, self.options.img_size), scans.labels[which], ids)


def compose(scans: Tensor, which: Tensor, ids: Tensor) -> Tensor:
    """Canvases; every draw is a function of the canvas's id alone.

    Args:
        scans: (S, 8, 8) uint8.
        which: (N,) the scan that lies on top of each canvas.
        ids: (N,) identities of the canvases.

    Returns:
        (N, 32, 32) uint8.
    """
    canvases = torch.zeros(len(ids), SIDE, SIDE, dtype=torch.uint8)
    for number in range(1, PIECES + 1):
        # pieces of one canvas are told apart by what is an epoch elsewhere
        draw = uniforms(0, number, ids, [_Y, _X, _SCAN, _CUT_Y, _CUT_X])
        y, x = _below(draw[:, 0], SIDE - PIECE + 1), _below(draw[:, 1], SIDE - PIECE + 1)
        other = (which + 1 + _below(draw[:, 2], len(scans) - 1)) % len(scans)  # any scan but the canvas's own
        cut = _windows(_below(draw[:, 3], DIGIT - PIECE + 1), _below(draw[:, 4], DIGIT - PIECE + 1), PIECE)
        _paste(canvases, scans[(other[:, None, None], *cut)], y, x)
    draw = uniforms(0, 0, ids, [_Y, _X])
    _paste(canvases, scans[which], _below(draw[:, 0], SIDE - DIGIT + 1), _below(draw[:, 1], SIDE - DIGIT + 1))
    return canvases


def _below(uniform: Tensor, n: int) -> Tensor:
    """Uniform numbers in [0, 1) to whole ones in 0 ... n - 1."""
    return (uniform * n).long().clamp_(max=max(n - 1, 0))


def _windows(y: Tensor, x: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """(N, side, 1) rows and (N, 1, side) columns of squares with these upper left corners."""
    steps = torch.arange(side)
    return y[:, None, None] + steps[:, None], x[:, None, None] + steps


def _paste(canvases: Tensor, squares: Tensor, y: Tensor, x: Tensor) -> None:
    """Lay (N, side, side) squares over (N, H, W) canvases, in place."""
    rows, columns = _windows(y, x, squares.shape[-1])
    canvases[torch.arange(len(canvases))[:, None, None], rows, columns] = squares
