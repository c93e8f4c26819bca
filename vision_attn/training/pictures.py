"""The pictures of a run folder: learning curves, confusion matrix, sample predictions, augmented images.

Every function takes data and a path and can be used alone; :func:`draw_all` makes them for a finished run.
Matplotlib is imported when something is drawn and never opens a window.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.atomic import atomic_write
from vision_attn.training.run_folder import best_row

TRAIN, VAL, GREY, GOOD, BAD = "#4477AA", "#EE6677", "#777777", "#1B7837", "#B2182B"  # Paul Tol's bright scheme
STYLE: Any = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def curve(axis: Any, rows: Sequence[dict[str, Any]], key: str, label: str, color: str) -> None:
    """One metric over optimizer steps; nothing where no row has it."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    if points:
        mark = "o" if len(points) < 40 else None
        axis.plot(*zip(*points, strict=True), color=color, lw=1.6, marker=mark, ms=3, label=label)


def mark_best(axis: Any, rows: Sequence[dict[str, Any]], key: str, form: str) -> None:
    """A star on the best validation, which the title tells; ``form`` writes the value."""
    best = best_row(list(rows), key)
    if best:
        axis.plot(best["step"], best[key], "*", color=VAL, ms=11, mec="white", mew=0.6)
        axis.set_title(f"best validation: {form.format(best[key])} at step {best['step']:,}")


def learning_rate(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """The learning rate over optimizer steps."""
    axis.plot([r["step"] for r in rows], [r["lr"] for r in rows], color=GREY, lw=1.6)
    axis.set(xlabel="optimizer step", ylabel="learning rate", ylim=(0, None))
    axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))


