"""Watching attention during training: what is written, what is left alone, what it costs."""

from __future__ import annotations

import csv
import time

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain.callback import AttentionWatch


class Anybody(LightningModule):
    """Somebody else's module around a model of this core, or of none."""

    def __init__(self, name="vit_tiny_patch16_224", **args):
        super().__init__()
        size = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 2}
        self.net = va.create_model(name, num_classes=3, **(args or size))

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(size=16):
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(24, 3, size, size), torch.arange(24) % 3), batch_size=8)


def train(tmp_path, watch, module=None, epochs=4):
    torch.manual_seed(0)
    module = module or Anybody()
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[watch] if watch else [],
    )
    trainer.fit(module, loader(), loader())
    return module


def test_anybody_can_use_it(tmp_path):
    watch = AttentionWatch(images=3, share=1.0)
    module = train(tmp_path, watch)
    folder = tmp_path / "plots"
    assert {p.name for p in folder.iterdir()} == {
        "attention.csv",
        "attention_curves.png",
        *(f"attention_{moment}.png" for moment in ("start", "middle", "end")),
    }
    with (folder / "attention.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["layer"] for row in rows} == {"blocks.0.attn", "blocks.1.attn"}
    assert sorted({int(row["step"]) for row in rows}) == [0, 3, 6, 9, 12]
    assert all(0 < float(row["entropy"]) <= float(row["uniform"]) + 1e-4 for row in rows)
    assert watch.maps["middle"]["step"] == 6
    # the curves end with the numbers of the trained model
    from vision_attn.explain.distance import mean_attention_distance

    found = mean_attention_distance(module.net, watch.samples["image"])["blocks.1.attn"].mean()
    assert float(rows[-1]["distance"]) == pytest.approx(float(found), rel=1e-4)


def test_training_is_not_changed(tmp_path):
    watched = train(tmp_path / "a", AttentionWatch(share=1.0)).state_dict()
    alone = train(tmp_path / "b", None).state_dict()
    for name, value in alone.items():
        torch.testing.assert_close(watched[name], value, rtol=0, atol=0)


def test_a_model_without_attention_is_left_alone(tmp_path):
    watch = AttentionWatch()
    train(tmp_path, watch, Anybody("resnet8_cifar", img_size=16), epochs=1)
    assert not (tmp_path / "plots").exists()
    assert watch.spent < 0.1


def test_an_error_is_a_warning(tmp_path, monkeypatch):
    from vision_attn.explain import callback

    def fail(*args, **kwargs):
        raise RuntimeError("no luck")

    monkeypatch.setattr(callback, "head_statistics", fail)
    with pytest.warns(UserWarning, match="not watched any more: RuntimeError: no luck"):
        train(tmp_path, AttentionWatch(), epochs=1)


def test_it_goes_on_where_it_was(tmp_path):
    watch = AttentionWatch()
    train(tmp_path, watch, epochs=1)
    other = AttentionWatch()
    torch.save(watch.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.rows == watch.rows
    assert set(other.maps) == set(watch.maps)


def test_it_spends_no_more_than_its_share(tmp_path, monkeypatch):
    from vision_attn.explain import callback

    now, slow = [0.0], []
    monkeypatch.setattr(callback.time, "monotonic", lambda: now[0])

    def look(*args, **kwargs):
        now[0] += 1.0
        slow.append(now[0])
        return {}

    monkeypatch.setattr(callback, "head_statistics", look)
    monkeypatch.setattr(callback, "_layers", lambda *args: {})
    watch = AttentionWatch(share=0.02, draw=False)
    original = Anybody.training_step

    def step(self, batch, index):
        now[0] += 1.0
        return original(self, batch, index)

    monkeypatch.setattr(Anybody, "training_step", step)
    train(tmp_path, watch, epochs=60)
    assert len(slow) <= 3 + 0.02 * now[0] + 1  # start, middle, end and the share of the rest


@pytest.mark.parametrize("options", [{"images": 0}, {"share": 0.0}, {"share": 1.5}])
def test_wrong_options(options):
    with pytest.raises(UserError):
        AttentionWatch(**options)


def test_watching_is_cheap(tmp_path):
    """Looking at four images costs about as much as a few steps of training."""
    module = Anybody(img_size=32, patch_size=4, embed_dim=96, num_heads=3, depth=6)
    watch = AttentionWatch(draw=False)
    watch.samples = {"image": torch.randn(4, 3, 32, 32)}
    watch._measure(module.net, 0, "start")
    begin = time.perf_counter()
    watch._measure(module.net, 1, "end")
    looked = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(5):
        module.training_step((torch.randn(128, 3, 32, 32), torch.zeros(128, dtype=torch.long)), 0).backward()
    assert looked < time.perf_counter() - begin
