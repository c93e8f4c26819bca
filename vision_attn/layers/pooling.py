"""From tokens to one vector per image: c = Σ αᵢ hᵢ, a weighted sum whose weights are attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, Layout, Watch, attend, attention_weights
from vision_attn.errors import UserError
from vision_attn.layers.embed import pair


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
        self.watch = Watch()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None]  # (B, 1, N, D): one head
        query = self.query.to(x.dtype).expand(x.shape[0], 1, 1, -1)
        self.watch(query, tokens, score="dot")
        return attend(query, tokens, tokens, score="dot", kernel=self.kernel)[:, 0, 0]

    def weights(self, x: Tensor) -> Tensor:
        """The weights of the tokens, (B, N, D) → (B, N); they sum to 1."""
        return attention_weights(self.query.to(x.dtype).expand(x.shape[0], 1, 1, -1), x[:, None], score="dot")[:, 0, 0]


class AttentionPool(nn.Module):
    """A learned weighted mean, its weights from one hidden layer: (B, N, D) → (B, D).

    Yang et al. 2016 (https://aclanthology.org/N16-1174), equations 5 to 7: α = softmax(u · tanh(W h + b)), c = Σ α h.
    Attention with one learned query u; the keys are tanh(W h + b), the values the tokens h themselves.

    Args:
        dim: D.
        hidden: width of u; default D.
        kernel: ``auto`` or a name of ``vision_attn.attention.KERNELS``.
    """

    def __init__(self, dim: int, *, hidden: int | None = None, kernel: str = "auto") -> None:
        super().__init__()
        self.kernel = kernel
        self.key = nn.Linear(dim, hidden or dim)
        self.query = nn.Parameter(nn.init.trunc_normal_(torch.empty(hidden or dim), std=0.02))
        self.watch = Watch()

    def _pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, N, D) sets → their query (B, S, 1, d) and keys (B, S, N, d): each set is a head of its own."""
        keys = self.key(x).tanh().to(x.dtype)
        return self.query.to(x.dtype).expand(x.shape[0], x.shape[1], 1, -1), keys

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, N, D) → (B, D), or S sets of tokens at once, (B, S, N, D) → (B, S, D).

        Args:
            x: tokens.
            mask: boolean, broadcastable to x without its last dimension; False leaves a token out. A set without any
                token gives zeros.
        """
        if x.dim() == 3:
            return self.forward(x[:, None], mask=None if mask is None else mask[:, None])[:, 0]
        query, keys = self._pair(x)
        mask = None if mask is None else mask[..., None, :]
        self.watch(query, keys, score="dot", mask=mask)
        return attend(query, keys, x, score="dot", mask=mask, kernel=self.kernel)[:, :, 0]

    def weights(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The weights α, shaped like x without its last dimension; they sum to 1 over the tokens of a set."""
        if x.dim() == 3:
            return self.weights(x[:, None], mask=None if mask is None else mask[:, None])[:, 0]
        mask = None if mask is None else mask[..., None, :]
        return attention_weights(*self._pair(x), score="dot", mask=mask)[:, :, 0]


class PoolWeights(NamedTuple):
    """What ``HierarchicalPool`` looked at.

    Attributes:
        patches: (B, rows · columns), the weight of each patch within its region: they sum to 1 in every region.
        regions: (B, region rows · region columns), the weights of the regions: they sum to 1.
        product: (B, rows · columns), the weight of each patch in the image: they sum to 1.
    """

    patches: Tensor
    regions: Tensor
    product: Tensor


