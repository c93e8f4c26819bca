"""The folder of a run: numbering, files, and what is written when things go wrong."""

import errno
import json
import threading
from pathlib import Path

import pytest
import torch

from vision_attn.cli.fit import resume_from
from vision_attn.errors import UserError
from vision_attn.training.checkpointing import link_or_copy
from vision_attn.training.fitting import finish
from vision_attn.training.interrupt import Interrupted
from vision_attn.training.run_folder import (
    best_row,
    config_hash,
    create_run_folder,
    latest_run,
    read_metrics,
    run_of_checkpoint,
    write_config,
    write_metrics,
)

KEYS = ["recipe", "model", "seed", "val/acc", "test/acc", "seconds", "images_per_second", "params", "macs"]
KEYS += ["data_hash", "config_hash", "version"]


def test_numbers_are_unique_under_a_race(tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(create_run_folder(tmp_path, "r"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(path.name) for path in found) == list(range(16))
    assert create_run_folder(tmp_path, "r").name == "16"


def test_the_configuration_is_that_of_now_and_earlier_ones_stay(tmp_path):
    first, second, third = (f"trainer: {{max_epochs: {n}}}\nrecipe: r\n" for n in (1, 2, 3))
    for text in (first, first.replace("recipe: r", "recipe: other"), second, third):
        write_config(tmp_path, text)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"config.yaml": third, "config_0.yaml": first, "config_1.yaml": second}


def test_latest_run_needs_a_checkpoint(tmp_path):
    for number in (2, 10, 11):
        (tmp_path / "digits_vit" / str(number) / "checkpoints").mkdir(parents=True)
    for number in (2, 10):
        (tmp_path / "digits_vit" / str(number) / "checkpoints" / "last.ckpt").touch()
    assert latest_run(tmp_path, "digits_vit").name == "10"
    (tmp_path / "digits_vit" / "11" / "checkpoints" / "last.ckpt").mkdir()  # what processes that share weights save
    assert latest_run(tmp_path, "digits_vit").name == "11"
    with pytest.raises(UserError, match=r"nothing to resume.*digits_vi.*Did you mean digits_vit"):
        latest_run(tmp_path, "digits_vi")
    with pytest.raises(UserError, match="nothing to resume"):
        latest_run(tmp_path / "nowhere", "x")


def test_metrics_round_trip(tmp_path):
    rows = [
        {"epoch": 0, "step": 3, "seconds": 1.5, "lr": 1e-3, "train/loss": 2.25},
        {"epoch": 0, "step": 5, "seconds": 2.5, "lr": 5e-4, "train/loss": 2.0, "val/acc": 0.5, "val/ap": 0.25},
    ]
    write_metrics(tmp_path / "m.csv", rows)
    assert read_metrics(tmp_path / "m.csv") == rows
    assert (tmp_path / "m.csv").read_text().startswith("epoch,step,seconds,lr,train/loss,train/acc,val/loss,val/acc")
    assert read_metrics(tmp_path / "none.csv") == []


def test_best_row_takes_the_latest_of_equals():
    rows = [{"step": n, "val/acc": acc} for n, acc in enumerate([0.1, 0.7, 0.7, 0.3])]
    assert best_row([{"step": 9}, *rows], "val/acc")["step"] == 2
    assert best_row([{"step": 1}], "val/acc") == {}


def test_config_hash_ignores_places():
    a = config_hash("data: {root: /a, name: x}\ntrainer: {default_root_dir: /b}\nrecipe: r\n")
    assert a == config_hash("trainer: {default_root_dir: /c}\ndata:\n  name: x\n")
    assert a != config_hash("data: {name: y}\ntrainer: {}\n")


def test_a_run_leaves_everything(tmp_path, make_run):
    run = make_run(tmp_path, ema={"decay": 0.9}).fit()
    summary = finish(run.folder, run.trainer, run.module, run.data, test=True)
    folder = run.folder.path
    assert folder == tmp_path / "tiny" / "0"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    plots = {f"plots/{n}.png" for n in ("learning_curves", "confusion_matrix", "predictions", "augmented")}
    plots |= {f"plots/attention_{n}.png" for n in ("start", "middle", "end", "curves")} | {"plots/attention.csv"}
    assert files == plots | {
        *("config.yaml", "metrics.csv", "summary.json", "model.safetensors", "config.json"),
        *("checkpoints/best.ckpt", "checkpoints/last.ckpt"),
    }
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert list(json.loads((folder / "summary.json").read_text())) == KEYS
    assert 0 <= summary["test/acc"] <= 1
    assert summary["val/acc"] == pytest.approx(max(row["val/acc"] for row in run.folder.rows), abs=1e-6)
    assert run_of_checkpoint(folder / "checkpoints" / "best.ckpt") == folder
    assert run_of_checkpoint(folder / "model.safetensors") == folder
    assert run_of_checkpoint(tmp_path / "other.ckpt") is None


def make_folder(path):
    """What makes a folder one of a run."""
    (path / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "model.safetensors", "checkpoints/best.ckpt", "checkpoints/last.ckpt"):
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("inside", "path"),
    [
        ("checkpoints", "last.ckpt"),
        ("checkpoints", "./best.ckpt"),
        ("checkpoints", "../checkpoints/last.ckpt"),
        ("checkpoints", "../model.safetensors"),
        ("checkpoints", ".."),
        (".", "checkpoints/last.ckpt"),
        (".", "model.safetensors"),
        (".", "."),
        ("..", "0/checkpoints/best.ckpt"),
        ("../../other", "../tiny/0/checkpoints/last.ckpt"),
    ],
)
def test_a_checkpoint_is_of_its_run_wherever_it_is_named_from(tmp_path, monkeypatch, inside, path):
    folder = make_folder(tmp_path / "tiny" / "0")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(folder / inside)
    found = run_of_checkpoint(path)
    assert found is not None
    assert found.resolve() == folder
    if path.endswith("last.ckpt"):
        chosen, run = resume_from(path, tmp_path, "tiny")
        assert (Path(chosen).resolve(), run.resolve()) == (folder / "checkpoints" / "last.ckpt", folder)


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_to_a_checkpoint(tmp_path, monkeypatch, link):
    """A linked folder is the run's own; a linked file lies where the link does."""
    folder = make_folder(tmp_path / "tiny" / "0")
    if link == "folder":
        (tmp_path / "link").symlink_to(folder / "checkpoints")
        assert run_of_checkpoint(tmp_path / "link" / "last.ckpt") == folder
    else:
        (tmp_path / "link").symlink_to(folder / "checkpoints" / "last.ckpt")
        assert run_of_checkpoint(tmp_path / "link") is None


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [{"optimizer": {"name": "sgd"}}, {"max_images": 190}], ids=["optimizer", "data"])
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(tmp_path, make_run, options):
    run = make_run(tmp_path, stop_at=5)
    with pytest.raises(Interrupted) as caught:
        run.fit()
    before = everything(run.folder.path)
    again = make_run(tmp_path, resume=run.folder.path, **options)
    again.folder.config = "data: {name: other}\n"
    with pytest.raises(UserError):
        again.fit(caught.value.path)
    assert everything(run.folder.path) == before


