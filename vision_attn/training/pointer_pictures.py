"""The pictures of a run that learned to sort: sequences before and after, and where each step pointed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.training.pictures import BAD, GOOD, GREY, _Figure, image_grid, learning_curves


def draw_all(run: Any, module: Any, data: Any, device: torch.device | str = "cpu") -> list[Path]:
    """Every picture of a finished run.

    Args:
        run: the :class:`~vision_attn.training.run_folder.RunFolder`.
        module: a ``Sorter`` with the weights to show.
        data: the :class:`~vision_attn.data.sorting.SortingData`.
        device: where the model computes.

    Returns:
        The files written.
    """
    folder, name = run.path / "plots", f"{run.recipe}, {run.summary.get('model')}"
    learning_curves(run.rows, folder / "learning_curves.png", name)
    changes = ", ".join(f"{k} {v}" for k, v in data.augment.changed().items()) or "no augmentation"
    images, classes = data.sample_grid(64)
    captions = [data.labels[int(c)] for c in classes]
    image_grid(images, folder / "augmented.png", f"training images as the model sees them: {changes}", captions)
    written = ["learning_curves", "augmented"]
    if data.split("val") is not None:
        n = data.eval_lengths[0]
        shown, result = look(module, data, n, data.eval_sequences, device)
        title = f"{name}: validation sequences of {n}, as they came in and as they were pointed at"
        guess, path = result.argmax(-1), folder / "sorted.png"
        strips(shown["image"], shown["label"], shown["order"], guess, data.labels, path, title)
        longest = max(data.eval_lengths)
        shown, result = look(module, data, longest, 1, device)
        title = f"{name}: where each step points, {longest} images"
        attention_matrix(shown["image"][0], result[0].exp(), folder / "attention.png", title)
        written += ["sorted", "attention"]
    return [folder / f"{picture}.png" for picture in written]


@torch.no_grad()
def look(module: Any, data: Any, n: int, count: int, device: torch.device | str) -> tuple[dict[str, Any], Tensor]:
    """The first validation sequences of length n, and what the model says about them.

    Returns:
        The batch of raw pixels, and (count, n, n) log-weights of greedy decoding.
    """
    from vision_attn.data.sorting import SequenceEvalLoader

    was_training = module.training
    module.eval().to(device)
    batches, results = [], []
    sequences = data.sequences_of("val")
    sequences.sequences = min(count, len(sequences))
    for batch in SequenceEvalLoader(sequences, lengths=[n], batch_size=data.eval_batch_size):
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        results.append(module.model(data.on_after_batch_transfer(moved)["image"]).float().cpu())
        batches.append(batch)
    module.train(was_training)
    keys = ("image", "label", "order")
    return {key: torch.cat([batch[key] for batch in batches]) for key in keys}, torch.cat(results)


def strips(
    images: Tensor, labels: Tensor, order: Tensor, guess: Tensor, names: Sequence[str], path: Path, title: str = ""
) -> None:
    """Sequences on the left, the same images in the order pointed at on the right; wrong ones at the bottom.

    Args:
        images: (B, n, 3, H, W) uint8.
        labels: (B, n) true classes.
        order: (B, n) right indices.
        guess: (B, n) indices pointed at.
        names: class names, ascending.
        path: the PNG to write.
        title: above the strips.
    """
    right = (guess == order).all(1)
    accuracy = float(right.double().mean())
    good, bad = torch.nonzero(right).flatten()[:8], torch.nonzero(~right).flatten()[:6]
    rows = [*good.tolist(), *bad.tolist()]
    n, aspect = images.shape[1], images.shape[-2] / images.shape[-1]
    step, gap = aspect + 0.42, 1.0
    with _Figure(path, figsize=(0.62 * (2 * n + gap) + 0.4, 0.62 * step * len(rows) + 0.7)) as (figure, axis):
        figure.suptitle(f"{title}\nexactly right: {accuracy:.1%} of {len(images):,}", fontsize=9)
        for place, row in enumerate(rows):
            y = place * step
            for column in range(n):
                _thumbnail(axis, images[row, column], column, y, aspect)
                picked = int(guess[row, column])
                fits = bool(guess[row, column] == order[row, column])
                _thumbnail(axis, images[row, picked], n + gap + column, y, aspect, GOOD if fits else BAD)
                label = f"{names[int(labels[row, picked])]}"
                where = n + gap + column + 0.48
                axis.text(where, y - 0.03, label, ha="center", va="bottom", fontsize=7.5, color=GOOD if fits else BAD)
                axis.text(column + 0.48, y - 0.03, column, ha="center", va="bottom", fontsize=6.5, color=GREY)
            arrow, middle = {"arrowstyle": "->", "color": GREY}, y + aspect / 2
            axis.annotate("", (n + gap - 0.15, middle), (n + 0.1, middle), arrowprops=arrow)
        axis.set(xlim=(-0.1, 2 * n + gap + 0.1), ylim=(step * len(rows) - 0.35, -0.4), aspect="equal")
        axis.axis("off")


def attention_matrix(images: Tensor, weights: Tensor, path: Path, title: str = "") -> None:
    """Which image each step of the decoder points at: rows are steps, columns are images as they came in.

    Args:
        images: (n, 3, H, W) uint8.
        weights: (n, n) of step and image; rows sum to 1.
        path: the PNG to write.
        title: above the matrix.
    """
    n, aspect = len(images), images.shape[-2] / images.shape[-1]
    with _Figure(path, figsize=(0.75 * n + 2.2, 0.75 * n + 1.6)) as (figure, axis):
        axis.grid(False)
        top = aspect + 0.15  # the images lie above the matrix, in its coordinates
        extent = (0, n, n + top, top)
        drawn = axis.imshow(weights, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", extent=extent)
        for column in range(n):
            _thumbnail(axis, images[column], column, 0, aspect)
        for row in range(n):
            y = row + top + 0.5
            for column in range(n):
                value = float(weights[row, column])
                color = "white" if value > 0.5 else "#333333"
                if value >= 0.005:
                    axis.text(column + 0.5, y, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color=color)
            _thumbnail(axis, images[int(weights[row].argmax())], n + 0.25, y - 0.5 * aspect * 0.96, aspect)
        axis.set(xlim=(-0.05, n + 1.3), ylim=(n + top + 0.05, -0.05), aspect="equal")
        axis.set_xticks([i + 0.5 for i in range(n)], [str(i) for i in range(n)])
        axis.set_yticks([i + top + 0.5 for i in range(n)], [str(i) for i in range(n)])
        axis.set(xlabel="image (index in the input)", ylabel="step of the decoder")
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        figure.colorbar(drawn, ax=axis, shrink=0.6, label="attention weight")
        figure.suptitle(title, fontsize=10)


def _thumbnail(axis: Any, image: Tensor, x: float, y: float, aspect: float, frame: str | None = None) -> None:
    """One image (3, H, W) uint8 with its upper left corner at (x, y), one unit wide."""
    extent = (x, x + 0.96, y + 0.96 * aspect, y)
    axis.imshow(image.permute(1, 2, 0), extent=extent, interpolation="nearest")
    if frame is not None:
        xs, ys = (x, x + 0.96, x + 0.96, x, x), (y, y, y + 0.96 * aspect, y + 0.96 * aspect, y)
        axis.plot(xs, ys, color=frame, lw=1.4)
