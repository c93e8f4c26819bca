"""Lightning's own resume, stopped after every possible step, sees the samples that an uninterrupted run sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from vision_attn.data import AugmentConfig, ImageData

EPOCHS = 3


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, tuple[int, ...], float]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        checksum = float(batch["image"].double().sum())
        self.seen.append((self.current_epoch, tuple(batch["index"].tolist()), checksum))
        return self.layer(batch["image"].mean().view(1, 1)).sum()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val/n", float(len(batch["label"])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(21):
        path = tmp_path / "images" / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(torch.randint(0, 256, (9, 9, 3), dtype=torch.uint8).numpy()).save(path)
    return tmp_path / "images"


STEPS = {"every_n_train_steps": 1, "save_on_train_epoch_end": False}


def run(
    data: ImageData, folder: Path, ckpt: Path | None = None, save: dict[str, Any] | None = None, **kwargs: Any
) -> list[Any]:
    module = Recorder()
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, **(save or {}))
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        callbacks=[saver] if save else [],
        enable_checkpointing=bool(save),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **kwargs,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return module.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("workers", "limit", "stops", "save"),
    [
        (0, 1.0, range(1, 12), STEPS),
        (2, 1.0, (2, 4, 7), STEPS),
        (0, 2, range(1, 6), STEPS),
        (0, 1.0, (4, 8), {"every_n_epochs": 1, "save_on_train_epoch_end": True}),
        (0, 1.0, (4, 8), {"every_n_epochs": 1, "save_on_train_epoch_end": False}),
    ],
    ids=["inline", "workers", "limited", "epoch-end", "validation-end"],
)
def test_resume_sees_what_an_uninterrupted_run_sees(
    folder: Path, tmp_path: Path, workers: int, limit: float, stops: Any, save: dict[str, Any]
) -> None:
    def data() -> ImageData:
        # memory_limit_mb=0 makes this a streamed set, so that workers have something to do
        return ImageData(
            "image_folder",
            root=folder,
            img_size=7,
            batch_size=5,
            num_workers=workers,
            memory_limit_mb=0 if workers else 64,
            augment=AugmentConfig(flip=True, crop_padding=2, resized_crop=0.5),
            seed=11,
        )

    whole = run(data(), tmp_path, save=save, limit_train_batches=limit)
    per_epoch = len(whole) // EPOCHS
    assert [epoch for epoch, *_ in whole] == sorted(list(range(EPOCHS)) * per_epoch)
    assert len({ids for _, ids, _ in whole}) == len(whole)
    for step in stops:
        resumed = run(data(), tmp_path, ckpt=tmp_path / f"step={step}.ckpt", limit_train_batches=limit)
        assert resumed == whole[step:], f"stopped after step {step}"
