"""Random predictions and targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


class Detections:
    """Makes predictions of several layers, and targets; a different prime for every dimension."""

    classes = 5

    def boxes(self, *shape: int) -> Tensor:
        """(…, 4) as ``cxcywh``."""
        return torch.cat([torch.rand(*shape, 2) * 0.8 + 0.1, torch.rand(*shape, 2) * 0.4 + 0.05], -1)

    def outputs(
        self, batch: int, classification: str = "softmax", layers: int = 3, queries: int = 13, **extra: Any
    ) -> dict[str, Any]:
        """Of a model; every tensor is a leaf that wants gradients."""
        logits = self.classes + (classification == "softmax")
        made = [
            {
                "pred_logits": torch.randn(batch, queries, logits).requires_grad_(),
                "pred_boxes": self.boxes(batch, queries).requires_grad_(),
            }
            for _ in range(layers)
        ]
        return {**made[-1], "aux_outputs": made[:-1], **extra}

    def targets(self, *counts: int) -> list[dict[str, Tensor]]:
        """One dictionary per image."""
        return [{"labels": torch.randint(self.classes, (n,)), "boxes": self.boxes(n)} for n in counts]

    def leaves(self, outputs: dict[str, Any]) -> list[Tensor]:
        """All predictions."""
        layers = [*outputs["aux_outputs"], outputs, *([outputs["enc_outputs"]] if "enc_outputs" in outputs else [])]
        return [layer[key] for layer in layers for key in ("pred_logits", "pred_boxes")]


@pytest.fixture(scope="session")
def make() -> Detections:
    return Detections()
