"""What the lines of progress tell a user."""

from __future__ import annotations

import io
import sys

import pytest
import torch

from vision_attn.cli.main import main
from vision_attn.training.progress import LASTING, ProgressLine, rising


def rows(*losses):
    return [{"train/loss": loss} for loss in losses] + [{"val/loss": 100.0}]


@pytest.mark.parametrize(
    "losses",
    [
        (),
        (3.0,),
        (3.0, 2.0, 1.0),
        (3.0, 2.0, 2.6, 2.1, 2.6, 2.6),  # one epoch was back
        (2.0, 2.4, 2.4, 2.4, 2.4),  # not by much
        (0.0, 2.0, 2.0, 2.0, 2.0),  # of such a loss no share can be told
        (-1.0, 2.0, 2.0, 2.0, 2.0),
    ],
)
def test_a_training_that_goes_well_is_not_spoken_of(losses):
    assert rising(rows(*losses)) == ""


def test_a_loss_that_keeps_rising_is():
    assert "from 2 to 2.7" in rising(rows(3.0, 2.0, 2.3, 2.6, 2.6, 2.7))
    assert rising(rows(2.0, *[2.6] * LASTING))
    assert not rising(rows(2.0, *[2.6] * (LASTING - 1)))


def test_it_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    losses = iter([1.0, *[2.0] * 20])
    from vision_attn.training.module import TrainingModule

    plain = TrainingModule.take_means
    monkeypatch.setattr(TrainingModule, "take_means", lambda self: plain(self) | {"train/loss": next(losses)})
    (tmp_path / "tiny.yaml").write_text(
        "data: {name: digits}\n"
        "model: {name: resnet8_cifar, args: {width: 3, blocks: [1, 1, 1]}, optimizer: {lr: 0.001}}\n"
        "trainer: {max_epochs: 6, limit_train_batches: 2}\n"
    )
    torch.manual_seed(0)
    assert main(["fit", "--config", "tiny.yaml"]) == 0
    assert capsys.readouterr().err.count("the training loss has risen from 1 to 2") == 1


@pytest.mark.parametrize(("encoding", "bar"), [("iso-8859-1", "####"), ("utf-8", "━━━━")])
def test_lines_fit_the_encoding_of_a_log_file(make_run, tmp_path, monkeypatch, encoding, bar):
    """The first such line comes after half a minute, and must not be the last."""
    log = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", log)

    def at_once(callbacks):
        for callback in callbacks:
            if isinstance(callback, ProgressLine):
                callback._every = 0.0
        return callbacks

    make_run(tmp_path, progress=True, enable_progress_bar=True, change=at_once, max_epochs=1, max_images=60).fit()
    log.flush()
    text = log.buffer.getvalue().decode(encoding)
    assert f"{bar} 4/4" in text
    assert f"validation {bar}" in text
