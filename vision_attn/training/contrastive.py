"""Two encoders that learn to agree on what belongs together."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def contrastive_loss(a: Tensor, b: Tensor, temperature: float | Tensor = 0.07) -> Tensor:
    """The symmetric loss of CLIP (Radford et al. 2021, arXiv 2103.00020, figure 3).

    Row i of ``a`` belongs to row i of ``b`` and to none of the others. The cosines of all pairs, divided by the
    temperature, are the logits of two classifications: which b belongs to each a, and which a to each b. The loss is
    the mean of both cross-entropies, in float32 at least; exchanging ``a`` and ``b`` does not change it. It is ln B
    for embeddings that say nothing.

    Args:
        a, b: (B, D) embeddings; normalized here.
        temperature: a positive number.

    Returns:
        A number.

    Raises:
        ValueError: embeddings of other or different shapes, or a temperature that is not positive.
    """
    if a.dim() != 2 or a.shape != b.shape:
        raise ValueError(
            f"a contrastive loss compares two (B, D) sets of embeddings, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature={temperature} is not positive")
    with torch.autocast(a.device.type, enabled=False):  # cosines over a small temperature need more than 8 bits
        wide = torch.promote_types(a.dtype, torch.float32)
        a, b = F.normalize(a.to(wide), dim=-1), F.normalize(b.to(wide), dim=-1)
        logits = a @ b.T / temperature  # (B, B)
        matches = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(logits, matches) + F.cross_entropy(logits.T, matches)) / 2


class ContrastiveLoss(nn.Module):
    """``contrastive_loss`` with a learned temperature.

    What is learned is ln(1 / temperature). As in CLIP (Radford et al. 2021, arXiv 2103.00020, section 2.5) it is cut
    off where 1 / temperature is 100, before each step of training, so that it can come back from there.

    Args:
        temperature: where it begins.

    Raises:
        ValueError: it is not at least 0.01.
    """

    LIMIT = math.log(100)

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        if not temperature >= 0.01:
            raise ValueError(f"temperature={temperature} must be at least 0.01")
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / temperature)))

    @property
    def temperature(self) -> Tensor:
        """The temperature now."""
        # not clamp, which has no gradient at the limit itself
        return (-self.log_scale.where(self.log_scale <= self.LIMIT, self.LIMIT)).exp()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, D) and (B, D) → a number."""
        if self.training:
            with torch.no_grad():
                self.log_scale.clamp_(max=self.LIMIT)
        return contrastive_loss(a, b, self.temperature)


class DualEncoder(nn.Module):
    """Two models that map their inputs into one space (Radford et al. 2021, arXiv 2103.00020).

    Args:
        first, second: modules from a batch to (B, D): two models of the zoo with ``num_classes=D``, or one model twice,
            which then is shared.
        temperature: where the learned temperature begins.

    Example:
        >>> towers = [va.create_model(name, num_classes=64) for name in ("vit_tiny_patch16_224", "resnet20_cifar")]
        >>> loss = DualEncoder(*towers).loss(images, other_views)
    """

    def __init__(self, first: nn.Module, second: nn.Module, *, temperature: float = 0.07) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.criterion = ContrastiveLoss(temperature)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(B, …) and (C, …) → (B, C) cosines of all pairs."""
        a, b = F.normalize(self.first(x), dim=-1), F.normalize(self.second(y), dim=-1)
        if a.shape[-1] != b.shape[-1]:
            raise ValueError(f"the encoders' embeddings differ in width: {a.shape[-1]} and {b.shape[-1]}")
        return a @ b.T

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """(B, …) and (B, …) → the symmetric loss, where x[i] belongs to y[i]."""
        return self.criterion(self.first(x), self.second(y))
