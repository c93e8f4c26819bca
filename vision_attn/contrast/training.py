"""One cell: a training from its first weights to its measures, the same numbers every time on the same machine."""

from __future__ import annotations

import copy
import math
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.contrast.cells import shows_looks
from vision_attn.contrast.config import Arm, ContrastConfig
from vision_attn.contrast.identity import code_hash
from vision_attn.contrast.measures import (
    accuracy_and_loss,
    best_row,
    calibration_error,
    evaluation_steps,
    memorised,
    predict,
    turning_point,
)
from vision_attn.contrast.results import TRIAL_SEED, Cell, Result
from vision_attn.contrast.subsets import StudyData, load_data, sample_rows, training_images
from vision_attn.data.augment import Augmenter
from vision_attn.data.loader import TrainLoader
from vision_attn.data.sets import MemorySet, StreamedSet
from vision_attn.errors import UserError, first_line
from vision_attn.models import create_model
from vision_attn.models.profile import count_macs, count_parameters
from vision_attn.training.classifier import prefers_channels_last
from vision_attn.training.memory import keep_freed_memory
from vision_attn.training.module import seed_generators, step_seed
from vision_attn.training.optimizers import build_optimizer
from vision_attn.training.schedule import lr_factor_by_step

_FIRST_WEIGHTS = -1  # the "epoch" of the seed that draws them
_WHITENING_IMAGES = 5000
_LOOK_EVERY = 50  # steps, where reading the loss off the device costs time


class CellFailed(Exception):
    """A training that has no result, for a reason that belongs into the report."""


@dataclass
class Outcome:
    """What a cell gave.

    Attributes:
        result: its measures, or why there are none.
        looks: where its attention or its receptive field reaches; for some cells only.
        trace: where an unexpected error came from.
        code: hash of the package's sources in the process that ran the cell.
    """

    result: Result
    looks: dict[str, Any] | None = None
    trace: str = ""
    code: str = ""


