"""A callback that watches attention grow: maps of fixed samples, and curves of entropy and distance by layer."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer, WeightAveraging
from torch import Tensor, nn

from vision_attn.atomic import atomic_write_text
from vision_attn.attention import recordable
from vision_attn.errors import UserError
from vision_attn.explain import figures
from vision_attn.explain.distance import head_statistics
from vision_attn.explain.maps import recording
from vision_attn.explain.planes import evaluating

Method = TypeVar("Method", bound=Callable[..., None])


def _warn_only(method: Method) -> Method:
    """An error is a warning, and the end of watching."""

    @functools.wraps(method)
    def careful(self: Any, *args: Any) -> None:
        if not getattr(self, "failed", False):
            try:
                method(self, *args)
            except Exception as error:
                self.failed = True
                warnings.warn(f"attention is not watched any more: {type(error).__name__}: {error}", stacklevel=2)

    return careful  # type: ignore[return-value]


SHARE = 0.01  # of the run's time that watching may take
MOMENTS = ("start", "middle", "end")


class AttentionWatch(Callback):
    """Maps of a few fixed validation images at the start, in the middle and at the end of training, and curves.

    Works with any Lightning module whose model has attention of this core; does nothing for others. Writes
    ``attention_start.png``, ``attention_middle.png``, ``attention_end.png``, ``attention_curves.png`` and
    ``attention.csv`` when training ends. Whatever goes wrong is a warning: the training is what counts. Only process 0
    looks; where a model is cut into parts (FSDP and the like), nobody does.

    The samples are the first images of the validation set, as the module's or data module's hooks hand them to the
    model. The middle is the first step past half of the training, by steps, epochs, time or budget, whichever is
    furthest. After each validation the entropy and distance of the heads are measured, as often as that stays below a
    hundredth of the time the run has taken, which leaves some for drawing. Where weights are averaged
    (``WeightAveraging``), everything is about the averaged ones, as validation is.

    Args:
        folder: where to write, or a function that says so when training has ended; by default
            ``default_root_dir/plots``.
        images: how many samples.
        share: of the run's time that may be spent.
        draw: draw when training ends; otherwise when ``draw`` is called.
    """

    def __init__(
        self,
        folder: str | Path | Callable[[], Path] | None = None,
        *,
        images: int = 4,
        share: float = SHARE,
        draw: bool = True,
    ) -> None:
        super().__init__()
        if images < 1 or not 0 < share <= 1:
            raise UserError(f"images={images} must be 1 or more, share={share} above 0 and at most 1")
        self.folder, self.count, self.share, self.draws = folder, images, share, draw
        self.samples: dict[str, Tensor] = {}
        self.rows: list[dict[str, Any]] = []
        self.maps: dict[str, dict[str, Any]] = {}  # moment → step and the maps of the layers
        self.spent = 0.0  # seconds, drawing included
        self._begin = 0.0
        self._averaged = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first map: of the untrained model, or of one that is trained further."""
        self._begin = time.monotonic()
        self._look(trainer, pl_module, "start" if "start" not in self.maps else None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The map in the middle."""
        if "middle" not in self.maps and _progress(trainer, pl_module, batch_idx) >= 0.5:
            self._look(trainer, pl_module, "middle")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A point on the curves."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.spent <= self.share * (time.monotonic() - self._begin):
            self._look(trainer, pl_module, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last map, and the figures."""
        self._look(trainer, pl_module, "end")
        if self.draws:
            self.draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Curves and maps go on after a run is resumed."""
        return {"rows": self.rows, "maps": self.maps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        self.rows, self.maps = list(state_dict["rows"]), dict(state_dict["maps"])

    @_warn_only
    def draw(self, trainer: Trainer) -> None:
        """Writes the figures and ``attention.csv``; again, with what is known by then, when called again."""
        if not self.maps or not self.samples:
            return
        begin = time.monotonic()
        if callable(self.folder):
            folder = Path(self.folder())
        else:
            folder = Path(trainer.default_root_dir) / "plots" if self.folder is None else Path(self.folder)
        for moment in MOMENTS:
            if moment in self.maps:
                found = self.maps[moment]
                title = f"attention at step {found['step']:,}{self._which}"
                _draw(self.samples["image"], found["layers"], folder / f"attention_{moment}.png", title)
        _write_rows(self.rows, folder / "attention.csv")
        _curves(self.rows, folder / "attention_curves.png", self._which)
        self.spent += time.monotonic() - begin

    @property
    def _which(self) -> str:
        return ", averaged weights" if self._averaged else ""

    @_warn_only
    def _look(self, trainer: Trainer, module: LightningModule, moment: str | None) -> None:
        model = _model_of(module)
        if not trainer.is_global_zero or trainer.fast_dev_run or not recordable(model) or is_sharded(trainer):  # type: ignore[attr-defined]
            return
        begin = time.monotonic()
        device = trainer.strategy.root_device
        forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with forked, torch.no_grad(), _averaged(trainer, module) as self._averaged:  # training must not be changed
            self.samples = self.samples or _samples(trainer, module, self.count)
            if self.samples:
                self._measure(model, trainer.global_step, moment)
        self.spent += time.monotonic() - begin

    def _measure(self, model: Any, step: int, moment: str | None) -> None:
        images, mask = self.samples["image"], self.samples.get("mask")
        if not any(row["step"] == step for row in self.rows):
            for name, numbers in head_statistics(model, images, mask=mask, divergence=False).items():
                row = {"entropy": float(numbers.entropy.mean()), "distance": float(numbers.distance.mean())}
                title = f"{name} (implied)" if numbers.implied else name
                self.rows.append({"step": step, "layer": title, "uniform": numbers.uniform, **row})
        if moment is not None:
            self.maps[moment] = {"step": step, "layers": _layers(model, images, mask)}


def _model_of(module: LightningModule) -> Any:
    """What maps images to an answer: ``module.model``, the module itself, or the part of it that attends."""
    if isinstance(getattr(module, "model", None), nn.Module):
        return module.model
    if type(module).forward is not LightningModule.forward:
        return module
    return next((child for child in module.children() if recordable(child)), module)


def _progress(trainer: Trainer, module: LightningModule, batch: int) -> float:
    """How much of the training is done, 0 to 1, by the limit that is nearest; 0 where there is none."""
    done = [0.0]
    used = getattr(module, "budget_used", None)
    if isinstance(used, int | float):
        done.append(float(used))
    if trainer.max_steps and trainer.max_steps > 0:
        done.append(trainer.global_step / trainer.max_steps)
    if trainer.max_epochs and trainer.max_epochs > 0:
        done.append((trainer.current_epoch + min(1.0, (batch + 1) / trainer.num_training_batches)) / trainer.max_epochs)
    for timer in (callback for callback in trainer.callbacks if isinstance(callback, Timer)):  # type: ignore[attr-defined]
        left = timer.time_remaining()
        if left is not None:
            done.append(timer.time_elapsed() / max(timer.time_elapsed() + left, 1e-9))
    return max(done)


@contextlib.contextmanager
def _averaged(trainer: Trainer, module: LightningModule) -> Iterator[bool]:
    """The averaged weights in the module, where there are any, and its own again afterwards."""
    averages = [one for one in trainer.callbacks if isinstance(one, WeightAveraging) and one._average_model is not None]  # type: ignore[attr-defined]
    for average in averages[:1]:
        average._swap_models(module)
    try:
        yield bool(averages)
    finally:
        for average in averages[:1]:
            average._swap_models(module)


def is_sharded(trainer: Trainer) -> bool:
    """Whether the processes share the weights out among them, so that a forward pass needs all of them."""
    return any(word in type(trainer.strategy).__name__ for word in ("FSDP", "DeepSpeed", "ModelParallel"))


def _samples(trainer: Trainer, module: LightningModule, count: int) -> dict[str, Tensor]:
    """The first validation images, as the model is given them, and their mask; nothing where there are none."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if hasattr(data, "whole_dataloader"):  # the first of all, not of this process's share
        loader = None if data.split("val") is None else data.whole_dataloader("val")
    else:
        loader = trainer.val_dataloaders if data is None else data.val_dataloader()
    if isinstance(loader, list | tuple):
        loader = loader[0] if loader else None
    batch = None if loader is None else next(iter(loader), None)
    if batch is None:
        return {}
    with _validating(trainer, module):  # hooks that augment in training must not do so now
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, 0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)  # runs the hooks, whoever has them
    image = _image(batch)
    if image is None:
        return {}
    found = {"image": image[:count].clone()}
    mask = batch.get("mask") if isinstance(batch, Mapping) else None
    return found | ({"mask": mask[:count].clone()} if isinstance(mask, Tensor) else {})


