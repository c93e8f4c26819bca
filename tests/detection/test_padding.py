"""Predictions do not move with batch and padding; and the certificate notices a model whose do."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vision_attn as va
from vision_attn.cli.main import main
from vision_attn.detection.padding import Movement, Truth, padding_certificate
from vision_attn.errors import UserError

SIZES = [(96, 96), (61, 83), (96, 41), (37, 71), (61, 83), (17, 13)]  # the last has fewer tokens than there are queries


def randomised(name, seed=0, **kwargs):
    """A detector whose predictions depend on the image."""
    torch.manual_seed(seed)
    small = {"embed_dim": 32, "num_heads": 2, "enc_layers": 2, "dec_layers": 2, "num_queries": 7, "num_classes": 5}
    model = va.create_model(name, **{**small, **kwargs})
    for key, p in model.named_parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=1.0 if key.startswith("queries") else 1.4 * p[0].numel() ** -0.5)
        else:
            p.data += 0.1 * torch.randn_like(p)
    return model.eval()


def noise(sizes=SIZES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, h, w, generator=generator) for h, w in sizes]


VARIANTS = [
    ("detr_tiny", {}),
    ("dn_detr_tiny", {}),
    ("dn_detr_tiny", {"query_selection": True}),
    ("dn_detr_tiny", {"box_bias": True}),
    ("dn_detr_tiny", {"queries": "point", "refine": False, "conditional": True, "dn_groups": 0}),
    ("dn_detr_tiny", {"backbone": "resnet18", "pre_norm": True}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_no_detector_of_ours_moves(name, options):
    model = randomised(name, **options)
    images = noise()
    first, second = (model(image[None])["pred_boxes"] for image in (images[1], images[4]))
    assert (first - second).abs().mean() > 1e-3  # images are told apart
    movements = padding_certificate(model, images, SIZES, batch_sizes=(2, 3, 5))
    assert len(movements) == 1 + 3 + 1 + 4
    for movement in movements:
        assert movement.holds, movement
        assert movement.ap is None


def test_a_backbone_that_reads_padding_is_noticed():
    """The way of the original: its predictions depend on the batch, but not when images come as a list."""
    images = noise()
    moved = padding_certificate(randomised("detr_tiny", exact_padding=False), images, SIZES)
    by_setting = {movement.setting: movement for movement in moved}
    assert by_setting["as a list of images"].holds
    assert by_setting["each image alone, without padding"].holds
    assert sum(not movement.holds for movement in moved) == len(moved) - 2


def test_masks_that_are_ignored_are_noticed():
    model = randomised("detr_tiny")

    class Careless(torch.nn.Module):
        classification, training = "softmax", False

        def forward(self, images, mask=None):
            return model(images) if mask is None or isinstance(images, list) else model(images * mask[:, None])

    moved = padding_certificate(Careless(), noise(), SIZES)
    assert [m.setting for m in moved if m.holds] == ["each image alone, without padding", "as a list of images"]


@pytest.mark.parametrize("options", [{}, {"query_selection": True}])
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_any_sizes_and_margins(options, sizes, seed):
    draw = np.random.default_rng(seed)
    margins = [tuple(draw.integers(0, 90, 2).tolist())]
    model = randomised("dn_detr_tiny", seed=seed % 3, **options)
    for movement in padding_certificate(model, noise(sizes, seed), sizes, batch_sizes=(len(sizes),), margins=margins):
        assert movement.holds, movement


def test_average_precision_and_the_models_mode():
    model = randomised("dn_detr_tiny").train()
    images = [{"id": 5 * i + 1} for i in range(len(SIZES))]
    boxes = [{"id": i + 1, "image_id": 5 * i + 1, "category_id": 9, "bbox": [3, 4, 30, 20]} for i in range(len(SIZES))]
    coco = {"images": images, "annotations": boxes, "categories": [{"id": i, "name": str(i)} for i in (2, 4, 6, 8, 9)]}
    truth = Truth(coco, [image["id"] for image in images], [2, 4, 6, 8, 9])
    movements = padding_certificate(model, noise(), SIZES, truth=truth)
    assert model.training
    assert len({round(movement.ap, 9) for movement in movements}) == 1


def test_verdict():
    assert Movement("a", 1e-4, 1e-3).holds
    assert not Movement("a", 2e-4, 0.0).holds
    assert not Movement("a", 0.0, 2e-3).holds
    assert not Movement("a", math.nan, 0.0).holds
    with pytest.raises(UserError, match="6 images came with 4 sizes"):
        padding_certificate(None, noise(), SIZES[:4])
    with pytest.raises(UserError, match="0 images"):
        padding_certificate(None, [], [])


def test_verb(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    images, boxes = [], []
    for number, (h, w) in enumerate([(50, 80), (90, 40), (64, 64)], 1):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (h, w, 3), dtype=np.uint8)).save(f"images/{number}.png")
        images.append({"id": number, "file_name": f"{number}.png"})
        boxes.append({"id": number, "image_id": number, "category_id": 1, "bbox": [3, 4, 30, 20]})
    categories = [{"id": i, "name": str(i)} for i in range(5)]
    (tmp_path / "a.json").write_text(json.dumps({"images": images, "annotations": boxes, "categories": categories}))
    va.save_model(randomised("dn_detr_tiny"), "exact")
    va.save_model(randomised("dn_detr_tiny", exact_padding=False), "original")
    call = ["check", "padding", "--device", "cpu", "images", "--ckpt_path"]
    assert main([*call, "exact", "--annotations", "a.json"]) == 0
    out = capsys.readouterr().out
    assert out.count("holds") == out.count("AP 0.") == 8
    assert "on 3 images of 3 sizes, float32" in out
    assert main([*call, "exact", "--dtype", "float64"]) == 0
    assert "e-0" not in capsys.readouterr().out.split("alone, without padding")[1].replace("0.0e+00", "")
    assert main([*call, "original", "--json", "out.json"]) == 1
    out = capsys.readouterr().out
    assert "FAILS" in out
    assert "exact_padding: false" in out
    rows = json.loads((tmp_path / "out.json").read_text())["settings"]
    assert [row["holds"] for row in rows].count(True) == 2
    va.save_model(va.create_model("resnet8_cifar", num_classes=3, img_size=8, width=4), "classifier")
    for bad, words in (
        ([*call, "classifier"], "only detectors"),
        ([*call, "exact", "--batch_size", "1"], "at least two images"),
        ([*call, "exact", "--dtype", "half"], "float32 or float64"),
        (["check", "padding", "images/1.png", "--ckpt_path", "exact"], "One image makes no batch"),
        ([*call, "exact", "--annotations", "exact/config.json"], "no images with file_name"),
    ):
        assert main(bad) == 2
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert words in text