def test_the_configuration_changes_with_the_first_step(tmp_path, make_run):
    run = make_run(tmp_path, max_epochs=1).fit()
    folder, last = run.folder.path, run.folder.path / "checkpoints" / "last.ckpt"
    first = (folder / "config.yaml").read_text()

    def resumed(epochs):
        again = make_run(tmp_path, resume=folder, max_epochs=epochs)
        again.folder.config = "data: {name: other}\n"
        again.fit(last)
        again.folder.write_summary()
        return summary_of(again)["config_hash"]

    assert resumed(epochs=1) == config_hash(first)  # nothing is left to train
    assert (folder / "config.yaml").read_text() == first
    assert resumed(epochs=2) == config_hash("data: {name: other}\n")
    assert (folder / "config.yaml").read_text() == "data: {name: other}\n"
    assert (folder / "config_0.yaml").read_text() == first


def summary_of(run):
    return json.loads((run.folder.path / "summary.json").read_text())


def numbers_of_test(summary):
    return {key: value for key, value in summary.items() if key.startswith("test/")}


def test_a_test_stays_while_the_weights_do(tmp_path, make_run, monkeypatch):
    """A finished run that is resumed has nothing to train; one that goes on has other weights."""
    monkeypatch.setattr("vision_attn.training.fitting.draw", lambda *args: None)  # pictures take the most time
    monkeypatch.setattr("vision_attn.explain.callback.AttentionWatch.draw", lambda *args: None)
    run = make_run(tmp_path, max_epochs=1).fit()
    finish(run.folder, run.trainer, run.module, run.data, test=True)
    run.folder.write_summary(**{"test/ap_nms50": 0.25})
    first, last = summary_of(run), run.folder.path / "checkpoints" / "last.ckpt"
    assert set(numbers_of_test(first)) == {"test/acc", "test/ap_nms50"}

    again = make_run(tmp_path, max_epochs=1, resume=run.folder.path).fit(last)
    assert finish(again.folder, again.trainer, again.module, again.data).keys() == first.keys()
    for key in (*numbers_of_test(first), "val/acc", "params", "macs", "data_hash"):
        assert summary_of(run)[key] == first[key]

    longer = make_run(tmp_path, max_epochs=2, resume=run.folder.path, stop_at=15)
    with pytest.raises(Interrupted):
        longer.fit(last)
    # so far best.ckpt, which it is about, is what it was
    assert numbers_of_test(summary_of(run)) == numbers_of_test(first)
    longer = make_run(tmp_path, max_epochs=2, resume=run.folder.path).fit(last)
    assert not numbers_of_test(summary_of(run))
    assert not numbers_of_test(finish(longer.folder, longer.trainer, longer.module, longer.data))
    assert not numbers_of_test(summary_of(run))
    assert len(longer.folder.rows) == 2


