"""Images with boxes as a LightningDataModule: digit scenes, COCO, and every set in COCO's layout."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vision_attn.data.augment import Augmenter
from vision_attn.data.base import SplitData
from vision_attn.data.coco import read_coco
from vision_attn.data.coco_images import compare_with_files, image_folder_of, image_paths, report_bad
from vision_attn.data.coco_table import CocoTable, choose_categories, drop_unchosen, fit_boxes, match_categories
from vision_attn.data.config import AugmentConfig
from vision_attn.data.detection_augment import DetectionAugmentConfig, ViewMaker, jitter_in_pieces
from vision_attn.data.detection_layouts import LAYOUTS, check_value, choose_resize
from vision_attn.data.detection_loader import DetectionEvalLoader, DetectionTrainLoader
from vision_attn.data.detection_sets import Boxes, DetectionSet, make_targets
from vision_attn.data.detection_subsets import subset_rows, without_overlap
from vision_attn.data.digit_scenes import prepare_scenes, scenes_folder
from vision_attn.data.findings import Findings, short_names
from vision_attn.data.pixels import DecodedImages, UnreadableImages, where_pixels_fit
from vision_attn.data.randomness import Stream, uniforms
from vision_attn.data.sources import Split, data_root
from vision_attn.data.verify import Verifier
from vision_attn.errors import UserError, closest

_OFF = DetectionAugmentConfig()
_SPLITS: tuple[Split, ...] = ("train", "val", "test")


class DetectionData(SplitData):
    """Images with boxes.

    Every random choice depends on (seed, epoch, image) alone: not on workers or a resume. Batches leave the loader as
    raw pixels, already cut, resized and padded; colour and normalisation follow on the model's device, in
    ``on_after_batch_transfer``, which also makes the ``targets``.

    After it a batch has ``image`` (B, 3, H, W) float32, padding 0; ``mask`` (B, H, W) bool, True = image, or None when
    nothing is padded; ``index`` (B,) int64, each image's place in its file; in training ``epoch``; and ``targets``, for
    each image a dictionary with ``labels`` (n,) int64, ``boxes`` (n, 4) float32 (centre x, centre y, width, height as
    shares of the unpadded image), ``image_id`` (the file's), ``size`` and ``orig_size`` (2,) int64, height and width
    after and before the transforms. Crowds are no training targets; evaluation knows them (:meth:`ground_truth`).

    Args:
        name: ``digit_scenes``, ``coco`` (any set in COCO's layout), ``coco_320`` or ``bccd``.
        root: folder of the set (``coco``), or the data root that holds it; None takes ``$VISION_ATTN_DATA``, then
            ``~/.cache/vision_attn``.
        train_json, val_json, test_json: annotation files, absolute or under ``root``. None: those of the official
            layout; with a ``train_json`` of one's own, no validation or test.
        train_images, val_images, test_images: folders of the images. None: those of the official layout, or the folder
            that has the annotation file's name.
        batch_size: training images per step and process.
        eval_batch_size: images per evaluation batch and process.
        img_size: the shorter side, or (height, width) of a fixed size. None: what the set is known for.
        max_size: of the longer side, where only the shorter one is given.
        resize: ``shorter`` brings the shorter side to ``img_size``; ``fit`` keeps the aspect within a fixed (height,
            width) and pads the rest; ``stretch`` gives exactly that size. None: ``shorter`` for one number, ``fit`` for
            two.
        fraction: share of the training images to use; nested: a smaller share is part of a larger one of the same seed.
        max_images: most training images to use, chosen in the same way.
        eval_max_images: most images of each evaluation split, chosen in the same way.
        categories: names of the only classes to use, as the training file has them; or ids, where no name is a number.
            Training keeps the images that show one of them, evaluation all images, because a false alarm on another
            image counts.
        augment: what is done to training images.
        num_workers: processes that read and augment.
        seed: of order, augmentation and subsets.
        drop_last: leave out the last training batch of an epoch when it is smaller than the others.
        channels_last: give images in the channels-last memory format.
        memory_limit_mb: splits of up to this many decoded megabytes are kept in memory.
        cache: folder for the decoded and resized images of larger splits, one file each (3 bytes a pixel), made by the
            first run and shared by later ones. None: larger splits are decoded in every epoch.
        group_batches: batches among which images are exchanged to put like shapes together. 1: none.
        skip_bad_images: leave out images that are missing or damaged, with a warning, instead of refusing the set. In
            place of one that goes bad during a run another is trained on; in evaluation its objects count as missed.
        verify_images: decode every image once before training, so that a damaged file is found then and not hours
            later. The first start takes 6 ms of one core for a JPEG of 640 x 480, so 12 minutes of one core for COCO,
            all cores at work; what was whole is remembered in ``verified`` under ``cache``, else under
            ``$VISION_ATTN_DATA`` (``~/.cache/vision_attn``), until a file changes. False: a file whose damage does not
            show at its ends is found when its turn comes.
        overlap: what to do with validation or test images that are in the training set too, by their pixels (by the
            bytes of the files without ``verify_images``): ``error``, ``drop`` them from training with a warning, or
            ``allow`` them with a warning.

    Attributes:
        num_classes, labels, category_ids, img_size, preprocess: known at once. ``category_ids`` are the file's ids of
            the contiguous labels.
        data_hash: after ``setup``: 16 hexadecimal digits that change when the images or boxes read so far do.
        findings: what was repaired in the files read so far.

    Raises:
        UserError: for an unknown name, a value out of range, or files that are missing or cannot be used.
    """

    in_chans = 3
    train_loader, eval_loader = DetectionTrainLoader, DetectionEvalLoader

    def __init__(
        self,
        name: str = "digit_scenes",
        root: str | Path | None = None,
        train_json: str | Path | None = None,
        val_json: str | Path | None = None,
        test_json: str | Path | None = None,
        train_images: str | Path | None = None,
        val_images: str | Path | None = None,
        test_images: str | Path | None = None,
        batch_size: int = 16,
        eval_batch_size: int = 16,
        img_size: int | tuple[int, int] | None = None,
        max_size: int = 1333,
        resize: Literal["shorter", "fit", "stretch"] | None = None,
        fraction: float = 1.0,
        max_images: int | None = None,
        eval_max_images: int | None = None,
        categories: list[str] | None = None,
        augment: DetectionAugmentConfig = _OFF,
        num_workers: int = 0,
        seed: int = 0,
        drop_last: bool = False,
        channels_last: bool = False,
        memory_limit_mb: int = 1024,
        cache: str | Path | None = None,
        group_batches: int = 16,
        skip_bad_images: bool = False,
        verify_images: bool = True,
        overlap: Literal["error", "drop", "allow"] = "error",
    ) -> None:
        super().__init__()
        if name not in LAYOUTS:
            raise UserError(f"Unknown data set {name!r}.{closest(name, LAYOUTS)} There are: {', '.join(LAYOUTS)}.")
        positive = {"batch_size": batch_size, "eval_batch_size": eval_batch_size, "max_size": max_size}
        for key, value in {**positive, "group_batches": group_batches}.items():
            check_value(key, value, value >= 1, "at least 1")
        for key, most in (("max_images", max_images), ("eval_max_images", eval_max_images)):
            check_value(key, most, most is None or most >= 1, "at least 1")
        check_value("num_workers", num_workers, num_workers >= 0, "at least 0")
        check_value("fraction", fraction, 0.0 < fraction <= 1.0, "above 0 and at most 1")
        check_value("overlap", overlap, overlap in ("error", "drop", "allow"), "error, drop or allow")
        layout = LAYOUTS[name]
        self.name, self.layout = name, layout
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.fraction, self.max_images, self.eval_max_images = fraction, max_images, eval_max_images
        self.categories = None if categories is None else list(categories)
        self.num_workers, self.seed, self.drop_last, self.group_batches = num_workers, seed, drop_last, group_batches
        self.memory_limit, self.skip_bad_images, self.overlap = memory_limit_mb << 20, skip_bad_images, overlap
        self.cache = None if cache is None else Path(cache).expanduser()
        self.verify_images = verify_images
        self._verifier = Verifier((self.cache or data_root(None)) / "verified", verify_images)
        self.augment = replace(augment)
        self.resize = choose_resize(layout.resize, img_size, max_size, resize)
        self.maker = ViewMaker(self.augment, self.resize, seed)
        self._data_root = data_root(root)
        self.root = self._data_root / layout.folder
        if name == "digit_scenes":
            self.root = scenes_folder(self._data_root)
        self._json = {"train": train_json, "val": val_json, "test": test_json}
        self._images = {"train": train_images, "val": val_images, "test": test_images}
        self.findings: list[Any] = []
        self._tables: dict[str, CocoTable | None] = {}
        self._listed: dict[int, str] = {}  # the categories of the training file, before the choice
        self._splits: dict[str, DetectionSet | None] = {}
        self.labels, self.category_ids = self._classes()
        self.num_classes: int = len(self.labels)
        self.img_size: tuple[int, int] = self.resize.size
        self.preprocess: dict[str, Any] = {
            "size": list(self.resize.size),
            "resize": self.resize.mode,
            "mean": list(layout.mean),
            "std": list(layout.std),
            "interpolation": "bilinear",
            "crop_pct": 1.0,
        }
        self._ground = (torch.tensor(layout.mean) * 255.0).round().to(torch.uint8)
        self.augmenter = Augmenter(
            AugmentConfig(), mean=layout.mean, std=layout.std, num_classes=self.num_classes, channels_last=channels_last
        )
        self.data_hash: str | None = None

    # -- files ----------------------------------------------------------------------------------

    def annotation_file(self, split: Split) -> Path | None:
        """The annotation file of a split, or None where the set has none."""
        given = self._json[split]
        if given is None:
            known = self.layout.files.get(split)
            if known is None or (self.name == "coco" and split != "train" and self._json["train"] is not None):
                return None  # own training annotations are not validated on COCO's
            return self.root / known
        return self.root / Path(given).expanduser()

    def image_folder(self, split: Split) -> Path:
        """The folder of a split's images."""
        given = self._images[split]
        if given is not None:
            return self.root / Path(given).expanduser()
        file = self.annotation_file(split)
        assert file is not None
        known = self.layout.images.get(split)
        return self.root / known if self._json[split] is None and known else image_folder_of(self.root, file)

    def _classes(self) -> tuple[list[str], list[int]]:
        if self.name == "digit_scenes":  # known before a scene is made
            if self.categories is None:
                return [str(digit) for digit in range(10)], list(range(1, 11))
            prepare_scenes(self._data_root)
        table = self.table("train")
        assert table is not None
        return table.labels, table.category_ids

    def table(self, split: Split) -> CocoTable | None:
        """The annotations of a split, cut down to ``categories`` and checked, but not compared with the images."""
        if split not in self._tables:
            path = self.annotation_file(split)
            if path is None:
                self._tables[split] = None
                return None
            if not path.is_file() and not self.root.is_dir():
                raise UserError(f"There is no folder {self.root} with the set {self.name!r}: set data.root.")
            findings = Findings()
            table = read_coco(path, findings)
            if split == "train":
                self._listed = dict(zip(table.category_ids, table.names, strict=True))
                if self.categories is not None:
                    table = choose_categories(table, self.categories)
            else:
                reference = self.table("train")
                assert reference is not None
                if self.categories is not None:
                    table = drop_unchosen(table, reference, self._listed)
                table = match_categories(table, reference)
            self._note(findings)
            self._tables[split] = table
        return self._tables[split]

    def _note(self, findings: Findings) -> None:
        self.findings += findings.found
        findings.warn()

    # -- splits ---------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        if self.name == "digit_scenes":
            prepare_scenes(self._data_root)
        if self.cache is not None or self.verify_images:
            # by one process of each machine: the others find the decoded images, and which ones are whole
            state = None if self.trainer is None else self.trainer.state.fn
            self.setup("fit" if state is None else state.value)

    def setup(self, stage: str | None = None) -> None:
        """Read what a stage needs and no more: ``fit`` keeps no test images, it only compares them with training."""
        # training images are compared with those of validation: what was decoded for one is known to the other
        names: dict[str | None, tuple[Split, ...]] = {"fit": ("val", "train"), "validate": ("val",), "test": ("test",)}
        for split in names.get(stage, _SPLITS if stage is None else ("test",)):
            self.split(split)

    def split(self, name: Split) -> DetectionSet | None:
        """``train`` (cut down to the subset asked for), ``val`` or ``test``; read once.

        Returns:
            The images, or None where the data set has no such split.
        """
        if name not in self._splits:
            if self.name == "digit_scenes":
                prepare_scenes(self._data_root)
            table = self.table(name)
            self._splits[name] = None if table is None else self._read(name, table)
            parts = [part.digest for _, part in sorted(self._splits.items()) if part is not None]
            self.data_hash = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
        return self._splits[name]

    def _read(self, name: Split, table: CocoTable) -> DetectionSet:
        index = subset_rows(
            table,
            fraction=self.fraction if name == "train" else 1.0,
            most=self.max_images if name == "train" else self.eval_max_images,
            seed=self.seed,
            only_with_boxes=name == "train" and self.categories is not None,
        )
        whole, table = table, table.take(index)
        findings = Findings()
        folder, training = self.image_folder(name), name == "train"
        decoded = DecodedImages.of(table.sizes, self.maker, training, self.memory_limit)
        look = functools.partial(self._verifier.look, images=folder, keep=None if decoded is None else decoded.keep)
        table, paths, sizes, rows = compare_with_files(
            table, folder, findings, skip_bad=self.skip_bad_images, look=look, whole=whole
        )
        index = index[rows]
        if training:
            kept = self._without_overlap(table, paths, findings)
            table, paths, sizes, index = table.take(kept), [paths[row] for row in kept], sizes[kept], index[kept]
        stored = self.maker.stored(torch.from_numpy(sizes), training)
        try:
            pixels = where_pixels_fit(paths, stored, self.memory_limit, self.cache, decoded)
        except UnreadableImages as error:  # not verified, or gone bad since
            bad = [f"{table.files[row]}: {reason}" for row, reason in error.reasons.items()]
            report_bad("images that cannot be read", bad, table, findings, self.skip_bad_images)
            kept = np.setdiff1d(np.arange(len(paths)), list(error.reasons))
            if len(kept) == 0:
                raise UserError(f"{table.path}: none of its images in {folder} can be read.") from error
            table, paths, index = table.take(kept), [paths[row] for row in kept], index[kept]
            pixels = where_pixels_fit(paths, stored[torch.from_numpy(kept)], self.memory_limit, self.cache)
        table, cut = fit_boxes(table, findings)
        self._note(findings)
        if training and not (~table.crowd).any():
            raise UserError(f"{table.path}: no box is left to train on.")
        places = torch.from_numpy(index)
        data = DetectionSet(table, Boxes.of(table, cut), pixels, places, self.maker, self._ground)
        data.skip_bad_images = self.skip_bad_images
        return data

    def _without_overlap(self, table: CocoTable, paths: list[str], findings: Findings) -> np.ndarray:
        """The rows of the training images that may be trained on."""
        splits = _SPLITS[1:] if self.name != "digit_scenes" else ()
        others = [(split, other) for split in splits if (other := self.table(split)) is not None]
        names = short_names([table.path, *(other.path for _, other in others)])[1:]
        shared = []
        for name, (split, other) in zip(names, others, strict=True):
            folder = self.image_folder(split)
            pairs = self._verifier.shared((paths, self.image_folder("train")), (image_paths(other, folder), folder))
            shared.append((name, pairs))
        return without_overlap(table, shared, self.overlap, findings)

    def required(self, name: Split) -> DetectionSet:
        """The split.

        Raises:
            UserError: there is none.
        """
        data = self.split(name)
        if data is None:
            raise UserError(f"The data set {self.name!r} has no {name} images: set data.{name}_json.")
        return data

    def ground_truth(self, split: Split) -> dict[str, Any]:
        """A COCO dictionary of exactly the images that a split shows, with the file's ids and with crowds.

        Boxes are in pixels of ``orig_size``.
        """
        return self.required(split).table.to_coco()

    # -- loaders --------------------------------------------------------------------------------

    def _train_options(self, data: DetectionSet) -> dict[str, Any]:
        return {"group": self.group_batches}

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int = 0) -> dict[str, Any]:
        """Colour (training batches, which carry an ``epoch``), normalise, make the targets; on the batch's device."""
        images, mask = batch["image"], batch["mask"]
        if "epoch" in batch and self.augment.color_jitter:
            streams = (Stream.BRIGHTNESS, Stream.CONTRAST, Stream.SATURATION)
            draw = uniforms(self.seed, batch["epoch"], batch["index"], streams)
            images = jitter_in_pieces(images, self.augment.color_jitter, draw, mask)
        images = self.augmenter.normalize(images)
        if mask is not None:
            images = images.mul_(mask[:, None])
        out = {"image": images, "mask": mask, "targets": make_targets(batch), "index": batch["index"]}
        if "epoch" in batch:
            out["epoch"] = batch["epoch"]
        # Lightning casts inputs for precisions such as bf16-true before this hook, when images are still bytes, and
        # boxes integers: 8 bits would move them by pixels
        if self.trainer is not None:
            out["image"] = self.trainer.precision_plugin.convert_input(images)
        return out

    # -- pictures -------------------------------------------------------------------------------

    def sample_batch(
        self, n: int = 16, augmented: bool = True, epoch: int = 0, split: Split = "train"
    ) -> dict[str, Any]:
        """The first n images of an epoch, or of an evaluation split, as a model gets them.

        Args:
            n: how many at most.
            augmented: False shows training images whole.
            epoch: whose draws to show.
            split: from which to take them.

        Returns:
            A batch, see the class; :meth:`denormalize` gives pixels.
        """
        data = self.required(split)
        if split == "train":
            loader = DetectionTrainLoader(data, batch_size=n, seed=self.seed, group=1)
            rows = loader.rows(epoch)[0]
        else:
            rows = torch.arange(min(n, len(data)))
        batch = data.batch(rows, epoch if augmented and split == "train" else -1)
        return self.on_after_batch_transfer(batch)

    def denormalize(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) back to raw pixels, uint8."""
        return self.augmenter.denormalize(images)

    def describe(self, stage: Split) -> str:
        """What an evaluation looks at, in words."""
        data = self.required(stage)
        return f"{len(data):,} {stage} images with {len(data.boxes.labels):,} boxes"
