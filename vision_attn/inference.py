"""From images of any kind to class names and probabilities, to boxes, or to an order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from vision_attn.data.images import image_files, read_image, resize_and_crop, to_rgb
from vision_attn.data.luma import luma
from vision_attn.errors import UserError, refuse_nan

if TYPE_CHECKING:
    from vision_attn.detection.inference import Detections

ImageLike: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
PROGRESS_AFTER = 2.0  # seconds: shorter jobs need no progress bar
CLASSES = 5  # reported of an image
BATCH = 32


@dataclasses.dataclass
class Classification:
    """What a classifier says about one image.

    Attributes:
        label: the likeliest class; its index as text when the model knows no names.
        index: its number.
        score: its probability, 0 to 1.
        topk: the likeliest classes with their probabilities, best first.
        source: the file, or ``image 3`` for the fourth of those given.
    """

    label: str
    index: int
    score: float
    topk: list[tuple[str, float]]
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return {**dataclasses.asdict(self), "topk": [{"label": label, "score": p} for label, p in self.topk]}


@dataclasses.dataclass
class Pointed:
    """What a pointer network says in one step.

    Attributes:
        place: the step, from 0: where the image stands in the order.
        index: which of the images given it points at, from 0.
        score: the attention weight of that image in this step, 0 to 1.
        source: the file, or ``image 3`` for the fourth of those given.
    """

    place: int
    index: int
    score: float
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return dataclasses.asdict(self)


def predict(
    model: nn.Module,
    images: ImageLike | Iterable[ImageLike],
    *,
    batch_size: int | None = None,
    topk: int | None = None,
    threshold: float | None = None,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> list[Classification] | list[Detections] | list[Pointed]:
    """Classify images, find objects in them, or sort them, as the task of the model is.

    They are preprocessed as the model was trained (``model.config["preprocess"]``). All kinds of input go through the
    same 8-bit RGB pixels, so the same picture gives the same answer however it is handed in, and to a detector whatever
    else is in its batch.

    Args:
        model: from ``load_model`` or ``create_model``.
        images: one or a list of: path, folder (searched through), PIL image, array ``(H, W)`` or ``(H, W, C)``, tensor
            ``(C, H, W)`` or ``(B, C, H, W)``. Integers are raw pixels 0…255 (16-bit: 0…65535), floats 0…1; never
            normalised ones. C is 1, 3 or 4.
        batch_size: images per forward pass; None: 32, or as many as a detector of this size can take with some 2 GB. A
            pointer network sees all images at once.
        topk: how many classes to report (None: 5), or at most how many objects of an image (None: 100).
        threshold: of a detector: scores must be above it (None: 0.5; 0 keeps all).
        device: the model is moved there; ``None`` leaves it where it is.
        progress: show a bar on standard error when it takes more than a moment.

    Returns:
        One :class:`Classification` per image, in the order given (folders sorted by name); from a detector one
        :class:`~vision_attn.detection.inference.Detections`, with boxes in pixels of the image; from a pointer network
        one :class:`Pointed` per image, in the order it puts them in.

    Raises:
        UserError: a file is missing or broken, an array is no image, the model has no configuration, a number is out of
            range, or what the model says is NaN.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, dict) or not config.get("preprocess"):
        raise UserError("The model has no preprocessing in .config: build it with create_model or load_model.")
    run, usual = _task(model, config, topk, threshold)
    batch_size = usual if batch_size is None else batch_size
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}.")
    sources = list(_expand(images))
    if device is not None:
        model.to(device)
    results: list[Any] = []
    was_training = model.training
    model.eval()
    try:
        if config.get("task") == "sorting":
            return _sort(model, sources, config)
        for start in _steps(range(0, len(sources), batch_size), progress, len(sources)):
            chunk = sources[start : start + batch_size]
            results += run([_picture(image, source) for image, source in chunk], [source for _, source in chunk])
    finally:
        model.train(was_training)
    return results


def _task(
    model: nn.Module, config: dict[str, Any], topk: int | None, threshold: float | None
) -> tuple[Callable[[list[Image.Image], list[str]], list[Any]], int]:
    """What turns pictures and their names into results, and how many pictures it usually takes at once."""
    if config.get("task") == "detection":
        from vision_attn.detection.inference import check_options, detect, usual_batch

        least, most = check_options(threshold, topk)
        return partial(detect, model, threshold=least, topk=most), usual_batch(config)
    if threshold is not None:
        raise UserError(f"threshold is for detectors; {config.get('name')} is a model for {config.get('task')}.")
    topk = CLASSES if topk is None else topk
    if topk < 1:
        raise UserError(f"topk must be at least 1, got {topk}.")
    return partial(_classify, model, config=config, topk=topk), BATCH


def pick_device(name: str = "auto") -> torch.device:
    """A device by name; ``auto`` is the accelerator of this machine, or the CPU.

    Raises:
        UserError: no such device here.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        reason = (str(error).splitlines() or ["unknown"])[0]
        raise UserError(f"device {name!r} cannot be used here: {reason}") from error
    return device


def preprocess(pictures: Sequence[Image.Image], config: dict[str, Any]) -> Tensor:
    """Resize, crop and normalise RGB pictures as a model's configuration says; ``(B, C, H, W)`` float."""
    settings = config["preprocess"]
    size = (int(settings["size"][0]), int(settings["size"][1]))
    crop, interpolation = float(settings.get("crop_pct") or 1.0), settings.get("interpolation") or "bilinear"
    x = torch.stack([resize_and_crop(picture, size, crop, interpolation) for picture in pictures])
    x = x.float() / 255.0
    if config.get("args", {}).get("in_chans", 3) == 1:
        x = luma(x)
    mean, std = (torch.tensor(settings[key], dtype=torch.float32)[:, None, None] for key in ("mean", "std"))
    return (x - mean) / std


