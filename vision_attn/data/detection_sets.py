"""A split of a detection set: pixels in memory or in files, boxes in tables, and how both become a batch."""

from __future__ import annotations

import functools
import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vision_attn.data.coco_table import CocoTable
from vision_attn.data.detection_augment import ViewMaker, Views, draw_view, move_boxes
from vision_attn.data.pixels import Pixels
from vision_attn.errors import UserError


@dataclass
class Boxes:
    """The training targets of N images, without crowds.

    Attributes:
        corners: (T, 4) float64 left, top, right, bottom as shares of the image's width and height, in 0...1.
        labels: (T,) int64.
        starts: (N + 1,) int64: image i has the boxes starts[i] ... starts[i + 1] - 1.
    """

    corners: Tensor
    labels: Tensor
    starts: Tensor

    @classmethod
    def of(cls, table: CocoTable, cut: np.ndarray) -> Boxes:
        """Of a table and its boxes cut to the images, (T, 4) left, top, right, bottom in pixels."""
        plain = ~table.crowd
        size = table.sizes[table.image[plain]][:, [1, 0, 1, 0]]
        corners = torch.from_numpy(cut[plain] / size)
        counts = np.bincount(table.image[plain], minlength=len(table))
        starts = torch.from_numpy(np.concatenate([[0], counts.cumsum()]))
        return cls(corners, torch.from_numpy(table.label[plain]), starts)

    def rows(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The boxes of some images: their rows, and for each the place of its image in ``images``."""
        starts, counts = self.starts[images], self.starts[images + 1] - self.starts[images]
        image = torch.arange(len(images)).repeat_interleave(counts)
        first = (counts.cumsum(0) - counts)[image]
        return starts[image] + torch.arange(len(image)) - first, image


class DetectionSet:
    """One split: what :class:`DetectionData` loads batches from.

    Args:
        table: of exactly these images.
        boxes: their targets.
        pixels: their images.
        index: (N,) int64, the place of each image in its file's own order; keys all randomness.
        maker: of views.
        ground: (3,) uint8, the colour around images that are made smaller.

    Attributes:
        skip_bad_images: go on when a file cannot be read any more, with a warning.
    """

    def __init__(
        self, table: CocoTable, boxes: Boxes, pixels: Pixels, index: Tensor, maker: ViewMaker, ground: Tensor
    ) -> None:
        self.table, self.boxes, self.pixels, self.index, self.maker = table, boxes, pixels, index, maker
        self.ground = ground.view(3, 1, 1)
        self.image_ids: list[int] = table.image_ids.tolist()
        self.orig_sizes = torch.from_numpy(table.sizes)
        self.skip_bad_images = False
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self.index)

    def views(self, rows: Tensor, epoch: int) -> Views:
        """The views of some images in an epoch; -1 means evaluation."""
        sizes = self.pixels.sizes[rows]
        if epoch < 0:
            return self.maker.evaluation(sizes, self.orig_sizes[rows])
        return self.maker.training(sizes, epoch, self.index[rows])

    def batch(self, rows: Tensor, epoch: int = -1) -> dict[str, Any]:
        """Images and boxes as they are in an epoch.

        Args:
            rows: (B,) int64.
            epoch: whose draws; -1 for evaluation.

        Returns:
            ``image`` (B, 3, H, W) uint8, padded with 0 below and to the right; ``mask`` (B, H, W) bool, True = image,
            or None when nothing is padded; ``boxes`` (T, 4) centre x, centre y, width, height as shares of the images,
            the bits of float32 as int32, which a trainer does not round to the precision of the model (see
            ``make_targets``); ``labels`` (T,) int64; ``counts``, boxes of each image; ``size`` and ``orig_size`` (B, 2)
            int64; ``image_id``, B ints; ``index`` (B,) int64; in training ``epoch``.

        Raises:
            UserError: an image cannot be read, and bad images are not skipped; or none can be read.
        """
        images: list[Tensor] | None = None
        if not self.pixels.same_size:
            found = [self._picture(row, training=epoch >= 0) for row in rows.tolist()]
            rows, images = torch.tensor([row for row, _ in found]), [image for _, image in found]
        views = self.views(rows, epoch)
        image, mask = self._render(rows, images, views)
        chosen, place = self.boxes.rows(rows)
        least = self.maker.config.min_visible if epoch >= 0 else 0.0
        boxes, keep = move_boxes(self.boxes.corners[chosen], self.pixels.sizes[rows], place, views, least)
        batch = {
            "image": image,
            "mask": mask,
            "boxes": boxes[keep].view(torch.int32),
            "labels": self.boxes.labels[chosen][keep],
            "counts": place[keep].bincount(minlength=len(rows)).tolist(),
            "size": views.output,
            "orig_size": self.orig_sizes[rows],
            "image_id": [self.image_ids[row] for row in rows.tolist()],
            "index": self.index[rows],
        }
        return batch if epoch < 0 else {**batch, "epoch": epoch}

    def _picture(self, row: int, training: bool) -> tuple[int, Tensor]:
        """The stored image of a row; if it went bad meanwhile, the next one, or a plain ground in evaluation."""
        for step in range(len(self)):
            other = (row + step) % len(self)
            try:
                return other, self.pixels.read(other)
            except UserError as error:
                if not self.skip_bad_images:
                    raise UserError(f"{error} data.skip_bad_images=true leaves such images out.") from error
                self._warn(other, error, training)
            if not training:  # another image would be counted twice
                height, width = self.pixels.sizes[row].tolist()
                return row, self.ground.expand(3, height, width)
        raise UserError(f"no image of {self.table.path} can be read any more.")

    def _warn(self, row: int, error: UserError, training: bool) -> None:
        """Once for each file, and each process that reads."""
        if row not in self._gone:
            self._gone.add(row)
            what = "another image takes its place" if training else "its objects count as missed"
            warnings.warn(f"{error} Until then {what} (so far {len(self._gone)} files went bad).", stacklevel=4)

    def _render(self, rows: Tensor, images: list[Tensor] | None, views: Views) -> tuple[Tensor, Tensor | None]:
        """Draw views of these images; None: all have one size and are in memory."""
        pixels = self.pixels
        if images is None and torch.equal(views.source, views.place) and _whole(views, pixels.sizes[0]):
            out = pixels.stack(rows)  # nothing is resized: one copy for all
            for axis in (0, 1):
                if views.mirror[:, axis].any():
                    chosen = views.mirror[:, axis].nonzero()[:, 0]
                    out[chosen] = out[chosen].flip(axis + 2)
            return out, None
        fixed = self.maker.fixed
        height, width = fixed or views.output.amax(0).tolist()
        padded = bool((views.output != torch.tensor([height, width])).any())
        make = torch.zeros if padded else torch.empty
        out = make(len(rows), 3, height, width, dtype=torch.uint8)
        for place, row in enumerate(rows.tolist()):
            draw_view(pixels.read(row) if images is None else images[place], views, place, out[place], self.ground)
        if not padded:
            return out, None
        tall, wide = views.output.unbind(1)
        mask = (torch.arange(height) < tall[:, None])[:, :, None] & (torch.arange(width) < wide[:, None])[:, None]
        return out, mask

    @functools.cached_property
    def digest(self) -> bytes:
        """A SHA-256 over everything that makes this set what it is."""
        digest, table = hashlib.sha256(), self.table
        for part in (table.image_ids, table.sizes, self.boxes.corners.numpy(), self.boxes.labels.numpy()):
            digest.update(np.ascontiguousarray(part))
        # what evaluation takes from the file: crowds, areas, and boxes as written there
        for part in (table.image, table.label, table.boxes, table.crowd, table.area, np.array(table.category_ids)):
            digest.update(np.ascontiguousarray(part))
        digest.update("\n".join(table.labels).encode())
        digest.update(self.boxes.starts.numpy())
        self.pixels.update_hash(digest)
        return digest.digest()


def _whole(views: Views, size: Tensor) -> bool:
    """Whether every view is the whole image and nothing else."""
    return bool((views.output == size).all() and (views.source[:, 2:] == size).all())


def make_targets(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets of a batch, one dictionary for each image, as views of the batch's flat tensors."""
    parts = (batch["labels"].split(batch["counts"]), batch["boxes"].view(torch.float32).split(batch["counts"]))
    rows = zip(*parts, batch["image_id"], batch["size"], batch["orig_size"], strict=True)
    names = ("labels", "boxes", "image_id", "size", "orig_size")
    return [dict(zip(names, row, strict=True)) for row in rows]