def test_what_is_exported_is_the_best_state(tmp_path, make_run):
    from vision_attn.checkpoints import load_model

    run = make_run(tmp_path, ema={"decay": 0.9}).fit()
    finish(run.folder, run.trainer, run.module, run.data)
    best = run.checkpoint("best")
    exported = load_model(run.folder.path)
    for name, value in exported.state_dict().items():
        torch.testing.assert_close(value, best["state_dict"][f"model.{name}"], rtol=0, atol=0)
    assert exported.config["labels"] == run.data.labels
    assert exported.config["extra"]["recipe"] == "tiny"
    again = load_model(run.folder.path / "checkpoints" / "best.ckpt")
    torch.testing.assert_close(again.state_dict(), exported.state_dict(), rtol=0, atol=0)


class Connector:
    """What a trainer asks for its strategy."""

    def __init__(self):
        self.strategy = FSDPStrategy()


class FSDPStrategy:
    """Only its name counts: the real one needs several GPUs."""

    is_global_zero = True


@pytest.mark.parametrize("test", [True, False])
def test_weights_that_processes_share_out_are_exported_from_the_checkpoint(
    tmp_path, make_run, monkeypatch, capsys, test
):
    """The module, which none of them has whole, is neither filled nor evaluated."""
    from vision_attn.checkpoints import load_model

    run = make_run(tmp_path).fit()
    monkeypatch.setattr(run.trainer, "_accelerator_connector", Connector())
    for name in ("load_state_dict", "draw"):
        monkeypatch.setattr(run.module, name, lambda *_: pytest.fail("it was touched"))
    finish(run.folder, run.trainer, run.module, run.data, test=test, make_trainer=lambda: pytest.fail("tested"))
    exported, best = load_model(run.folder.path), run.checkpoint("best")
    for name, value in exported.state_dict().items():
        torch.testing.assert_close(value, best["state_dict"][f"model.{name}"], rtol=0, atol=0)
    assert exported.config["extra"]["val/acc"] == run.folder.summary["val/acc"]
    assert f"vision-attn {'test' if test else 'validate'} --ckpt_path {run.folder.path}" in capsys.readouterr().err


def test_a_checkpoint_that_is_a_folder_is_copied(tmp_path):
    for content in ("old", "new"):
        (tmp_path / "last.ckpt").mkdir(exist_ok=True)
        (tmp_path / "last.ckpt" / "part").write_text(content)
        link_or_copy(tmp_path / "last.ckpt", tmp_path / "best.ckpt")
        (tmp_path / "last.ckpt" / "part").write_text("written into")
        assert (tmp_path / "best.ckpt" / "part").read_text() == content


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, make_run, monkeypatch):
    run = make_run(tmp_path, stop_at=5)
    with pytest.raises(Interrupted):
        run.fit()
    before = run.checkpoint()
    real = torch.save

    def full(value, path, **options):
        real(value, path, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    again = make_run(tmp_path, resume=run.folder.path)
    with pytest.raises(UserError, match=r"disk is full.*last\.ckpt.*previous file is intact"):
        again.fit(run.folder.path / "checkpoints" / "last.ckpt")
    monkeypatch.undo()
    torch.testing.assert_close(run.checkpoint()["state_dict"], before["state_dict"], rtol=0, atol=0)
    assert [path.name for path in (run.folder.path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_mid_epoch_saves_by_the_clock(tmp_path, make_run):
    from lightning.pytorch import Callback

    saved = []

    class Watch(Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            saved.append(trainer.global_step)

    make_run(tmp_path, save_every="0.0001s", max_epochs=1, callbacks=[Watch()]).fit()
    assert saved == list(range(1, 12))
