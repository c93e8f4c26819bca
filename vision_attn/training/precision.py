"""Which precision a device can afford."""

from __future__ import annotations

import torch


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 itself. Where it does not, PyTorch takes up to 200 times as long."""
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return True


def widest(device: torch.device) -> torch.dtype:
    """What many numbers are added up in: float64, but on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def affordable(precision: str | int | None, device: torch.device) -> str | int | None:
    """The precision asked for, or ``32-true`` in place of bfloat16 on a processor without bfloat16 instructions."""
    if isinstance(precision, str) and precision.startswith("bf16") and not multiplies_bfloat16(device):
        return "32-true"
    return precision
