"""What a recipe's ``task:`` stands for. A new task is a new line here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from vision_attn.errors import UserError, closest


@dataclass(frozen=True)
class Task:
    """Where the classes of a task are, and what makes one of its checkpoints better than another.

    Attributes:
        module: ``package.module:Class`` of the LightningModule.
        data: ``package.module:Class`` of the LightningDataModule.
        monitor: the metric to maximize.
        links: attributes of the data module that become arguments of the module.
    """

    module: str
    data: str
    monitor: str
    links: tuple[str, ...]

    def module_class(self) -> Any:
        """The LightningModule class."""
        return _load(self.module)

    def data_class(self) -> Any:
        """The LightningDataModule class."""
        return _load(self.data)


TASKS = {
    "classification": Task(
        module="vision_attn.training.classifier:Classifier",
        data="vision_attn.data:ImageData",
        monitor="val/acc",
        links=("num_classes", "img_size", "labels", "preprocess"),
    ),
    "detection": Task(
        module="vision_attn.training.detector:Detector",
        data="vision_attn.data.detection:DetectionData",
        monitor="val/ap",
        links=("num_classes", "img_size", "labels", "category_ids", "preprocess"),
    ),
    "sorting": Task(
        module="vision_attn.training.pointer:Sorter",
        data="vision_attn.data.sorting:SortingData",
        monitor="val/acc",
        links=("img_size", "labels", "preprocess"),
    ),
}


def task_by_name(name: str) -> Task:
    """Look a task up.

    Raises:
        UserError: there is no such task.
    """
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}.{closest(str(name), TASKS)} There is: {', '.join(TASKS)}.")
    return TASKS[name]


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
