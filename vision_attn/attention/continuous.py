"""Continuous relative positions: a small network says the bias of an offset (Liu et al. 2021, arXiv 2111.09883)."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from vision_attn.attention.layout import Layout
from vision_attn.attention.relative import PairBias

HIDDEN = 512
LARGEST = 16.0
"""No bias is larger."""


class ContinuousBias(PairBias):
    """16 σ(network(offset in log-spaced rows and columns)): one number per head and offset (Swin V2).

    Offsets are divided by the largest, so that the network serves every grid: c = 8 · offset / (side − 1), and then
    sign(c) log₂(1 + |c|) / log₂ 8. The network has one hidden layer of 512 (Liu et al. 2021, arXiv 2111.09883).

    Args:
        num_heads: H.
        with_prefix: three more numbers for pairs with prefix tokens, see ``PairBias``.

    Attributes:
        reference: sides of the windows that the network was trained with, by which offsets are then divided instead;
            None for the grid at hand.
    """

    def __init__(self, num_heads: int, *, with_prefix: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.reference: tuple[int, int] | None = None
        # Named as its parts are in a sequence with the activation between them, in which all checkpoints have it.
        self.mlp = nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU(inplace=True), nn.Linear(HIDDEN, num_heads, bias=False))
        self.prefix = nn.Parameter(nn.init.trunc_normal_(torch.empty(3, num_heads), std=0.02)) if with_prefix else None

    @classmethod
    def build(cls, num_heads: int, head_dim: int, layout: Layout | None) -> ContinuousBias:
        return cls(num_heads, with_prefix=layout is not None and layout.prefix > 0)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}"

    def entries(self, layout: Layout) -> Tensor:
        if layout.grid is None or (layout.prefix > 0 and self.prefix is None):
            raise ValueError(
                f"position 'cpb' was built {'with' if self.prefix is not None else 'without'} prefix tokens and needs "
                f"a grid; it cannot serve {layout}; build the layer with the layout it will meet, or use 't5'"
            )
        weight = next(self.mlp.parameters())
        # While a graph is traced, tensors stand for others and must not outlive the tracing.
        make = _log_offsets if torch.compiler.is_compiling() or type(weight.data) is not Tensor else _kept_offsets
        offsets = make(layout.grid, self.reference or layout.grid, str(weight.device))
        numbers = LARGEST * self.mlp(offsets.to(weight.dtype)).sigmoid()
        if self.prefix is not None:
            numbers = torch.cat([numbers, self.prefix])
        return numbers if numbers.dtype == torch.float64 else numbers.float()

    def places(self, i: Tensor, layout: Layout) -> Tensor:
        assert layout.grid is not None
        columns = layout.grid[1]
        i = i - layout.prefix
        return i + i // columns * (columns - 1)  # row · (2C − 1) + column, as for a table

    def offset_index(self, difference: Tensor, layout: Layout) -> Tensor:
        assert layout.grid is not None
        rows, columns = layout.grid
        return difference + (rows - 1) * (2 * columns - 1) + columns - 1


def _log_offsets(grid: tuple[int, int], reference: tuple[int, int], device: str) -> Tensor:
    """((2R − 1)(2C − 1), 2) offsets query − key, log-spaced; in float32, as every implementation has them."""
    axes = [
        torch.arange(1 - side, side, dtype=torch.float32) / max(whole - 1, 1) * 8
        for side, whole in zip(grid, reference, strict=True)
    ]
    offsets = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return (offsets.sign() * torch.log2(offsets.abs() + 1.0) / math.log2(8)).to(device)


@functools.lru_cache(maxsize=64)
def _kept_offsets(grid: tuple[int, int], reference: tuple[int, int], device: str) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # kept, and may be used in training later
        return _log_offsets(grid, reference, device)
