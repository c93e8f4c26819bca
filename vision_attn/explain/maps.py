"""Attention maps of any model that stands on the core."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vision_attn.attention import Layout, Recorder, record, recordable
from vision_attn.attention.recorder import Call
from vision_attn.errors import UserError, closest
from vision_attn.explain.planes import Grid, Plane, evaluating, layer_plane

Images: TypeAlias = Tensor | Sequence[Tensor]
SHARE = 0.5  # of the free memory that maps may take


class AttentionMaps(dict[str, Tensor]):
    """Layer name → (B, H, N, M) weights, with what is needed to read them.

    Attributes:
        implied: names of maps of layers that never had weights over their keys (Linformer, Performer): each is the map
            that the result implies. Linformer's rows need not sum to 1.
        planes: name → where its queries and its keys lie on the image; None for those that do not lie there (object
            queries, the steps of a decoder).
        rows: indices of the queries that the maps have rows for; None for all.
        heads: indices of the heads; None for all.
        size: (H, W) of the images, padding included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.implied: frozenset[str] = frozenset()
        self.planes: dict[str, tuple[Plane | None, Plane | None]] = {}
        self.rows: list[int] | None = None
        self.heads: list[int] | None = None
        self.size: tuple[int, int] = (0, 0)


@torch.no_grad()
def attention_maps(
    model: nn.Module,
    images: Images,
    *,
    mask: Tensor | None = None,
    layers: str | Sequence[str] = "all",
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> AttentionMaps:
    """The attention weights of a model on a batch of images, whatever kernel it runs.

    Fused, compiled and half-precision models give their weights too: queries and keys are kept during an ordinary
    forward pass, and the weights computed from them in float32.

    Args:
        model: a model with attention layers; its outputs and mode are left as they are.
        images: (B, C, H, W), normalized as the model wants them. A pointer network takes (B, n, C, H, W), a detector a
            list of (C, h, w) too.
        mask: for models that take one: a detector's (B, H, W), a pointer network's (B, n).
        layers: ``"all"``, a shell wildcard such as ``"blocks.1*"``, or a list of names and wildcards.
        heads: indices of heads, all by default.
        queries: indices of query tokens, all by default (0 is the class token of a ViT that has one).

    Returns:
        Layer name → (B, H, N, M) weights in float32; rows sum to 1 (0 where all is masked). Windows of a Swin are put
        back: N = M = all tokens of the grid (filled up to whole windows). A layer that runs several times has maps
        ``name[0]``, ``name[1]`` …; steps of one query over the same keys are the rows of one map.

    Raises:
        UserError: no attention layer, head or query goes by what was asked for, or the maps would not fit in memory.
    """
    with recording(model, images, mask=mask, layers=layers, heads=heads, queries=queries) as run:
        refuse_too_large([call for calls in run.recorder.calls.values() for call in calls])
        maps = AttentionMaps()
        for name in run.names():
            maps[name] = run.weights(name)
        maps.implied = frozenset(name for name in maps if run.recorder.implied(name))
        maps.size = run.size
        maps.planes = {name: run.planes(name) for name in maps}
        maps.rows = None if queries is None else list(queries)
        maps.heads = None if heads is None else list(heads)
    return maps


@dataclasses.dataclass
class Recording:
    """A forward pass, and what its attention layers used.

    Attributes:
        model: that ran.
        recorder: with what its layers used.
        size: (H, W) of the images in pixels, padding included.
        output: of the model.
        memory: (rows, columns) of the image tokens that a detector's queries attend to.
    """

    model: nn.Module
    recorder: Recorder
    size: tuple[int, int]
    output: Any = None
    memory: Grid | None = None

    def names(self) -> list[str]:
        """Names of all maps."""
        return self.recorder.names()

    def weights(self, name: str) -> Tensor:
        """(B, H, N, M) of one map, see ``Recorder.weights``."""
        return self.recorder.weights(name)

    def planes(self, name: str) -> tuple[Plane | None, Plane | None]:
        """Where the queries and the keys of a layer lie on the image."""
        call = self.recorder.calls_of(name)[0]
        layout = call.operands.layout
        if layout.grid is None and self.memory is not None and name.startswith("decoder."):
            layout = Layout(0, self.memory)
        plane = layer_plane(self.model, name.partition("[")[0], layout, self.size)
        found = [plane if plane is not None and plane.length == n else None for n in call.tokens]
        if name.endswith("cross_attn"):  # as many queries as keys do not make them patches
            found[0] = None
        return found[0], found[1]


@contextlib.contextmanager
def recording(
    model: nn.Module,
    images: Images,
    *,
    mask: Tensor | None = None,
    layers: str | Sequence[str] = "all",
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    gradients: bool = False,
) -> Iterator[Recording]:
    """A forward pass in evaluation mode, recorded; arguments as for ``attention_maps``.

    Raises:
        UserError: as for ``attention_maps``.
    """
    try:
        context = record(model, layers=layers, heads=heads, queries=queries, gradients=gradients)
        with evaluating(model), context as recorder, _memory_of(model) as memory:
            run = Recording(model, recorder, image_size(images))
            run.output = run_model(model, images, mask)
            run.memory = memory[-1] if memory else None
            yield run
    except ValueError as error:
        if isinstance(error, UserError) or not _is_ours(error):
            raise
        hint = "" if isinstance(layers, str) else _hint(model, layers)
        raise UserError(f"{error}.{hint}") from error


def _is_ours(error: ValueError) -> bool:
    return any(words in str(error) for words in ("no attention layer", "has no head", "has no query"))


def _hint(model: nn.Module, layers: Sequence[str]) -> str:
    names = recordable(model)
    return next((closest(name, names) for name in layers if name not in names), "")


def run_model(model: nn.Module, images: Images, mask: Tensor | None = None) -> Any:
    """One forward pass of images that are brought where the model is, and to its precision."""
    where = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    moved: Any
    if isinstance(images, Tensor):
        moved = images.to(where.device, where.dtype)
    else:
        moved = [image.to(where.device, where.dtype) for image in images]
    return model(moved) if mask is None else model(moved, mask.to(where.device))


def image_size(images: Images) -> tuple[int, int]:
    """(H, W) of a batch; of a list, what holds them all."""
    if isinstance(images, Tensor):
        return images.shape[-2], images.shape[-1]
    return max(image.shape[-2] for image in images), max(image.shape[-1] for image in images)


@contextlib.contextmanager
def _memory_of(model: nn.Module) -> Iterator[list[Grid]]:
    """Grids of the map that a detector hands to its encoder, once it has run."""
    found: list[Grid] = []
    projection = getattr(model, "input_proj", None)
    if not isinstance(projection, nn.Module):
        yield found
        return
    handle = projection.register_forward_hook(lambda module, x, out: found.append((out.shape[-2], out.shape[-1])))
    try:
        yield found
    finally:
        handle.remove()


def refuse_too_large(calls: Sequence[Call]) -> None:
    """Says how large maps would be, before memory runs out.

    Raises:
        UserError: they would take more than half of what is free.
    """
    need, call = sum(call.bytes for call in calls), max(calls, key=lambda call: call.bytes)
    free = free_memory(call.operands.q.device)
    if need > SHARE * free:
        b, h, n, m = call.shape
        raise UserError(
            f"these maps would take {need / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free: the largest is "
            f"{b} × {h} heads × {n:,} queries × {m:,} keys. Ask for fewer with layers=…, heads=… or queries=[…], or "
            "give fewer or smaller images."
        )


def free_memory(device: torch.device | str) -> int:
    """Bytes that can be had on a device now; where nobody knows, as many as one likes."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    status = Path("/proc/meminfo")
    if device.type == "cpu" and status.exists():
        return next(1024 * int(x.split()[1]) for x in status.read_text().splitlines() if x.startswith("MemAvailable"))
    return 2**62
