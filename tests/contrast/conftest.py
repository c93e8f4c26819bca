"""A study of a few seconds: two tiny models on a few digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vision_attn.cli.quiet import quiet
from vision_attn.contrast.config import ContrastConfig, DataChoice, ModelChoice, NoiseChoice
from vision_attn.contrast.results import Cell
from vision_attn.contrast.runner import Plan, make_plan
from vision_attn.contrast.training import Outcome, Trainings

VIT = {"patch_size": 4, "embed_dim": 14, "depth": 2, "num_heads": 2, "class_token": False, "global_pool": "avg"}
CNN = {"width": 3, "blocks": [1, 1, 1]}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    with quiet():
        yield
    torch.set_num_threads(before)


def make_tiny(**changes: Any) -> ContrastConfig:
    settings: dict[str, Any] = {
        "models": {"vit": ModelChoice("vit_tiny_patch16_224", VIT), "cnn": ModelChoice("resnet8_cifar", CNN)},
        "data": DataChoice("digits"),
        "sizes": [0.02, 0.1],
        "arms": ["none", "flip_crop"],
        "noise": NoiseChoice(levels=[0.4], sizes=[0.1], seeds=1),
        "seeds": 1,
        "small_seeds": 2,
        "steps": 7,
        "batch_size": 11,
        "learning_rates": [1e-3, 1e-2],
        "evaluations": 3,
        "match": False,
        "device": "cpu",
    }
    return ContrastConfig(**{**settings, **changes})


class Here:
    """Runs cells in this process; ``stop_after`` raises as Ctrl-C would."""

    def __init__(self, plan: Plan, stop_after: int | None = None) -> None:
        self.trainings = Trainings(plan.config, data=plan.data)
        self.ran: list[str] = []
        self.stop_after = stop_after

    def run(self, cells: list[Cell], started: Callable[[Cell], None]) -> Iterator[tuple[Cell, Outcome]]:
        for cell in cells:
            started(cell)
            if self.stop_after is not None and len(self.ran) == self.stop_after:
                raise KeyboardInterrupt
            self.ran.append(cell.id)
            yield cell, self.trainings.run(cell)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., ContrastConfig]:
    """Makes the configuration of the tiny study, with changes."""
    return make_tiny


@pytest.fixture(scope="session")
def here() -> type[Here]:
    """An executor in this process."""
    return Here


@pytest.fixture(scope="session")
def plan() -> Plan:
    """The tiny study, nothing trained."""
    return make_plan(make_tiny())
