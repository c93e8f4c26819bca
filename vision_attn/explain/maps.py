"""Attention maps of any model that stands on the core."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import Layout, Recorder, record, recordable
from vision_attn.attention.linear import Linformer, Performer
from vision_attn.attention.recorded import Call, Sizes
from vision_attn.attention.recorder import NotRecorded
from vision_attn.errors import UserError, closest
from vision_attn.explain.planes import Grid, Plane, evaluating, layer_plane
from vision_attn.models.glimpse import GlimpseNet

Images: TypeAlias = Tensor | Sequence[Tensor]
SHARE = 0.5  # of the free memory that maps may take
LIMITS = (  # of a container: control groups of version 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class AttentionMaps(dict[str, Tensor]):
    """Layer name → (B, H, N, M) weights, with what is needed to read them.

    Attributes:
        implied: names of maps of layers that never had weights over their keys (Linformer, Performer): each is the map
            that the result implies. Linformer's rows need not sum to 1, and have negative entries.
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
        Layer name → (B, H, N, M) weights in float32. Rows sum to 1, and to 0 where all is masked; with the normalizers
        ``bernoulli`` and ``linear_chain``, which give every key a probability of its own, and in the implied maps of
        Linformer they sum to something else. Windows of a Swin are put back: N = M = all tokens of the grid (filled up
        to whole windows). A layer that runs several times has maps ``name[0]``, ``name[1]`` …; steps of one query over
        the same keys are the rows of one map. Pools, pointers and glimpses, which have few queries, are given whole
        beside other layers; where they are all that is asked for, ``heads`` and ``queries`` choose among theirs.

    Raises:
        UserError: no attention layer, head or query goes by what was asked for, or the maps would not fit in memory;
            the latter is said before the first layer that is too large attends.
    """
    with recording(model, images, mask=mask, layers=layers, heads=heads, queries=queries, hold="all") as run:
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

    def weights(self, name: str, *, rows: Tensor | None = None) -> Tensor:
        """(B, H, N, M) of one map, or some rows of it, see ``Recorder.weights``.

        Raises:
            UserError: the map would not fit in memory.
        """
        if rows is None:
            refuse_too_large(self.recorder.calls_of(name))
        return self.recorder.weights(name, rows=rows)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The same some rows at a time, which memory always has room for: first row, (B, H, n, M)."""
        return self.recorder.pieces(name)

    def first_row(self, name: str) -> Tensor:
        """(B, M) mean over heads of what the first query looks at, the class token where there is one."""
        first = torch.zeros(1, dtype=torch.long, device=self.recorder.calls_of(name)[0].operands.q.device)
        return self.weights(name, rows=first)[:, :, 0].mean(1)

    def mean_row(self, name: str) -> Tensor:
        """(B, M) mean over heads and queries, some rows at a time."""
        total, rows = torch.zeros(()), 0
        for _, weights in self.pieces(name):
            total = total.to(weights) + weights.mean(1).sum(1)
            rows += weights.shape[2]
        return total / rows

    def planes(self, name: str) -> tuple[Plane | None, Plane | None]:
        """Where the queries and the keys of a layer lie on the image."""
        call, layer = self.recorder.calls_of(name)[0], name.partition("[")[0]
        layout, crosses = call.operands.layout, layer.endswith("cross_attn")
        if crosses and self.memory is not None and layer.startswith("decoder."):
            layout = Layout(0, self.memory)
        plane = layer_plane(self.model, layer, layout, self.size)
        model = getattr(self.model, "_orig_mod", self.model)  # of a compiled one
        if plane is not None and isinstance(model, GlimpseNet):
            plane = Glimpses(0, plane.grid, (model.stride, model.stride), side=model.glimpse_size, size=self.size)
        found = [plane if plane is not None and plane.length == n else None for n in call.tokens]
        if crosses:  # as many queries as keys do not make them patches
            found[0] = None
        return found[0], found[1]


