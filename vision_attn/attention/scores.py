"""Scores: how much a query has to do with a key, before normalization.

A score is a small module with ``forward(q, k) -> (B, H, N, M)``. One that is a dot product of transformed
queries and keys says so through ``as_dot``, and every fused kernel then serves it.

=============  =============================  ==========  ===================================================
name           score                          parameters  paper
=============  =============================  ==========  ===================================================
``dot``        q·k                            none        Luong et al. 2015, arXiv 1508.04025
``scaled_dot`` q·k/√d                         none        Vaswani et al. 2017, arXiv 1706.03762
``cosine``     q·k/(‖q‖‖k‖)/temperature       may have    Graves et al. 2014, arXiv 1410.5401; Liu et al. 2021,
                                                          arXiv 2111.09883
``general``    qᵀWk                           W           Luong et al. 2015
``additive``   vᵀtanh(W_q q + W_k k)          W_q W_k v   Bahdanau et al. 2014, arXiv 1409.0473
``concat``     vᵀtanh(W[q; k])                W v         Luong et al. 2015
``location``   row of W q at the key's place  W           Luong et al. 2015
=============  =============================  ==========  ===================================================

Legend: B batch, H query heads, G key heads (G divides H), N queries, M keys, d and d_k their head widths.
Parameters are per query head: the first dimension of each is H.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vision_attn.attention.additive import tanh_scores
from vision_attn.attention.positions import sinusoidal_1d

Dot3 = tuple[Tensor, Tensor, float]

SCORES: dict[str, type[Score]] = {}

MAX_LOGIT_SCALE = math.log(100.0)
"""Largest logarithm of 1 / temperature that a learned temperature may reach, as in Swin Transformer V2."""


class Score(nn.Module):
    """Compares ``q`` (B, H, N, d) with ``k`` (B, G, M, d_k), where groups of query heads share a key head.

    A subclass defines ``as_dot`` or ``forward``; one with parameters or options also ``build``, whose arguments are
    its options.

    Args:
        num_heads: H.
        q_dim: d.
        k_dim: d_k; ``q_dim`` by default.
        **options: what the ``build`` of the score takes; None stands for its default.

    Raises:
        ValueError: an option that this score does not take, or sizes that are not positive.
    """

    name: ClassVar[str] = ""
    needs_equal_widths: ClassVar[bool] = True
    has_parameters: bool = False  # of the class: always. Such a score cannot be named in a call of ``attend``.

    def __init__(self, num_heads: int = 1, q_dim: int = 1, k_dim: int | None = None, **options: Any) -> None:
        super().__init__()
        self.num_heads, self.q_dim = num_heads, q_dim
        self.k_dim = q_dim if k_dim is None else k_dim
        if min(self.num_heads, self.q_dim, self.k_dim) < 1:
            raise ValueError(f"a score needs positive sizes, got num_heads={num_heads}, q_dim={q_dim}, k_dim={k_dim}")
        if self.needs_equal_widths and self.k_dim != self.q_dim:
            raise ValueError(f"{self._unequal()} got q_dim={self.q_dim} and k_dim={self.k_dim}")
        options = {key: value for key, value in options.items() if value is not None}
        takes = tuple(inspect.signature(self.build).parameters)
        for key in options:
            if key not in takes:
                what = ", ".join(takes) if takes else "none"
                raise ValueError(f"score {self._called()!r} has no option {key!r}; it takes: {what}")
        self.build(**options)

    def build(self) -> None:
        """Makes the parameters. Its arguments are the options of the score."""

    def as_dot(self, q: Tensor, k: Tensor) -> Dot3 | None:
        """``(q', k', scale)`` with score = scale · q'·k', or None where the score is no bilinear form.

        ``q'`` is (B, H, N, c) and ``k'`` (B, G, M, c): as many key heads as there were, for any width c.
        """
        return None

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        form = self.as_dot(q, k)
        if form is None:
            raise NotImplementedError(f"{type(self).__name__} must define forward or as_dot")
        return dot_scores(*form)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, q_dim={self.q_dim}, k_dim={self.k_dim}" if self.has_parameters else ""

    def check(self, q: Tensor, k: Tensor) -> None:
        """Whether this score can compare them.

        Raises:
            ValueError: heads or widths that do not fit each other, or the parameters; both shapes are named.
        """
        shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads: got {shapes}")
        if self.needs_equal_widths and q.shape[-1] != k.shape[-1]:
            raise ValueError(f"{self._unequal()} got {shapes}")
        have, need = (q.shape[1], q.shape[-1], k.shape[-1]), (self.num_heads, self.q_dim, self.k_dim)
        if self.has_parameters and have != need:
            raise ValueError(
                f"score {self._called()!r} was made for {need[0]} heads, queries of width {need[1]} and keys of width "
                f"{need[2]}, got {shapes}; make it with make_score({self._called()!r}, {have[0]}, {have[1]}, {have[2]})"
            )

    def _called(self) -> str:
        return self.name or type(self).__name__

    def _unequal(self) -> str:
        return (
            f"score {self._called()!r} is a dot product and needs equal widths "
            "(where they differ: 'general', 'additive' or 'concat'),"
        )


def register_score(name: str) -> Callable[[type[Score]], type[Score]]:
    """Makes a score available by name, in every model."""

    def add(cls: type[Score]) -> type[Score]:
        cls.name = name
        SCORES[name] = cls
        return cls

    return add


def _find(name: str) -> type[Score]:
    if name not in SCORES:
        near = difflib.get_close_matches(str(name), list(SCORES), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown score {name!r}; there are: {', '.join(SCORES)}.{hint}")
    return SCORES[name]


def make_score(
    score: str | Score, num_heads: int = 1, q_dim: int = 1, k_dim: int | None = None, **options: Any
) -> Score:
    """A score for a layer, with parameters of its own where it has any.

    Args:
        score: name, see ``SCORES``; or a module, which is checked and returned as it is.
        num_heads: H.
        q_dim: d, width of a query head.
        k_dim: width of a key head; ``q_dim`` by default.
        **options: ``temperature`` of ``cosine``, ``hidden`` of ``additive`` and ``concat``, ``max_keys`` of
            ``location``. None stands for the default.

    Raises:
        ValueError: unknown name, an option that the score does not take, or a module made for other sizes.
    """
    if not isinstance(score, Score):
        return _find(score)(num_heads, q_dim, k_dim, **options)
    given = [key for key, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]!r} is an option of a score's name; give it to the module when making it")
    want = (num_heads, q_dim, q_dim if k_dim is None else k_dim)
    have = (score.num_heads, score.q_dim, score.k_dim)
    if score.has_parameters and have != want:
        raise ValueError(
            f"this {type(score).__name__} was made for (num_heads, q_dim, k_dim) = {have}, but {want} is needed"
        )
    return score


_plain: dict[str, Score] = {}  # scores without parameters by name: making a module at every call costs more than it


def resolve_score(score: str | Score) -> Score:
    """A score by name, for a single call; or the module itself.

    Raises:
        ValueError: there is no score of that name, or it has parameters, which must live in a module.
    """
    if isinstance(score, Score):
        return score
    if score in _plain:
        return _plain[score]
    cls = _find(score)
    if cls.has_parameters:
        raise ValueError(
            f"score {score!r} has parameters, and a function call has no place to keep them: make it once with "
            f"make_score({score!r}, num_heads, q_dim, k_dim) and pass the module as score="
        )
    return _plain.setdefault(score, cls())


def dot_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale · q·kᵀ, (B, H, N, d) × (B, G, M, d) → (B, H, N, M), where G divides H (grouped-query attention)."""
    b, h, n, d = q.shape
    g, m = k.shape[1], k.shape[2]
    # Query heads that share a key head are stacked along the rows, so shared keys are read once and never repeated.
    rows = q.reshape(b * g, h // g * n, d)
    columns = k.reshape(b * g, m, d).transpose(1, 2)
    # beta = 0: the first argument is ignored; baddbmm scales inside the product, where it is still float32.
    scores = torch.baddbmm(rows.new_empty(1, 1, 1), rows, columns, beta=0, alpha=scale)
    return scores.view(b, h, n, m)


@register_score("dot")
class Dot(Score):
    """q·k, without parameters (Luong et al. 2015, arXiv 1508.04025)."""

    def as_dot(self, q: Tensor, k: Tensor) -> Dot3:
        self.check(q, k)
        return q, k, 1.0


@register_score("scaled_dot")
class ScaledDot(Score):
    """q·k/√d: variance 1 for q and k of unit variance (Vaswani et al. 2017, arXiv 1706.03762)."""

    def as_dot(self, q: Tensor, k: Tensor) -> Dot3:
        self.check(q, k)
        return q, k, q.shape[-1] ** -0.5


def unit(x: Tensor) -> Tensor:
    """x/‖x‖ over the last dimension, in float32 at least; a vector of no length has no direction and gives zeros.

    Its gradient is zero too, where x/max(‖x‖, ε) would have one of 1/ε: padded tokens then disturb nobody.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.masked_fill(length < 1e-12, math.inf)


@register_score("cosine")
class Cosine(Score):
    """q·k/(‖q‖‖k‖) / temperature: only directions count (Liu et al. 2021, arXiv 2111.09883).

    Options:
        temperature: a positive number, 1 by default; or ``"learned"``: one per head, kept as the logarithm of its
            inverse, ``logit_scale`` (H,). It starts at 0.1 and stays ≥ 0.01, as in Swin Transformer V2.
    """

    def build(self, temperature: float | Literal["learned"] = 1.0) -> None:
        self.has_parameters = temperature == "learned"
        if self.has_parameters:
            self.logit_scale = nn.Parameter(torch.full((self.num_heads,), math.log(10.0)))
            return
        if isinstance(temperature, str | bool) or not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature!r} of the cosine score must be a positive number or 'learned'")
        self.temperature = float(temperature)

    def extra_repr(self) -> str:
        return super().extra_repr() if self.has_parameters else f"temperature={self.temperature}"

    def as_dot(self, q: Tensor, k: Tensor) -> Dot3:
        self.check(q, k)
        direction = unit(q)
        scale = 1.0
        if self.has_parameters:
            inverse = self.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp().to(direction.dtype)
            direction = direction * inverse[:, None, None]
        else:
            scale = 1.0 / self.temperature
        return direction.to(q.dtype), unit(k).to(q.dtype), scale


@register_score("general")
class General(Score):
    """qᵀWk with one W (d, d_k) per head; the widths may differ (Luong et al. 2015, arXiv 1508.04025).

    A square W starts at I/√d, so that training starts from scaled dot products. Any other starts at random, with
    scores of variance 1 for q and k of unit variance.
    """

    needs_equal_widths = False
    has_parameters = True

    def build(self) -> None:
        h, d, e = self.num_heads, self.q_dim, self.k_dim
        start = torch.eye(d).expand(h, d, e) * d**-0.5 if d == e else torch.randn(h, d, e) * (d * e) ** -0.5
        self.weight = nn.Parameter(start)

    def as_dot(self, q: Tensor, k: Tensor) -> Dot3:
        self.check(q, k)
        return torch.einsum("bhnd,hde->bhne", q, self.weight.to(q.dtype)), k, 1.0


@register_score("additive")
class Additive(Score):
    """vᵀtanh(W_q q + W_k k), a network with one hidden layer (Bahdanau et al. 2014, arXiv 1409.0473).

    Neither the forward nor the backward pass holds the hidden layer of all pairs; see ``tanh_scores``.

    Options:
        hidden: width of the hidden layer; ``q_dim`` by default.
    """

    needs_equal_widths = False
    has_parameters = True

    def build(self, hidden: int | None = None) -> None:
        hidden = _hidden(hidden, self.q_dim)
        # A hidden unit starts with variance 1, for q and k of unit variance.
        self.query = nn.Parameter(torch.randn(self.num_heads, hidden, self.q_dim) * (2 * self.q_dim) ** -0.5)
        self.key = nn.Parameter(torch.randn(self.num_heads, hidden, self.k_dim) * (2 * self.k_dim) ** -0.5)
        self.v = nn.Parameter(torch.randn(self.num_heads, hidden) * hidden**-0.5)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        self.check(q, k)
        return tanh_scores(q, k, self.query, self.key, self.v)


@register_score("concat")
class Concat(Score):
    """vᵀtanh(W[q; k]) (Luong et al. 2015, arXiv 1508.04025); equals ``additive`` with W = [W_q W_k].

    Options:
        hidden: width of the hidden layer; ``q_dim`` by default.
    """

    needs_equal_widths = False
    has_parameters = True

    def build(self, hidden: int | None = None) -> None:
        hidden, both = _hidden(hidden, self.q_dim), self.q_dim + self.k_dim
        self.weight = nn.Parameter(torch.randn(self.num_heads, hidden, both) * both**-0.5)
        self.v = nn.Parameter(torch.randn(self.num_heads, hidden) * hidden**-0.5)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        self.check(q, k)
        w_q, w_k = self.weight.split([self.q_dim, self.k_dim], dim=-1)
        return tanh_scores(q, k, w_q, w_k, self.v)


def _hidden(hidden: int | None, default: int) -> int:
    hidden = default if hidden is None else hidden
    if hidden < 1:
        raise ValueError(f"hidden={hidden} must be a positive width")
    return hidden


@register_score("location")
class Location(Score):
    """Scores from the query alone: key j gets row j of W q, whatever it holds (Luong et al. 2015, arXiv 1508.04025).

    Luong's W has one row per key position. Without ``max_keys`` it is factorised, W = C U, where the rows of C
    (M, c) are fixed sinusoidal codes of the positions and U (c, d) is learned: then any number of keys will do, and
    c is d, or d + 1 where d is odd.

    Options:
        max_keys: learn a full W (max_keys, d) per head instead; M keys use its first M rows.
    """

    needs_equal_widths = False
    has_parameters = True

    def build(self, max_keys: int | None = None) -> None:
        if max_keys is not None and max_keys < 1:
            raise ValueError(f"max_keys={max_keys} of the location score must be positive")
        self.max_keys = max_keys
        self.codes = torch.empty(0, self.q_dim + self.q_dim % 2)  # no buffer: it is made anew wherever it is needed
        # Scores of variance 1 for queries of unit variance; a code of width c has the squared length c / 2.
        rows, gain = (self.codes.shape[1], self.codes.shape[1] / 2) if max_keys is None else (max_keys, 1.0)
        self.weight = nn.Parameter(torch.randn(self.num_heads, rows, self.q_dim) * (gain * self.q_dim) ** -0.5)

    def as_dot(self, q: Tensor, k: Tensor) -> Dot3:
        self.check(q, k)
        weight = self.weight.to(q.dtype)
        b, g, m = k.shape[0], k.shape[1], k.shape[2]
        if self.max_keys is None:
            codes = self._codes(m, q.device).to(q.dtype)
            return torch.einsum("bhnd,hcd->bhnc", q, weight), codes.expand(b, g, -1, -1), 1.0
        if m > self.max_keys:
            raise ValueError(
                f"this location score has rows for max_keys={self.max_keys} keys, got {m}; make it with max_keys={m}, "
                "or without max_keys, which serves any number"
            )
        h, n, d = q.shape[1], q.shape[2], q.shape[3]
        group = h // g
        # Each head has rows of its own, yet a kernel expects H / G query heads to share their keys. So the keys hold
        # the rows of all heads of a group side by side, and a query is zero but in the place of its head.
        keys = weight[:, :m].view(g, group, m, d).transpose(1, 2).reshape(g, m, group * d)
        if group > 1:
            place = torch.eye(group, dtype=q.dtype, device=q.device)[:, None, :, None]
            q = (q.reshape(b, g, group, n, 1, d) * place).reshape(b, h, n, group * d)
        return q, keys.expand(b, -1, -1, -1), 1.0

    @torch.no_grad()
    def _codes(self, m: int, device: torch.device) -> Tensor:
        """(M, c) codes of the first M positions; the table grows with the longest sequence seen."""
        if self.codes.shape[0] < m or self.codes.device != device:
            with torch.inference_mode(False):  # else the table could not serve a training step later
                self.codes = sinusoidal_1d(m, self.codes.shape[1]).to(device)
        return self.codes[:m]


# made now and not at the first call: that may be traced by torch.compile, which cannot look into a constructor
_plain.update({name: cls() for name, cls in SCORES.items() if not cls.has_parameters})
