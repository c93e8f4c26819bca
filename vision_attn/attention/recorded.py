"""What one call of an attention layer used, and the weights that follow from it.

Legend: B batch, H query heads, G key/value heads, N queries, M keys, e value width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vision_attn.attention.core import implied_weights, without_autocast
from vision_attn.attention.kernels import Operands, weights_of
from vision_attn.attention.masks import merge_masks, open_rows

ROWS = 2**22  # weights that are computed at a time, beyond the result

Sizes = tuple[int, int, int, int]


@dataclasses.dataclass
class Call:
    """What one call of a layer used.

    Attributes:
        operands: its tensors, of the chosen heads and rows where they can be chosen beforehand.
        rows: indices of the query rows that ``operands`` holds; None for all.
        heads: indices of the heads that ``operands`` holds; None for all.
        picked: indices of the heads to choose from the weights; None where that is done already.
        shape: (B, H, N, M) of the weights that will come out.
        tokens: (N, M) of the whole layer.
        whole: whether all heads and rows were kept because the call has few, see ``Watch``.
        values: (B, G, M, e) the values, where gradients are recorded.
        out: the result, where gradients are recorded.
        unfold: brings the gradient of ``out`` into the shape (B, H, N, e); None where it has it.
        gradient: (B, H, N, e) of the result, once ``Recorder.differentiate`` has brought it.
    """

    operands: Operands
    rows: Tensor | None
    heads: Tensor | None
    picked: Tensor | None
    shape: Sizes
    tokens: tuple[int, int]
    whole: bool = False
    values: Tensor | None = None
    out: Tensor | None = None
    unfold: Callable[[Tensor], Tensor] | None = None
    gradient: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Memory that the weights take in float32."""
        b, h, n, m = self.shape
        return 4 * b * h * n * m


def _rows(pair: Tensor | None, heads: Tensor | None, queries: Tensor | None) -> Tensor | None:
    """The chosen heads and rows of a mask or bias (B or 1, H or 1, N or 1, M or 1)."""
    if pair is None:
        return None
    if heads is not None and pair.shape[1] > 1:
        pair = pair[:, heads]
    if queries is not None and pair.shape[2] > 1:
        pair = pair[:, :, queries]
    return pair.detach()


def rows_of(o: Operands, heads: Tensor | None, queries: Tensor | None) -> Operands:
    """What the chosen heads and rows need. Pattern and position are written out when weights are computed."""
    # Linformer's and Performer's maps are implied ones, over the keys as they were before
    q, k = o.q.detach(), (o.k if o.whole_k is None else o.whole_k).detach()
    group = q.shape[1] // k.shape[1]
    bias, mask, some = (_rows(pair, heads, queries) for pair in (o.bias, o.mask, o.some))
    if heads is not None:
        q, k = q[:, heads], k[:, heads // group]
    if queries is not None:
        q = q[:, :, queries]
    return dataclasses.replace(o, q=q, k=k, v=k, bias=bias, mask=mask, some=some, whole_k=None)


def _dense(call: Call, span: Tensor) -> Operands:
    """Some rows of what a call kept, with pattern and position written out for these rows alone."""
    o, (n, m) = call.operands, call.tokens
    device = o.q.device
    i = (span if call.rows is None else call.rows[span])[:, None]
    bias, mask, some = (_rows(pair, None, span) for pair in (o.bias, o.mask, o.some))
    if o.pattern is not None or o.position is not None:
        j = torch.arange(m, device=device)[None]
        if o.position is not None:
            place = o.position.at(i, j, n, m, o.layout).detach()[None]
            place = place if call.heads is None else place[:, call.heads]
            bias = place if bias is None else bias + place
        if o.pattern is not None:
            mask = merge_masks(mask, o.pattern.allowed(i, j, n, o.layout)[None, None])
    if mask is not None:
        mask, some = open_rows(mask)
    q, k = o.q[:, :, span].float(), o.k.float()
    bias = None if bias is None else bias.float()
    return dataclasses.replace(
        o, q=q, k=k, v=k, bias=bias, mask=mask, some=some, pattern=None, position=None, whole_k=None
    )


def some_weights(call: Call, span: Tensor) -> Tensor:
    """(B, H, n, M) in float32, of the rows ``span`` among those that a call kept."""
    o = call.operands
    with without_autocast(o.q):
        if o.low_rank is not None:
            o = dataclasses.replace(o, q=o.q[:, :, span].float(), k=o.k.float(), some=_rows(o.some, None, span))
            weights = o.finish(implied_weights(o))
        else:
            o = _dense(call, span)
            weights = o.finish(weights_of(o))
    return weights if call.picked is None else weights[:, call.picked]


def spans(call: Call) -> Iterator[Tensor]:
    """The rows of a call, as many at a time as ``ROWS`` allows."""
    o, (b, _, n, m) = call.operands, call.shape
    step = max(1, ROWS // max(1, b * o.q.shape[1] * m))
    for start in range(0, n, step):
        yield torch.arange(start, min(start + step, n), device=o.q.device)


def all_weights(call: Call) -> Tensor:
    """(B, H, N, M) in float32. Rows are computed some at a time, so that no second tensor of that size is held."""
    parts = list(spans(call))
    if len(parts) == 1:
        return some_weights(call, parts[0])
    weights = call.operands.q.new_empty(call.shape, dtype=torch.float32)
    for span in parts:
        weights[:, :, int(span[0]) : int(span[-1]) + 1] = some_weights(call, span)
    return weights
