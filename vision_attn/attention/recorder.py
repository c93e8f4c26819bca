"""Attention weights out of a model, whatever kernel it runs.

Fused kernels never hold the weights. The recorder keeps the queries and keys that each layer used, of the
heads and rows asked for, and computes the weights from them afterwards, in float32. The forward pass itself
is left as it is, so outputs do not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.core import operands, without_autocast
from vision_attn.attention.kernels import Operands
from vision_attn.attention.recorded import Call, Sizes, all_weights, rows_of, some_weights, spans


class NotRecorded(ValueError):
    """There is no such layer, head or query to record; the message names those there are."""


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

    Such calls have few queries, one for a pool and one for each step of a pointer: beside other layers they are kept
    whole, whatever heads and queries are asked for. Where nothing else is recorded, these choose among theirs.
    """

    def forward(self, q: Tensor, k: Tensor, **options: Any) -> None:
        """Keeps the call for the recorder, if one is there; arguments as for ``attention_weights``."""
        if self.recorder is not None:
            self.recorder.expect(self.recorded_as, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), whole=True)
            with without_autocast(q):
                given = {"bias": None, "mask": None, "normalizer": "softmax", **options}
                self.recorder.keep(self.recorded_as, operands(q, k, k, **given), whole=True)


@dataclasses.dataclass
class Recorder:
    """Collects what each attention layer used; ``weights()`` computes the maps.

    A layer may run several times in one forward pass, as those of a decoder that works step by step do. Its maps are
    then called ``name[0]``, ``name[1]`` …; but steps of one query each, over the same keys, are the rows of one map.

    Attributes:
        layers: ``"all"``, a shell wildcard, or names of attention layers.
        heads, queries: indices to keep; None keeps all. Memory falls accordingly.
        gradients: also keep values and results, for ``differentiate``.
        check: is told the name and the sizes (B, H, N, M) of each map that is asked for before its layer attends, and
            may raise.
        calls: layer name -> what it used in the calls of the latest forward pass.
    """

    layers: str | Sequence[str] = "all"
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None
    gradients: bool = False
    check: Callable[[str, Sizes], None] | None = None
    calls: dict[str, list[Call]] = dataclasses.field(default_factory=dict)

    def wants(self, name: str) -> bool:
        """Whether the layer of that name is asked for."""
        if isinstance(self.layers, str):
            return self.layers == "all" or fnmatchcase(name, self.layers)
        return any(name == asked or fnmatchcase(name, asked) for asked in self.layers)

    def expect(self, name: str, sizes: Sizes, *, whole: bool = False) -> None:
        """Called before a layer attends: refuses heads and queries that it does not have.

        Args:
            name: of the layer.
            sizes: (B, H, N, M) of all its weights.
            whole: all heads and rows will be kept.

        Raises:
            NotRecorded: there is no such head or query.
        """
        b, h, n, m = sizes
        if not whole:
            h = h if self.heads is None else len(_chosen(name, "head", self.heads, h))
            n = n if self.queries is None else len(_chosen(name, "query", self.queries, n))
        if self.check is not None:
            self.check(name, (b, h, n, m))

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
            out: (B, H, N, e) what came out.
            unfold: brings the gradient of ``out`` into that shape where it has another.
            whole: keep all heads and rows.
        """
        device, (h, n) = o.q.device, (o.q.shape[1], o.q.shape[2])
        m = (o.k if o.whole_k is None else o.whole_k).shape[2]
        heads = None if whole or self.heads is None else _chosen(name, "head", self.heads, h).to(device)
        queries = None if whole or self.queries is None else _chosen(name, "query", self.queries, n).to(device)
        shape = (o.q.shape[0], h if heads is None else len(heads), n if queries is None else len(queries), m)
        # What has parameters per head, and the implied maps, are computed for all heads and picked from afterwards.
        together = o.scale is None or o.low_rank is not None or isinstance(o.normalizer, nn.Module)
        with torch.no_grad():
            kept = rows_of(o, None if together else heads, queries)
        call = Call(kept, queries, None if together else heads, heads if together else None, shape, (n, m), whole)
        self.calls.setdefault(name, []).append(call)
        if self.gradients and out is not None and torch.is_grad_enabled():
            if not out.requires_grad:
                out.requires_grad_()  # nothing before it asks for gradients: it is where they end
            call.values, call.out, call.unfold = o.v.detach(), out, unfold

    def differentiate(self, answer: Tensor, *, again: bool = False) -> None:
        """Brings each call the gradient of a number with respect to the layer's result, and none to parameters.

        Results are differentiated themselves, so it does not matter which parameters ask for gradients. A call that
        the answer does not depend on has no gradient.

        Args:
            answer: a number that the forward pass has led to.
            again: keep the graph for another answer.

        Raises:
            NotRecorded: the answer depends on no layer that was recorded.
        """
        calls = [call for calls in self.calls.values() for call in calls if call.out is not None]
        found: Sequence[Tensor | None] = [None] * len(calls)
        if calls and answer.requires_grad:
            results = [call.out for call in calls if call.out is not None]
            found = torch.autograd.grad(answer, results, retain_graph=again, allow_unused=True)
        if all(gradient is None for gradient in found):
            raise NotRecorded("the answer depends on no layer whose gradients were recorded")
        for call, gradient in zip(calls, found, strict=True):
            call.gradient = gradient if gradient is None or call.unfold is None else call.unfold(gradient)

    def forget(self) -> None:
        """Drops what was kept: another forward pass begins."""
        self.calls.clear()

    def implied(self, name: str) -> bool:
        """Whether a layer never had weights over its keys, so that its map is one that its result implies."""
        return self.calls_of(name)[0].operands.low_rank is not None

    def names(self) -> list[str]:
        """The names of all maps, in the order in which the layers ran."""
        found = []
        for name, calls in self.calls.items():
            found += [name] if _one_map(calls) else [f"{name}[{step}]" for step in range(len(calls))]
        return found

    def calls_of(self, name: str) -> list[Call]:
        """The calls that the map of that name is made of.

        Raises:
            NotRecorded: nothing of that name was recorded.
        """
        if name in self.calls and _one_map(self.calls[name]):
            return self.calls[name]
        layer, bracket, step = name.rpartition("[")
        if bracket and layer in self.calls and step[:-1].isdigit() and int(step[:-1]) < len(self.calls[layer]):
            return [self.calls[layer][int(step[:-1])]]
        raise NotRecorded(f"nothing was recorded as {name!r}; there are: {', '.join(self.names()) or 'no maps'}")

    @torch.no_grad()
    def weights(self, name: str, *, rows: Tensor | None = None) -> Tensor:
        """(B, H, N, M) weights of one layer in float32.

        Rows sum to 1 where the normalizer's do (see ``SUM_TO_ONE``), and to 0 where nothing may be attended.

        Args:
            name: of the map.
            rows: indices among the rows that were kept; only these are computed. By default all are.

        Raises:
            NotRecorded: nothing of that name was recorded, or it has no such head or query.
        """
        calls = self.calls_of(name)
        if len(calls) == 1 and rows is not None and not calls[0].whole:
            return some_weights(calls[0], rows)
        found = all_weights(calls[0]) if len(calls) == 1 else torch.cat([all_weights(call) for call in calls], dim=2)
        found = self._of_few(name, found)
        return found if rows is None else found[:, :, rows]

    @torch.no_grad()
    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The same map some rows at a time, with the number of the first: (B, H, n, M). It is never held whole."""
        calls = self.calls_of(name)
        if calls[0].whole:
            yield 0, self.weights(name)
            return
        first = 0
        for call in calls:
            for span in spans(call):
                yield first + int(span[0]), some_weights(call, span)
            first += call.shape[2]

    def _of_few(self, name: str, weights: Tensor) -> Tensor:
        """What is asked for of layers that are kept whole, where there are no others that it could be meant for."""
        if not all(call.whole for calls in self.calls.values() for call in calls):
            return weights
        if self.heads is not None:
            weights = weights[:, _chosen(name, "head", self.heads, weights.shape[1]).to(weights.device)]
        if self.queries is not None:
            weights = weights[:, :, _chosen(name, "query", self.queries, weights.shape[2]).to(weights.device)]
        return weights

    def maps(self) -> dict[str, Tensor]:
        """Layer name -> weights, for every layer that ran."""
        return {name: self.weights(name) for name in self.names()}