def pick_device(name: str) -> torch.device:
    """``auto``: CUDA where there is some, otherwise the CPU.

    Raises:
        UserError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not (name.split(":")[0] == "cuda" and torch.cuda.is_available()):
        raise UserError(f"device {name}: this machine has no such device that PyTorch can use; choose auto or cpu.")
    return torch.device(name)


def make_model(config: ContrastConfig, name: str, data: StudyData) -> nn.Module:
    """A model of the study with fresh weights."""
    choice = config.models[name]
    return create_model(
        choice.name,
        num_classes=len(data.labels),
        img_size=data.img_size,
        attention=choice.attention,
        **(choice.args or {}),
    )


class Trainings:
    """Data and device of a process that runs cells.

    Args:
        config: of the study.
        data_hash: what the data must be; None for any.
        data: read already.

    Raises:
        UserError: this process cannot read the same data.
    """

    def __init__(self, config: ContrastConfig, data_hash: str | None = None, data: StudyData | None = None) -> None:
        torch.set_num_threads(config.threads)
        keep_freed_memory()
        self.config, self.device, self.code = config, pick_device(config.device), code_hash()
        if self.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not repeatable
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.data = load_data(config.data) if data is None else data
        if data_hash not in (None, self.data.hash):
            raise UserError(f"a job found other images (data hash {self.data.hash}) than the study ({data_hash}).")

    def run(self, cell: Cell) -> Outcome:
        """See :func:`run_cell`."""
        outcome = run_cell(self.config, self.data, cell, self.device)
        outcome.code = self.code
        return outcome


def run_cell(config: ContrastConfig, data: StudyData, cell: Cell, device: torch.device) -> Outcome:
    """Train and measure; whatever goes wrong becomes a failed result with its reason."""
    try:
        return Training(config, data, cell, device).run()
    except CellFailed as error:
        return Outcome(Result(cell, "failed", str(error)))
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Outcome(Result(cell, "failed", f"out of memory: {first_line(error, 300)}"))
    except Exception as error:
        kind = "out of memory" if "allocate memory" in str(error) else type(error).__name__
        return Outcome(Result(cell, "failed", f"{kind}: {first_line(error, 300)}"), trace=traceback.format_exc())


class Training:
    """The state of one training.

    Args:
        config: of the study.
        data: its images.
        cell: which training.
        device: where.
    """

    def __init__(self, config: ContrastConfig, data: StudyData, cell: Cell, device: torch.device) -> None:
        self.config, self.data, self.cell, self.device = config, data, cell, device
        self.arm: Arm = config.arm(cell.arm, data.img_size)
        self.autocast = config.precision == "bf16-mixed"
        self.images, self.true = training_images(data, cell.size, cell.noise, cell.seed)
        seed_generators(step_seed(cell.seed, _FIRST_WEIGHTS, cell.role, 0), device)
        self.model = make_model(config, cell.model, data)
        self.channels_last = prefers_channels_last(self.model)
        self.model.to(device, memory_format=torch.channels_last if self.channels_last else torch.preserve_format)  # type: ignore[call-overload]
        self.augmenter: Augmenter = data.augmenter(self.arm, cell.seed, self.channels_last)
        if hasattr(self.model, "init_whitening"):
            rows = sample_rows(self.images, _WHITENING_IMAGES)
            self.model.init_whitening(self.augmenter.normalize(self.images.batch(rows)["image"].to(device)))  # type: ignore[operator]
        self.curve: list[dict[str, float]] = []
        self.best: dict[str, Tensor] = {}

    def run(self) -> Outcome:
        """Train, measure.

        Raises:
            CellFailed: a loss is no number any more.
        """
        start = time.perf_counter()
        due = evaluation_steps(self.cell.steps, self.config.evaluations)
        for step in self.steps():
            if step in due:
                self._evaluate(step)
        values = self._measure() | {
            "params": count_parameters(self.model),
            "macs": count_macs(self.model, self.data.img_size),
            "steps": self.cell.steps,
        }
        looks = None
        if shows_looks(self.config, self.cell):
            from vision_attn.contrast.looks import look

            looks = look(self.model, self.data, self.augmenter, self.device)
        values["seconds"] = round(time.perf_counter() - start, 3)
        return Outcome(Result(self.cell, "done", "", values, self.curve), looks)

    # -- training -------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Train; after every optimizer step its number, from 1."""
        cell = self.cell
        config = self.config.optimizer_of(cell.model, cell.arm, cell.lr, self.data.img_size)
        optimizer = build_optimizer(self.model, config)
        floor = config.min_lr / cell.lr
        self.model.train()
        for step, (epoch, number, batch) in zip(range(cell.steps), self._batches(), strict=False):
            seed_generators(step_seed(cell.seed, epoch, number, 0), self.device)
            factor = lr_factor_by_step(step, cell.steps, config.warmup, config.schedule, floor)
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            loss = self._loss(batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if self.device.type == "cpu" or (step + 1) % _LOOK_EVERY == 0:
                self._check(float(loss.detach()), "training", step + 1)
            yield step + 1

    def _batches(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Epoch, number within it, and batch; without end, in the same order for every model."""
        loader = TrainLoader(
            self.images,
            batch_size=min(self.config.batch_size, len(self.images)),
            seed=self.cell.seed,
            drop_last=True,
            partners=self.arm.augment.mixes and isinstance(self.images, MemorySet),
            num_workers=self.data.num_workers,
        )
        epoch = 0
        while True:
            for number, batch in enumerate(loader):
                moved = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
                yield epoch, number, self.augmenter.train(moved)
            epoch += 1

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(batch["image"])
        return F.cross_entropy(logits.float(), batch["label"], label_smoothing=self.arm.label_smoothing)

    def _check(self, loss: float, which: str, step: int) -> None:
        if not math.isfinite(loss):
            raise CellFailed(f"the {which} loss became {loss} at step {step} (learning rate {self.cell.lr:g})")

    # -- measuring ------------------------------------------------------------------------------------

    def predict(self, images: MemorySet | StreamedSet, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """Logits and labels of all images or ``limit`` of them, see :func:`~vision_attn.contrast.measures.predict`."""
        return predict(
            self.model,
            images,
            self.augmenter,
            device=self.device,
            autocast=self.autocast,
            limit=limit,
            num_workers=self.data.num_workers,
        )

    def _evaluate(self, step: int) -> None:
        """A row of the curve; the weights with the highest validation accuracy are kept."""
        limit = self.config.eval_images
        row: dict[str, float] = {"step": step}
        row |= accuracy_and_loss(*self.predict(self.images, limit), "train")
        row |= accuracy_and_loss(*self.predict(self.data.val, limit), "val")
        self._check(row["train_loss"] + row["val_loss"], "evaluation", step)
        self.curve.append({key: row[key] for key in ("step", "train_loss", "train_acc", "val_loss", "val_acc")})
        if best_row(self.curve) is self.curve[-1] and self.cell.seed != TRIAL_SEED:
            self.best = copy.deepcopy(self.model.state_dict())

    def _measure(self) -> dict[str, float]:
        """Everything that is read off the finished model; a trial never touches the test set."""
        logits, given = self.predict(self.images)
        values = accuracy_and_loss(logits, given, "train") | accuracy_and_loss(logits, self.true, "train_clean")
        if bool((given != self.true).any()):
            values["memorised"] = memorised(logits, given, self.true)
        values |= accuracy_and_loss(*self.predict(self.data.val), "val")
        values |= turning_point(self.curve)
        if self.cell.seed != TRIAL_SEED:
            values |= self._test(values["train_acc"], values["train_loss"])
        self._check(sum(values.values()), "final", self.cell.steps)
        return values

    def _test(self, train_acc: float, train_loss: float) -> dict[str, float]:
        """The test set, evaluated once, at the end: by the last weights and by the best ones of the trajectory."""
        logits, labels = self.predict(self.data.test)
        values = accuracy_and_loss(logits, labels, "test")
        values |= {"gap_acc": train_acc - values["test_acc"], "gap_loss": values["test_loss"] - train_loss}
        values["ece"] = calibration_error(logits, labels)
        row = best_row(self.curve)
        last = self.model.state_dict()
        if row is not self.curve[-1]:
            last = copy.deepcopy(last)
            self.model.load_state_dict(self.best)
            logits, labels = self.predict(self.data.test)
            self.model.load_state_dict(last)
        values |= {"best_step": row["step"], "best_val_acc": row["val_acc"], "best_val_loss": row["val_loss"]}
        return values | accuracy_and_loss(logits, labels, "best_test")
