"""A run that was stopped anywhere and resumed ends with the weights of one that was not, bit for bit."""

import pytest
import torch

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
    assert [r.get("val/acc") for r in rows] == [r.get("val/acc") for r in expected]
    last, expected = second.checkpoint(), whole.checkpoint()
    torch.testing.assert_close(last["state_dict"], expected["state_dict"], rtol=0, atol=0)
    assert last["epoch"] == expected["epoch"]