def _chosen(layer: str, what: str, asked: Sequence[int], size: int) -> Tensor:
    """Indices of heads or queries, counted from 0.

    Raises:
        NotRecorded: none are asked for, or one that there is not.
    """
    there = f"it has {size}, 0 to {size - 1}" if size > 1 else "it has one, 0"
    if not len(asked):
        raise NotRecorded(f"layer {layer!r}: no {what} is asked for; {there}")
    bad = [i for i in asked if not isinstance(i, numbers.Integral) or not -size <= i < size]
    if bad:
        raise NotRecorded(f"layer {layer!r} has no {what} {bad[0]!r}: {there}")
    return torch.as_tensor(list(asked), dtype=torch.long) % size


def _one_map(calls: Sequence[Call]) -> bool:
    return len(calls) == 1 or all(call.shape[2] == 1 and call.shape == calls[0].shape for call in calls)


def recordable(model: nn.Module) -> dict[str, Recordable]:
    """Name → every attention of a model that can be recorded, in the order of its modules."""
    return {
        name.replace("_orig_mod.", "").removesuffix(".watch"): module
        for name, module in model.named_modules()
        if isinstance(module, Recordable)
    }


def _announce(recorder: Recorder, name: str) -> Callable[..., None]:
    """A hook that tells the recorder what will come, before a layer attends."""

    def hook(layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        x = args[0] if args else options["x"]
        context = args[1] if len(args) > 1 else options.get("context")
        keys = x if context is None else context
        recorder.expect(name, (x.shape[0], layer.num_heads, x.shape[1], keys.shape[1]))

    return hook


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
    check: Callable[[str, Sizes], None] | None = None,
) -> Iterator[Recorder]:
    """Records the attention of ``model`` while the block runs; of several forward passes, the latest.

    Args:
        model: any model with attention layers of this core. A compiled one runs eagerly meanwhile.
        layers: ``"all"``, a shell wildcard such as ``"blocks.1*"``, or a list of names and wildcards.
        heads: indices of heads to keep, all by default.
        queries: indices of query rows to keep, all by default.
        gradients: also keep values and results, for ``Recorder.differentiate``.
        check: is told the name and sizes (B, H, N, M) of each map before its layer attends, and may raise.

    Yields:
        A ``Recorder``, to be asked for ``maps()`` or ``weights(name)`` after a forward pass.

    Raises:
        NotRecorded: no attention layer, head or query goes by what is asked for.
    """
    recorder = Recorder(layers, heads, queries, gradients, check)
    every = recordable(model)
    if not every:
        raise NotRecorded(f"{type(model).__name__} has no attention layer of this core, so there is nothing to record")
    asked = [layers] if isinstance(layers, str) else list(layers)
    missing = [a for a in asked if a != "all" and not any(name == a or fnmatchcase(name, a) for name in every)]
    chosen = {name: module for name, module in every.items() if recorder.wants(name)}
    if missing or not chosen:
        what = missing[0] if missing else layers
        raise NotRecorded(f"no attention layer is called {what!r}; there are: {', '.join(every)}")
    for name, module in chosen.items():
        module.recorder, module.recorded_as = recorder, name
    handles = [model.register_forward_pre_hook(lambda module, inputs: recorder.forget(), prepend=True)]
    handles += [
        module.register_forward_pre_hook(_announce(recorder, name), with_kwargs=True)
        for name, module in chosen.items()
        if not isinstance(module, Watch)
    ]
    try:
        # A compiled graph has no place for a recorder. (Asking for the stance imports the compiler: seconds.)
        with torch.compiler.set_stance("force_eager") if _is_compiled(model) else contextlib.nullcontext():
            yield recorder
    finally:
        for handle in handles:
            handle.remove()
        for module in chosen.values():
            module.recorder, module.recorded_as = None, ""