@dataclasses.dataclass(frozen=True)
class Glimpses(Plane):
    """The places of an image that glimpses can be taken at: squares that overlap, the first in the corner.

    Attributes:
        side: of a square in pixels.
        size: (H, W) of the image in pixels.
    """

    side: int = 0
    size: tuple[int, int] = (0, 0)

    def to_picture(self, values: Tensor) -> Tensor:
        """Each square's weight spread evenly over its pixels, added up where squares overlap."""
        (down, across), (height, width) = (int(self.stride[0]), int(self.stride[1])), self.size
        cell = math.gcd(down, across, self.side, height, width)
        places = self.to_image(values).float()
        square = places.new_full((1, 1, self.side // cell, self.side // cell), (cell / self.side) ** 2)
        flat = places.reshape(-1, 1, *self.grid)
        spread = F.conv_transpose2d(flat, square, stride=(down // cell, across // cell))
        missing = [0, width // cell - spread.shape[-1], 0, height // cell - spread.shape[-2]]
        spread = F.pad(spread, missing)  # a margin that no square reaches
        return spread.view(*places.shape[:-2], *spread.shape[-2:])

    def centres(self, device: torch.device | str | None = None) -> Tensor:
        """(R · C, 2) the middle (y, x) of each square in pixels, row by row."""
        down, across = (torch.arange(n, device=device) * step for n, step in zip(self.grid, self.stride, strict=True))
        return torch.cartesian_prod(down, across).view(-1, 2) + self.side / 2


def implied_layers(model: nn.Module) -> frozenset[str]:
    """Names of the layers that never have weights over their keys (Linformer, Performer).

    Their maps are those that their results imply, and whatever is made of these maps is to be called implied too.
    """
    return frozenset(
        name
        for name, layer in recordable(model).items()
        if isinstance(getattr(layer, "pattern", None), Linformer | Performer)
    )


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
    hold: Literal["all", "one", "rows"] = "one",
) -> Iterator[Recording]:
    """A forward pass in evaluation mode, recorded.

    Args:
        model, images, mask, layers, heads, queries: as for ``attention_maps``.
        gradients: keep what ``Recorder.differentiate`` needs.
        hold: what will be in memory at the same time: all maps, one, or some rows of one. What would not fit is refused
            before the layer attends.

    Raises:
        UserError: as for ``attention_maps``.
    """
    try:
        check = None if hold == "rows" else _Guard(hold == "all", model)
        context = record(model, layers=layers, heads=heads, queries=queries, gradients=gradients, check=check)
        with evaluating(model), context as recorder, _memory_of(model) as memory:
            run = Recording(model, recorder, image_size(images))
            run.output = run_model(model, images, mask)
            run.memory = memory[-1] if memory else None
            yield run
    except NotRecorded as error:
        hint = "" if isinstance(layers, str) else _hint(model, layers)
        raise UserError(f"{error}.{hint}") from error


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


class _Guard:
    """Refuses maps before their layer attends."""

    def __init__(self, together: bool, model: nn.Module) -> None:
        self.together, self.need = together, 0
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def __call__(self, name: str, sizes: Sizes) -> None:
        self.need = math.prod(sizes) * 4 + (self.need if self.together else 0)
        _refuse(self.need, free_memory(self.device), name, sizes)


def refuse_too_large(calls: Sequence[Call]) -> None:
    """Says how large maps would be, before memory runs out.

    Raises:
        UserError: they would take more than half of what is free.
    """
    largest = max(calls, key=lambda call: call.bytes)
    _refuse(sum(call.bytes for call in calls), free_memory(largest.operands.q.device), "the largest", largest.shape)


def _refuse(need: int, free: int, name: str, sizes: Sizes) -> None:
    if need > SHARE * free:
        b, h, n, m = sizes
        raise UserError(
            f"these maps would take {need / 2**30:.3g} GiB or more, and {free / 2**30:.3g} GiB are free: {name} alone "
            f"is {b} × {h} heads × {n:,} queries × {m:,} keys. Ask for fewer with layers=…, heads=… or queries=[…], or "
            "give fewer or smaller images."
        )


def free_memory(device: torch.device | str) -> int:
    """Bytes that can be had on a device now; where nobody knows, as many as one likes."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    status = Path("/proc/meminfo")
    if device.type == "cpu" and status.exists():
        lines = status.read_text().splitlines()
        free = next((1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")), 2**62)
        return min(free, _container_memory())
    return 2**62


def _container_memory() -> int:
    """What the limit of a container leaves; file caches count as free, as they do for the machine."""
    for limit, used in LIMITS:
        try:
            most, now = Path(limit).read_text().strip(), int(Path(used).read_text())
            status = dict(line.split() for line in (Path(used).parent / "memory.stat").read_text().splitlines())
            caches = int(status.get("total_inactive_file", status.get("inactive_file", 0)))
            return 2**62 if most == "max" else max(0, int(most) - now + caches)
        except (OSError, ValueError):
            continue
    return 2**62
