"""Detectors learn, are resumed bit for bit, and are measured by what they find."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

import vision_attn as va
from vision_attn.data.detection import DetectionData
from vision_attn.detection.criterion import CriterionConfig
from vision_attn.errors import UserError
from vision_attn.training.detector import Detector, label_map, with_backbone_rate
from vision_attn.training.ema import EmaConfig
from vision_attn.training.fitting import finish, make_callbacks, make_plugins
from vision_attn.training.interrupt import Interrupted, StopSignal
from vision_attn.training.optimizers import OptimizerConfig, parameter_groups
from vision_attn.training.progress import ProgressLine
from vision_attn.training.run_folder import RunFolder, read_metrics
from vision_attn.training.tasks import task_by_name

TINY = {"embed_dim": 24, "num_heads": 3, "enc_layers": 1, "dec_layers": 2, "num_queries": 7, "mlp_ratio": 2.0}
SETTINGS = {
    "max_epochs": 2,
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "logger": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


@pytest.fixture(scope="session")
def root(tmp_path_factory, write_coco) -> Path:
    counts = {"train2017": 19, "val2017": 5, "test2017": 3}
    return write_coco(tmp_path_factory.mktemp("coco"), counts)


class Run:
    """One run in batches of 5: 4 steps an epoch."""

    def __init__(
        self, folder: Path, root: Path, resume: Path | None = None, stop_at: int | None = None, **options: Any
    ):
        self.stop = StopSignal()
        self.data = DetectionData(
            "coco", root=root, test_json="annotations/instances_test2017.json", img_size=48, max_size=96, batch_size=5
        )
        torch.manual_seed(0)
        linked = {k: getattr(self.data, k) for k in ("num_classes", "img_size", "labels", "category_ids", "preprocess")}
        args = {**TINY, **options.pop("args", {})}
        self.module = Detector(
            options.pop("name", "dn_detr_tiny"),
            args,
            optimizer=OptimizerConfig(**options.pop("optimizer", {"lr": 1e-3})),
            criterion=CriterionConfig(**options.pop("criterion", {})),
            lr_backbone=options.pop("lr_backbone", None),
            **linked,
        )
        self.folder = RunFolder(folder, "tiny", "data: {name: coco}\n", monitor="val/ap", resume=resume)
        callbacks = make_callbacks(
            self.folder, ema=EmaConfig(**options.pop("ema", {})), save_every="1h", stop=self.stop, progress=False
        )
        if stop_at is not None:
            callbacks.insert(0, _StopAt(self.stop, stop_at))
        self.trainer = Trainer(**{**SETTINGS, **options}, callbacks=callbacks, plugins=make_plugins("auto"))

    def fit(self, ckpt_path: Path | None = None) -> Run:
        self.trainer.fit(self.module, self.data, ckpt_path=ckpt_path, weights_only=True)
        return self


class _StopAt(Callback):
    """Asks for the end of the run during optimizer step ``step``."""

    def __init__(self, stop: StopSignal, step: int) -> None:
        self.stop, self.step = stop, step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step + 1 == self.step:
            self.stop.requested = True


@pytest.fixture(scope="module")
def finished(tmp_path_factory, root):
    """A finished run with a test, for the tests that only look at one."""
    run = Run(tmp_path_factory.mktemp("finished"), root, optimizer={"lr": 2e-3})
    run.fit()
    trainer = Trainer(**{**SETTINGS, "enable_checkpointing": False})
    finish(run.folder, run.trainer, run.module, run.data, test=True, make_trainer=lambda: trainer)
    return run


# -- a run -------------------------------------------------------------------------------------------


def test_a_run_leaves_its_numbers(finished):
    summary = json.loads((finished.folder.path / "summary.json").read_text())
    names = ("val/ap", "val/ap50", "val/ap75", "val/ar_100", "test/ap", "test/ap50")
    for key in (*names, "val/ap_nms50", "val/ap_nms70", "test/ap_nms50", "test/ap_nms70"):
        assert 0 <= summary[key] <= 1
    assert list(summary).index("val/ap") < list(summary).index("params")
    with (finished.folder.path / "metrics.csv").open() as file:
        names = next(csv.reader(file))
    assert {"train/loss", "train/loss_class", "train/loss_bbox", "train/loss_giou", "train/class_error"} < set(names)
    assert {"train/surplus", "val/loss", "val/ap", "val/ap50", "val/ar_100"} < set(names)
    assert "val/acc" not in names
    rows = read_metrics(finished.folder.path / "metrics.csv")
    assert [row["step"] for row in rows] == [4, 8]
    assert rows[1]["train/loss"] < rows[0]["train/loss"]
    assert all(row["train/surplus"] == 0 for row in rows)


@pytest.mark.parametrize("case", ["denoising and selection", "one layer of learned queries"])
def test_every_part_of_the_loss_is_a_column(tmp_path, root, case):
    """With their weights, those of a row add up to its loss, though an image here has no object."""
    all_of_it = case == "denoising and selection"
    args = {"query_selection": True, "dn_contrastive": True} if all_of_it else {"dec_layers": 1}
    name = "dn_detr_tiny" if all_of_it else "detr_tiny"
    weights = {"weight_bbox": 3.0, "aux_weight": 0.7, "dn_weight": 0.3, "enc_weight": 0.2}
    run = Run(tmp_path, root, name=name, args=args, criterion=weights, max_epochs=1)
    run.trainer.callbacks.append(ProgressLine(run.folder))
    run.fit()
    (row,) = read_metrics(run.folder.path / "metrics.csv")
    factors = {"": 1.0, **({"_aux": 0.7, "_dn": 0.3, "_enc": 0.2} if all_of_it else {})}
    parts = {f"train/loss_{part}{ending}" for part in ("class", "bbox", "giou") for ending in factors}
    assert {key for key in row if key.startswith("train/loss_")} == parts
    total = sum(
        factor * weight * row[f"train/loss_{part}{ending}"]
        for ending, factor in factors.items()
        for part, weight in (("class", 1.0), ("bbox", 3.0), ("giou", 2.0))
    )
    assert total == pytest.approx(row["train/loss"], rel=1e-4)
    assert not run.module.shown & {key.removeprefix("train/") for key in parts}


def test_a_batch_without_objects_has_the_same_parts(tmp_path):
    """Processes add up their sums by name."""
    module = Detector("dn_detr_tiny", TINY, num_classes=3, img_size=(48, 48))
    names = []
    for count in (2, 0):
        target = {"labels": torch.ones(count, dtype=torch.int64), "boxes": torch.full((count, 4), 0.4)}
        module._sums = {}
        module.training_step({"image": torch.randn(1, 3, 48, 48), "mask": None, "targets": [target]}, 0)
        names.append(sorted(module._sums))
    assert names[0] == names[1]
    assert "loss_bbox_dn" in names[0]


@pytest.mark.parametrize("name", ["dn_detr_tiny", "detr_tiny"])
def test_training_with_bfloat16_weights(tmp_path, root, name):
    """Images become bfloat16, boxes do not."""
    run = Run(tmp_path, root, name=name, max_epochs=1, precision="bf16-true")
    exact = Run(tmp_path / "exact", root, name=name, max_epochs=1)
    seen: list[torch.Tensor] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            seen.extend(target["boxes"] for target in batch["targets"])
            assert (batch["image"].dtype == torch.bfloat16) == (trainer is run.trainer)

    rows = []
    for one in (run, exact):
        one.trainer.callbacks.append(Look())
        one.fit()
        rows += read_metrics(one.folder.path / "metrics.csv")
    ours, theirs = torch.cat(seen[: len(seen) // 2]), torch.cat(seen[len(seen) // 2 :])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert run.module.model.class_embed.weight.dtype == torch.bfloat16
    assert rows[0]["train/loss"] == pytest.approx(rows[1]["train/loss"], rel=0.1)
    assert rows[0]["val/loss"] == pytest.approx(rows[1]["val/loss"], rel=0.2)


def test_a_run_leaves_its_pictures(finished):
    plots = finished.folder.path / "plots"
    for name in ("learning_curves", "augmented", "detections", "average_precision", "precision_recall"):
        assert (plots / f"{name}.png").stat().st_size > 5000
    assert (plots / "confusion_matrix.png").is_file()


def test_the_checkpoint_knows_its_classes(finished):
    for path in ("checkpoints/best.ckpt", "model.safetensors"):
        model = va.load_model(finished.folder.path / path)
        assert model.config["task"] == "detection"
        assert model.config["labels"] == ["red", "green", "blue"]
        assert model.config["category_ids"] == [3, 7, 20]
        assert model.config["preprocess"]["size"] == [48, 96]


def test_evaluating_the_checkpoint_says_the_same(finished, root):
    model = va.load_model(finished.folder.path / "checkpoints" / "best.ckpt")
    trainer = Trainer(**{**SETTINGS, "enable_checkpointing": False})
    data = DetectionData("coco", root=root, img_size=48, max_size=96, eval_batch_size=2)
    result = trainer.validate(Detector.from_model(model), datamodule=data, verbose=False)[0]
    summary = json.loads((finished.folder.path / "summary.json").read_text())
    assert result["val/ap"] == pytest.approx(summary["val/ap"], abs=1e-5)
    row = max(read_metrics(finished.folder.path / "metrics.csv"), key=lambda row: (row["val/ap"], row["step"]))
    assert result["val/loss"] == pytest.approx(row["val/loss"], rel=1e-4)  # other batches, the same mean over objects


def test_the_detector_learns(tmp_path, root):
    run = Run(tmp_path, root, max_epochs=12, optimizer={"lr": 2e-3}, check_val_every_n_epoch=12).fit()
    rows = read_metrics(run.folder.path / "metrics.csv")
    assert rows[-1]["train/loss"] < 0.85 * rows[0]["train/loss"]
    assert rows[-1]["val/ap50"] > 0


# -- resuming ----------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "denoising": {},
    "softmax and dropout": {
        "name": "detr_tiny",
        "args": {"dropout": 0.1},
        "optimizer": {"lr": 1e-3, "schedule": "step", "drop_at": (0.4,), "warmup": 0},
    },
    "groups, query selection, ema": {
        "args": {"query_groups": 3, "query_selection": True, "dn_contrastive": True},
        "ema": {"decay": 0.9},
        "criterion": {"loss": "stable"},
        "lr_backbone": 1e-4,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, root, case):
    options = CASES[case]
    whole = Run(tmp_path / "whole", root, **_copy(options)).fit()
    first = Run(tmp_path / "stopped", root, stop_at=3, **_copy(options))
    with pytest.raises(Interrupted) as caught:
        first.fit()
    second = Run(tmp_path / "stopped", root, resume=first.folder.path, **_copy(options)).fit(caught.value.path)
    assert first.trainer.global_step == 3
    torch.testing.assert_close(second.module.state_dict(), whole.module.state_dict(), rtol=0, atol=0)
    rows, expected = (read_metrics(r.folder.path / "metrics.csv") for r in (second, whole))
    for key in (
        "step",
        "lr",
        "train/loss",
        "train/loss_class",
        "train/class_error",
        "train/surplus",
        "train/loss_bbox_aux",
        "train/loss_giou_dn",
        "train/loss_class_enc",
        "val/ap",
        "val/loss",
    ):
        assert [row.get(key) for row in rows] == [row.get(key) for row in expected], key


def _copy(options: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in options.items()}


# -- what goes wrong ---------------------------------------------------------------------------------


def test_nan_names_the_step_and_what_to_try(tmp_path, root):
    run = Run(tmp_path, root)

    class Poison(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                with torch.no_grad():
                    module.model.bbox_embed.layers[-1].bias.fill_(float("nan"))

    run.trainer.callbacks.append(Poison())
    with pytest.raises(
        UserError, match=r"step 2 \(epoch 0, lr .*\): the predicted boxes became NaN in decoder layer 1 of 2"
    ):
        run.fit()


def test_a_head_for_fewer_classes_is_refused_at_once(tmp_path, root):
    run = Run(tmp_path, root)
    run.module = Detector("dn_detr_tiny", TINY, num_classes=2)
    with pytest.raises(UserError, match="the data have 3 classes, the model's head 2: build it with num_classes=3"):
        run.fit()


def test_a_missing_package_is_noticed_before_training(tmp_path, root, monkeypatch):
    """However late the first validation is; without any, it is not needed."""
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    late = Run(tmp_path, root, max_epochs=20, check_val_every_n_epoch=10)
    with pytest.raises(UserError, match="needs the package faster-coco-eval"):
        late.fit()
    assert late.trainer.global_step == 0
    assert Run(tmp_path, root, max_epochs=1, limit_val_batches=0).fit().trainer.global_step == 4


def test_models_of_other_tasks_are_refused():
    with pytest.raises(UserError, match=r"is a model for classification, not for detection; there are: .*dn_detr_tiny"):
        Detector("vit_tiny_patch16_224", img_size=(32, 32))


def test_a_loss_that_does_not_fit_the_head_is_refused():
    with pytest.raises(UserError, match=r"criterion.loss softmax does not fit a sigmoid head"):
        Detector("dn_detr_tiny", TINY, criterion=CriterionConfig(loss="softmax"))


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_nan_in_an_evaluation_names_the_batch(root, stage):
    model = va.create_model("dn_detr_tiny", num_classes=3, **TINY)
    with torch.no_grad():
        model.bbox_embed.layers[-1].bias[1] = float("nan")
    trainer = Trainer(**{**SETTINGS, "enable_checkpointing": False})
    data = DetectionData(
        "coco", root=root, test_json="annotations/instances_test2017.json", img_size=48, max_size=96, eval_batch_size=2
    )
    split = "val" if stage == "validate" else "test"
    with pytest.raises(UserError, match=rf"^{split}, batch 0: the predicted boxes became NaN"):
        getattr(trainer, stage)(Detector.from_model(model), datamodule=data, verbose=False)
    model.config["category_ids"] = [3, 7, 999]  # without a loss, it is the detections that tell
    with pytest.raises(UserError, match=rf"^{split}, batch 0: image \d+.*: predictions are NaN"):
        getattr(trainer, stage)(Detector.from_model(model), datamodule=data, verbose=False)


def test_nan_in_a_validation_of_a_run_names_the_step(tmp_path, root):
    run = Run(tmp_path, root)

    class Poison(Callback):
        def on_validation_start(self, trainer: Trainer, module: Any) -> None:
            with torch.no_grad():
                module.model.class_embed.bias[2] = float("nan")

    run.trainer.callbacks.insert(0, Poison())
    with pytest.raises(UserError, match=r"^val, batch 0, after step 4 \(epoch 0, lr .*class logits became NaN"):
        run.fit()


def test_too_few_queries_are_told_before_the_first_step_and_in_every_line(tmp_path, root, capsys):
    run = Run(tmp_path, root, args={"num_queries": 1, "query_groups": 3})
    run.trainer.callbacks.append(ProgressLine(run.folder))
    counts = [
        sum(a["image_id"] == image["id"] and not a.get("iscrowd") for a in truth["annotations"])
        for truth in [json.loads((root / "annotations" / "instances_train2017.json").read_text())]
        for image in truth["images"]
    ]
    over = sum(count > 1 for count in counts)
    says = (
        rf"{over} of 19 training images have more objects than the model has queries \(1; up to {max(counts)} objects\)"
    )
    with pytest.warns(UserWarning, match=says + r".*--model\.args\.num_queries"):
        run.fit()
    surplus = sum(max(0, count - 1) for count in counts) / len(counts)
    rows = read_metrics(run.folder.path / "metrics.csv")
    assert surplus > 0
    assert [row["train/surplus"] for row in rows] == pytest.approx([surplus] * 2, rel=1e-4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 2
    assert all(f"surplus {surplus:.4f}" in line for line in lines)


def test_enough_queries_are_no_matter_of_talk(finished):
    assert "surplus" not in finished.module.shown


def groups_of(run):
    names = {id(p): name for name, p in run.module.model.named_parameters()}
    return {names[id(p)]: group for group in run.trainer.optimizers[0].param_groups for p in group["params"]}


@pytest.mark.parametrize("lr_backbone", [None, 1e-3])
def test_rates_given_at_the_resume_are_those_of_the_run(tmp_path, root, lr_backbone):
    """That of the backbone too, also where it had none of its own before and so was in the others' groups."""
    first = Run(tmp_path, root, stop_at=3, lr_backbone=lr_backbone, optimizer={"lr": 1e-3})
    with pytest.raises(Interrupted) as caught:
        first.fit()
    optimizer = {"lr": 5e-4, "weight_decay": 0.25, "warmup": 0, "schedule": "constant"}
    second = Run(tmp_path, root, resume=first.folder.path, lr_backbone=1e-5, optimizer=optimizer, max_epochs=1)
    second.fit(caught.value.path)
    for name, group in groups_of(second).items():
        assert group["lr"] == group["peak_lr"] == (1e-5 if name.startswith("backbone.") else 5e-4)
        assert group["weight_decay"] in (0.0, 0.25)
    assert {group["weight_decay"] for group in groups_of(second).values()} == {0.0, 0.25}
    assert [row["lr"] for row in second.folder.rows] == [5e-4]
    steps = {int(state["step"]) for state in second.trainer.optimizers[0].state.values()}
    assert steps == {4}  # all parameters have their old moments


