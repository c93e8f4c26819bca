"""Which kernel is fastest where: a small measured table, because intuition fails.

Placeholder rule until the measured table lands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vision_attn.attention.kernels import Request


def fastest(request: Request, able: list[str]) -> str:
    """The name, out of ``able``, of the kernel that serves the request fastest."""
    short = request.queries * request.keys < 1000 * 1000
    if request.device == "cpu" and request.dtype == torch.bfloat16 and short and "explicit" in able:
        return "explicit"
    return "sdpa" if "sdpa" in able else able[0]
