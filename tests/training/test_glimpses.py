"""The picture of where a model looked shows the places it looked at."""

from __future__ import annotations

import torch
from PIL import Image
from torch.testing import assert_close

from vision_attn.training.glimpses import FRAMES, ZOOM, chosen, framed, where_it_looks


def test_glimpses_stay_bright_and_are_framed():
    images = torch.full((2, 3, 12, 20), 200, dtype=torch.uint8)
    corners = torch.tensor([[[0, 8], [4, 12], [4, 12]], [[0, 0], [0, 0], [0, 0]]])
    out = framed(images, corners, 8)
    assert out.shape == (2, 3, 12 * ZOOM, 20 * ZOOM)
    assert_close(out[0, :, 2 * ZOOM, 10 * ZOOM], torch.tensor([200] * 3, dtype=torch.uint8))  # inside the first
    assert (out[0, :, 2 * ZOOM, 2 * ZOOM] < 200).all()  # outside of all
    for k, (y, x) in enumerate([(0, 8), (4, 12)]):
        assert_close(out[0, :, y * ZOOM, x * ZOOM].long(), FRAMES[k])
    assert_close(out[0, :, 4 * ZOOM + 1, 12 * ZOOM + 1].long(), FRAMES[2])  # the same place again: nested
    assert_close(out[1, :, 2, 8 * ZOOM - 3].long(), FRAMES[2])


def test_right_images_first_and_a_quarter_of_mistakes_at_most():
    truth = torch.arange(100) % 10
    guess = truth.clone()
    guess[50:70] += 1
    rows = chosen(guess, truth, 32)
    assert len(rows.unique()) == 32
    right = guess[rows] == truth[rows]
    assert right[:24].all()
    assert not right[24:].any()
    assert len(chosen(truth, truth, 32)) == 32
    assert len(chosen(truth + 1, truth, 32)) == 32
    assert len(chosen(truth[:5], truth[:5], 32)) == 5


def test_a_run_has_the_picture(make_run, tmp_path):
    run = make_run(tmp_path, model=("glimpse_small_32", {"glimpse_size": 4, "stride": 2}), max_images=57, max_epochs=1)
    run.fit()
    files = run.module.draw(run.folder, run.data)
    assert "glimpses.png" in [path.name for path in files]
    with Image.open(run.folder.path / "plots" / "glimpses.png") as picture:
        assert picture.size[0] > 1000
    corners = where_it_looks(run.module, torch.randn(5, 3, 8, 8))
    assert corners.shape == (5, 3, 2)
    assert set(corners.flatten().tolist()) <= {0, 2, 4}
