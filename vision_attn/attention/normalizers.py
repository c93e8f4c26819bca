"""Normalizers: how scores become weights.

A normalizer maps scores (B, H, N, M), −inf where a pair may not attend, to weights of the same shape and dtype, zero
there. No row is masked as a whole: the core opens such rows and sets their results to zero. 16-bit scores are worked
on in float32.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Normalizer = Callable[[Tensor], Tensor]

NORMALIZERS: dict[str, Normalizer | type[nn.Module]] = {}
"""Name -> a function, or, for one with parameters, a module class that is built with the number of heads."""

FUSED = frozenset({"softmax"})
"""Normalizers that the fused kernels compute themselves."""

SUM_TO_ONE = frozenset({"softmax", "sum", "hard", "straight_through", "sampled"})
"""Normalizers whose rows sum to one. The others give every key a probability of its own."""


def register_normalizer(name: str) -> Callable[[Any], Any]:
    """Makes a normalizer ``scores (B, H, N, M) -> weights (B, H, N, M)`` available by name, in every model.

    It is a function, or a subclass of ``nn.Module`` whose only argument is the number of heads; it learns its ``name``.
    """

    def add(normalizer: Any) -> Any:
        normalizer.name = name
        NORMALIZERS[name] = normalizer
        return normalizer

    return add


def make_normalizer(normalizer: str | Normalizer, num_heads: int) -> Normalizer:
    """A normalizer for a layer with that many heads: a module where it has parameters or a training mode.

    Raises:
        ValueError: there is no normalizer of that name.
    """
    if not isinstance(normalizer, str):
        return normalizer
    if normalizer not in NORMALIZERS:
        raise ValueError(f"unknown normalizer {normalizer!r}; there are: {', '.join(NORMALIZERS)}")
    found: Any = Sampled if normalizer == "sampled" else NORMALIZERS[normalizer]
    return found(num_heads) if isinstance(found, type) else found


def resolve_normalizer(normalizer: str | Normalizer) -> Normalizer:
    """A normalizer for a single call, by name, or the callable itself.

    Raises:
        ValueError: there is no normalizer of that name, or it has parameters and so must be given as a module.
    """
    if not isinstance(normalizer, str):
        return normalizer
    if normalizer not in NORMALIZERS:
        raise ValueError(f"unknown normalizer {normalizer!r}; there are: {', '.join(NORMALIZERS)}")
    found: Any = NORMALIZERS[normalizer]
    if isinstance(found, type):
        raise ValueError(
            f"normalizer {normalizer!r} has parameters of its own, so its name is not enough here; pass the module, "
            f"normalizer=make_normalizer({normalizer!r}, num_heads)"
        )
    return found


def _wide(scores: Tensor) -> Tensor:
    """16-bit scores as float32."""
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    """(…, 1) indices as rows with a single one."""
    return torch.zeros_like(like, requires_grad=False).scatter_(-1, index, 1.0)


@register_normalizer("softmax")
def softmax(scores: Tensor) -> Tensor:
    """exp(s - max s) / Σ exp(s - max s) over the keys; the arithmetic inside is float32 for 16-bit scores."""
    return scores.softmax(dim=-1)


def log_weights(scores: Tensor) -> Tensor:
    """Logarithms of the softmax weights, s - max s - log Σ exp(s - max s); −inf where masked.

    Finite where the weights themselves underflow.

    Returns:
        (B, H, N, M), float32 for 16-bit scores.
    """
    return _wide(scores).log_softmax(dim=-1)


@register_normalizer("sum")
def share(scores: Tensor) -> Tensor:
    """s / Σ s over the keys, for scores that are not negative; masked keys count as 0.

    Raises:
        ValueError: a negative score, or a row whose sum is not positive; the value is named.
    """
    wide = _wide(scores)
    wide = wide.masked_fill(wide == float("-inf"), 0.0)
    total = wide.sum(dim=-1, keepdim=True)
    if not scores.is_meta and scores.numel():  # one look at the device for both
        least, poorest = torch.stack([wide.detach().amin(), total.detach().amin()]).tolist()
        if least < 0:
            raise ValueError(
                "normalizer 'sum' divides by the row sum and needs scores that are not negative, but one is "
                f"{least:.6g}; use normalizer='softmax'"
            )
        if not poorest > 0:  # NaN comes here too
            raise ValueError(
                f"normalizer 'sum' needs rows with a positive sum, but one sums to {poorest:.6g}; "
                "use normalizer='softmax'"
            )
    return (wide / total).to(scores.dtype)


@register_normalizer("hard")
def hard(scores: Tensor) -> Tensor:
    """All weight on the key with the highest score, the first of several. No gradient reaches the scores.

    Queries and keys learn nothing from it: train with ``straight_through`` or ``sampled``.
    """
    return _one_hot(scores.argmax(dim=-1, keepdim=True), scores)


@register_normalizer("straight_through")
def straight_through(scores: Tensor) -> Tensor:
    """``hard`` forward, the gradient of ``softmax`` backward (Bengio et al. 2013, arXiv 1308.3432).

    The gradient is a biased stand-in: it belongs to a function that was not computed. ``sampled`` is unbiased.
    """
    soft = _wide(scores).softmax(dim=-1)
    # The difference is exactly zero, so the result is exactly one-hot.
    return _one_hot(scores.argmax(dim=-1, keepdim=True), scores) + (soft - soft.detach()).to(scores.dtype)


class _Blocks(threading.local):
    """The ``collect_log_probs`` blocks that are open in this thread."""

    def __init__(self) -> None:
        self.open: list[list[Tensor]] = []


_BLOCKS = _Blocks()


@contextlib.contextmanager
def collect_log_probs() -> Iterator[list[Tensor]]:
    """Collects what ``sampled`` attention draws in this thread while the block runs.

    Yields:
        a list that grows by one (B, H, N) tensor for every call: the log-probability of the key that each row drew,
        with its gradient to the scores. Outside such a block nothing is computed or kept; an inner block takes its
        draws to itself.
    """
    draws: list[Tensor] = []
    _BLOCKS.open.append(draws)
    try:
        yield draws
    finally:
        _BLOCKS.open.pop()


@torch.compiler.disable
def _collect(scores: Tensor, index: Tensor) -> None:
    if _BLOCKS.open:
        _BLOCKS.open[-1].append(log_weights(scores).gather(-1, index).squeeze(-1))


@register_normalizer("sampled")
def sampled(scores: Tensor) -> Tensor:
    """All weight on one key, drawn from the softmax by PyTorch's global generator (Xu et al. 2015, arXiv 1502.03044).

    No gradient reaches the scores through the result: they learn by REINFORCE (Williams 1992), from the
    log-probabilities that ``collect_log_probs`` hands out. In a layer the mode counts, see ``Sampled``.
    """
    flat = _wide(scores.detach()).softmax(dim=-1).flatten(0, -2)
    index = torch.multinomial(flat, 1).view(*scores.shape[:-1], 1)
    _collect(scores, index)
    return _one_hot(index, scores)


class Sampled(nn.Module):
    """What ``sampled`` means in a layer: keys are drawn in training, and the most probable ones taken in evaluation.

    Predictions then repeat, and recorded maps show the keys that were used.
    """

    name = "sampled"

    def __init__(self, num_heads: int = 1) -> None:
        super().__init__()

    def forward(self, scores: Tensor) -> Tensor:
        return sampled(scores) if self.training else hard(scores)


def _unary(scores: Tensor) -> Tensor:
    """Scores minus the logarithm of how many keys the row may attend to.

    With that prior every key has the odds 1 : M where scores are zero, and the expected number of chosen keys is near
    one at any length (Ramapuram et al. 2024, arXiv 2409.04431).
    """
    wide = _wide(scores)
    count = (wide != float("-inf")).sum(dim=-1, keepdim=True)
    return wide - count.to(wide.dtype).log()


@register_normalizer("bernoulli")
def bernoulli(scores: Tensor) -> Tensor:
    """σ(s - log M): each key is chosen or not, independently (structured attention, Kim et al. 2017, arXiv 1702.00887).

    M counts the keys that the row may attend to. Rows need not sum to one.
    """
    return _unary(scores).sigmoid().to(scores.dtype)


_FAR = 60.0  # log-odds beyond which a key is certain, in float64 too
_STRAIGHT = 50.0  # where softplus(x) = x to the last bit


def _step(odds: Tensor, pairwise: Tensor) -> Tensor:
    """What a key says to its neighbour: log (1 + exp(odds + pairwise)) / (1 + exp(odds)), odds being its own log-odds.

    Odds are bounded first, since the difference of two large numbers would lose its digits.
    """
    odds = odds.clamp(-_FAR, _FAR)
    return F.softplus(odds + pairwise, threshold=_STRAIGHT).sub_(F.softplus(odds, threshold=_STRAIGHT))


class _Messages(torch.autograd.Function):
    """Messages along a chain, m₀ = 0, mᵢ₊₁ = step(tᵢ + mᵢ), for tᵢ = unary[i] of shape (M, …).

    One pass of M small steps. A scan by doubling makes log₂ M passes over 2 × 2 matrices, with four sums of logarithms
    each: at 65 keys it took 6 to 14 times as long. The backward pass is a linear recurrence, written out because M
    recorded steps take two to four times as long.
    """

    @staticmethod
    def forward(ctx: Any, unary: Tensor, pairwise: Tensor) -> Tensor:
        out = torch.zeros_like(unary)
        for i in range(len(unary) - 1):
            out[i + 1] = _step(unary[i] + out[i], pairwise)
        ctx.save_for_backward(unary, pairwise, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        unary, pairwise, out = ctx.saved_tensors
        odds = (unary + out)[:-1]
        moved = (odds + pairwise).sigmoid()  # derivative of a step to the pairwise potential
        slope = moved - odds.sigmoid()  # and to the odds
        total = grad.clone()  # to every message, with what flows back from the later ones
        for i in range(len(slope) - 1, -1, -1):
            total[i].addcmul_(total[i + 1], slope[i])
        to_unary = torch.zeros_like(unary)
        torch.mul(total[1:], slope, out=to_unary[:-1])
        return to_unary, (total[1:] * moved).sum_to_size(pairwise.shape)


@register_normalizer("linear_chain")
class LinearChain(nn.Module):
    """Marginals of a binary linear-chain CRF over the keys (structured attention, Kim et al. 2017, arXiv 1702.00887).

    zᵢ ∈ {0, 1} says whether key i is chosen, log p(z) = Σᵢ (sᵢ - log M) zᵢ + Σᵢ w zᵢ zᵢ₊₁ + const, and the weights are
    p(zᵢ = 1), by forward-backward in log space. A masked key is never chosen; it parts the chain, so padding changes
    nothing. (A full 2 × 2 table of potentials between two choices says no more: the rest moves into the unary ones.)
    Rows need not sum to one, and their weights depend on the order of the keys.

    Args:
        num_heads: H.

    Attributes:
        pairwise: (H,) potentials w of two neighbours both chosen; at their initial value of zero it is ``bernoulli``.
    """

    def __init__(self, num_heads: int = 1) -> None:
        super().__init__()
        self.pairwise = nn.Parameter(torch.zeros(num_heads))

    def forward(self, scores: Tensor) -> Tensor:
        """Scores to marginals, both (B, H, N, M).

        Raises:
            ValueError: the scores have another number of heads.
        """
        if scores.shape[1] != len(self.pairwise):
            raise ValueError(
                f"linear_chain was built for {len(self.pairwise)} heads, but the scores are {tuple(scores.shape)} "
                "= (B, H, N, M); build it with make_normalizer('linear_chain', H)"
            )
        unary = _unary(scores).movedim(-1, 0)  # (M, B, H, N)
        both = torch.stack([unary, unary.flip(0)], dim=1)  # from the left and from the right at once
        messages = _Messages.apply(both, self.pairwise.to(both.dtype)[:, None])
        odds = unary + messages[:, 0] + messages[:, 1].flip(0)
        return odds.sigmoid().movedim(0, -1).contiguous().to(scores.dtype)
