"""Training and evaluating a detector."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from vision_attn.attention.config import AttentionConfig
from vision_attn.detection.coco_eval import CocoMetric, coco_package
from vision_attn.detection.criterion import Criterion, CriterionConfig
from vision_attn.detection.postprocess import postprocess
from vision_attn.detection.report import nms_beside
from vision_attn.errors import UserError
from vision_attn.layers.resnet import FrozenBatchNorm
from vision_attn.training.building import build_model, check_task
from vision_attn.training.classifier import prefers_channels_last
from vision_attn.training.module import TrainingModule
from vision_attn.training.optimizers import OptimizerConfig, PeakRate

LOGGED = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar_100")
LOSSES = ("loss_class", "loss_bbox", "loss_giou")


class Detector(TrainingModule):
    """A detection transformer, matched to the objects in every decoder layer.

    Batches are dictionaries: ``image`` (B, 3, H, W) float, ``mask`` (B, H, W) bool or None, True = image, and
    ``targets``, for each image a dictionary with ``labels`` (n,), ``boxes`` (n, 4) as centre x, centre y, width, height
    in 0 … 1, ``image_id`` and ``orig_size`` (2,).

    Logged: ``{train,val,test}/loss``; in training the parts of the last decoder layer, ``train/loss_class``,
    ``train/loss_bbox``, ``train/loss_giou``, ``train/class_error``, and ``train/surplus``, objects per image beyond the
    number of queries; the same losses with ``_aux``, the sum of the layers before the last, ``_dn``, of denoising
    queries, summed over all layers, and ``_enc``, of the encoder's proposals, where the model has them: where layers
    refine boxes, ``loss_bbox`` is below ``loss_bbox_aux`` over its number of layers; in evaluations COCO's average
    precision and recall, 0 … 1: ``ap ap50 ap75 ap_small ap_medium ap_large ar_100``, those without any such object left
    out; in tests also ``ap_nms50 ap_nms70``, the average precision after non-maximum suppression, which a set predictor
    should not need.

    Args:
        name: of the model; ``vision-attn models`` lists them.
        args: further keywords of the model, e.g. ``{"num_queries": 50}``.
        attention: the attention mechanism, in place of the model's own.
        weights: a checkpoint to start from, ours or somebody else's (fine-tuning): see
            :func:`~vision_attn.checkpoints.transfer.start_from`. None: from scratch.
        num_classes: of the data (linked).
        img_size: (H, W) of the data (linked).
        labels: class names of the data (linked).
        category_ids: the ids of the classes in the data's files (linked); travel with the checkpoint.
        preprocess: how images become tensors (linked); travels with the checkpoint.
        optimizer: optimizer and schedule.
        lr_backbone: peak learning rate of all parameters of the backbone, with ``muon`` of those left to AdamW, too;
            None: that of everything else; 0: the backbone stays as it is, its norms' statistics and all.
        criterion: losses and matching costs.
        max_detections: per image, in evaluations.
        channels_last: memory format of the backbone; None means where convolutions overlap.
        compile: pass the model through ``torch.compile``.
        seed: of dropout, denoising queries and the like (linked to ``seed_everything``).

    Raises:
        UserError: unknown model or keyword, or a model of another task (from ``build_model``), a loss that does not
            belong to its head.
    """

    shown = frozenset(("loss", "class_error", "ap", "ap50"))

    def __init__(
        self,
        name: str = "dn_detr_tiny",
        args: dict[str, Any] | None = None,
        attention: AttentionConfig | None = None,
        weights: str | None = None,
        num_classes: int = 91,
        img_size: tuple[int, int] | None = None,
        labels: list[str] | None = None,
        category_ids: list[int] | None = None,
        preprocess: dict[str, Any] | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 (never changed; lists its options in --help)
        lr_backbone: float | None = None,
        criterion: CriterionConfig = CriterionConfig(),  # noqa: B008
        max_detections: int = 100,
        channels_last: bool | None = None,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, seed)
        self.model = build_model(
            "detection", name, args, img_size=img_size, num_classes=num_classes, attention=attention
        )
        config = self.model.config
        if labels is not None:
            config["labels"] = [str(label) for label in labels]
        if category_ids is not None:
            config["category_ids"] = [int(i) for i in category_ids]
        if preprocess is not None:
            config["preprocess"] = dict(preprocess)
        self.start_from(weights)
        self.started |= bool((args or {}).get("backbone_weights"))
        if lr_backbone is not None:
            self.optimizer_config = with_backbone_rate(optimizer, lr_backbone)
        self._setup(num_classes, criterion, max_detections, channels_last)
        if lr_backbone == 0:
            self.frozen = True
            self.model.backbone.requires_grad_(False).eval()
        if compile:
            self.model.compile()

    @classmethod
    def from_model(
        cls,
        model: Any,
        channels_last: bool | None = None,
        criterion: CriterionConfig | None = None,
        max_detections: int = 100,
    ) -> Detector:
        """Wrap a finished model (from ``load_model``) for ``trainer.validate`` and ``trainer.test``.

        Args:
            model: a detector.
            channels_last, max_detections: as for the class.
            criterion: losses to evaluate with; None: those that the model's head is made for.
        """
        self = cls.__new__(cls)
        TrainingModule.__init__(self)
        self.model = model
        check_task(model, "detection")
        classes = int(model.config["args"]["num_classes"])
        self._setup(classes, criterion or CriterionConfig(), max_detections, channels_last)
        return self

    def _setup(
        self, num_classes: int, criterion: CriterionConfig, max_detections: int, channels_last: bool | None
    ) -> None:
        self.criterion = Criterion(num_classes, criterion, self.model.classification)
        self.max_detections, self.frozen = max_detections, False
        self.channels_last = prefers_channels_last(self.model.backbone) if channels_last is None else channels_last
        if self.channels_last:
            self.model.backbone.to(memory_format=torch.channels_last)
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()
        # made when an evaluation starts, because they need the ground truth; no part of the module, which is saved
        self._precision: dict[str, Any] = {}
        self._seen_data: dict[str, Any] = {}  # whose ground truth that is
        self._label_map: dict[str, Tensor | None] = {}
        self.evaluation: Any = None  # of the last validation or test: tables and curves

    def forward(self, image: Tensor, mask: Tensor | None = None, targets: Any = None) -> dict[str, Any]:
        """Images (B, 3, H, W) float, normalized, with their mask (B, H, W), to the model's outputs."""
        if self.channels_last:
            image = image.contiguous(memory_format=torch.channels_last)
        return self.model(image, mask=mask, targets=targets)

    # -- training -----------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Refuse data that the head was not built for, and validations that cannot be scored, before the first step.

        Raises:
            UserError: another number of classes, or no package for average precision.

        Warns:
            UserWarning: images with more objects than there are queries; a frozen backbone into which nothing was
                loaded.
        """
        super().on_fit_start()
        found = getattr(getattr(self.trainer, "datamodule", None), "num_classes", None)
        if found not in (None, self.criterion.num_classes):
            raise UserError(
                f"the data have {found} classes, the model's head {self.criterion.num_classes}: "
                f"build it with num_classes={found}"
            )
        if self.trainer.enable_validation:  # the first one may be hours away
            coco_package()
        if self.trainer.is_global_zero:
            self._warn_of_surplus(getattr(self.trainer, "datamodule", None))
            self._warn_of_random_features()

    def _warn_of_random_features(self) -> None:
        """Frozen layers are for weights that somebody trained: without any, they stay at random."""
        still = self.frozen or any(isinstance(module, FrozenBatchNorm) for module in self.model.backbone.modules())
        if still and not self.started and not self.trainer.ckpt_path:
            warnings.warn(
                "the backbone is frozen, at least its norms and first layers, and nothing was loaded into it: give "
                "--model.args.backbone_weights true (or a file), --model.weights FILE, or train it all with "
                "--model.args.backbone_options.norm batch.",
                stacklevel=2,
            )

    def _warn_of_surplus(self, data: Any) -> None:
        boxes = getattr(data.split("train"), "boxes", None) if hasattr(data, "split") else None
        queries = int(self.model.num_queries)
        if boxes is None:
            return
        counts = boxes.starts.diff()
        over = int((counts > queries).sum())
        if over:
            warnings.warn(
                f"{over:,} of {len(counts):,} training images have more objects than the model has queries "
                f"({queries}; up to {int(counts.max())} objects): the surplus cannot be learned. "
                f"Raise --model.args.num_queries.",
                stacklevel=2,
            )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Match, and add up the losses of all layers.

        Raises:
            UserError: predictions that became NaN, with the step.
        """
        if self.frozen and self.model.backbone.training:  # somebody called model.train(): its norms would count along
            self.model.backbone.eval()
        outputs = self(batch["image"], batch["mask"], batch["targets"])
        try:
            losses = self.criterion(outputs, batch["targets"])
        except UserError as error:  # NaN, most of all
            where = f"step {self.global_step} (epoch {self.current_epoch}, lr {self.lr:.2g})"
            raise UserError(f"{where}: {error}") from None
        count = len(batch["targets"])
        self._record(count, losses)
        return losses["loss"]

    def _record(self, count: int, losses: dict[str, Tensor]) -> None:
        """All parts of the loss, for the means of the epoch."""
        sums = {name: value if name == "surplus" else value * count for name, value in losses.items()}
        if getattr(self.model, "denoising", {}).get("groups"):
            # a batch without objects has none of these; but processes add up their sums by name, so all have them
            nothing = torch.zeros_like(losses["surplus"])
            sums = {f"{name}_dn": nothing for name in LOSSES} | sums
        self.record(count, **sums)

    def take_means(self) -> dict[str, float]:
        """As of every task; objects without a query are shown where there are any."""
        means = super().take_means()
        self.shown = type(self).shown | ({"surplus"} if means.get("train/surplus", 0) > 0 else set())
        return means

    # -- evaluation ---------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Have the ground truth ready."""
        self._begin("val")

    def on_test_epoch_start(self) -> None:
        """Have the ground truth ready."""
        self._begin("test")

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Collect losses and detections."""
        self._evaluate(batch, batch_idx, "val", self.val_loss)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Collect losses and detections."""
        self._evaluate(batch, batch_idx, "test", self.test_loss)

    def on_validation_epoch_end(self) -> None:
        """``val/loss`` and ``val/ap…`` over all processes; every image counts once."""
        self._finish("val", self.val_loss)

    def on_test_epoch_end(self) -> None:
        """``test/loss`` and ``test/ap…`` over all processes; every image counts once."""
        self._finish("test", self.test_loss)

    def _begin(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self._seen_data.get(stage) is not data:
            own, theirs = self.model.config.get("category_ids") or data.category_ids, data.category_ids
            truth = data.ground_truth(stage)
            self._precision[stage] = CocoMetric(truth, category_ids=own, max_dets=self.max_detections)
            self._label_map[stage], self._seen_data[stage] = label_map(own, theirs), data
        self._precision[stage].reset()
        self._precision[stage].to(self.device)

    def _evaluate(self, batch: dict[str, Any], batch_idx: int, stage: str, mean: MeanMetric) -> None:
        try:
            self._score(batch, stage, mean)
        except UserError as error:
            where = f"{stage}, batch {batch_idx}"
            if self.trainer.state.fn == "fit":
                where += f", after step {self.global_step} (epoch {self.current_epoch}, lr {self.lr:.2g})"
            raise UserError(f"{where}: {error}") from None

    def _score(self, batch: dict[str, Any], stage: str, mean: MeanMetric) -> None:
        targets = batch["targets"]
        ids = [int(target["image_id"]) for target in targets]
        outputs = self(batch["image"], batch["mask"])
        labels = self._label_map[stage]
        if labels is not None:  # otherwise the model does not know all classes of the data, and there is no loss
            labels = labels.to(self.device)
            known = [{**target, "labels": labels[target["labels"]]} for target in targets]
            # losses are means over objects, so batches count by their objects
            count = max(1, sum(len(target["labels"]) for target in known))
            mean.update(self.criterion(outputs, known)["loss"], weight=count)
        sizes = torch.stack([target["orig_size"] for target in targets])
        names = [f"image {i}" for i in ids]
        found = postprocess(outputs, sizes, self.model.classification, topk=self.max_detections, names=names)
        self._precision[stage].update(ids, found)

    def _finish(self, stage: str, mean: MeanMetric) -> None:
        numbers = self._precision[stage].compute()
        self.evaluation = self._precision[stage].evaluation
        values = {name: numbers[name] for name in LOGGED if name in numbers and not math.isnan(numbers[name])}
        if self._label_map[stage] is not None:
            values["loss"] = float(mean.compute())
        if stage == "test":  # two more evaluations: not after every epoch
            values |= {name: value for name, value in nms_beside(self.evaluation).items() if not math.isnan(value)}
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, rank_zero_only=False)
        mean.reset()

    def draw(self, run: Any, data: Any, device: torch.device | str = "cpu") -> list[Path]:
        """Learning curves, training images, detections, average precision by class, curves and confusions."""
        from vision_attn.training.detection_pictures import draw_all

        return draw_all(run, self, data, device)


def with_backbone_rate(optimizer: OptimizerConfig, lr: float) -> OptimizerConfig:
    """The optimizer with another peak learning rate for ``backbone.*``; patterns that were given go first.

    Args:
        optimizer: of the detector.
        lr: of every parameter of the backbone, whatever the algorithm, and whatever the rate of the others.

    Raises:
        UserError: a negative rate.
    """
    if not lr >= 0:
        raise UserError(f"lr_backbone must not be negative, got {lr}")
    if lr == 0:  # the caller freezes it
        return optimizer
    return dataclasses.replace(optimizer, lr_mult={**(optimizer.lr_mult or {}), "backbone.*": PeakRate(lr)})


def label_map(own: list[int], theirs: list[int]) -> Tensor | None:
    """The data's label to the model's: position i holds the place of ``theirs[i]`` in ``own``; None if one lacks."""
    place = {category: i for i, category in enumerate(own)}
    if any(category not in place for category in theirs):
        return None
    return torch.tensor([place[category] for category in theirs], dtype=torch.int64)
