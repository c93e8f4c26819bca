"""A run that was stopped anywhere and resumed ends with the weights of one that was not, bit for bit."""

import pytest
import torch
from lightning.pytorch import Callback

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.training.interrupt import Interrupted
from vision_attn.training.run_folder import read_metrics

EPOCH = 11  # optimizer steps
CASES = {
    "plain": {},
    "muon and ema": {"optimizer": {"name": "muon", "lr": 3e-3}, "ema": {"decay": 0.9}},
    "sgd, mixing": {"optimizer": {"name": "sgd", "lr": 0.05}, "augment": {"mixup": 0.4, "cutmix": 1.0}},
    "batch norm and ema": {"model": ("resnet20_cifar", {}), "ema": {"decay": 0.9}, "max_epochs": 2},
    "accumulated": {"accumulate_grad_batches": 2},
    "validations in mid-epoch": {"val_check_interval": 0.5},
    "rare validations": {"check_val_every_n_epoch": 2},
    "no validation": {"val_fraction": 0.0},
}


def resumed(tmp_path, stop_at, make_run, **options):
    first = make_run(tmp_path / "stopped", stop_at=stop_at, **options)
    with pytest.raises(Interrupted) as caught:
        first.fit()
    second = make_run(tmp_path / "stopped", resume=first.folder.path, **options)
    return first, second.fit(caught.value.path)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stop_at", [5, EPOCH])
def test_same_weights(tmp_path, make_run, case, stop_at):
    options = CASES[case]
    if case == "accumulated":
        stop_at = 2 if stop_at == 5 else 6
    whole = make_run(tmp_path / "whole", **options).fit()
    first, second = resumed(tmp_path, stop_at, make_run, **options)
    assert first.trainer.global_step == stop_at
    assert second.trainer.global_step == whole.trainer.global_step
    torch.testing.assert_close(second.weights(), whole.weights(), rtol=0, atol=0)
    rows, expected = (read_metrics(r.folder.path / "metrics.csv") for r in (second, whole))
    assert [r["step"] for r in rows] == [r["step"] for r in expected]
    assert [r["lr"] for r in rows] == [r["lr"] for r in expected]
    for key in ("train/loss", "train/acc", "val/loss", "val/acc"):
        assert [r.get(key) for r in rows] == [r.get(key) for r in expected], key
    for row, wanted in zip(second.folder.rows, whole.folder.rows, strict=True):  # files are rounded
        if row["step"] > stop_at:
            assert (row["train/loss"], row["train/acc"]) == (wanted["train/loss"], wanted["train/acc"])
    last, expected = second.checkpoint(), whole.checkpoint()
    torch.testing.assert_close(last["state_dict"], expected["state_dict"], rtol=0, atol=0)
    assert last["epoch"] == expected["epoch"]


# -- what is known of an epoch that was broken off ---------------------------------------------------


def test_a_checkpoint_of_mid_epoch_is_a_checkpoint_as_any_other(tmp_path, make_run):
    run = make_run(tmp_path, stop_at=5)
    with pytest.raises(Interrupted) as caught:
        run.fit()
    means = run.checkpoint()["running_means"]
    assert means["images"] == 5 * 19
    assert means["seconds"] > 0
    assert set(means["sums"]) == {"loss", "acc"}
    model = va.load_model(caught.value.path)
    assert model.config == run.module.model.config


def test_the_end_of_an_epoch_keeps_no_sums(tmp_path, make_run):
    run = make_run(tmp_path, max_epochs=1).fit()
    assert "running_means" not in run.checkpoint()


# -- other settings ----------------------------------------------------------------------------------


class Rates(Callback):
    """The hyperparameters of every group, at the first step."""

    def __init__(self):
        self.groups = []

    def on_train_batch_end(self, trainer, *args):
        if not self.groups:
            self.groups = [{k: v for k, v in g.items() if k != "params"} for g in trainer.optimizers[0].param_groups]


def stopped(tmp_path, make_run, **options):
    run = make_run(tmp_path, stop_at=5, **options)
    with pytest.raises(Interrupted) as caught:
        run.fit()
    return run, caught.value.path


