"""Watching attention during training: what is written, what is left alone, what it costs."""

from __future__ import annotations

import csv
import time
import warnings

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain import callback
from vision_attn.explain.callback import AttentionWatch
from vision_attn.training.ema import EMA, EmaConfig


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


def train(tmp_path, watch, module=None, epochs=4, data=None, callbacks=(), **more):
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
        callbacks=[*callbacks, *([watch] if watch else [])],
        **more,
    )
    if data is None:
        trainer.fit(module, loader(), loader())
    else:
        trainer.fit(module, datamodule=data)
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


@pytest.mark.parametrize("averaging", [False, True])
def test_training_is_not_changed(tmp_path, averaging):
    def ema():
        return [EMA(EmaConfig(0.9))] if averaging else []

    watched = train(tmp_path / "a", AttentionWatch(share=1.0), callbacks=ema()).state_dict()
    alone = train(tmp_path / "b", None, callbacks=ema()).state_dict()
    for name, value in alone.items():
        torch.testing.assert_close(watched[name], value, rtol=0, atol=0)


class Doubling:
    """Hooks on tuples, before and after the transfer, that tell training from validation."""

    seen: list

    def on_before_batch_transfer(self, batch, dataloader_idx):
        images, labels = batch  # a dictionary would not do
        return images + 1, labels

    def on_after_batch_transfer(self, batch, dataloader_idx):
        images, labels = batch
        trainer = self.trainer
        self.seen.append((trainer.training, trainer.lightning_module.training))
        return (images * (100 if trainer.training else 2), labels)


class HookedModule(Doubling, Anybody):
    pass


class HookedData(Doubling, LightningDataModule):
    def train_dataloader(self):
        return loader()

    val_dataloader = train_dataloader


@pytest.mark.parametrize("who", ["module", "data module", "both"])
def test_samples_are_what_the_hooks_hand_to_the_model(tmp_path, who):
    """Whoever has the hooks, they are given the batch as the loader made it, and told that this is no training."""
    module = Anybody() if who == "data module" else HookedModule()
    data = None if who == "module" else HookedData()
    for one in (module, data):
        if isinstance(one, Doubling):
            one.seen = []
    watch = AttentionWatch(images=3, draw=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "attention is not watched")
        train(tmp_path, watch, module, epochs=1, data=data)
    torch.testing.assert_close(watch.samples["image"], (next(iter(loader()))[0][:3] + 1) * 2)
    assert set(watch.maps) == {"start", "middle", "end"}
    assert not any(trains != mode for trains, mode in (module if data is None else data).seen)


def test_samples_are_the_first_of_all_images_not_of_a_share(tmp_path):
    class Data(HookedData):
        """Its loaders give this process its share; ``whole_dataloader`` gives it everything."""

        def split(self, name):
            return self if name == "val" else None

        def whole_dataloader(self, name):
            return ((images + 10, labels) for images, labels in loader())

    data = Data()
    data.seen = []
    watch = AttentionWatch(images=3, draw=False)
    train(tmp_path, watch, Anybody(), epochs=1, data=data)
    torch.testing.assert_close(watch.samples["image"], (next(iter(loader()))[0][:3] + 11) * 2)


@pytest.mark.parametrize(
    "make", [lambda x, y: (y, {"pixels": x}), lambda x, y: {"label": y, "picture": x}, lambda x, y: x]
)
def test_images_are_found_in_whatever_a_batch_is(make):
    x, y = torch.rand(2, 3, 8, 8), torch.arange(2)
    assert callback._image(make(x, y)) is x
    assert callback._image((y, [y.float()])) is None
    assert callback._image({"image": torch.rand(2, 5, 3, 8, 8)}) is None


@pytest.mark.parametrize(
    ("limits", "step"),
    [
        ({"epochs": 2, "check_val_every_n_epoch": 2}, 3),
        ({"epochs": 1}, 2),
        ({"epochs": -1, "max_steps": 7}, 4),
        ({"epochs": 100, "max_steps": 6, "check_val_every_n_epoch": 50}, 3),
    ],
)
def test_the_middle_is_the_first_step_past_half(tmp_path, limits, step):
    """Validation need not fall there, nor be there at all."""
    watch = AttentionWatch(draw=False)
    train(tmp_path, watch, **limits)
    assert watch.maps["middle"]["step"] == step


class Minutes(Anybody):
    """Every step takes a minute of a clock of its own."""

    steps = 0

    def training_step(self, batch, index):
        self.steps += 1
        if self.has_budget:
            self.budget_used = self.steps / 60
        self.trainer.should_stop = self.steps == 40
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.log("loss", super().training_step(batch, index))