def test_the_backbone_can_be_frozen_and_freed_at_a_resume(tmp_path, root):
    first = Run(tmp_path, root, stop_at=3, lr_backbone=0.0)
    with pytest.raises(Interrupted) as caught:
        first.fit()
    second = Run(tmp_path, root, resume=first.folder.path, lr_backbone=1e-4, max_epochs=1).fit(caught.value.path)
    steps = {
        name: int(second.trainer.optimizers[0].state[p]["step"]) for name, p in second.module.model.named_parameters()
    }
    assert {key: steps[key] for key in steps} == {key: 1 if key.startswith("backbone.") else 4 for key in steps}


def test_a_test_of_a_detector_stays_with_its_weights(finished):
    """``finished`` was tested; resumed, it has nothing left to train."""
    before = json.loads((finished.folder.path / "summary.json").read_text())
    path = finished.folder.path / "checkpoints" / "last.ckpt"
    again = Run(finished.folder.root, Path(finished.data.root), resume=finished.folder.path).fit(path)
    again.folder.write_summary()
    after = json.loads((finished.folder.path / "summary.json").read_text())
    assert {key: value for key, value in after.items() if key.startswith("test/")} == {
        key: value for key, value in before.items() if key.startswith("test/")
    }
    assert "test/ap_nms50" in after


