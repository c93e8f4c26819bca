"""The module itself: losses, metrics, random state, memory format, checkpoints."""

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback

from vision_attn.errors import UserError
from vision_attn.training.classifier import Classifier, prefers_channels_last
from vision_attn.training.module import step_seed
from vision_attn.training.optimizers import OptimizerConfig

TINY = {"patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 3}


def classifier(**options):
    options = {"num_classes": 5, "img_size": (8, 8), "args": TINY, **options}
    return Classifier("vit_tiny_patch16_224", **options)


def test_smoothing_works_with_hard_and_soft_labels():
    module = classifier(label_smoothing=0.1).eval()
    image, hard = torch.randn(7, 3, 8, 8), torch.randint(0, 5, (7,))
    soft = F.one_hot(hard, 5).float()
    a = module.training_step({"image": image, "label": hard}, 0)
    b = module.training_step({"image": image, "label": soft}, 0)
    torch.testing.assert_close(a, b)
    log_p = module(image).log_softmax(1)
    target = 0.9 * soft + 0.1 / 5
    torch.testing.assert_close(a, -(target * log_p).sum(1).mean())
    mixed = (soft + soft.roll(1, 0)) / 2
    c = module.training_step({"image": image, "label": mixed}, 0)
    target = 0.9 * mixed + 0.1 / 5
    torch.testing.assert_close(c, -(target * log_p).sum(1).mean())


def test_labels_and_preprocessing_travel_with_the_model():
    preprocess = {"size": [8, 8], "mean": [0.1] * 3, "std": [0.2] * 3, "interpolation": "bilinear", "crop_pct": 1.0}
    module = classifier(labels=list("abcde"), preprocess=preprocess)
    checkpoint = {}
    module.on_save_checkpoint(checkpoint)
    config = checkpoint["hyper_parameters"]["config"]
    assert config["labels"] == list("abcde")
    assert config["preprocess"] == preprocess
    assert all(name.startswith("model.") for name in module.state_dict())


@pytest.mark.parametrize("name", ["resnet20_cifar", "cct_2_3x2_32"])
def test_models_whose_convolutions_overlap_get_channels_last(name):
    model = Classifier(name, num_classes=5, img_size=(8, 8))
    assert prefers_channels_last(model.model)
    assert model.channels_last
    weight = next(p for p in model.model.parameters() if p.ndim == 4 and p.shape[1] > 3)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    plain = Classifier(name, num_classes=5, img_size=(8, 8), channels_last=False)
    plain.load_state_dict(model.state_dict())
    image = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(plain.eval()(image), model.eval()(image))


def test_patches_are_no_overlapping_convolutions():
    vit = classifier()
    assert not vit.channels_last
    assert not prefers_channels_last(vit.model)


def test_step_seeds_differ():
    seeds = {step_seed(a, b, c, d) for a in range(3) for b in range(4) for c in range(5) for d in range(2)}
    assert len(seeds) == 3 * 4 * 5 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_every_optimizer_trains_with_clipping(tmp_path, make_run, precision, name):
    lr = {"adamw": 3e-3, "sgd": 0.02, "muon": 3e-3}[name]
    optimizer = {"name": name, "lr": lr, "warmup": 0}
    run = make_run(tmp_path, optimizer=optimizer, precision=precision, gradient_clip_val=1.0, max_epochs=4).fit()
    rows = run.folder.rows
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert math.isfinite(rows[-1]["val/loss"])


def test_metrics_are_right(tmp_path, make_run):
    """Logged validation numbers equal a plain pass; every sample counts once, whatever the batches."""
    run = make_run(tmp_path, max_epochs=1)
    run.data.eval_batch_size = 23
    run.fit()
    module, total, right, count = run.module.eval(), 0.0, 0, 0
    for batch in run.data.val_dataloader():
        batch = run.data.on_after_batch_transfer(batch)
        logits = module(batch["image"])
        total += float(F.cross_entropy(logits, batch["label"], reduction="sum").detach())
        right += int((logits.argmax(1) == batch["label"]).sum())
        count += len(logits)
    row = run.folder.rows[-1]
    assert row["val/acc"] == pytest.approx(right / count)
    assert row["val/loss"] == pytest.approx(total / count, rel=1e-5)
    assert run.module.confusion.sum() == count
    assert run.module.confusion.diag().sum() == right


def test_training_means_are_over_samples(tmp_path, make_run):
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((float(outputs["loss"].detach()), len(batch["label"])))

    run = make_run(tmp_path, max_epochs=1, callbacks=[Watch()]).fit()
    expected = sum(loss * n for loss, n in seen) / sum(n for _, n in seen)
    assert run.folder.rows[-1]["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert len({n for _, n in seen}) == 2  # the last batch is smaller


def test_nan_loss_stops_with_advice(tmp_path, make_run):
    run = make_run(tmp_path, optimizer={"name": "sgd", "lr": 1e30, "warmup": 0})
    with pytest.raises(UserError, match=r"loss became (nan|inf) at step \d+ .*smaller --model.optimizer.lr"):
        run.fit()


def test_optimizer_default_is_not_shared():
    assert classifier().optimizer_config == OptimizerConfig()


def test_compile_keeps_names():
    module = classifier(compile=True)
    assert all("_orig_mod" not in name for name in module.state_dict())
