"""The module: multi-head attention with every mechanism of the core.

Legend: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D token width, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.config import LOW_RANK, split_options
from vision_attn.attention.core import operands, refuse_pairs, run, without_autocast
from vision_attn.attention.kernels import Operands, Request, choose_kernel, normalizer_name
from vision_attn.attention.layout import Layout
from vision_attn.attention.linear import Linformer, Performer
from vision_attn.attention.normalizers import make_normalizer
from vision_attn.attention.patterns import Pattern, make_pattern
from vision_attn.attention.positions import make_layer_position
from vision_attn.attention.projections import QueryValueBias, TwoStep
from vision_attn.attention.recorder import Recordable
from vision_attn.attention.relative import PairBias
from vision_attn.attention.rotary import Rotary
from vision_attn.attention.scores import Score, make_score
from vision_attn.attention.windows import Folding, ShiftedWindows, run_in_windows

MASKING = ("gathered", "flex")
"""Kernels that find their way through windows themselves."""


def _make_pattern(
    name: str, kv_heads: int, head_dim: int, layout: Layout | None, options: dict[str, Any]
) -> Pattern | Linformer | Performer | None:
    if name in LOW_RANK:
        takes = ("rank",) if name == "linformer" else ("features", "redraw", "seed")
        foreign = [key for key in options if key not in takes]
        if foreign:
            raise ValueError(f"pattern {name!r} has no option {foreign[0]!r}; it takes: {', '.join(takes)}")
    if name == "linformer":
        if layout is None or layout.length is None:
            raise ValueError(
                "linformer learns a matrix over the tokens, so it must know how many: pass layout=Layout(...)"
            )
        return Linformer(kv_heads, layout.length, layout=layout, **options)
    if name == "performer":
        return Performer(head_dim, **options)
    return make_pattern(name, **options)


class Attention(Recordable):
    """Multi-head attention: the one module behind self-attention, cross-attention, windows and object queries.

    Order, as most of the field has it: project, normalize queries and keys per head, rotate, score, normalize, mix
    values, project (Vaswani et al. 2017, arXiv 1706.03762).

    Args:
        dim: D, width of the tokens and of the result.
        num_heads: H.
        num_kv_heads: G key/value heads shared by groups of query heads; default H.
        head_dim: d; default dim / num_heads.
        context_dim: width of the context in cross-attention; default ``dim``.
        score: name or module; see ``SCORES``.
        normalizer: name; see ``NORMALIZERS``.
        pattern: name, which pairs may meet; see ``PATTERNS`` and ``LOW_RANK``.
        position: a position that acts inside the layer; see ``LAYER_POSITIONS``. Others are added to the tokens.
        layout: how the tokens lie at the size the layer is built for; needed by ``relative_bias`` and ``linformer``.
        qk_norm: LayerNorm of queries and keys over the head width.
        tie_kv: the keys are the values.
        two_step: a second projection per q, k and v, q = W₂(W₁x); the same functions as one, in other coordinates.
        kernel: ``auto`` or a name of ``KERNELS``; decided per call.
        dropout: probability of dropping an attention weight in training.
        proj_dropout: probability of dropping an entry of the result in training.
        qkv_bias, proj_bias: whether the projections have biases.
        key_bias: whether that of the keys has one, where ``qkv_bias`` is set.
        **options: of the score (``temperature``, …) and the pattern (``window``, ``num_random``, …); see
            ``AttentionConfig``.

    Raises:
        ValueError: heads that do not divide the width, key/value heads that do not divide the heads, unknown names or
            options, or mechanisms that do not go together.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        score: str | Score = "scaled_dot",
        normalizer: str = "softmax",
        pattern: str = "full",
        position: str = "none",
        layout: Layout | None = None,
        qk_norm: bool = False,
        tie_kv: bool = False,
        two_step: bool = False,
        kernel: str = "auto",
        dropout: float = 0.0,
        proj_dropout: float = 0.0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        key_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and dim % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide dim={dim}; choose another, or give head_dim")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"num_kv_heads={kv_heads} does not divide num_heads={num_heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} is no probability below 1")
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.head_dim = d = dim // num_heads if head_dim is None else head_dim
        self.q_width, self.kv_width = num_heads * d, kv_heads * d
        self.kernel, self.dropout, self.tie_kv = kernel, dropout, tie_kv
        score_options, pattern_options = split_options(options)
        self.score = make_score(score, num_heads, d, **score_options)
        self.normalizer = make_normalizer(normalizer, num_heads)
        self.pattern = _make_pattern(pattern, kv_heads, d, layout, pattern_options)
        if isinstance(self.pattern, ShiftedWindows):
            layout = self.pattern.of_window(layout or Layout())
        self.position = make_layer_position(position, num_heads, d, layout)
        if isinstance(self.pattern, ShiftedWindows) and self.position is not None:
            self.position.windows = self.pattern
        self._check_choice()
        if isinstance(self.pattern, Pattern) and layout is not None and layout.length is not None:
            self.pattern.check(layout.length, layout.length, layout)  # what does not fit is refused now
        self._make_projections(dim, context_dim, qkv_bias=qkv_bias, key_bias=key_bias, proj_bias=proj_bias)
        self.second = TwoStep(num_heads, kv_heads, d, tie_kv) if two_step else None
        self.q_norm = nn.LayerNorm(d, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(d, eps=1e-6) if qk_norm else nn.Identity()
        self.proj_drop = nn.Dropout(proj_dropout)

    def _make_projections(
        self, dim: int, context_dim: int | None, *, qkv_bias: bool, key_bias: bool, proj_bias: bool
    ) -> None:
        """The linear layers before and after: one for queries, keys and values where they come from equal tokens."""
        values = 0 if self.tie_kv else self.kv_width
        self.qkv: nn.Linear
        if not key_bias and qkv_bias:
            if context_dim is not None:
                raise ValueError("key_bias=False is for self-attention; leave out context_dim, or set qkv_bias=False")
            self.qkv = QueryValueBias(dim, self.q_width, self.kv_width, values)
        elif context_dim is None or context_dim == dim:
            self.qkv = nn.Linear(dim, self.q_width + self.kv_width + values, bias=qkv_bias)
        else:  # keys and values come from tokens of another width
            self.q = nn.Linear(dim, self.q_width, bias=qkv_bias)
            self.kv = nn.Linear(context_dim, self.kv_width + values, bias=qkv_bias)
        self.proj = nn.Linear(self.q_width, dim, bias=proj_bias)

    def _check_choice(self) -> None:
        """Refuses what can never run, when the model is built and not in its first step."""
        H, G, d = self.num_heads, self.num_kv_heads, self.head_dim
        dot = self.score.as_dot(torch.zeros(1, H, 1, d), torch.zeros(1, G, 1, d)) is not None
        name = normalizer_name(self.normalizer)
        pattern = self.pattern
        if isinstance(pattern, Linformer | Performer):
            q, k = torch.zeros(1, H, 1, d), torch.zeros(1, G, 1, d)
            position = self.position if isinstance(self.position, PairBias) else None
            scale = 1.0 if dot else None
            o = Operands(q, k, k, scale, self.score, None, None, self.normalizer, self.dropout, position=position)
            refuse_pairs(o, pattern.name)
        known = pattern.name if isinstance(pattern, Pattern | Performer) else None
        request = Request(
            "cpu",
            torch.float32,
            1,
            H,
            G,
            1,
            1,
            d,
            dot=dot,
            normalizer=name,
            pattern=known,
            bias=isinstance(self.position, PairBias),
            dropout=self.dropout,
        )
        choose_kernel(self.kernel, request)

    @property
    def whole(self) -> bool:
        """Whether the layer must see all queries at once, because pattern or position ask where they are."""
        return self.pattern is not None or self.position is not None

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, kernel={self.kernel}"

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)  # (B, heads, N, d)

    def _linear(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The rows ``start … stop`` of the fused projection."""
        layer = self.qkv if hasattr(self, "qkv") else self.kv
        bias = layer.whole_bias() if isinstance(layer, QueryValueBias) else layer.bias
        return nn.functional.linear(x, layer.weight[start:stop], None if bias is None else bias[start:stop])

    def _project(
        self, x: Tensor, context: Tensor | None, query_pos: Tensor | None, key_pos: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, N, d) queries, (B, G, M, d) keys and values. Positions go to queries and keys only."""
        if hasattr(self, "qkv"):
            if context is None and query_pos is None and key_pos is None:
                heads = self.qkv(x).view(x.shape[0], x.shape[1], -1, self.head_dim)  # (B, N, H + 2G, d)
                # Split and not unbound: the backward pass then writes the gradient of the three in one go.
                if self.tie_kv:
                    q, k = heads.split([self.num_heads, self.num_kv_heads], dim=2)
                    return q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2)
                q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
                return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            start = self.q_width
            q = self._linear(x if query_pos is None else x + query_pos, 0, start)
            source = x if context is None else context
        else:
            if context is None:
                raise ValueError("this layer was built with context_dim: it needs a context")
            start, source = 0, context
            q = self.q(x if query_pos is None else x + query_pos)
        stop = start + self.kv_width
        if key_pos is None and not self.tie_kv:
            k, v = self._linear(source, start, stop + self.kv_width).chunk(2, dim=-1)
        else:
            k = self._linear(source if key_pos is None else source + key_pos, start, stop)
            # tied: the values are the projected keys, without their position
            first = start if self.tie_kv else stop
            v = k if self.tie_kv and key_pos is None else self._linear(source, first, first + self.kv_width)
        return self._heads(q, self.num_heads), self._heads(k, self.num_kv_heads), self._heads(v, self.num_kv_heads)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """Self-attention of ``x``, or cross-attention from ``x`` to ``context``.

        Args:
            x: (B, N, D) tokens that ask.
            context: (B, M, D or context_dim) tokens that are asked; ``x`` itself by default.
            query_pos, key_pos: added to the inputs of queries and keys, not of values
                (Carion et al. 2020, arXiv 2005.12872). In self-attention give both.
            bias: broadcastable to (B, H, N, M), added to the scores.
            mask: boolean, broadcastable to (B, H, N, M), True = may attend; (N, M) and (B, N, M) too.
            layout: how the tokens lie, for patterns and positions; a plain sequence by default.

        Returns:
            (B, N, D).
        """
        layout = layout or Layout()
        if isinstance(self.pattern, ShiftedWindows):
            self.pattern.check(x.shape[1], x.shape[1] if context is None else context.shape[1], layout)
            folding = None if self.kernel in MASKING else self.pattern.folding(layout, x.device)
            if folding is not None and all(given is None for given in (context, query_pos, key_pos, bias, mask)):
                return self._in_windows(x, layout, folding)
        q, k, v = self._prepare(x, context, query_pos, key_pos, layout)
        with without_autocast(q):
            o = self._operands(q, k, v, bias, mask, self.pattern, layout)
            out = run(o, self.kernel)
        if self.recorder is not None:
            self.recorder.keep(self.recorded_as, o, out)
        return self._finish(out)

    def _prepare(
        self, x: Tensor, context: Tensor | None, query_pos: Tensor | None, key_pos: Tensor | None, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projected, normalized and turned: (B, H, N, d) queries, (B, G, M, d) keys and values."""
        q, k, v = self._project(x, context, query_pos, key_pos)
        if self.second is not None:
            q, k, v = self.second(q, k, v)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if self.position is not None:
            self._check_sequence(q.shape[2], k.shape[2], layout)
        if isinstance(self.position, Rotary):
            with without_autocast(q):
                q, k = self.position.rotate(q, layout), self.position.rotate(k, layout)
        return q, k, v

    def _operands(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        pattern: Pattern | Linformer | Performer | None,
        layout: Layout,
    ) -> Operands:
        return operands(
            q,
            k,
            v,
            score=self.score,
            bias=bias,
            mask=mask,
            normalizer=self.normalizer,
            dropout=self.dropout if self.training else 0.0,
            pattern=pattern,
            layout=layout,
            position=self.position if isinstance(self.position, PairBias) else None,
        )

    def _in_windows(self, x: Tensor, layout: Layout, folding: Folding) -> Tensor:
        """The tokens of a window together, all windows as one batch: (B, N, D) → (B, N, D)."""
        q, k, v = self._prepare(folding.fold(x), None, None, None, folding.layout)  # (B · S, H, n, d)
        with without_autocast(q):
            o = self._operands(q, k, v, None, None, None, folding.layout)
            out = run_in_windows(o, folding, self.kernel)
            if self.recorder is not None:
                q, k, v = (folding.unfold_heads(t) for t in (q, k, v))
                whole = self._operands(q, k, v, None, None, self.pattern, layout)
                self.recorder.keep(self.recorded_as, whole, out, folding.unfold_heads)
        return folding.unfold(self._finish(out))

    def _finish(self, out: Tensor) -> Tensor:
        """(B, H, N, d) mixed values → (B, N, D)."""
        out = out.transpose(1, 2).reshape(out.shape[0], out.shape[2], out.shape[1] * out.shape[3])
        return self.proj_drop(self.proj(out))

    @staticmethod
    def _check_sequence(n: int, m: int, layout: Layout) -> None:
        """Positions inside a layer compare places of one sequence."""
        if n != m:
            raise ValueError(
                f"a position inside the layer compares places of one sequence, but there are {n} queries and {m} keys; "
                "in cross-attention use position='none', and query_pos and key_pos"
            )
        layout.check(n)
