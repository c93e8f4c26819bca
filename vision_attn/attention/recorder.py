"""Attention weights out of a model, whatever kernel it runs.

Fused kernels never hold the weights. The recorder keeps the queries and keys that each layer used, of the
heads and rows asked for, and computes the weights from them afterwards, in float32. The forward pass itself
is left as it is, so outputs do not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from vision_attn.attention.core import implied_weights
from vision_attn.attention.kernels import Operands, weights_of
from vision_attn.attention.masks import merge_masks, open_rows


def _rows(pair: Tensor | None, heads: Tensor | None, queries: Tensor | None) -> Tensor | None:
    """The chosen heads and rows of a mask or bias (B or 1, H or 1, N or 1, M or 1)."""
    if pair is None:
        return None
    if heads is not None and pair.shape[1] > 1:
        pair = pair[:, heads]
    if queries is not None and pair.shape[2] > 1:
        pair = pair[:, :, queries]
    return pair.detach()


def _rows_of(o: Operands, heads: Tensor | None, queries: Tensor | None) -> Operands:
    """What the chosen heads and rows need, with pattern and position written out for these rows alone."""
    # Linformer's and Performer's maps are implied ones, over the keys as they were before
    q, k = o.q.detach(), (o.k if o.whole_k is None else o.whole_k).detach()
    n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    bias, mask, some = (_rows(pair, heads, queries) for pair in (o.bias, o.mask, o.some))
    if o.pattern is not None or o.position is not None:
        i = (torch.arange(n, device=q.device) if queries is None else queries)[:, None]
        j = torch.arange(m, device=q.device)[None]
        if o.position is not None:
            place = o.position.at(i, j, n, m, o.layout).detach()[None]
            place = place if heads is None else place[:, heads]
            bias = place if bias is None else bias + place
        if o.pattern is not None:
            mask = merge_masks(mask, o.pattern.allowed(i, j, n, o.layout)[None, None])
    if mask is not None:
        mask, some = open_rows(mask)
    if heads is not None:
        q, k = q[:, heads], k[:, heads // group]
    if queries is not None:
        q = q[:, :, queries]
    return dataclasses.replace(
        o, q=q, k=k, v=k, bias=bias, mask=mask, some=some, pattern=None, position=None, whole_k=None
    )


@dataclasses.dataclass
class Recorder:
    """Collects what each attention layer used; ``weights()`` computes the maps.

    Attributes:
        layers: ``"all"``, a shell wildcard, or names of attention layers.
        heads, queries: indices to keep; None keeps all. Memory falls accordingly.
        calls: layer name -> what it used in its latest call.
    """

    layers: str | Sequence[str] = "all"
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None
    calls: dict[str, Operands] = dataclasses.field(default_factory=dict)
    picked: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def wants(self, name: str) -> bool:
        """Whether the layer of that name is asked for."""
        if isinstance(self.layers, str):
            return self.layers == "all" or fnmatchcase(name, self.layers)
        return name in self.layers

    def keep(self, name: str, o: Operands) -> None:
        """Called by the layer during its forward pass."""
        device, n = o.q.device, o.q.shape[2]
        self._check(name, "head", self.heads, o.q.shape[1])
        self._check(name, "query", self.queries, n)
        heads = None if self.heads is None else torch.as_tensor(list(self.heads), device=device) % o.q.shape[1]
        queries = None if self.queries is None else torch.as_tensor(list(self.queries), device=device) % n
        # What has parameters per head, and the implied maps, are computed for all heads and picked from afterwards.
        together = o.scale is None or o.low_rank is not None or isinstance(o.normalizer, nn.Module)
        self.picked.pop(name, None)
        if together and heads is not None:
            self.picked[name], heads = heads, None
        with torch.no_grad():
            self.calls[name] = _rows_of(o, heads, queries)

    def implied(self, name: str) -> bool:
        """Whether a layer never had weights over its keys, so that its map is one that its result implies."""
        return self.calls[name].low_rank is not None

    @staticmethod
    def _check(layer: str, what: str, asked: Sequence[int] | None, size: int) -> None:
        bad = [i for i in asked or () if not -size <= i < size]
        if bad:
            raise ValueError(f"layer {layer!r} has no {what} {bad[0]}: it has {size}")

    @torch.no_grad()
    def weights(self, name: str) -> Tensor:
        """(B, H, N, M) weights of one layer in float32; rows sum to 1, or to 0 where nothing may be attended."""
        o = self.calls[name]
        q, k = o.q.float(), o.k.float()
        with torch.autocast(o.q.device.type, enabled=False):
            if o.low_rank is not None:
                weights = implied_weights(dataclasses.replace(o, q=q, k=k))
            else:
                bias = None if o.bias is None else o.bias.float()
                weights = weights_of(dataclasses.replace(o, q=q, k=k, bias=bias))
            weights = o.finish(weights)
        return weights[:, self.picked[name]] if name in self.picked else weights

    def maps(self) -> dict[str, Tensor]:
        """Layer name -> weights, for every layer that ran."""
        return {name: self.weights(name) for name in self.calls}


@contextlib.contextmanager
def record(
    model: nn.Module,
    *,
    layers: str | Sequence[str] = "all",
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Iterator[Recorder]:
    """Records the attention of ``model`` while the block runs.

    Args:
        model: any model with attention layers of this core.
        layers: ``"all"``, a shell wildcard such as ``"blocks.1*"``, or a list of names.
        heads: indices of heads to keep, all by default.
        queries: indices of query rows to keep, all by default.

    Yields:
        A ``Recorder``, to be asked for ``maps()`` or ``weights(name)`` after a forward pass.

    Raises:
        ValueError: no attention layer goes by the names asked for.
    """
    from vision_attn.attention.multihead import Attention

    recorder = Recorder(layers, heads, queries)
    every = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    if not every:
        raise ValueError(f"{type(model).__name__} has no attention layer of this core, so there is nothing to record")
    missing = [] if isinstance(layers, str) else [name for name in layers if name not in every]
    chosen = {name: module for name, module in every.items() if recorder.wants(name)}
    if missing or not chosen:
        asked = missing[0] if missing else layers
        raise ValueError(f"no attention layer is called {asked!r}; there are: {', '.join(every)}")
    for name, module in chosen.items():
        module.recorder, module.recorded_as = recorder, name
    try:
        yield recorder
    finally:
        for module in chosen.values():
            module.recorder, module.recorded_as = None, ""