def _classify(
    model: nn.Module, pictures: Sequence[Image.Image], sources: Sequence[str], *, config: dict[str, Any], topk: int
) -> list[Classification]:
    """One forward pass over some pictures."""
    x = preprocess(pictures, config)  # (B, C, H, W)
    labels = config.get("labels")
    where = next(model.parameters())
    with torch.inference_mode():
        probabilities = model(x.to(where.device, where.dtype)).float().softmax(-1)  # (B, classes)
    refuse_nan(probabilities.isfinite().all(1).tolist(), sources)
    classes = probabilities.shape[-1]
    if labels is not None and len(labels) != classes:
        raise UserError(f"The model has {classes} outputs, but its configuration names {len(labels)} labels.")
    names = labels or [str(i) for i in range(classes)]
    scores, indices = probabilities.topk(min(topk, classes), dim=-1)
    return [
        Classification(names[i[0]], i[0], p[0], [(names[j], q) for j, q in zip(i, p, strict=True)], source)
        for i, p, source in zip(indices.tolist(), scores.tolist(), sources, strict=True)
    ]


def _sort(model: nn.Module, sources: Sequence[tuple[ImageLike, str]], config: dict[str, Any]) -> list[Pointed]:
    """All images as one sequence, in the order pointed at."""
    where = next(model.parameters())
    x = preprocess([_picture(image, source) for image, source in sources], config)  # (n, C, H, W)
    with torch.inference_mode():
        scores, order = model(x.to(where.device, where.dtype)).float().exp().max(-1)  # (n,) and (n,)
    refuse_nan(scores.isfinite().tolist(), [f"step {step}" for step in range(len(scores))])
    steps = zip(order.tolist(), scores.tolist(), strict=True)
    return [Pointed(place, index, score, sources[index][1]) for place, (index, score) in enumerate(steps)]


def open_pictures(images: ImageLike | Iterable[ImageLike]) -> tuple[list[Image.Image], list[str]]:
    """RGB pictures out of anything that ``predict`` takes, and what to call them.

    Raises:
        UserError: a file is missing or broken, or an array is no image.
    """
    sources = list(_expand(images))
    return [_picture(image, source) for image, source in sources], [source for _, source in sources]


def _expand(images: ImageLike | Iterable[ImageLike]) -> Iterator[tuple[ImageLike, str]]:
    """Single images with the names they are reported under; files are not opened yet."""
    single = isinstance(images, (str, Path, Image.Image, np.ndarray, Tensor))
    count = 0
    for item in [images] if single else images:  # type: ignore[union-attr,list-item]
        if isinstance(item, (str, Path)):
            for path in image_files(Path(item).expanduser()):
                yield path, str(path)
                count += 1
            continue
        # a tensor with four axes, or an array with four, is a batch
        members: Iterable[Any] = item if isinstance(item, (Tensor, np.ndarray)) and item.ndim == 4 else [item]
        for member in members:
            yield member, f"image {count}"
            count += 1


def _picture(image: ImageLike, source: str) -> Image.Image:
    """RGB with 8 bits out of anything that ``predict`` takes."""
    if isinstance(image, (str, Path)):
        return read_image(image)
    if isinstance(image, Image.Image):
        return to_rgb(ImageOps.exif_transpose(image))
    if isinstance(image, Tensor):
        array = image.detach().cpu()
        array = array.float() if array.dtype == torch.bfloat16 else array  # numpy has no bfloat16
        pixels = array.numpy()
        pixels = pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels
    elif isinstance(image, np.ndarray):
        pixels = image
    else:
        kind = type(image).__name__
        raise UserError(f"{source}: cannot make an image of {kind}; give a path, PIL image, array or tensor.")
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)) or 0 in pixels.shape:
        kind = "tensors are (C, H, W)" if isinstance(image, Tensor) else "arrays are (H, W) or (H, W, C)"
        raise UserError(f"{source}: shape {tuple(image.shape)} is no image; {kind} with 1, 3 or 4 channels.")
    pixels = _eight_bits(pixels, source)
    pixels = pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    return to_rgb(Image.fromarray(np.ascontiguousarray(pixels)))


def _eight_bits(pixels: np.ndarray, source: str) -> np.ndarray:
    """Raw pixels of any type as uint8.

    Raises:
        UserError: values outside the range of their type's pixels.
    """
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    low, high = float(pixels.min()), float(pixels.max())
    is_float = np.issubdtype(pixels.dtype, np.floating)
    top = 1.0 if is_float else 65535.0 if pixels.dtype == np.uint16 else 255.0
    if not (low >= -1e-6 and high <= top + 1e-6):  # written so that NaN fails too
        raise UserError(
            f"{source}: values from {low:.3g} to {high:.3g}; raw pixels are 0…{top:.0f} for {pixels.dtype} "
            f"(predict normalises them itself)."
        )
    return np.rint(pixels.astype(np.float64) * (255.0 / top)).clip(0, 255).astype(np.uint8)


def _steps(steps: range, progress: bool, total: int) -> Iterator[int]:
    """The steps, with a bar on standard error once they have taken more than a moment."""
    bar, task, begin = None, None, time.monotonic()
    try:
        for step in steps:
            yield step
            if progress and bar is None and time.monotonic() - begin > PROGRESS_AFTER:
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                task = bar.add_task("images", total=total)
                bar.start()
            if bar is not None and task is not None:
                bar.update(task, completed=min(step + steps.step, total))
    finally:
        if bar is not None:
            bar.stop()
