"""The picture of where a model looked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.training.pictures import BAD, GOOD, _Figure, _short, _tiles

ZOOM = 6  # screen pixels per image pixel, so that a frame is thinner than what it frames
FRAMES = torch.tensor([[238, 119, 51], [0, 119, 187], [0, 153, 136], [204, 51, 17], [51, 187, 238], [238, 51, 119]])


def framed(images: Tensor, corners: Tensor, side: int) -> Tensor:
    """Images on which everything is dim but the glimpses, each in a frame of its own color.

    Args:
        images: (N, 3, H, W) uint8.
        corners: (N, K, 2) upper left corner (y, x) of every glimpse, in pixels.
        side: of a glimpse, in pixels.

    Returns:
        (N, 3, ZOOM · H, ZOOM · W) uint8. Glimpses at the same place lie in nested frames.
    """
    seen = torch.zeros(len(images), 1, *images.shape[-2:], dtype=torch.bool)
    for n, k in torch.cartesian_prod(torch.arange(corners.shape[0]), torch.arange(corners.shape[1])).tolist():
        y, x = corners[n, k].tolist()
        seen[n, :, y : y + side, x : x + side] = True
    dim = 70 + images.float() * 0.45  # towards grey: black canvases could not be told from dim ones otherwise
    out = torch.where(seen, images.float(), dim).to(torch.uint8)
    out = out.repeat_interleave(ZOOM, -1).repeat_interleave(ZOOM, -2)
    for n, places in enumerate(corners.tolist()):
        for k, (y, x) in enumerate(places):
            inset = sum(place == [y, x] for place in places[:k])  # nested, where another glimpse is framed already
            _frame(out[n], ZOOM * y + inset, ZOOM * x + inset, ZOOM * side - 2 * inset, FRAMES[k % len(FRAMES)])
    return out


def _frame(image: Tensor, y: int, x: int, side: int, color: Tensor, width: int = 1) -> None:
    color = color.to(torch.uint8)[:, None, None]
    bottom, right = y + side, x + side
    image[:, y : y + width, x:right] = color
    image[:, bottom - width : bottom, x:right] = color
    image[:, y:bottom, x : x + width] = color
    image[:, y:bottom, right - width : right] = color


def chosen(guess: Tensor, truth: Tensor, most: int) -> Tensor:
    """Rows to show: right ones spread over the set, which may be sorted by class, then mistakes, a quarter at most."""
    right, wrong = torch.nonzero(guess == truth).flatten(), torch.nonzero(guess != truth).flatten()
    wrong = wrong[: max(most // 4, most - len(right))]
    count = min(most - len(wrong), len(right))
    if count:
        right = right[torch.linspace(0, len(right) - 1, count).long()]
    return torch.cat([right, wrong])


@torch.no_grad()
def where_it_looks(module: Any, images: Tensor) -> Tensor:
    """(N, K, 2) upper left corners of the glimpses that the model takes in evaluation: at the most probable places.

    Args:
        module: a ``Classifier`` whose model has ``weights`` and ``corners``.
        images: (N, 3, H, W) normalized.
    """
    model, was_training = module.model, module.model.training
    places = model.eval().weights(images).argmax(-1)
    model.train(was_training)
    return model.corners(tuple(images.shape[-2:]), places.device)[places]


def glimpses(
    pictures: Tensor, guess: Tensor, truth: Tensor, labels: Sequence[str], path: Path, title: str = ""
) -> None:
    """Images in frames, each with what the model said.

    Args:
        pictures: (N, 3, H, W) uint8, see :func:`framed`.
        guess, truth: (N,) predicted and true classes.
        labels: class names.
        path: the PNG to write.
        title: above the images.
    """
    columns, tiles = 8, []
    for place, picture in enumerate(pictures):
        said, is_ = _short(labels[int(guess[place])]), _short(labels[int(truth[place])])
        caption, color = (said, GOOD) if said == is_ else (f"{said}, is {is_}", BAD)
        tiles.append((place, picture, caption, color))
    rows = -(-len(tiles) // columns)
    with _Figure(path, figsize=(11.5, 1.6 * rows + 0.3)) as (figure, axis):
        figure.suptitle(title, fontsize=11)
        _tiles(axis, tiles, columns, gap=0.14, fontsize=8.5)


def draw(
    module: Any, data: Any, path: Path, title: str, images: Tensor, guess: Tensor, truth: Tensor, most: int = 32
) -> None:
    """Where a model with glimpses looked in some of the images.

    Args:
        module: as for :func:`where_it_looks`.
        data: its data module.
        path: the PNG to write.
        title: above the images.
        images: (N, 3, H, W) uint8.
        guess, truth: (N,) predicted and true classes.
        most: images to show.
    """
    rows = chosen(guess, truth, most)
    device = next(module.model.parameters()).device
    corners = where_it_looks(module, data.augmenter.normalize(images[rows].to(device)))
    pictures = framed(images[rows], corners.cpu(), module.model.glimpse_size)
    glimpses(pictures, guess[rows], truth[rows], data.labels, path, title)
