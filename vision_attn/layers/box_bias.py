"""A bias on cross-attention from where a token lies relative to the box of a query."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class BoxBias(nn.Module):
    """Scores of image tokens by their distances to the edges of a box, per head (Plain-DETR, arXiv 2308.01904).

    Rows and columns are scored apart, by two small MLPs, and summed, as in the paper's decomposed form.

    Args:
        num_heads: H.
        hidden_dim: width of the MLPs.
    """

    def __init__(self, num_heads: int, hidden_dim: int = 128) -> None:
        super().__init__()
        self.rows = _mlp(hidden_dim, num_heads)
        self.columns = _mlp(hidden_dim, num_heads)

    def forward(self, boxes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The bias of N boxes on the h · w tokens of an image.

        Args:
            boxes: (B, N, 4) centre x, y, width, height in 0 … 1.
            rows: (B or 1, h), where the rows of tokens lie in their image, 0 … 1.
            columns: (B or 1, w), the same for the columns.

        Returns:
            (B, H, N, h · w).
        """
        centre, size = boxes[..., :2], boxes[..., 2:]
        low, high = centre - size / 2, centre + size / 2  # (B, N, 2)
        down = self._scores(self.rows, rows, low[..., 1], high[..., 1])  # (B, H, N, h)
        across = self._scores(self.columns, columns, low[..., 0], high[..., 0])
        return (down[..., :, None] + across[..., None, :]).flatten(-2)

    @staticmethod
    def _scores(mlp: nn.Module, at: Tensor, low: Tensor, high: Tensor) -> Tensor:
        edges = torch.stack([low, high], dim=-1)  # (B, N, 2)
        distance = 8 * (at[:, None, :, None] - edges[:, :, None, :])  # (B, N, h or w, 2)
        # logarithmic, as the continuous positions of Swin V2: near the edge it matters most
        distance = distance.sign() * torch.log2(distance.abs() + 1) / math.log2(8)
        return mlp(distance.to(next(mlp.parameters()).dtype)).permute(0, 3, 1, 2)


def _mlp(hidden_dim: int, num_heads: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, hidden_dim), nn.ReLU(inplace=True), nn.Linear(hidden_dim, num_heads))
