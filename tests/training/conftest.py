"""A tiny run on digits, put together by hand: what the tests of training share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from vision_attn.cli.quiet import quiet
from vision_attn.data import AugmentConfig, ImageData
from vision_attn.training.classifier import Classifier
from vision_attn.training.ema import EmaConfig
from vision_attn.training.fitting import make_callbacks, make_plugins
from vision_attn.training.interrupt import StopSignal
from vision_attn.training.optimizers import OptimizerConfig
from vision_attn.training.run_folder import RunFolder

VIT = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "drop_path": 0.2}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with quiet():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def make_run():
    return Run


class StopAt(Callback):
    """Asks for the end of the run, as Ctrl-C would, during optimizer step ``step``."""

    def __init__(self, stop: StopSignal, step: int) -> None:
        self.stop, self.step = stop, step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step + 1 == self.step:
            self.stop.requested = True


class Run:
    """One run on 200 digits in batches of 19: 11 steps an epoch."""

    def __init__(self, root: Path, resume: Path | None = None, stop_at: int | None = None, **options: Any) -> None:
        self.stop = StopSignal()
        optimizer = OptimizerConfig(**options.pop("optimizer", {"lr": 3e-3, "warmup": 0.2}))
        name, args = options.pop("model", ("vit_tiny_patch16_224", VIT))
        self.data = ImageData(
            "digits",
            batch_size=options.pop("batch_size", 19),
            max_images=options.pop("max_images", 200),
            augment=AugmentConfig(**options.pop("augment", {"crop_padding": 1})),
            val_fraction=options.pop("val_fraction", None),
        )
        torch.manual_seed(0)  # only the initial weights may depend on it
        self.module = Classifier(
            name,
            args,
            attention=options.pop("attention", None),
            num_classes=10,
            img_size=(8, 8),
            labels=self.data.labels,
            preprocess=self.data.preprocess,
            optimizer=optimizer,
            label_smoothing=0.1,
        )
        self.folder = RunFolder(root, "tiny", "data: {name: digits}\n", resume=resume)
        callbacks = make_callbacks(
            self.folder,
            budget=options.pop("budget", None),
            ema=EmaConfig(**options.pop("ema", {})),
            save_every=options.pop("save_every", "1h"),
            stop=self.stop,
            progress=options.pop("progress", False),
        )
        callbacks = options.pop("change", lambda c: c)(callbacks)
        if stop_at is not None:
            callbacks.insert(0, StopAt(self.stop, stop_at))
        callbacks += options.pop("callbacks", [])
        settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "accelerator": "cpu", "enable_progress_bar": False}
        settings |= {"logger": False, "enable_model_summary": False, "use_distributed_sampler": False}
        self.trainer = Trainer(**{**settings, **options}, callbacks=callbacks, plugins=make_plugins("auto"))

    def fit(self, ckpt_path: Path | None = None) -> Run:
        self.trainer.fit(self.module, self.data, ckpt_path=ckpt_path, weights_only=True)
        return self

    def checkpoint(self, name: str = "last") -> dict[str, Any]:
        return torch.load(self.folder.path / "checkpoints" / f"{name}.ckpt", weights_only=True)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.module.model.state_dict())
