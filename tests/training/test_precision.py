"""bfloat16 only where the hardware multiplies it."""

from __future__ import annotations

import pytest
import torch

from vision_attn.cli.main import main
from vision_attn.training import precision


@pytest.mark.parametrize("asked", ["bf16-mixed", "bf16-true"])
def test_without_bfloat16_instructions_it_is_float32(monkeypatch, asked):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: False)
    assert precision.affordable(asked, torch.device("cpu")) == "32-true"
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: True)
    assert precision.affordable(asked, torch.device("cpu")) == asked


@pytest.mark.parametrize("asked", [None, "32-true", "16-mixed", 64])
def test_other_precisions_are_left_alone(monkeypatch, asked):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: False)
    assert precision.affordable(asked, torch.device("cpu")) == asked


def test_sums_are_as_wide_as_the_device_has_numbers():
    assert precision.widest(torch.device("mps")) == torch.float32
    assert precision.widest(torch.device("cpu")) == precision.widest(torch.device("cuda")) == torch.float64


@pytest.mark.parametrize("asked", ["bf16-mixed", "16-mixed"])  # of the second Lightning makes the first on a CPU
def test_fit_says_so_once(monkeypatch, tmp_path, capsys, asked):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: False)
    monkeypatch.chdir(tmp_path)
    words = ["fit", "--data.name", "digits", "--model.name", "resnet20_cifar", "--trainer.precision", asked]
    words += ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "1", "--trainer.enable_progress_bar", "false"]
    words += ["--trainer.accelerator", "cpu"]
    assert main(words) == 0
    assert capsys.readouterr().err.count("no bfloat16 instructions") == 1