@pytest.mark.parametrize("limit", ["max_time", "budget"])
def test_the_middle_by_the_clock(tmp_path, limit, monkeypatch):
    """An hour's training of as many epochs as there is time for."""
    from lightning.pytorch.callbacks import Timer

    module = Minutes()
    module.has_budget = limit == "budget"
    monkeypatch.setattr(Timer, "time_elapsed", lambda self, stage="train": 60.0 * module.steps)
    monkeypatch.setattr(Timer, "time_remaining", lambda self, stage="train": 3600.0 - 60.0 * module.steps)
    watch = AttentionWatch(draw=False)
    train(tmp_path, watch, module, epochs=1000, max_time="00:01:00:00" if limit == "max_time" else None)
    assert watch.maps["middle"]["step"] == 30
    assert watch.maps["end"]["step"] >= 40


@pytest.mark.parametrize("first", [True, False])
def test_averaged_weights_are_watched_all_along(tmp_path, first, drawn):
    """Maps and curves are of the weights that are validated, in whatever order the callbacks stand."""
    ema, watch = EMA(EmaConfig(0.9)), AttentionWatch(share=1.0)
    seen = []
    original = AttentionWatch._measure

    def measure(self, model, step, moment):
        average = dict(ema._average_model.module.net.named_parameters())
        own = dict(model.named_parameters())
        # they have changed places
        seen.append((own["blocks.0.attn.qkv.weight"].clone(), average["blocks.0.attn.qkv.weight"].clone(), moment))
        original(self, model, step, moment)

    watch._measure = measure.__get__(watch)
    module = Anybody()
    history = []
    update = ema.on_train_batch_end

    def remember(*args):
        update(*args)
        history.append(dict(ema._average_model.module.net.named_parameters())["blocks.0.attn.qkv.weight"].clone())

    ema.on_train_batch_end = remember
    train(tmp_path, watch if first else None, module, callbacks=[ema] if first else [watch, ema])
    for own, _, moment in seen[1:]:
        assert any(torch.equal(own, average) for average in history), moment
    assert "averaged weights" in drawn["attention_end.png"][0]
    assert "averaged weights" in drawn["attention_curves.png"][0]


def test_titles_say_what_is_implied_and_that_weights_are_not_causes(tmp_path, drawn):
    module = Anybody(img_size=16, patch_size=4, embed_dim=12, num_heads=3, depth=2, attention={"pattern": "performer"})
    train(tmp_path, AttentionWatch(images=2), module, epochs=2)
    above, axes = drawn["attention_middle.png"]
    assert "not causes" in above
    assert "averaged" not in above
    wanted = ["blocks.0.attn (implied)", "blocks.1.attn (implied)"]
    assert [" ".join(text.get_text().split()) for text in axes[0][0].texts] == wanted
    above, axes = drawn["attention_curves.png"]
    assert "not causes" in above
    assert [line.get_label() for line in axes[0][0].lines] == wanted


def test_panels_show_samples_and_maps_where_they_lie(tmp_path, drawn):
    """Rows are samples, columns layers; a map is brightest where it is largest."""
    maps = torch.zeros(2, 2, 3)
    maps[0, 1, 2] = maps[1, 0, 0] = 1
    samples = torch.zeros(2, 3, 16, 24)
    samples[1, 0] = 1  # red
    callback._draw(samples, {"one": maps, "two": maps.flip(0)}, tmp_path / "x.png", "title")
    shown = torch.from_numpy(drawn["x.png"][1][0][0].images[0].get_array()).float()
    height, width, gap = 64, 96, callback.GAP
    assert shown.shape == (2 * height + gap, 3 * width + 2 * gap, 3)

    def tile(i, j):
        return shown[i * (height + gap) :, j * (width + gap) :][:height, :width]

    assert tile(1, 0).mean((0, 1)).tolist() == [255, 0, 0]
    for column, order in ((1, (0, 1)), (2, (1, 0))):
        for row, sample in enumerate(order):
            cells = tile(row, column).mean(-1).unflatten(0, (2, 32)).unflatten(2, (3, 32)).mean((1, 3))
            assert cells.argmax() == maps[sample].argmax()


def test_a_model_without_attention_is_left_alone(tmp_path):
    watch = AttentionWatch()
    train(tmp_path, watch, Anybody("resnet8_cifar", img_size=16), epochs=1)
    assert not (tmp_path / "plots").exists()
    assert watch.spent < 0.1


def test_an_error_is_a_warning(tmp_path, monkeypatch):
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


@pytest.mark.slow  # two minutes: drawing takes a second and a half, so shorter runs would say nothing
def test_watching_costs_less_than_three_per_cent_of_a_run(tmp_path):
    """By its own account, drawing and waiting for the processor included, of a run that other work slows as much."""
    module = Anybody(img_size=32, patch_size=4, embed_dim=96, num_heads=3, depth=6)
    data = TensorDataset(torch.randn(1280, 3, 32, 32), torch.arange(1280) % 3)
    watch = AttentionWatch()
    trainer = Trainer(max_epochs=16, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[watch])
    watch.folder = tmp_path
    begin = time.monotonic()
    trainer.fit(module, DataLoader(data, batch_size=128), DataLoader(data, batch_size=256))
    whole = time.monotonic() - begin
    assert len(list(tmp_path.glob("attention_*.png"))) == 4
    assert watch.spent < 0.03 * whole, (watch.spent, whole)
