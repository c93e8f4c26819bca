"""One folder per run: ``runs/<recipe>/<n>/``."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vision_attn import __version__
from vision_attn.atomic import atomic_write_text
from vision_attn.errors import UserError, closest

COLUMNS = (
    "epoch",
    "step",
    "seconds",
    "lr",
    "train/loss",
    "train/acc",
    "val/loss",
    "val/acc",
    "images_per_second",
)


def create_run_folder(root: str | Path, recipe: str) -> Path:
    """Make ``root/recipe/<n>`` with the next free number.

    ``mkdir`` either makes a folder or fails, so of several processes that start together each gets its own.
    """
    parent = Path(root) / recipe
    parent.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(parent), default=-1) + 1
    while True:
        try:
            (parent / str(number)).mkdir()
            return parent / str(number)
        except FileExistsError:
            number += 1


def write_config(folder: Path, config: str) -> None:
    """``config.yaml`` of what is trained from now on; what a resumed run had until now stays as ``config_<n>.yaml``."""
    path = folder / "config.yaml"
    if path.is_file():
        before = read_config(folder)
        if config_hash(before) == config_hash(config):
            return
        number = next(n for n in itertools.count() if not (folder / f"config_{n}.yaml").exists())
        atomic_write_text(folder / f"config_{number}.yaml", before)
    atomic_write_text(path, config)


def read_config(folder: Path) -> str:
    """The text of ``config.yaml``; empty where there is none."""
    path = folder / "config.yaml"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def last_checkpoint(folder: Path) -> Path:
    """Where a run's last state is saved: a file, or a folder where processes share the weights out among them."""
    return folder / "checkpoints" / "last.ckpt"


def latest_run(root: str | Path, recipe: str) -> Path:
    """The newest run of ``recipe`` under ``root`` that has a checkpoint to go on from.

    Raises:
        UserError: there is none.
    """
    parent = Path(root) / recipe
    for number in sorted(_numbers(parent), reverse=True):
        if last_checkpoint(parent / str(number)).exists():
            return parent / str(number)
    others = [p.name for p in Path(root).iterdir() if p.is_dir()] if Path(root).is_dir() else []
    raise UserError(
        f"nothing to resume: no run of {recipe!r} under {root} has saved a checkpoint."
        f"{closest(recipe, others)} Leave --ckpt_path out to start one."
    )


def run_of_checkpoint(path: str | Path) -> Path | None:
    """The run folder that a checkpoint (or exported model) lies in, if it lies in one."""
    path = Path(path)
    whole = path.parent.resolve() / path.name  # a relative path need not name the folders that it lies in
    for folder in (path.parent.parent, path.parent, path, whole.parent.parent, whole.parent):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return folder
    return None


