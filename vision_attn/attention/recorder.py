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

from vision_attn.attention.kernels import Operands, weights_of


def _rows(pair: Tensor | None, heads: Tensor | None, queries: Tensor | None) -> Tensor | None:
    """The chosen heads and rows of a mask or bias (B or 1, H or 1, N or 1, M or 1)."""
    if pair is None:
        return None
    if heads is not None and pair.shape[1] > 1:
        pair = pair[:, heads]
    if queries is not None and pair.shape[2] > 1:
        pair = pair[:, :, queries]
    return pair.detach()


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
    some: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def wants(self, name: str) -> bool:
        """Whether the layer of that name is asked for."""
        if isinstance(self.layers, str):
            return self.layers == "all" or fnmatchcase(name, self.layers)
        return name in self.layers

    def keep(self, name: str, o: Operands, some: Tensor | None) -> None:
        """Called by the layer during its forward pass."""
        device = o.q.device
        heads = None if self.heads is None else torch.as_tensor(list(self.heads), device=device)
        queries = None if self.queries is None else torch.as_tensor(list(self.queries), device=device)
        q, k = o.q.detach(), o.k.detach()
        if heads is not None:
            self._check(name, "head", self.heads, q.shape[1])
            group = q.shape[1] // k.shape[1]
            q, k = q[:, heads], k[:, heads // group]
        if queries is not None:
            self._check(name, "query", self.queries, q.shape[2])
            q = q[:, :, queries]
        bias, mask = _rows(o.bias, heads, queries), _rows(o.mask, heads, queries)
        self.calls[name] = dataclasses.replace(o, q=q, k=k, v=q, bias=bias, mask=mask)
        self.some.pop(name, None)
        kept = _rows(some, heads, queries)
        if kept is not None:
            self.some[name] = kept

    @staticmethod
    def _check(layer: str, what: str, asked: Sequence[int] | None, size: int) -> None:
        bad = [i for i in asked or () if not -size <= i < size]
        if bad:
            raise ValueError(f"layer {layer!r} has no {what} {bad[0]}: it has {size}")

    @torch.no_grad()
    def weights(self, name: str) -> Tensor:
        """(B, H, N, M) weights of one layer in float32; rows sum to 1, or to 0 where nothing may be attended."""
        o = self.calls[name]
        bias = None if o.bias is None else o.bias.float()
        with torch.autocast(o.q.device.type, enabled=False):
            weights = weights_of(dataclasses.replace(o, q=o.q.float(), k=o.k.float(), bias=bias))
        return weights * self.some[name] if name in self.some else weights

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
    from vision_attn.attention.core import Attention

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