class HierarchicalPool(nn.Module):
    """Attention over the patches of each region, then over the regions: (B, N, D) → (B, D).

    Hierarchical attention (Yang et al. 2016, https://aclanthology.org/N16-1174), with patch → region → image for the
    paper's word → sentence → document. The weights of the two levels multiply to one distribution over the
    patches, and the result is the mean of the patches under it. Unlike the paper's there is no recurrent net between
    the levels: the layers before have done that work.

    Args:
        dim: D.
        region: patches down and across in a region, one number or two. Regions at the lower and right edge are smaller
            where it does not divide the grid.
        hidden: width of the queries; default D.
        kernel: ``auto`` or a name of ``vision_attn.attention.KERNELS``.

    Raises:
        UserError: a region without patches.
    """

    def __init__(
        self, dim: int, region: int | tuple[int, int] = 4, *, hidden: int | None = None, kernel: str = "auto"
    ) -> None:
        super().__init__()
        self.region = pair(region)
        if min(self.region) < 1:
            raise UserError(f"region={region}: a region needs at least one patch down and across")
        self.patches = AttentionPool(dim, hidden=hidden, kernel=kernel)
        self.regions = AttentionPool(dim, hidden=hidden, kernel=kernel)

    def extra_repr(self) -> str:
        return f"region={self.region[0]}×{self.region[1]}"

    def forward(self, x: Tensor, grid: tuple[int, int] | Layout) -> Tensor:
        """(B, N, D) → (B, D).

        Args:
            x: patch tokens, row by row. A ``Layout`` may have prefix tokens before them, which are left out.
            grid: (rows, columns) of the patches, or a ``Layout``.

        Raises:
            ValueError: the tokens are no such grid.
        """
        sets, mask, _ = self._split(*_on_grid(x, grid))
        return self.regions(self.patches(sets, mask=mask))

    def weights(self, x: Tensor, grid: tuple[int, int] | Layout) -> PoolWeights:
        """The weights of both levels and their product; arguments as for ``forward``."""
        x, grid = _on_grid(x, grid)
        sets, mask, blocks = self._split(x, grid)
        within = self.patches.weights(sets, mask=mask)  # (B, S, P)
        between = self.regions.weights(self.patches(sets, mask=mask))  # (B, S)
        product = within * between[..., None]
        return PoolWeights(_join(within, blocks, grid), between, _join(product, blocks, grid))

    def _split(self, x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor | None, tuple[int, int, int, int]]:
        """(B, N, D) → (B, S, P, D): S regions of P places.

        Returns:
            The regions; (1, S, P) True where a place holds a patch, None where all do; and how they lie: region rows,
            region columns, patch rows and patch columns in a region.
        """
        (rows, columns), (down, across) = grid, self.region
        down, across = min(down, rows), min(across, columns)
        blocks = (-(-rows // down), -(-columns // across), down, across)
        below, right = blocks[0] * down - rows, blocks[1] * across - columns
        image = x.unflatten(1, grid)  # (B, rows, columns, D)
        if not below and not right:
            return _cut(image, blocks), None, blocks
        real = torch.ones(1, rows, columns, 1, dtype=torch.bool, device=x.device)
        edge = (0, 0, 0, right, 0, below)
        return _cut(F.pad(image, edge), blocks), _cut(F.pad(real, edge), blocks)[..., 0], blocks


def _cut(image: Tensor, blocks: tuple[int, int, int, int]) -> Tensor:
    """(B, rows, columns, D) → (B, S, P, D)."""
    up, left, down, across = blocks
    cells = image.view(len(image), up, down, left, across, -1).transpose(2, 3)
    return cells.reshape(len(image), up * left, down * across, -1)


def _join(weights: Tensor, blocks: tuple[int, int, int, int], grid: tuple[int, int]) -> Tensor:
    """(B, S, P) → (B, rows · columns): the inverse of ``_cut``, without the places that hold no patch."""
    up, left, down, across = blocks
    image = weights.view(-1, up, left, down, across).transpose(2, 3).reshape(-1, up * down, left * across)
    return image[:, : grid[0], : grid[1]].flatten(1)


def _on_grid(x: Tensor, grid: tuple[int, int] | Layout) -> tuple[Tensor, tuple[int, int]]:
    """The patch tokens alone, and their grid.

    Raises:
        ValueError: they are none.
    """
    layout = grid if isinstance(grid, Layout) else Layout(grid=(int(grid[0]), int(grid[1])))
    if layout.grid is None:
        raise ValueError("hierarchical pooling needs tokens that lie on a grid; give its (rows, columns)")
    layout.check(x.shape[1])
    return x[:, layout.prefix :], layout.grid


def make_pool(name: str, dim: int, region: int = 4) -> nn.Module | None:
    """The pooling layer of a classifier: ``seq``, ``attention`` or ``hierarchical``; None for names that need none."""
    if name == "hierarchical":
        return HierarchicalPool(dim, region)
    return {"seq": SequencePool, "attention": AttentionPool}[name](dim) if name in ("seq", "attention") else None


def refuse_blind_token(config: AttentionConfig, global_pool: str) -> None:
    """A class token stands in front of the patches: where attention is causal, it sees nothing but itself.

    Raises:
        UserError: causal attention with ``global_pool="token"``.
    """
    if config.pattern == "causal" and global_pool == "token":
        raise UserError(
            "pattern='causal' with global_pool='token': the class token comes first, so it would see no patch. "
            "Use global_pool='avg'."
        )