def learning_curves(rows: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Loss and accuracy (training and validation) and the learning rate over optimizer steps.

    Args:
        rows: of ``metrics.csv``, see :func:`~vision_attn.training.run_folder.read_metrics`.
        path: the PNG to write.
        title: above the panels.
    """
    with _Figure(path, figsize=(10.5, 3.3), columns=3) as (figure, axes):
        for axis, name in zip(axes, ("loss", "acc"), strict=False):
            for stage, color in (("train", TRAIN), ("val", VAL)):
                curve(axis, rows, f"{stage}/{name}", stage, color)
            axis.set(xlabel="optimizer step", ylabel={"loss": "cross-entropy", "acc": "accuracy"}[name])
            if axis.lines:
                axis.legend()
        mark_best(axes[1], rows, "val/acc", "{:.2%}")
        learning_rate(axes[2], rows)
        figure.suptitle(title, fontsize=11)


def confusion_matrix(
    counts: Tensor,
    labels: Sequence[str],
    path: Path,
    title: str = "",
    *,
    predicted: Sequence[str] | None = None,
    unit: str | None = None,
) -> None:
    """Rows are the true classes, in shares of the class; small matrices carry numbers.

    Beyond 20 classes the most frequent confusions are listed beside the matrix.

    Args:
        counts: (classes, classes) images by true and predicted class.
        labels: class names.
        path: the PNG to write.
        title: goes before the accuracy.
        predicted: names of the columns, when they are others.
        unit: what is counted, when it is not images; the title is then all there is to say.
    """
    from matplotlib.colors import PowerNorm

    n = len(labels)
    shares = counts.double() / counts.sum(1, keepdim=True).clamp_min(1)
    if unit is None:
        accuracy = float(counts.diag().sum() / counts.sum().clamp_min(1))
        title = f"{title}accuracy {accuracy:.2%} of {int(counts.sum()):,} images"
    many = n > 20
    side = min(14.0, max(4.5, 2.6 + 0.36 * n if not many else 3.0 + 0.11 * n))
    with _Figure(path, figsize=(side + (3.0 if many else 0.9), side)) as (figure, axis):
        axis.grid(False)
        image = axis.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        size = 8 if not many else max(4.0, min(7.0, 540 / n))
        across, down = (
            [textwrap.shorten(str(label), 22, placeholder="…") for label in some]
            for some in (predicted or labels, labels)
        )
        axis.set_xticks(range(n), across, rotation=90 if many or max(map(len, across)) > 3 else 0, fontsize=size)
        axis.set_yticks(range(n), down, fontsize=size)
        axis.tick_params(length=0 if many else 2, pad=1.5)
        axis.set(xlabel="predicted", ylabel="true")
        axis.set_title(title, fontsize=11)
        axis.spines[:].set_visible(False)
        if many:
            _list_confusions(axis, counts, labels, predicted or labels, unit or "images")
        else:
            figure.colorbar(image, ax=axis, shrink=0.7, label="share of the true class", ticks=[0, 0.1, 0.25, 0.5, 1])
            for row in range(n):
                for column in range(n):
                    if counts[row, column]:
                        color = "white" if shares[row, column] > 0.45 else "#333333"
                        number = int(counts[row, column])
                        axis.text(column, row, number, ha="center", va="center", color=color, fontsize=7.5)


def _list_confusions(
    axis: Any, counts: Tensor, labels: Sequence[str], predicted: Sequence[str], unit: str, most: int = 25
) -> None:
    wrong = counts.clone()
    wrong.fill_diagonal_(0)
    value, place = wrong.flatten().topk(min(most, wrong.numel()))
    lines = [
        f"{int(v):>3}  {labels[int(p) // len(labels)]} → {predicted[int(p) % len(labels)]}"
        for v, p in zip(value, place, strict=True)
        if v > 0
    ]
    text = f"most frequent confusions\n({unit}, true → predicted)\n\n" + "\n".join(lines)
    axis.text(1.02, 1.0, text, transform=axis.transAxes, va="top", fontsize=8.5, linespacing=1.35)


def predictions(
    images: Tensor, probabilities: Tensor, truth: Tensor, labels: Sequence[str], path: Path, title: str = ""
) -> None:
    """Some images the model got right and, below, the mistakes it was surest of.

    Args:
        images: (N, 3, H, W) uint8.
        probabilities: (N, classes).
        truth: (N,) true classes.
        labels: class names.
        path: the PNG to write.
        title: above the images.
    """
    sure, guess = probabilities.max(1)
    right = torch.nonzero(guess == truth).flatten()
    if len(right):  # spread over the set: many sets are sorted by class
        right = right[torch.linspace(0, len(right) - 1, min(16, len(right))).long()]
    wrong = torch.nonzero(guess != truth).flatten()
    wrong = wrong[sure[wrong].argsort(descending=True)][:16]
    columns = 8
    rows_right, rows_wrong = -(-len(right) // columns), -(-len(wrong) // columns)
    tiles = []
    for start, chosen in ((0, right.tolist()), (rows_right * columns, wrong.tolist())):
        for place, index in enumerate(chosen, start):
            caption, color = f"{_short(labels[int(guess[index])])} {float(sure[index]):.0%}", GOOD
            if guess[index] != truth[index]:
                caption, color = f"{caption}\nis {_short(labels[int(truth[index])])}", BAD
            tiles.append((place, images[index], caption, color))
    with _Figure(path, figsize=(11.5, 1.78 * (rows_right + rows_wrong) + 0.3)) as (figure, axis):
        figure.suptitle(title, fontsize=11)
        _tiles(axis, tiles, columns, gap=0.24, fontsize=8.5)


def image_grid(images: Tensor, path: Path, title: str = "", captions: Sequence[str] | None = None) -> None:
    """A square-ish grid of images.

    Args:
        images: (N, 3, H, W) uint8.
        path: the PNG to write.
        title: above the grid.
        captions: one per image.
    """
    columns = max(1, round(len(images) ** 0.5))
    rows, gap = -(-len(images) // columns), 0.16 if captions else 0.03
    texts = [_short(caption) for caption in captions] if captions else [""] * len(images)
    with _Figure(path, figsize=(columns, rows * (1 + gap) + 0.28)) as (figure, axis):
        figure.suptitle("\n".join(textwrap.wrap(title, 15 * columns)), fontsize=9)
        tiles = [(place, image, text, "#444444") for place, (image, text) in enumerate(zip(images, texts, strict=True))]
        _tiles(axis, tiles, columns, gap, fontsize=6.5)


def _tiles(axis: Any, tiles: Sequence[tuple[int, Tensor, str, str]], columns: int, gap: float, fontsize: float) -> None:
    """Images (place, (3, H, W) uint8, caption, its color) on one axis: an axis each would take seconds to lay out."""
    height, width = tiles[0][1].shape[-2:] if tiles else (1, 1)
    aspect = height / width
    for place, image, caption, color in tiles:
        x, y = place % columns, place // columns * (aspect + gap)
        axis.imshow(image.permute(1, 2, 0), extent=(x, x + 0.96, y + aspect * 0.96, y), interpolation="nearest")
        axis.text(
            x + 0.48, y - 0.015, caption, ha="center", va="bottom", fontsize=fontsize, color=color, linespacing=1.1
        )
    rows = max((place for place, *_ in tiles), default=0) // columns + 1
    axis.set(xlim=(0, columns), ylim=(rows * (aspect + gap) - gap, -gap), aspect="equal")
    axis.axis("off")


def draw_all(run: Any, module: Any, data: Any, device: torch.device | str = "cpu", limit: int = 10_000) -> list[Path]:
    """Every picture of a finished run.

    Args:
        run: the :class:`~vision_attn.training.run_folder.RunFolder`.
        module: a ``Classifier`` with the weights to show.
        data: the data module; the first ``limit`` validation images are looked at.
        device: where the model computes.
        limit: most validation images.

    Returns:
        The files written.
    """
    folder, name = run.path / "plots", f"{run.recipe}, {run.summary.get('model')}"
    learning_curves(run.rows, folder / "learning_curves.png", name)
    written = ["learning_curves"]
    changes = ", ".join(f"{k} {v}" for k, v in data.augment.changed().items()) or "no augmentation"
    images, classes = data.sample_grid(64)
    captions = [data.labels[int(c)] for c in classes]
    image_grid(images, folder / "augmented.png", f"training images as the model sees them: {changes}", captions)
    written.append("augmented")
    if data.split("val") is not None:
        images, probabilities, truth = look(module, data, device, limit)
        guess = probabilities.argmax(1)
        n = len(data.labels)
        counts = torch.bincount(truth * n + guess, minlength=n * n).view(n, n)
        confusion_matrix(counts, data.labels, folder / "confusion_matrix.png", f"{name}: validation ")
        predictions(images, probabilities, truth, data.labels, folder / "predictions.png", f"{name}: validation images")
        written += ["confusion_matrix", "predictions"]
        if hasattr(module.model, "glimpse_size"):
            from vision_attn.training.glimpses import draw

            title = f"where {name} looked: validation images"
            draw(module, data, folder / "glimpses.png", title, images, guess, truth)
            written.append("glimpses")
    return [folder / f"{picture}.png" for picture in written]


@torch.no_grad()
def look(module: Any, data: Any, device: torch.device | str, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first validation images, ``limit`` or a few more, with what the model says about them; by this process alone.

    Returns:
        (N, 3, H, W) uint8 images, (N, classes) probabilities and (N,) true classes.
    """
    loader = data.whole_dataloader("val")
    was_training = module.training
    module.eval().to(device)
    images, probabilities, truth, seen = [], [], [], 0
    for batch in loader:
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        batch = data.on_after_batch_transfer(moved)
        probabilities.append(module(batch["image"]).softmax(1).cpu())
        images.append(data.denormalize(batch["image"]).cpu())
        truth.append(batch["label"].cpu())
        seen += len(truth[-1])
        if seen >= limit:
            break
    module.train(was_training)
    return torch.cat(images), torch.cat(probabilities), torch.cat(truth)


def _short(text: str, width: int = 15) -> str:
    text = str(text)
    return text if len(text) <= width else text[: width - 1] + "…"


class _Figure:
    """A figure in the house style that is saved when the ``with`` block ends."""

    def __init__(self, path: Path, figsize: tuple[float, float], rows: int = 1, columns: int = 1) -> None:
        self.path, self.figsize, self.rows, self.columns = path, figsize, rows, columns

    def __enter__(self) -> tuple[Any, Any]:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._style = matplotlib.rc_context(STYLE)
        self._style.__enter__()
        self.figure = Figure(figsize=self.figsize, layout="constrained")
        FigureCanvasAgg(self.figure)
        axes = self.figure.subplots(self.rows, self.columns, squeeze=False).flatten()
        return self.figure, axes[0] if self.rows * self.columns == 1 else axes

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                atomic_write(self.path, lambda path: self.figure.savefig(path, format="png"))
        finally:
            self._style.__exit__(kind, error, trace)
