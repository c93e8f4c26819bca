"""Every mechanism by its word on the command line and in a recipe; what makes no sense is one line and exit code 2."""

from __future__ import annotations

import re

import pytest

from vision_attn.cli.main import main
from vision_attn.models import create_model

FIT = ["fit", "--data.name", "digits", "--model.name", "vit_tiny_patch16_224", "--trainer.max_steps", "1"]
FIT += ["--trainer.limit_val_batches", "1", "--trainer.enable_progress_bar", "false", "--trainer.precision", "32-true"]
SMALL = {"patch_size": 2, "embed_dim": 24, "depth": 1, "num_heads": 3, "global_pool": "avg", "class_token": False}


def words(attention: dict[str, object]) -> list[str]:
    model = [w for key, value in SMALL.items() for w in (f"--model.args.{key}", str(value).lower())]
    chosen = [w for key, value in attention.items() for w in (f"--model.attention.{key}", str(value).lower())]
    return FIT + model + chosen


@pytest.mark.parametrize(
    "attention",
    [
        {"score": "additive", "hidden": 5},
        {"score": "cosine", "temperature": "learned", "position": "rope", "kv_heads": 1},
        {"normalizer": "sampled", "pattern": "window_2d", "window": 1},
        {"pattern": "linformer", "rank": 4, "tie_kv": True},
        {"kernel": "tiled", "position": "relative_bias", "two_step": True, "qk_norm": True},
    ],
    ids=str,
)
def test_fit_trains_with_them(attention, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words(attention)) == 0
    chosen = next(tmp_path.glob("runs/*/0/config.json")).read_text()
    assert all(f'"{key}"' in chosen or key == "kv_heads" for key in attention)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"score": "aditive"}, "unknown score 'aditive'"),
        ({"pattern": "window", "window": 99}, "99"),
        ({"pattern": "window", "rank": 3}, "no option 'rank'|takes"),
        ({"kernel": "sdpa", "normalizer": "hard"}, "computes softmax only, not 'hard'; use kernel='explicit'"),
        ({"pattern": "performer", "position": "t5"}, "a bias has no place"),
        ({"pattern": "linformer", "rank": 4, "normalizer": "bernoulli"}, "nothing else; use pattern='window'"),
        ({"kv_heads": 2}, "does not divide num_heads=3"),
        ({"position": "spiral"}, "unknown position 'spiral'"),
        ({"kernel": "gathered"}, "here all pairs meet; use kernel='sdpa'"),
        ({"windw": 3}, "windw.*window"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_said_in_a_line(attention, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words(attention)) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error:")
    assert error.count("\n") <= 2
    assert re.search(message, error), error
    assert not list(tmp_path.iterdir())


def test_odd_head_widths_do_not_rotate():
    with pytest.raises(ValueError, match="7"):
        create_model("vit_tiny_patch16_224", attention={"position": "rope"}, **{**SMALL, "embed_dim": 21})
