"""Training and evaluating a pointer network that sorts images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.config import AttentionConfig
from vision_attn.errors import UserError
from vision_attn.training.building import build_model, check_task
from vision_attn.training.classifier import prefers_channels_last
from vision_attn.training.module import TrainingModule
from vision_attn.training.optimizers import OptimizerConfig
from vision_attn.training.precision import widest
from vision_attn.training.reinforce import draws_keys


class Sorter(TrainingModule):
    """A pointer network with cross-entropy on every step's attention weights, the right past given.

    Batches are dictionaries: ``image`` (B, n, 3, H, W) float, ``order`` (B, n) int64, −1 beyond a sequence's end,
    ``mask`` (B, n) where there is padding, and for evaluations ``suffix``, which tells the metrics of several lengths
    apart. Logged, in 0 … 1: ``{val,test}/acc`` (sequences with every index right, decoded greedily) and
    ``element_acc`` (indices that are right). ``{train,val,test}/loss`` and ``train/acc`` are those of teacher forcing;
    in training, sequences count by their length.

    Args:
        name: of the model; ``vision-attn models`` lists them.
        args: further keywords of the model, e.g. ``{"decoder": "transformer"}``.
        attention: the attention mechanism of the encoder over images, in place of the model's own.
        img_size: (H, W) of the data (linked).
        labels: class names of the data in ascending order (linked).
        preprocess: how images become tensors (linked); travels with the checkpoint.
        optimizer: optimizer and schedule.
        compile: pass the model through ``torch.compile``.
        seed: of dropout and the like (linked to ``seed_everything``).

    Raises:
        UserError: unknown model or keyword, or a model of another task (from ``build_model``).
    """

    def __init__(
        self,
        name: str = "pointer_lstm",
        args: dict[str, Any] | None = None,
        attention: AttentionConfig | None = None,
        img_size: tuple[int, int] | None = None,
        labels: list[str] | None = None,
        preprocess: dict[str, Any] | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 (never changed; lists its options in --help)
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, seed)
        self.model = build_model("sorting", name, args, img_size=img_size, attention=attention)
        if draws_keys(self.model):
            raise UserError("normalizer 'sampled' learns by rewards, which sorting does not give: use straight_through")
        if labels is not None:
            self.model.config["labels"] = [str(label) for label in labels]
        if preprocess is not None:
            self.model.config["preprocess"] = dict(preprocess)
        if prefers_channels_last(self.model.image_encoder):  # type: ignore[arg-type]
            self.model.image_encoder.to(memory_format=torch.channels_last)  # a fifth faster
        if compile:
            self.model.compile()
        self._totals: dict[str, Tensor] = {}

    @classmethod
    def from_model(cls, model: Any, **_: Any) -> Sorter:
        """Wrap a finished model (from ``load_model``) for ``trainer.validate`` and ``trainer.test``."""
        self = cls.__new__(cls)
        TrainingModule.__init__(self)
        self.model = model
        check_task(model, "sorting")
        self._totals = {}
        return self

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the right index in every step."""
        order = batch["order"]
        log_weights = self.model(batch["image"], batch.get("mask"), order)  # (B, T, n)
        loss = step_loss(log_weights, order)
        with torch.no_grad():
            right = (log_weights.argmax(-1) == order) | (order < 0)
            # counted in images, so that the speed is in images too
            self.record(order.numel(), loss=loss * order.numel(), acc=right.all(1).sum() * order.shape[1])
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Collect losses, and sequences and indices that are right."""
        self._evaluate(batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Collect losses, and sequences and indices that are right."""
        self._evaluate(batch)

    def _evaluate(self, batch: dict[str, Any]) -> None:
        order, images, mask = batch["order"], batch["image"], batch.get("mask")
        loss = step_loss(self.model(images, mask, order), order)
        right = self.model.order(images, mask) == order  # beyond the end both are −1
        real = order >= 0
        hits, steps, count = (right & real).sum(), real.sum(), loss.new_tensor(len(order))
        values = torch.stack([loss * steps, hits, steps, right.all(1).sum(), count]).to(widest(loss.device))
        suffix = batch.get("suffix", "")
        self._totals[suffix] = self._totals[suffix] + values if suffix in self._totals else values

    def on_validation_epoch_end(self) -> None:
        """``val/loss``, ``val/acc``, ``val/element_acc`` over all processes."""
        self._finish("val")

    def on_test_epoch_end(self) -> None:
        """``test/loss``, ``test/acc``, ``test/element_acc`` over all processes; of further lengths with ``_n<n>``."""
        self._finish("test")

    def _finish(self, stage: str) -> None:
        suffixes = sorted(self._totals)
        totals = torch.stack([self._totals[suffix] for suffix in suffixes])
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(totals)
        for suffix, (loss, hits, steps, exact, count) in zip(suffixes, totals.tolist(), strict=True):
            values = {"loss": loss / steps, "acc": exact / count, "element_acc": hits / steps}
            self.log_dict({f"{stage}/{name}{suffix}": v for name, v in values.items()}, rank_zero_only=False)
        self._totals = {}

    def draw(self, run: Any, data: Any, device: torch.device | str = "cpu") -> list[Path]:
        """Learning curves, sorted sequences and the attention of one of them."""
        from vision_attn.training.pointer_pictures import draw_all

        return draw_all(run, self, data, device)


def step_loss(log_weights: Tensor, order: Tensor) -> Tensor:
    """Mean of −log weight of the right image over all steps: (B, T, n) and (B, T), −1 is left out → one number."""
    return F.nll_loss(log_weights.flatten(0, 1), order.flatten(), ignore_index=-1)
