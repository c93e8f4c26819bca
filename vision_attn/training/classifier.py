"""Training and evaluating an image classifier."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from vision_attn.attention.config import AttentionConfig
from vision_attn.attention.normalizers import collect_log_probs
from vision_attn.training.building import build_model, check_task
from vision_attn.training.module import TrainingModule
from vision_attn.training.optimizers import OptimizerConfig
from vision_attn.training.reinforce import Reinforce, draws_keys


class Classifier(TrainingModule):
    """A model of the zoo with cross-entropy.

    Batches are dictionaries: ``image`` (B, 3, H, W) float, ``label`` (B,) int64, or (B, classes) float where labels are
    mixed. Logged: ``{train,val,test}/{loss,acc}``, accuracies in 0 ... 1. ``train/acc`` of mixed images counts the
    class with the larger share; validation and test losses are without label smoothing.

    Args:
        name: of the model; ``vision-attn models`` lists them.
        args: further keywords of the model, e.g. ``{"drop_path": 0.1}``.
        attention: the attention mechanism, in place of the model's own.
        weights: a checkpoint to start from, ours or somebody else's (fine-tuning): see
            :func:`~vision_attn.checkpoints.transfer.start_from`. None: from scratch.
        num_classes: of the data (linked).
        img_size: (H, W) of the data (linked).
        labels: class names of the data (linked).
        preprocess: how images become tensors (linked); travels with the checkpoint.
        optimizer: optimizer and schedule.
        label_smoothing: share of the target spread over all classes (Szegedy et al. 2016).
        channels_last: memory format of convolutions; None means for models with overlapping convolutions.
        compile: pass the model through ``torch.compile``.
        seed: of dropout and the like (linked to ``seed_everything``).

    Raises:
        UserError: unknown model or keyword, or a model of another task (from ``build_model``).
    """

    reinforce: Reinforce | None  # of a model that draws keys

    def __init__(
        self,
        name: str,
        args: dict[str, Any] | None = None,
        attention: AttentionConfig | None = None,
        weights: str | None = None,
        num_classes: int = 1000,
        img_size: tuple[int, int] | None = None,
        labels: list[str] | None = None,
        preprocess: dict[str, Any] | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 (never changed; lists its options in --help)
        label_smoothing: float = 0.0,
        channels_last: bool | None = None,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, seed)
        self.model = build_model(
            "classification", name, args, img_size=img_size, num_classes=num_classes, attention=attention
        )
        if labels is not None:
            self.model.config["labels"] = [str(label) for label in labels]
        if preprocess is not None:
            self.model.config["preprocess"] = dict(preprocess)
        self.start_from(weights)
        self._setup(num_classes, label_smoothing, channels_last, compile)

    @classmethod
    def from_model(cls, model: Any, channels_last: bool | None = None) -> Classifier:
        """Wrap a finished model (from ``load_model``) for ``trainer.validate`` and ``trainer.test``."""
        self = cls.__new__(cls)
        TrainingModule.__init__(self)
        self.model = model
        check_task(model, "classification")
        self._setup(int(model.config["args"]["num_classes"]), 0.0, channels_last, False)
        return self

    def _setup(self, num_classes: int, label_smoothing: float, channels_last: bool | None, compile: bool) -> None:
        self.label_smoothing = label_smoothing
        channels = self.model.config["args"].get("in_chans", 3)
        self.reinforce = Reinforce(channels) if draws_keys(self.model) else None
        self.channels_last = prefers_channels_last(self.model) if channels_last is None else channels_last
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)
        if compile:
            self.model.compile()  # in place: names in the checkpoint stay the same
        # one metric gives accuracy and the confusion matrix; states are sums, so processes add up exactly
        self.val_confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        self.val_loss = MeanMetric()
        self.test_confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        self.test_loss = MeanMetric()
        self.confusion: Tensor | None = None  # (classes, classes) counts of the last validation, rows are truths

    def forward(self, image: Tensor) -> Tensor:
        """Images (B, 3, H, W) float, normalized, to logits (B, classes) in float32."""
        if self.channels_last:
            image = image.contiguous(memory_format=torch.channels_last)
        return self.model(image).float()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy with label smoothing; hard and soft labels. Drawn keys learn by REINFORCE beside it."""
        label = batch["label"]
        with collect_log_probs() as draws:
            logits = self(batch["image"])
        loss = F.cross_entropy(logits, label, label_smoothing=self.label_smoothing)
        with torch.no_grad():
            hard = label if label.ndim == 1 else label.argmax(1)
            self.record(len(hard), loss=loss * len(hard), acc=(logits.argmax(1) == hard).sum())
        return loss if self.reinforce is None else loss + self.reinforce(batch["image"], logits, label, draws)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The model's optimizer, which also steps the baseline of drawn keys."""
        optimizer = super().configure_optimizers()
        if self.reinforce is not None:
            self.reinforce.add_to(optimizer)
        return optimizer

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Collect loss and confusion matrix."""
        self._evaluate(batch, self.val_loss, self.val_confusion)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Collect loss and confusion matrix."""
        self._evaluate(batch, self.test_loss, self.test_confusion)

    def _evaluate(self, batch: dict[str, Tensor], loss: MeanMetric, confusion: MulticlassConfusionMatrix) -> None:
        label = batch["label"]
        logits = self(batch["image"])
        loss.update(F.cross_entropy(logits, label), weight=len(label))
        confusion.update(logits.argmax(1), label)

    def on_validation_epoch_end(self) -> None:
        """``val/loss``, ``val/acc`` over all processes; every sample counts once."""
        self.confusion = self._finish("val", self.val_loss, self.val_confusion)

    def on_test_epoch_end(self) -> None:
        """``test/loss``, ``test/acc`` over all processes; every sample counts once."""
        self.confusion = self._finish("test", self.test_loss, self.test_confusion)

    def _finish(self, stage: str, loss: MeanMetric, confusion: MulticlassConfusionMatrix) -> Tensor:
        counts = confusion.compute()
        accuracy = counts.diag().sum() / counts.sum().clamp_min(1)
        self.log_dict({f"{stage}/loss": loss.compute(), f"{stage}/acc": accuracy.float()}, rank_zero_only=False)
        loss.reset()
        confusion.reset()
        return counts.cpu()


def prefers_channels_last(model: nn.Module) -> bool:
    """Whether a model convolves with windows that overlap, be it only in its tokenizer: faster with channels last.

    The patches of a ViT do not overlap: cutting them is one matrix product, whatever the memory format.
    """
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return any(size > step for conv in convolutions for size, step in zip(conv.kernel_size, conv.stride, strict=True))