def _image(batch: Any) -> Tensor | None:
    """The images of a batch: itself, its ``image``, or the first that might be some, in whatever it is made of."""
    if isinstance(batch, Tensor):
        return batch if batch.dim() == 4 and batch.is_floating_point() else None
    if isinstance(batch, Mapping):
        parts = [batch["image"]] if "image" in batch else list(batch.values())
    else:
        parts = list(batch) if isinstance(batch, list | tuple) else []
    return next((image for part in parts if (image := _image(part)) is not None), None)


@contextlib.contextmanager
def _validating(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    stage = trainer.state.stage
    trainer.validating = True
    try:
        with evaluating(module):
            yield
    finally:
        trainer.state.stage = stage


def _layers(model: Any, images: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Layer name → (B, R, C) what is looked at, mean over heads, by the class token or on average; twelve layers."""
    found = {}
    with recording(model, images, mask=mask, hold="rows") as run:
        names = [name for name in run.names() if run.planes(name)[1] is not None]
        for name in names[:: -(-len(names) // 12)] if names else []:
            plane = run.planes(name)[1]
            assert plane is not None
            token = plane.prefix > 0 and getattr(model, "global_pool", "") == "token"
            title = f"{name} (implied)" if run.recorder.implied(name) else name
            found[title] = plane.to_picture(run.first_row(name) if token else run.mean_row(name)).cpu()
    return found


TILE, GAP = 96, 4  # pixels of a panel, and between two


def _draw(samples: Tensor, layers: Mapping[str, Tensor], path: Path, title: str) -> None:
    """Rows are samples, columns layers. All panels are one picture: as many axes would take seconds to draw."""
    if not layers:
        return
    pixels = _sized(_visible(samples).float())
    grey = pixels.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    columns = [pixels, *(_overlaid(grey, maps) for maps in layers.values())]
    count, _, height, width = pixels.shape
    shape = count * (height + GAP) - GAP, len(columns) * (width + GAP) - GAP
    canvas = torch.full((3, *shape), 255.0)
    for j, column in enumerate(columns):
        for i, panel in enumerate(column):
            top, left = i * (height + GAP), j * (width + GAP)
            canvas[:, top : top + height, left : left + width] = panel
    panels, above = 1.2 * shape[0] / (width + GAP), 1.0  # inches
    with figures.figure(path, (max(1.2 * len(columns), 3.6), panels + above)) as (drawn, axes):
        drawn.set_layout_engine("none")  # everything has its place, and finding one would draw it all twice
        axis = axes[0][0]
        axis.set_position((0.01, 0.01, 0.98, panels / (panels + above)))
        axis.imshow(canvas.round().byte().permute(1, 2, 0).numpy(), interpolation="nearest")
        for j, name in enumerate(layers, 1):
            place = j * (width + GAP) + width / 2, -GAP
            axis.text(*place, figures.fit(name, 18), ha="center", va="bottom", fontsize=7)
        axis.axis("off")
        drawn.suptitle(figures.fit(f"{title}\n{figures.CAUSES}", max(20 * len(columns), 50)), fontsize=8.5, y=0.99)


def _sized(images: Tensor) -> Tensor:
    """(B, C, H, W) with the longer side of about ``TILE`` pixels; small images by a whole factor."""
    height, width = images.shape[-2:]
    factor = TILE // max(height, width)
    if factor >= 1:
        return images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    sides = [max(1, round(side * TILE / max(height, width))) for side in (height, width)]
    return F.interpolate(images, size=sides, mode="area")


def _overlaid(grey: Tensor, maps: Tensor) -> Tensor:
    """(B, 3, H, W), 0 to 255, with (B, R, C) over it, as ``figures.overlay`` does."""
    import matplotlib

    low = maps.float().amin((1, 2), keepdim=True).clamp_max(0)
    strength = maps.float() - low
    strength = strength / strength.amax((1, 2), keepdim=True).clamp_min(1e-12)
    strength = F.interpolate(strength[:, None], size=grey.shape[-2:], mode="nearest")
    heat = torch.from_numpy(matplotlib.colormaps[figures.HEAT](strength[:, 0].numpy())[..., :3]).float().movedim(-1, 1)
    cover = 0.35 + 0.5 * strength
    return grey * (1 - cover) + 255 * heat * cover


def _visible(samples: Tensor) -> Tensor:
    """Normalized images as (B, 3, H, W) uint8 of full contrast."""
    flat = samples.float().cpu().flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    scaled = (samples.float().cpu() - low[:, None, None, None]) / (high - low).clamp_min(1e-6)[:, None, None, None]
    return (scaled * 255).byte().expand(-1, 3, -1, -1)


def _write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", "layer", "entropy", "uniform", "distance"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    atomic_write_text(path, text.getvalue())


def _curves(rows: list[dict[str, Any]], path: Path, which: str) -> None:
    """Entropy and distance of each layer over optimizer steps."""
    import matplotlib

    names = list(dict.fromkeys(row["layer"] for row in rows))
    colors = matplotlib.colormaps["viridis"]
    with figures.figure(path, (9.5, 3.4), 1, 2) as (drawn, axes):
        for axis, kind in zip(axes[0], ("entropy", "distance"), strict=True):
            for i, name in enumerate(names):
                mine = [(row["step"], row[kind]) for row in rows if row["layer"] == name and row[kind] == row[kind]]
                if mine:
                    color = colors(0.92 * i / max(len(names) - 1, 1))
                    axis.plot(*zip(*mine, strict=True), color=color, lw=1.4, marker="o", ms=2.5, label=name)
            axis.set(
                xlabel="optimizer step", ylabel=figures.LABELS[kind][0], title=figures.LABELS[kind][1], ylim=(0, None)
            )
        if names:
            axes[0][1].legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
        title = f"Attention during training, mean over heads and samples{which}"
        drawn.suptitle(f"{title}\n{figures.CAUSES}", fontsize=9)