class RunFolder(Callback):
    """Makes the folder, and writes ``config.yaml``, ``metrics.csv`` and ``summary.json`` as training goes on.

    Only process 0 writes; the others learn the path.

    Args:
        root: parent of all runs.
        recipe: name of the recipe.
        config: the whole configuration as YAML text.
        seed: goes into the summary.
        monitor: the metric that says which state is best.
        resume: the folder to continue in, None for a new one.
    """

    def __init__(
        self,
        root: str | Path,
        recipe: str,
        config: str,
        seed: int = 0,
        monitor: str = "val/acc",
        resume: Path | None = None,
    ) -> None:
        self.root, self.recipe, self.config, self.seed, self.monitor = Path(root), recipe, config, seed, monitor
        self._path = resume
        self.resumed = resume is not None
        self.summary: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self._seconds = 0.0
        self._images = 0.0
        self._train_seconds = 0.0
        self._start: float | None = None
        self._row_step = -1

    @property
    def path(self) -> Path:
        """Where the run lies; known once training is being set up."""
        assert self._path is not None, "the run folder is made when training is set up"
        return self._path

    @property
    def last_checkpoint(self) -> Path | None:
        """What training can go on from; None where it was broken off before anything was saved."""
        last = self._path and last_checkpoint(self._path)
        return last if last and last.exists() else None

    @property
    def seconds(self) -> float:
        """Wall-clock time since the first training step, over all processes that ran after one another."""
        return self._seconds + (0.0 if self._start is None else time.monotonic() - self._start)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the folder; begin the summary."""
        if stage != "fit":
            return
        if self._path is None:
            path = create_run_folder(self.root, self.recipe) if trainer.is_global_zero else None
            self._path = Path(trainer.strategy.broadcast(str(path)))
        if trainer.is_global_zero and not self.resumed:
            write_config(self.path, self.config)
        self.rows = read_metrics(self.path / "metrics.csv")
        model_config = getattr(pl_module.model, "config", {})
        self.summary = {
            "recipe": self.recipe,
            "model": model_config.get("name"),
            "seed": self.seed,
            **model_size(pl_module.model, model_config),
            "data_hash": getattr(trainer.datamodule, "data_hash", None),  # type: ignore[attr-defined]
            "config_hash": config_hash(read_config(self.path) if self.resumed else self.config),
            "version": __version__,
        }
        if self.resumed:  # what was tested holds until the weights change
            self.summary |= {k: v for k, v in read_summary(self.path / "summary.json").items() if _is_tested(k)}
        if isinstance(model_config.get("extra"), dict):
            model_config["extra"] |= {k: self.summary[k] for k in ("recipe", "seed", "data_hash", "version")}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget rows that the checkpoint we go on from does not know."""
        self.rows = [row for row in self.rows if row["step"] <= trainer.global_step] if self.resumed else []
        self._row_step = self.rows[-1]["step"] if self.rows else -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock with the first step, after which no test of earlier weights counts.

        Only now is the configuration of a resumed run that of its folder: a resume that is refused changes nothing.
        """
        if self._start is None:
            self._start = time.monotonic()
            self.summary = {k: v for k, v in self.summary.items() if not _is_tested(k)}
            if self.resumed:
                self.summary["config_hash"] = config_hash(self.config)
                if trainer.is_global_zero:
                    write_config(self.path, self.config)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One row per validation."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._add_row(trainer, pl_module, validated=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One row per epoch, when it had no validation."""
        if self._row_step != trainer.global_step:
            self._add_row(trainer, pl_module, validated=False)

    def _add_row(self, trainer: Trainer, pl_module: LightningModule, validated: bool) -> None:
        means = pl_module.take_means()  # type: ignore[operator]
        images, seconds = means.pop("images", 0.0), means.pop("seconds", 0.0)
        self._images, self._train_seconds = self._images + images, self._train_seconds + seconds
        self._row_step = trainer.global_step
        row: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step, "seconds": self.seconds}
        row |= {"lr": pl_module.lr, **means}
        if seconds:
            row["images_per_second"] = images / seconds
        if validated:
            row |= {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        self.rows.append(row)
        for logger in trainer.loggers:
            logger.log_metrics({k: v for k, v in row.items() if not k.startswith("val/")}, step=trainer.global_step)
        if trainer.is_global_zero:
            write_metrics(self.path / "metrics.csv", self.rows)
            self.write_summary()

    def write_summary(self, **values: Any) -> None:
        """Update ``summary.json``; accuracies are those of the best validation."""
        best = best_row(self.rows, self.monitor)
        self.summary |= {k: round(v, 6) for k, v in best.items() if k.startswith("val/") and k != "val/loss"}
        speed = self._images / self._train_seconds if self._train_seconds else None
        self.summary |= {"seconds": round(self.seconds, 3), "images_per_second": speed and round(speed, 1)} | values
        keys = sorted(self.summary, key=lambda k: _ORDER.index(k) if k in _ORDER else len(_ORDER))
        text = json.dumps({key: self.summary[key] for key in keys}, indent=2) + "\n"
        atomic_write_text(self.path / "summary.json", text)

    def stop_clock(self) -> None:
        """Training is over: pictures and tests do not count."""
        self._seconds, self._start = self.seconds, None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""
        return {"seconds": self.seconds, "images": self._images, "train_seconds": self._train_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._seconds = float(state_dict["seconds"])
        self._images = float(state_dict["images"])
        self._train_seconds = float(state_dict["train_seconds"])


_ORDER = (
    *("recipe", "model", "seed", "val/acc", "test/acc", "val/ap", "val/ap50", "test/ap", "test/ap50"),
    *("seconds", "images_per_second"),
    *("params", "macs", "data_hash", "config_hash", "version"),
)


def model_size(model: Any, config: dict[str, Any]) -> dict[str, int | None]:
    """``params`` and ``macs`` (multiply-accumulates of one image) of a model."""
    from vision_attn.models.profile import count_macs, count_parameters

    size = config.get("preprocess", {}).get("size")
    return {"params": count_parameters(model), "macs": count_macs(model, size) if size else None}


def write_metrics(path: Path, rows: list[dict[str, Any]]) -> None:
    """``metrics.csv``, whole: known columns first, others by name; no accuracies where there is average precision."""
    found = {key for row in rows for key in row}
    detects = "val/ap" in found and not found & {"train/acc", "val/acc"}
    known = [name for name in COLUMNS if not (detects and name.endswith("/acc"))]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*known, *sorted(found - set(COLUMNS))], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    atomic_write_text(path, text.getvalue())


def best_row(rows: list[dict[str, Any]], monitor: str) -> dict[str, Any]:
    """The row with the highest ``monitor``, the latest of equal ones; empty when there is none."""
    return max((row for row in rows if monitor in row), key=lambda row: (row[monitor], row["step"]), default={})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.csv``; empty cells are left out, a missing file has no rows."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row | {"epoch": int(row["epoch"]), "step": int(row["step"])} for row in rows]


def read_summary(path: Path) -> dict[str, Any]:
    """``summary.json``; empty where there is none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def config_hash(config: str) -> str:
    """16 hexadecimal digits that change with the configuration, but not with places, names and comments."""
    import yaml

    tree = yaml.safe_load(config) or {}
    for section, key in (("trainer", "default_root_dir"), ("data", "root"), ("", "recipe"), ("", "ckpt_path")):
        (tree.get(section) or {} if section else tree).pop(key, None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _is_tested(key: str) -> bool:
    return key.startswith("test/")


def _numbers(parent: Path) -> list[int]:
    return [int(p.name) for p in parent.iterdir() if p.name.isdecimal()] if parent.is_dir() else []
