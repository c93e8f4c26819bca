"""Numbers of the host on the device, without the host waiting for it.

A training step waits once, for the costs of matching. ``torch.tensor(numbers, device=…)`` waits for all work that was
given to a GPU before it; a copy out of pinned memory joins the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def from_host(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on the device; the copy may still be under way there."""
    device = torch.device(device)
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def real_objects(counts: Sequence[int], most: int, device: torch.device | str) -> Tensor:
    """(B, most), True for the objects of each image, False for what its row is padded with.

    Args:
        counts: objects of each of the B images.
        most: of the fullest one.
        device: of the result.
    """
    each = from_host(torch.tensor(list(counts)), device)
    return torch.arange(most, device=device) < each[:, None]
