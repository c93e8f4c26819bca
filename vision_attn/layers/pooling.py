"""From tokens to one vector per image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_attn.attention import attend


class SequencePool(nn.Module):
    """A learned weighted mean of the tokens: (B, N, D) → (B, D).

    Hassani et al. 2021 (arXiv 2104.05704), section 3.3: softmax(g(x)) · x with a linear ``g`` to one number per token.
    That is attention with one learned query, unscaled, whose keys and values are the tokens; so the core does
    it. The bias of ``g`` would add the same number to every score, which softmax cancels: it is left out.

    Args:
        dim: D.
        kernel: ``auto`` or a name of ``vision_attn.attention.KERNELS``.
    """

    def __init__(self, dim: int, *, kernel: str = "auto") -> None:
        super().__init__()
        self.kernel = kernel
        self.query = nn.Parameter(nn.init.trunc_normal_(torch.empty(dim), std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None]  # (B, 1, N, D): one head
        query = self.query.to(x.dtype).expand(x.shape[0], 1, 1, -1)
        return attend(query, tokens, tokens, score="dot", kernel=self.kernel)[:, 0, 0]
