"""A callback that watches attention grow: maps of fixed samples, and curves of entropy and distance by layer."""

from __future__ import annotations

import csv
import functools
import io
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from vision_attn.atomic import atomic_write_text
from vision_attn.attention import recordable
from vision_attn.errors import UserError
from vision_attn.explain import figures
from vision_attn.explain.distance import head_statistics
from vision_attn.explain.maps import recording

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


SHARE = 0.02  # of the run's time that watching may take
MOMENTS = ("start", "middle", "end")


class AttentionWatch(Callback):
    """Maps of a few fixed validation images at the start, in the middle and at the end of training, and curves.

    Works with any Lightning module whose model has attention of this core; does nothing for others. Writes
    ``attention_start.png``, ``attention_middle.png``, ``attention_end.png``, ``attention_curves.png`` and
    ``attention.csv`` when training ends. Whatever goes wrong is a warning: the training is what counts. Only process 0
    looks; where a model is cut into parts (FSDP and the like), nobody does.

    The samples are the first images of the validation set. After each validation the entropy and distance of the heads
    are measured, as often as that stays below a fiftieth of the time the run has taken.

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
        self.spent = 0.0
        self._begin = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first map: of the untrained model, or of one that is trained further."""
        self._begin = time.monotonic()
        self._look(trainer, pl_module, "start" if "start" not in self.maps else None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A point on the curves, and the map in the middle."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        done = _progress(trainer, pl_module)
        middle = "middle" not in self.maps and done is not None and 0.4 <= done < 1
        if middle or self.spent <= self.share * (time.monotonic() - self._begin):
            self._look(trainer, pl_module, "middle" if middle else None)

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
        if callable(self.folder):
            folder = Path(self.folder())
        else:
            folder = Path(trainer.default_root_dir) / "plots" if self.folder is None else Path(self.folder)
        for moment in MOMENTS:
            if moment in self.maps:
                found = self.maps[moment]
                title = f"attention at step {found['step']:,}"
                _draw(self.samples["image"], found["layers"], folder / f"attention_{moment}.png", title)
        _write_rows(self.rows, folder / "attention.csv")
        _curves(self.rows, folder / "attention_curves.png")

    @_warn_only
    def _look(self, trainer: Trainer, module: LightningModule, moment: str | None) -> None:
        model = _model_of(module)
        if not trainer.is_global_zero or trainer.fast_dev_run or not recordable(model) or _sharded(trainer):  # type: ignore[attr-defined]
            return
        begin = time.monotonic()
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # watching must not change what is trained
            self.samples = self.samples or _samples(trainer, self.count)
            if self.samples:
                self._measure(model, trainer.global_step, moment)
        self.spent += time.monotonic() - begin

    def _measure(self, model: Any, step: int, moment: str | None) -> None:
        images, mask = self.samples["image"], self.samples.get("mask")
        if not any(row["step"] == step for row in self.rows):
            for name, numbers in head_statistics(model, images, mask=mask, divergence=False).items():
                row = {"entropy": float(numbers.entropy.mean()), "distance": float(numbers.distance.mean())}
                self.rows.append({"step": step, "layer": name, "uniform": numbers.uniform, **row})
        if moment is not None:
            self.maps[moment] = {"step": step, "layers": _layers(model, images, mask)}


def _model_of(module: LightningModule) -> Any:
    """What maps images to an answer: ``module.model``, the module itself, or the part of it that attends."""
    if isinstance(getattr(module, "model", None), nn.Module):
        return module.model
    if type(module).forward is not LightningModule.forward:
        return module
    return next((child for child in module.children() if recordable(child)), module)


def _progress(trainer: Trainer, module: LightningModule) -> float | None:
    """How much of the training is done, 0 to 1, by whatever limit it has."""
    used = getattr(module, "budget_used", None)
    if isinstance(used, int | float):
        return float(used)
    if trainer.max_steps and trainer.max_steps > 0:
        return trainer.global_step / trainer.max_steps
    return (trainer.current_epoch + 1) / trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None


def _sharded(trainer: Trainer) -> bool:
    """Whether a forward pass needs all processes."""
    return any(word in type(trainer.strategy).__name__ for word in ("FSDP", "DeepSpeed", "ModelParallel"))


def _samples(trainer: Trainer, count: int) -> dict[str, Tensor]:
    """The first validation images, as the model is given them, and their mask; nothing where there are none."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    loader = trainer.val_dataloaders if data is None else data.val_dataloader()
    if isinstance(loader, list | tuple):
        loader = loader[0] if loader else None
    batch = None if loader is None else next(iter(loader), None)
    if batch is None:
        return {}
    if not isinstance(batch, dict):
        batch = {"image": batch[0] if isinstance(batch, list | tuple) else batch}
    batch = move_data_to_device(batch, trainer.strategy.root_device)
    if data is not None:
        batch = data.on_after_batch_transfer(batch, 0)
    found = {key: batch[key][:count].clone() for key in ("image", "mask") if isinstance(batch.get(key), Tensor)}
    return found if "image" in found and found["image"].dim() == 4 else {}


def _layers(model: Any, images: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Layer name → (B, R, C) what is looked at, mean over heads, by the class token or on average; twelve layers."""
    found = {}
    with recording(model, images, mask=mask) as run:
        names = [name for name in run.names() if run.planes(name)[1] is not None]
        for name in names[:: -(-len(names) // 12)] if names else []:
            plane = run.planes(name)[1]
            assert plane is not None
            weights = run.weights(name).mean(1)
            token = plane.prefix > 0 and getattr(model, "global_pool", "") == "token"
            found[name] = plane.to_image(weights[:, 0] if token else weights.mean(1)).cpu()
    return found


def _draw(samples: Tensor, layers: Mapping[str, Tensor], path: Path, title: str) -> None:
    """Rows are samples, columns layers."""
    if not layers:
        return
    pixels = _visible(samples)
    aspect = samples.shape[-2] / samples.shape[-1]
    size = 1.2 * (len(layers) + 1), (1.2 * aspect + 0.05) * len(samples) + 0.9
    with figures.figure(path, size, len(samples), len(layers) + 1) as (drawn, axes):
        for i, line in enumerate(axes):
            figures.overlay(line[0], pixels[i], None)
            for axis, (name, maps) in zip(line[1:], layers.items(), strict=True):
                figures.overlay(axis, pixels[i], maps[i], figures.fit(name, 18) if i == 0 else "")
        drawn.suptitle(figures.fit(f"{title}\n{figures.CAUSES}", 20 * (len(layers) + 1)), fontsize=8.5)


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


def _curves(rows: list[dict[str, Any]], path: Path) -> None:
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
        drawn.suptitle("Attention during training, mean over heads and samples", fontsize=9)
