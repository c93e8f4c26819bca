"""Attention weights out of a model, whatever kernel it runs.

Fused kernels never hold the weights. The recorder keeps the queries and keys that each layer used, of the
heads and rows asked for, and computes the weights from them afterwards, in float32. The forward pass itself
is left as it is, so outputs do not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.core import implied_weights, operands, without_autocast
from vision_attn.attention.kernels import Operands, weights_of
from vision_attn.attention.masks import merge_masks, open_rows

ROWS = 2**22  # weights that are computed at a time, beyond the result


class Recordable(nn.Module):
    """A module whose attention weights ``record`` can ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder: Recorder | None = None  # set by ``record``
        self.recorded_as = ""

    def __getstate__(self) -> dict[str, Any]:
        # A recorder belongs to one block of code, never to a copied or saved module.
        return {**self.__dict__, "recorder": None, "recorded_as": ""}


class Watch(Recordable):
    """Stands beside a call of ``attend`` or ``attention_weights`` that is no layer, so that it can be recorded too.

    Such calls have few queries, one for a pool and one for each step of a pointer: they are kept whole, whatever heads
    and queries are asked for.
    """

    def forward(self, q: Tensor, k: Tensor, **options: Any) -> None:
        """Keeps the call for the recorder, if one is there; arguments as for ``attention_weights``."""
        if self.recorder is not None:
            with without_autocast(q):
                given = {"bias": None, "mask": None, "normalizer": "softmax", **options}
                self.recorder.keep(self.recorded_as, operands(q, k, k, **given), whole=True)


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
        values: (B, G, M, e) the values, where gradients are recorded.
        gradient: (B, H, N, e) of the result, once a backward pass has brought it.
    """

    operands: Operands
    rows: Tensor | None
    heads: Tensor | None
    picked: Tensor | None
    shape: tuple[int, int, int, int]
    tokens: tuple[int, int]
    values: Tensor | None = None
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


def _rows_of(o: Operands, heads: Tensor | None, queries: Tensor | None) -> Operands:
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


def _dense(call: Call, start: int, stop: int) -> Operands:
    """Rows ``start … stop`` of what a call kept, with pattern and position written out for these rows alone."""
    o, (n, m) = call.operands, call.tokens
    device = o.q.device
    span = torch.arange(start, stop, device=device)
    i = (span if call.rows is None else call.rows[start:stop])[:, None]
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
    q, k = o.q[:, :, start:stop].float(), o.k.float()
    bias = None if bias is None else bias.float()
    return dataclasses.replace(
        o, q=q, k=k, v=k, bias=bias, mask=mask, some=some, pattern=None, position=None, whole_k=None
    )


def _weights(call: Call) -> Tensor:
    """(B, H, N, M) in float32. Rows are computed some at a time, so that no second tensor of that size is held."""
    o, (b, _, n, m) = call.operands, call.shape
    with without_autocast(o.q):
        if o.low_rank is not None:
            weights = o.finish(implied_weights(dataclasses.replace(o, q=o.q.float(), k=o.k.float())))
            return weights if call.picked is None else weights[:, call.picked]
        step = max(1, ROWS // (b * o.q.shape[1] * m))
        if step >= n:
            return _some(call, 0, n)
        weights = o.q.new_empty(call.shape, dtype=torch.float32)
        for start in range(0, n, step):
            stop = min(start + step, n)
            weights[:, :, start:stop] = _some(call, start, stop)
        return weights


def _some(call: Call, start: int, stop: int) -> Tensor:
    o = _dense(call, start, stop)
    weights = o.finish(weights_of(o))
    return weights if call.picked is None else weights[:, call.picked]


@dataclasses.dataclass
class Recorder:
    """Collects what each attention layer used; ``weights()`` computes the maps.

    A layer may run several times in one forward pass, as those of a decoder that works step by step do. Its maps are
    then called ``name[0]``, ``name[1]`` …; but steps of one query each, over the same keys, are the rows of one map.

    Attributes:
        layers: ``"all"``, a shell wildcard, or names of attention layers.
        heads, queries: indices to keep; None keeps all. Memory falls accordingly.
        gradients: also keep the values, and the gradient of each layer's result once a backward pass brings it.
        calls: layer name -> what it used in the calls of the latest forward pass.
    """

    layers: str | Sequence[str] = "all"
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None
    gradients: bool = False
    calls: dict[str, list[Call]] = dataclasses.field(default_factory=dict)

    def wants(self, name: str) -> bool:
        """Whether the layer of that name is asked for."""
        if isinstance(self.layers, str):
            return self.layers == "all" or fnmatchcase(name, self.layers)
        return any(name == asked or fnmatchcase(name, asked) for asked in self.layers)

    def keep(
        self,
        name: str,
        o: Operands,
        out: Tensor | None = None,
        unfold: Callable[[Tensor], Tensor] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Called by the layer during its forward pass.

        Args:
            name: of the layer.
            o: what it used.
            out: (B, H, N, e) what came out, where it was differentiated.
            unfold: brings the gradient of ``out`` into that shape where it has another.
            whole: keep all heads and rows.
        """
        device, (h, n) = o.q.device, (o.q.shape[1], o.q.shape[2])
        m = (o.k if o.whole_k is None else o.whole_k).shape[2]
        heads = None if whole else self._chosen(name, "head", self.heads, h, device)
        queries = None if whole else self._chosen(name, "query", self.queries, n, device)
        shape = (o.q.shape[0], h if heads is None else len(heads), n if queries is None else len(queries), m)
        # What has parameters per head, and the implied maps, are computed for all heads and picked from afterwards.
        together = o.scale is None or o.low_rank is not None or isinstance(o.normalizer, nn.Module)
        with torch.no_grad():
            kept = _rows_of(o, None if together else heads, queries)
        call = Call(kept, queries, None if together else heads, heads if together else None, shape, (n, m))
        self.calls.setdefault(name, []).append(call)
        if self.gradients and out is not None and out.requires_grad:
            call.values = o.v.detach()

            def bring(gradient: Tensor) -> None:
                call.gradient = gradient if unfold is None else unfold(gradient)

            out.register_hook(bring)

    def forget(self) -> None:
        """Drops what was kept: another forward pass begins."""
        self.calls.clear()

    def implied(self, name: str) -> bool:
        """Whether a layer never had weights over its keys, so that its map is one that its result implies."""
        return self.calls_of(name)[0].operands.low_rank is not None

    @staticmethod
    def _chosen(layer: str, what: str, asked: Sequence[int] | None, size: int, device: torch.device) -> Tensor | None:
        if asked is None:
            return None
        bad = [i for i in asked if not -size <= i < size]
        if bad:
            raise ValueError(f"layer {layer!r} has no {what} {bad[0]}: it has {size}, 0 to {size - 1}")
        return torch.as_tensor(list(asked), dtype=torch.long, device=device) % size

    def names(self) -> list[str]:
        """The names of all maps, in the order in which the layers ran."""
        found = []
        for name, calls in self.calls.items():
            found += [name] if _one_map(calls) else [f"{name}[{step}]" for step in range(len(calls))]
        return found

    def calls_of(self, name: str) -> list[Call]:
        """The calls that the map of that name is made of.

        Raises:
            ValueError: nothing of that name was recorded.
        """
        if name in self.calls and _one_map(self.calls[name]):
            return self.calls[name]
        layer, bracket, step = name.rpartition("[")
        if bracket and layer in self.calls and step[:-1].isdigit() and int(step[:-1]) < len(self.calls[layer]):
            return [self.calls[layer][int(step[:-1])]]
        raise ValueError(f"nothing was recorded as {name!r}; there are: {', '.join(self.names()) or 'no maps'}")

    @torch.no_grad()
    def weights(self, name: str) -> Tensor:
        """(B, H, N, M) weights of one layer in float32; rows sum to 1, or to 0 where nothing may be attended."""
        calls = self.calls_of(name)
        return _weights(calls[0]) if len(calls) == 1 else torch.cat([_weights(call) for call in calls], dim=2)

    def maps(self) -> dict[str, Tensor]:
        """Layer name -> weights, for every layer that ran."""
        return {name: self.weights(name) for name in self.names()}