# -- parts -------------------------------------------------------------------------------------------


def test_the_backbone_has_a_rate_of_its_own():
    module = Detector("dn_detr_tiny", TINY, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1), lr_backbone=1e-5)
    groups = parameter_groups(module.model, module.optimizer_config)
    rates = {id(p): (group["peak_lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    for name, parameter in module.model.named_parameters():
        rate, decay = rates[id(parameter)]
        assert rate == pytest.approx(1e-5 if name.startswith("backbone.") else 1e-3)
        if parameter.ndim == 1 or name in module.model.no_weight_decay():
            assert decay == 0
    assert len(groups) == 4


@pytest.mark.parametrize("adamw_lr", [None, 1e-4, 0.0])
@pytest.mark.parametrize("lr_mult", [None, {"backbone.stem*": 0.5}])
def test_the_rate_of_the_backbone_is_that_of_all_its_parameters(adamw_lr, lr_mult):
    """With Muon, too, which leaves its norms and its first layer to AdamW."""
    optimizer = OptimizerConfig(name="muon", lr=1e-2, adamw_lr=adamw_lr, lr_mult=lr_mult)
    module = Detector("dn_detr_tiny", TINY, optimizer=optimizer, lr_backbone=3e-4)
    found: dict[str, set[float]] = {"muon": set(), "adamw": set()}
    rates = {}
    for group in parameter_groups(module.model, module.optimizer_config):
        rates |= {id(p): (group["peak_lr"], group["algorithm"]) for p in group["params"]}
    for name, parameter in module.model.named_parameters():
        rate, algorithm = rates[id(parameter)]
        if name.startswith("backbone.stem") and lr_mult:
            own = adamw_lr if algorithm == "adamw" and adamw_lr is not None else 1e-2
            assert rate == pytest.approx(0.5 * own)
        elif name.startswith("backbone."):
            assert rate == pytest.approx(3e-4)
            found[algorithm].add(rate)
        else:
            assert rate == pytest.approx(adamw_lr if algorithm == "adamw" and adamw_lr is not None else 1e-2)
    assert found["muon"]
    assert found["adamw"]


def test_a_rate_of_zero_freezes_the_backbone(tmp_path, root):
    """No gradients, and its norms do not count along, over validations and epochs."""
    run = Run(tmp_path, root, lr_backbone=0.0, args={"dn_groups": 2})
    module = run.module
    assert not any(p.requires_grad for p in module.model.backbone.parameters())
    assert all(p.requires_grad for p in module.model.encoder.parameters())
    before = {key: value.clone() for key, value in module.model.state_dict().items()}
    assert any("running_mean" in key for key in before)
    run.fit()
    after = module.model.state_dict()
    for key, value in before.items():
        if key.startswith("backbone."):
            torch.testing.assert_close(after[key], value, rtol=0, atol=0)
    assert (after["class_embed.weight"] != before["class_embed.weight"]).any()
    assert all(p.grad is None for p in module.model.backbone.parameters())


def test_another_set_of_data_is_measured_by_its_own_truth(root):
    """The same module, validated on one split and then on another."""
    torch.manual_seed(3)
    model = va.create_model("dn_detr_tiny", num_classes=3, **TINY)
    module = Detector.from_model(model)
    results = []
    for own in (module, None):
        for name in ("val2017", "test2017", "val2017"):
            images, annotations = f"{name}", f"annotations/instances_{name}.json"
            data = DetectionData("coco", root=root, val_json=annotations, val_images=images, img_size=48, max_size=96)
            trainer = Trainer(**{**SETTINGS, "enable_checkpointing": False})
            judged = own or Detector.from_model(model)
            results.append(trainer.validate(judged, datamodule=data, verbose=False)[0])
            assert judged.evaluation.images == {"val2017": 5, "test2017": 3}[name]
    assert results[:3] == results[3:]
    assert results[0] != results[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drop_at": (0.5, 1.0)}, r"optimizer.drop_at are fractions of a run, between 0 and 1, got \(0.5, 1.0\)"),
        ({"drop_factor": 0.0}, "optimizer.drop_factor must be above 0 and at most 1"),
    ],
)
def test_steps_that_make_no_sense_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        OptimizerConfig(schedule="step", **options)


def test_patterns_of_the_user_go_before_the_backbones():
    optimizer = with_backbone_rate(OptimizerConfig(lr=1e-3, lr_mult={"backbone.stem*": 0.5}), 1e-4)
    assert list(optimizer.lr_mult.items()) == [("backbone.stem*", 0.5), ("backbone.*", 1e-4)]
    with pytest.raises(UserError, match="lr_backbone must not be negative"):
        with_backbone_rate(OptimizerConfig(), -1.0)


def test_labels_are_matched_by_the_files_ids():
    """A head by COCO's own ids evaluates on contiguous labels."""
    assert label_map(list(range(91)), [3, 7, 20]).tolist() == [3, 7, 20]
    assert label_map([20, 3, 7], [3, 7, 20]).tolist() == [1, 2, 0]
    assert label_map([3, 7], [3, 7, 20]) is None


def test_a_head_by_the_files_ids_is_evaluated_on_contiguous_labels(root):
    """As the original DETR's checkpoints are: 91 logits, a class's place is its id."""
    torch.manual_seed(1)
    model = va.create_model("detr_tiny", num_classes=21, **{**TINY, "num_queries": 11})
    by_place = va.create_model("detr_tiny", num_classes=3, **{**TINY, "num_queries": 11})
    state = model.state_dict()
    for key in ("class_embed.weight", "class_embed.bias"):
        state[key] = state[key][[3, 7, 20, 21]]
        model.state_dict()[key][[i for i in range(21) if i not in (3, 7, 20)]] = 0 if "weight" in key else -1e4
    by_place.load_state_dict(state)
    model.config["category_ids"] = list(range(21))
    by_place.config["category_ids"] = [3, 7, 20]
    results = []
    for candidate in (model, by_place):
        trainer = Trainer(**{**SETTINGS, "enable_checkpointing": False})
        data = DetectionData("coco", root=root, img_size=48, max_size=96)
        results.append(trainer.validate(Detector.from_model(candidate), datamodule=data, verbose=False)[0])
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        assert value == pytest.approx(results[1][key], rel=1e-4, abs=1e-6)


def test_the_task_is_registered():
    task = task_by_name("detection")
    assert task.module_class() is Detector
    assert task.data_class() is DetectionData
    assert task.monitor == "val/ap"


@pytest.mark.parametrize("case", ["frozen norms", "frozen by its rate", "norms that learn", "weights"])
def test_a_frozen_backbone_without_weights_is_spoken_of(case, tmp_path):
    """Random features that never learn look like a model that does not work."""
    args = {**TINY, "backbone": "resnet50"}
    options: dict[str, Any] = {}
    if case == "frozen by its rate":
        args, options = dict(TINY), {"lr_backbone": 0.0}
    elif case == "norms that learn":
        args["backbone_options"] = {"norm": "batch"}
    elif case == "weights":
        model = va.create_model("dn_detr_tiny", num_classes=5, img_size=(32, 32), **args)
        options = {"weights": str(va.save_model(model, tmp_path / "old"))}
    module = Detector("dn_detr_tiny", args, num_classes=5, img_size=(32, 32), **options)
    module._trainer = SimpleNamespace(ckpt_path=None, datamodule=None, is_global_zero=True, enable_validation=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.on_fit_start()
    spoken = [str(w.message) for w in caught if "frozen" in str(w.message)]
    assert len(spoken) == case.startswith("frozen")


@pytest.mark.parametrize("label", [-1, 5, 70])
@pytest.mark.parametrize("groups", [0, 3])
def test_a_label_beyond_the_head_is_named_by_every_model(label, groups):
    """Denoising looks labels up before the matcher checks them; on a GPU that would end the process."""
    module = Detector("dn_detr_tiny", {**TINY, "dn_groups": groups}, num_classes=5, img_size=(32, 32)).train()
    labels, boxes = torch.tensor([1, label]), torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.2]])
    outputs = module(torch.randn(1, 3, 32, 32), targets=[{"labels": labels, "boxes": boxes}])
    with pytest.raises(UserError, match=f"the label {label}, but the model's head knows the 5 classes"):
        module.criterion(outputs, [{"labels": labels, "boxes": boxes}])
