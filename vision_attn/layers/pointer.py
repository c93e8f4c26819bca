"""Pointing: attention whose weights are the answer, and the decoders that say where to look next."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from vision_attn.attention import Watch, attention_weights, sinusoidal_1d
from vision_attn.attention.normalizers import log_weights
from vision_attn.attention.scores import make_score
from vision_attn.layers.decoder import Decoder

State: TypeAlias = Any  # what a decoder remembers between two steps


class Pointer(nn.Module):
    """Log-weights of queries over elements: log softmax_j(vᵀ tanh(W₁ e_j + W₂ d_i)) with the score of the paper.

    Vinyals et al. 2015 (arXiv 1506.03134), equation 3. Nothing is mixed: the distribution itself is what is wanted,
    and its logarithm is what cross-entropy reads.

    Args:
        dim: D, width of queries and elements.
        score: ``additive`` as in the paper, or another name of ``SCORES``. Queries and elements are projected first
            where the score has no parameters of its own.
        **options: of the score: ``hidden``, ``temperature``.

    Raises:
        ValueError: a score that does not look at the elements, or an unknown one.
    """

    def __init__(self, dim: int, *, score: str = "additive", **options: Any) -> None:
        super().__init__()
        if score == "location":
            raise ValueError("the location score reads the query alone and cannot point at what it sees: use additive")
        self.score = make_score(score, 1, dim, dim, **options)
        bare = all(parameter.numel() < dim for parameter in self.score.parameters())
        self.query = nn.Linear(dim, dim, bias=False) if bare else nn.Identity()
        self.key = nn.Linear(dim, dim, bias=False) if bare else nn.Identity()
        self.watch = Watch()

    def forward(self, queries: Tensor, elements: Tensor, mask: Tensor) -> Tensor:
        """Log-weights in float32 at least, −inf where the mask forbids.

        Args:
            queries: (B, T, D).
            elements: (B, n, D).
            mask: (B, T, n) boolean, True = may be pointed at.

        Returns:
            (B, T, n); the exponentials of a row sum to 1, or to 0 where it may point at nothing.
        """
        q, k = self.query(queries)[:, None], self.key(elements)[:, None]  # (B, 1, T, D), (B, 1, n, D)
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(wide), k.to(wide)
        self.watch(q, k, score=self.score, mask=mask)
        weights = attention_weights(q, k, score=self.score, mask=mask, normalizer=log_weights)
        return weights[:, 0].masked_fill(~mask, float("-inf"))  # the core gives zeros for a row without any


class PointerDecoder(Protocol):
    """Turns what was pointed at so far into the next query."""

    def __call__(self, inputs: Tensor, elements: Tensor, keep: Tensor) -> Tensor:
        """All queries at once, (B, T, D), when all inputs (B, T, D) are known: the elements pointed at before."""

    def begin(self, elements: Tensor, keep: Tensor) -> State:
        """The state before the first step. Elements (B, n, D), ``keep`` (B, n) True = an element, not padding."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One query (B, D) from one input (B, D), and the next state."""


class RecurrentDecoder(nn.Module):
    """An LSTM that reads the elements in the order in which they are pointed at (Vinyals et al. 2015).

    Its first state comes from the mean of all elements: the encoder here is no LSTM that could hand over its last one.

    Args:
        dim: D.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.initial = nn.Linear(dim, 2 * dim)
        self.cell = nn.LSTMCell(dim, dim)

    def begin(self, elements: Tensor, keep: Tensor) -> State:
        present = keep[..., None].to(elements.dtype)
        mean = (elements * present).sum(1) / present.sum(1).clamp_min(1)
        hidden, cell = self.initial(mean).chunk(2, dim=-1)
        return hidden.tanh(), cell

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        state = self.cell(x, state)
        return state[0], state

    def forward(self, inputs: Tensor, elements: Tensor, keep: Tensor) -> Tensor:
        state, queries = self.begin(elements, keep), []
        for x in inputs.unbind(1):
            query, state = self.step(x, state)
            queries.append(query)
        return torch.stack(queries, dim=1)


class TransformerDecoder(nn.Module):
    """Causal decoder layers over the elements pointed at so far, with cross-attention to all elements.

    Args:
        dim, num_heads, depth, mlp_ratio: of the layers.
    """

    def __init__(self, dim: int, num_heads: int, depth: int, mlp_ratio: float) -> None:
        super().__init__()
        self.layers = Decoder(dim, num_heads, depth, causal=True, mlp_ratio=mlp_ratio)

    def begin(self, elements: Tensor, keep: Tensor) -> State:
        return elements, keep, elements[:, :0]

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        elements, keep, before = state
        inputs = torch.cat([before, x[:, None]], dim=1)
        return self(inputs, elements, keep)[:, -1], (elements, keep, inputs)

    def forward(self, inputs: Tensor, elements: Tensor, keep: Tensor) -> Tensor:
        places = sinusoidal_1d(inputs.shape[1], inputs.shape[2]).to(inputs)
        return self.layers(inputs + places, elements, context_mask=keep[:, None, None, :])
