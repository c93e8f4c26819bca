"""Digits on cluttered canvases: what lies where, and that it is always the same."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from vision_attn.data import ImageData
from vision_attn.data.canvas import _X, _Y, COPIES, _below, compose
from vision_attn.data.randomness import uniforms
from vision_attn.data.sources import Digits, SourceOptions


def test_every_scan_lies_on_its_canvases_whole():
    scans = Digits(SourceOptions()).scans("val")
    canvases = ImageData("digits_canvas").split("val")
    assert canvases.images.shape == (4 * len(scans), 3, 32, 32)
    assert_close(canvases.labels, scans.labels.repeat_interleave(4))
    assert len(canvases.ids.unique()) == len(canvases)
    draw = uniforms(0, 0, canvases.ids, [_Y, _X])
    y, x = _below(draw[:, 0], 25).tolist(), _below(draw[:, 1], 25).tolist()
    for n in range(0, len(canvases), 97):
        digit = canvases.images[n, :, y[n] : y[n] + 8, x[n] : x[n] + 8]
        assert_close(digit, scans.images[n // 4], rtol=0, atol=0)
    assert (min(y), max(y)) == (0, 24)
    assert (min(x), max(x)) == (0, 24)
    assert len({*zip(y, x, strict=True)}) > 400  # of 625 places


def test_clutter_comes_from_other_scans_and_keeps_off_the_digit():
    scans = torch.full((3, 8, 8), 9, dtype=torch.uint8) * torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None]
    which, ids = torch.tensor([0, 1, 2]).repeat(50), torch.arange(150)
    canvases = compose(scans, which, ids)
    own = (canvases == scans[which, :1, :1]).flatten(1).sum(1)
    assert_close(own, torch.full_like(own, 64))  # its digit, and no piece of itself
    others = ((canvases > 0).flatten(1).sum(1) - own).double()
    assert others.max() <= 8 * 16
    assert others.mean() > 60


def test_canvases_depend_on_the_scan_and_nothing_else():
    first, again = ImageData("digits_canvas", seed=0), ImageData("digits_canvas", seed=5)
    for split, per_scan in COPIES.items():
        one, two = first.split(split), again.split(split)
        assert_close(one.images, two.images, rtol=0, atol=0)
        assert len(one) == per_scan * {"train": 1257, "val": 270, "test": 270}[split]
    assert first.data_hash == again.data_hash
    pixels = first.split("train").images[:, 0].float() / 255
    assert_close(
        (float(pixels.mean()), float(pixels.std())), (first.source.mean[0], first.source.std[0]), rtol=0, atol=1e-3
    )
    assert ImageData("digits_canvas", val_fraction=0.0).split("val") is None
    assert ImageData("digits_canvas", img_size=64).split("test").images.shape == (1080, 3, 64, 64)
