"""Drawn boxes: where they should be, in the colour of their class, on any image, without changing it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vision_attn.detection.draw import PALETTE, _color, _ink, draw_detections
from vision_attn.errors import UserError

CLASSES = ["ant", "bee", "cat"]


def test_frames_are_where_the_boxes_are_in_the_colour_of_the_class():
    image = torch.full((3, 490, 610), 128, dtype=torch.uint8)
    before = image.clone()
    picture = draw_detections(image, torch.tensor([[101.0, 203.0, 301.0, 401.0]]), ["bee"], [0.731], classes=CLASSES)
    assert picture.size == (610, 490)
    torch.testing.assert_close(image, before)
    pixels = np.asarray(picture)
    for row, column in ((300, 101), (300, 300), (203, 250), (400, 250)):
        assert tuple(pixels[row, column]) == PALETTE[1]
    assert (pixels[220:390, 120:290] == 128).all()  # nothing inside
    assert (pixels[420:] == 128).all()
    assert (pixels[180:200, 101:140] != 128).any()  # the label stands above


def test_pictures_of_every_kind_and_small_ones_are_enlarged():
    grey = Image.new("L", (40, 30), 90)
    picture = draw_detections(grey, [[3, 5, 20, 25]], ["cat"], classes=CLASSES)
    assert picture.mode == "RGB"
    assert picture.size == (480, 360)
    assert tuple(np.asarray(picture)[180, 36]) == PALETTE[2]
    assert draw_detections(grey, [[3, 5, 20, 25]], ["cat"], longest_side=1).size == (40, 30)
    empty = draw_detections(grey, torch.zeros(0, 4), [], longest_side=1)
    assert (np.asarray(empty) == 90).all()
    assert grey.mode == "L"


def test_a_class_has_one_colour():
    many = [f"class {i}" for i in range(80)]
    colors = {_color(name, many) for name in many}
    assert len(colors) == 80
    assert _color("bee", CLASSES) == PALETTE[1]
    assert _color("bee", None) == _color("bee", ["other"]) == _color("bee", None)
    assert _ink((255, 255, 0)) == (0, 0, 0)
    assert _ink((0, 0, 160)) == (255, 255, 255)


number = st.floats(-300, 300)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(number, number, number, number), max_size=7), st.integers(1, 90), st.integers(1, 90))
def test_any_box_on_any_image(boxes, width, height):
    """Outside, turned around, without area: drawn as far as it is inside, never an error."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    names = [CLASSES[i % 3] for i in range(len(boxes))]
    picture = draw_detections(image, boxes, names, [0.5] * len(boxes), classes=CLASSES, longest_side=97)
    assert picture.width % width == 0
    assert picture.height % height == 0


@pytest.mark.parametrize(
    ("image", "boxes", "names", "scores", "words"),
    [
        (torch.zeros(3, 8, 8), [[1, 1, 2, 2]], ["ant"], None, "uint8 tensor"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), [[1, 1, 2, 2]], ["ant"], None, r"\(3, H, W\)"),
        ("cat.jpg", [[1, 1, 2, 2]], ["ant"], None, "Cannot draw on str"),
        (Image.new("RGB", (8, 8)), [[1, 1, 2, 2]], [], None, "1 boxes with 0 names"),
        (Image.new("RGB", (8, 8)), [[1, 1, 2, 2]], ["ant"], [0.1, 0.2], "2 scores"),
        (Image.new("RGB", (8, 8)), [1, 1, 2, 2], ["ant"], None, r"\(n, 4\)"),
        (Image.new("RGB", (8, 8)), [[1, 1, 2, 2], [1, float("nan"), 2, 2]], ["ant"] * 2, None, "Box 1 holds NaN"),
    ],
)
def test_what_cannot_be_drawn_is_named(image, boxes, names, scores, words):
    with pytest.raises(UserError, match=words):
        draw_detections(image, boxes, names, scores)
