"""REINFORCE: how attention that draws its keys learns where to look.

A drawn key passes no gradient to its score. The gradient of the expected loss over draws z ~ p is

    ∇ E[loss(z)] = E[∇ loss(z)] + E[loss(z) · ∇ log p(z)],

and one draw of both terms estimates it without bias (Williams 1992; for attention Mnih et al. 2014, arXiv 1406.6247,
and Xu et al. 2015, arXiv 1502.03044). Anything that does not depend on the draw may be taken off the loss in the
second term: a baseline that has learned to predict it leaves the expectation as it is and the variance small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def draws_keys(model: nn.Module) -> bool:
    """Whether a model has attention that draws keys in training, ``{"normalizer": "sampled"}``."""
    from vision_attn.attention.normalizers import Sampled

    return any(isinstance(module, Sampled) for module in model.modules())


def log_prob(draws: Sequence[Tensor], batch: int) -> Tensor:
    """The log-probability of everything that was drawn for each image.

    Args:
        draws: from ``collect_log_probs``: one tensor a layer whose first dimension is the batch, or the batch times the
            windows of an image.
        batch: B.

    Returns:
        (B,) sums, float32.

    Raises:
        ValueError: nothing was drawn.
    """
    if not draws:
        raise ValueError("the model drew no key: its layers must be in training mode and their normalizer 'sampled'")
    return torch.stack([draw.float().reshape(batch, -1).sum(dim=1) for draw in draws]).sum(dim=0)


def surrogate(reward: Tensor, baseline: Tensor, log_probs: Tensor) -> Tensor:
    """A number whose gradient is one draw of the second term above: -mean((reward - baseline) · log p).

    Args:
        reward: (B,) of each image, larger is better, e.g. minus its loss.
        baseline: (B,) what was expected before anything was drawn. No gradient flows to either of the two.
        log_probs: (B,) of all draws for the image.

    Returns:
        () to be added to the loss. Its value means nothing.
    """
    return -((reward - baseline).detach() * log_probs).mean()


class Baseline(nn.Module):
    """Predicts an image's reward from a coarse view of it, before anything is drawn: linear in 4 x 4 means per channel.

    Args:
        in_chans: channels of the images.
    """

    def __init__(self, in_chans: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(16 * in_chans, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) images to (B,) rewards."""
        view = F.adaptive_avg_pool2d(image.detach(), 4).flatten(1)
        return self.linear(view.to(self.linear.weight.dtype)).squeeze(1)


class Reinforce(nn.Module):
    """What a classifier adds to its loss so that drawn keys learn: :func:`surrogate`, and the baseline's squared error.

    The reward is 1 where the model is right and 0 where it is wrong (Mnih et al. 2014), so keys are drawn for accuracy
    while everything else follows the cross-entropy. Minus the cross-entropy would be one objective for both, but says
    nearly nothing while the model knows nothing: on ``digits_canvas`` a first form of ``glimpse_small_32`` had reached
    29 % with it after nine epochs, and 88 % with the other (one run each).

    Args:
        in_chans: channels of the images.
    """

    def __init__(self, in_chans: int = 3) -> None:
        super().__init__()
        self.baseline = Baseline(in_chans)

    def add_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the model step the baseline too, at a rate of its own."""
        like = next(group for group in optimizer.param_groups if group.get("algorithm") != "muon")
        group = {"params": list(self.parameters()), "weight_decay": 0.0, "peak_lr": 1e-2}
        optimizer.add_param_group({**like, **group})

    def forward(self, image: Tensor, logits: Tensor, label: Tensor, draws: Sequence[Tensor]) -> Tensor:
        """The addition to the loss.

        Args:
            image: (B, C, H, W).
            logits: (B, classes).
            label: (B,) int64, or (B, classes) shares: the reward is then the share of the class that was named.
            draws: from ``collect_log_probs`` around the forward pass.

        Returns:
            ().
        """
        guess = logits.detach().argmax(dim=1)
        reward = (guess == label).float() if label.ndim == 1 else label.gather(1, guess[:, None]).squeeze(1).float()
        expected = self.baseline(image).float()
        return surrogate(reward, expected, log_prob(draws, len(image))) + F.mse_loss(expected, reward)