OTHERS = {
    "adamw": ({"betas": (0.9, 0.99)}, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "sgd": ({"momentum": 0.9}, {"momentum": 0.8}),
    "muon": ({"adamw_lr": 1e-3}, {"adamw_lr": 2e-3, "momentum": 0.8}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_settings_given_at_the_resume_are_those_of_the_run(tmp_path, make_run, capsys, name):
    """And what metrics.csv says of the rate is what was used."""
    before, after = OTHERS[name]
    shape = {"warmup": 0, "schedule": "constant"}
    run, path = stopped(tmp_path, make_run, optimizer={"name": name, "lr": 3e-3, **shape, **before})
    watch = Rates()
    settings = {"name": name, "lr": 5e-4, "weight_decay": 0.25, **shape, **after}
    second = make_run(tmp_path, resume=run.folder.path, optimizer=settings, max_epochs=1, callbacks=[watch]).fit(path)
    own = {k: v for k, v in after.items() if k != "adamw_lr"}
    assert {group["weight_decay"] for group in watch.groups} == {0.25, 0.0}
    for group in watch.groups:
        adamw = group.get("algorithm") == "adamw"
        assert group["lr"] == group["peak_lr"] == (after["adamw_lr"] if adamw else 5e-4)
        assert {key: group[key] for key in own} == own
    assert [row["lr"] for row in second.folder.rows] == [5e-4]
    said = capsys.readouterr().out
    assert "goes on with other settings of the optimizer: " in said
    assert "weight_decay 0.05 -> 0.25" in said
    for key in own:
        assert f"{key} {before.get(key, 1e-8 if key == 'eps' else 0.95)} -> {own[key]}" in said


def test_a_rate_of_zero_leaves_the_weights_as_they_were(tmp_path, make_run, capsys):
    run, path = stopped(tmp_path, make_run)
    before = run.checkpoint()["state_dict"]
    capsys.readouterr()
    make_run(tmp_path, resume=run.folder.path, max_epochs=1, optimizer={"lr": 0.0}).fit(path)
    assert "peak_lr 0.003 -> 0.0" in capsys.readouterr().out
    torch.testing.assert_close(run.checkpoint()["state_dict"], before, rtol=0, atol=0)


def test_a_rate_for_a_part_can_be_given_at_the_resume(tmp_path, make_run):
    run, path = stopped(tmp_path, make_run)
    before = run.checkpoint()["state_dict"]
    settings = {"lr": 3e-3, "lr_mult": {"blocks.*": 0}}
    second = make_run(tmp_path, resume=run.folder.path, max_epochs=1, optimizer=settings).fit(path)
    for name, value in second.checkpoint()["state_dict"].items():
        if value.is_floating_point():
            assert torch.equal(value, before[name]) == name.startswith("model.blocks."), name


@pytest.mark.parametrize(("was", "now"), [("adamw", "sgd"), ("sgd", "muon"), ("muon", "adamw")])
def test_another_optimizer_cannot_go_on(tmp_path, make_run, was, now):
    run, path = stopped(tmp_path, make_run, optimizer={"name": was})
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"holds the state of {was}, from which {now} cannot go on"):
        make_run(tmp_path, resume=run.folder.path, optimizer={"name": now}).fit(path)
    assert path.read_bytes() == before


def test_the_baseline_of_drawn_keys_keeps_its_rate(tmp_path, make_run):
    options = {"attention": {"normalizer": "sampled"}, "max_epochs": 1}
    run, path = stopped(tmp_path, make_run, **options)
    watch = Rates()
    settings = {"lr": 1e-3, "weight_decay": 0.25}
    make_run(tmp_path, resume=run.folder.path, callbacks=[watch], optimizer=settings, **options).fit(path)
    *others, baseline = watch.groups
    assert {group["peak_lr"] for group in others} == {1e-3}
    assert (baseline["peak_lr"], baseline["weight_decay"]) == (1e-2, 0.0)


# -- other batches -----------------------------------------------------------------------------------


class Seen(Callback):
    """Of every step its epoch, its number therein, its images and its rate."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append((trainer.current_epoch, batch_idx, batch["index"].tolist(), module.lr))


def resumed_otherwise(tmp_path, make_run, stop_at, other, options):
    """The steps of a run that is resumed with ``other`` options, and of one that has had them from the start."""
    watches = Seen(), Seen()
    make_run(tmp_path / "whole", callbacks=[watches[0]], **options, **other).fit()
    first = make_run(tmp_path / "stopped", stop_at=stop_at, **options)
    with pytest.raises(Interrupted) as caught:
        first.fit()
    second = make_run(tmp_path / "stopped", resume=first.folder.path, callbacks=[watches[1]], **options, **other)
    second.fit(caught.value.path)
    return second, watches[1].steps, watches[0].steps


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("plain", {"batch_size": 38}),
        ("plain", {"batch_size": 10}),
        ("plain", {"limit_train_batches": 0.5}),
        ("accumulated", {"batch_size": 10}),
        ("no validation", {"batch_size": 38}),
    ],
)
def test_other_batches_from_the_end_of_an_epoch_on(tmp_path, make_run, case, other):
    """What follows is what a run sees that has had them from the start, at the same rates."""
    stop_at = 6 if case == "accumulated" else EPOCH
    run, steps, whole = resumed_otherwise(tmp_path, make_run, stop_at, other, CASES[case])
    assert steps == [step for step in whole if step[0] > 0]
    assert [row["epoch"] for row in run.folder.rows] == [0, 1, 2]
    assert [row["lr"] for row in run.folder.rows[1:]] == [step[3] for step in steps if step[1] == whole[-1][1]]
    assert all(("val/acc" in row) == (case != "no validation") for row in run.folder.rows)


@pytest.mark.parametrize(("size", "place"), [(38, 2), (10, 9), (200, 0)])
def test_other_batches_within_an_epoch(tmp_path, make_run, size, place):
    """It goes on at the batch with the first image that was not seen yet, and every epoch is validated."""
    with pytest.warns(UserWarning, match=f"within an epoch of batches of 19 images, now they have {size}"):
        run, steps, whole = resumed_otherwise(tmp_path, make_run, 5, {"batch_size": size}, {})
    assert steps == whole[place:]
    assert [row["epoch"] for row in run.folder.rows] == [0, 1, 2]
    assert all("val/acc" in row for row in run.folder.rows)


def test_other_batches_within_an_epoch_keep_step_with_accumulation(tmp_path, make_run):
    """76 images were seen, seven batches of ten: it goes on at the seventh, with which a step begins."""
    with pytest.warns(UserWarning, match="within an epoch"):
        run, steps, whole = resumed_otherwise(tmp_path, make_run, 2, {"batch_size": 10}, CASES["accumulated"])
    assert steps == whole[6:]
    assert all("val/acc" in row for row in run.folder.rows)


# -- what a kill leaves ------------------------------------------------------------------------------


def test_half_written_checkpoints_of_a_killed_process_are_cleared_away(tmp_path, make_run):
    run, path = stopped(tmp_path, make_run)
    left = [
        ".last.ckpt.q1w2e3r4.tmp",
        ".best.ckpt.abcd_fgh.tmp",
        ".best.ckpt.link",
        "../.model.safetensors.00000000.tmp",
    ]
    kept = [".mine.ckpt.q1w2e3r4.tmp", "last.ckpt.q1w2e3r4.tmp", "notes.tmp", "../.notes.q1w2e3r4.tmp"]
    for name in [*left, *kept]:
        (path.parent / name).touch()
    make_run(tmp_path, resume=run.folder.path, max_epochs=1).fit(path)
    assert not [name for name in left if (path.parent / name).exists()]
    assert [name for name in kept if (path.parent / name).exists()] == kept


def test_a_new_run_clears_nothing_away(tmp_path, make_run):
    """Not even in its own folder, which another process of it may already write into."""
    run = make_run(tmp_path, max_epochs=1)
    file = tmp_path / "tiny" / "0" / "checkpoints" / ".last.ckpt.q1w2e3r4.tmp"

    class Early(Callback):
        def setup(self, trainer, module, stage):
            file.parent.mkdir(exist_ok=True)
            file.touch()

    run.trainer.callbacks.insert(run.trainer.callbacks.index(run.folder) + 1, Early())
    run.fit()
    assert file.exists()