def _one_map(calls: Sequence[Call]) -> bool:
    return len(calls) == 1 or all(call.shape[2] == 1 and call.shape == calls[0].shape for call in calls)


def recordable(model: nn.Module) -> dict[str, Recordable]:
    """Name → every attention of a model that can be recorded, in the order of its modules."""
    return {
        name.replace("_orig_mod.", "").removesuffix(".watch"): module
        for name, module in model.named_modules()
        if isinstance(module, Recordable)
    }


def _is_compiled(model: nn.Module) -> bool:
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())


@contextlib.contextmanager
def record(
    model: nn.Module,
    *,
    layers: str | Sequence[str] = "all",
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    gradients: bool = False,
) -> Iterator[Recorder]:
    """Records the attention of ``model`` while the block runs; of several forward passes, the latest.

    Args:
        model: any model with attention layers of this core. A compiled one runs eagerly meanwhile.
        layers: ``"all"``, a shell wildcard such as ``"blocks.1*"``, or a list of names and wildcards.
        heads: indices of heads to keep, all by default.
        queries: indices of query rows to keep, all by default.
        gradients: also keep values, and gradients of the layers' results, see ``Call``.

    Yields:
        A ``Recorder``, to be asked for ``maps()`` or ``weights(name)`` after a forward pass.

    Raises:
        ValueError: no attention layer goes by the names asked for.
    """
    recorder = Recorder(layers, heads, queries, gradients)
    every = recordable(model)
    if not every:
        raise ValueError(f"{type(model).__name__} has no attention layer of this core, so there is nothing to record")
    asked = [layers] if isinstance(layers, str) else list(layers)
    missing = [a for a in asked if a != "all" and not any(name == a or fnmatchcase(name, a) for name in every)]
    chosen = {name: module for name, module in every.items() if recorder.wants(name)}
    if missing or not chosen:
        what = missing[0] if missing else layers
        raise ValueError(f"no attention layer is called {what!r}; there are: {', '.join(every)}")
    for name, module in chosen.items():
        module.recorder, module.recorded_as = recorder, name
    handle = model.register_forward_pre_hook(lambda module, inputs: recorder.forget())
    try:
        # A compiled graph has no place for a recorder. (Asking for the stance imports the compiler: seconds.)
        with torch.compiler.set_stance("force_eager") if _is_compiled(model) else contextlib.nullcontext():
            yield recorder
    finally:
        handle.remove()
        for module in chosen.values():
            module.recorder, module.recorded_as = None, ""
