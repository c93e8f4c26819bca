"""What is shown of each object is what the encoder and the decoder looked at, by the names that predict uses."""

from __future__ import annotations

import pytest
import torch

import vision_attn as va
from vision_attn.explain import maps as maps_module
from vision_attn.explain.objects import _object_maps, detector_view
from vision_attn.explain.views import Choice

CHOICE = Choice(threshold=0.0, most=3)
PIXELS = torch.zeros(3, 24, 40, dtype=torch.uint8)


def build(**more):
    torch.manual_seed(1)
    model = va.create_model("dn_detr_tiny", num_classes=4, **more).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model, torch.randn(3, 24, 40)


@pytest.mark.parametrize("queries", [15, 11])  # as many as image tokens, 3 × 5, and not
def test_maps_of_an_object_are_rows_of_the_encoder_and_of_cross_attention(queries):
    model, image = build(num_queries=queries)
    maps = va.attention_maps(model, image[None])
    encoder = next(name for name in reversed(maps) if name.startswith("encoder."))
    objects = detector_view(model, image, PIXELS, "x.png", CHOICE).detections
    assert len(objects) == 3
    for o in objects:
        row = min(int((o.box[1] + o.box[3]) / 2 * 3), 2)
        column = min(int((o.box[0] + o.box[2]) / 2 * 5), 4)
        expected = maps[encoder][0, :, row * 5 + column].mean(0).view(3, 5)
        torch.testing.assert_close(o.maps["encoder, at its centre"], expected)
        for i in range(len(model.decoder.layers)):
            cross = maps[f"decoder.layers.{i}.cross_attn"][0, :, o.query].mean(0).view(3, 5)
            torch.testing.assert_close(o.maps[f"cross-attention, layer {i}"], cross)
        assert set(o.maps) == {
            "encoder, at its centre",
            *(f"cross-attention, layer {i}" for i in range(len(model.decoder.layers))),
            "relevance",
        }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"labels": ["ant", "bee", "cow", "dog"], "category_ids": [3, 7, 20, 21]}, {"ant", "bee", "cow", "dog"}),
        ({"category_ids": [3, 7, 20, 21]}, {"3", "7", "20", "21"}),
        ({}, {"0", "1", "2", "3"}),
    ],
)
def test_objects_are_called_as_predict_calls_them(config, expected):
    model, image = build()
    model.config = {**model.config, **config}
    objects = detector_view(model, image, PIXELS, "x.png", CHOICE).detections
    predicted = va.predict(model, [image.new_zeros(24, 40, 3).byte().numpy()], threshold=0.0)[0]
    assert set(predicted.labels) <= expected
    names = config.get("labels") or [str(i) for i in config.get("category_ids", range(4))]
    assert objects
    assert [o.label for o in objects] == [names[o.index] for o in objects]


def test_maps_of_an_encoder_without_weights_are_called_implied_and_relevance_is_noted():
    model, image = build(img_size=(24, 40), attention={"pattern": "linformer", "rank": 4})
    notes = []
    (o, *_) = detector_view(model, image, PIXELS, "x.png", CHOICE, notes).detections
    assert "encoder, at its centre (implied)" in o.maps
    assert "relevance" not in o.maps
    assert any("linformer" in note for note in notes)


def test_the_maps_of_objects_need_no_whole_map(monkeypatch):
    model, image = build()
    objects = detector_view(model, image, PIXELS, "x.png", CHOICE).detections
    before = [dict(o.maps) for o in objects]
    monkeypatch.setattr(maps_module, "free_memory", lambda device: 100)
    _object_maps(model, image, objects, [])
    for o, maps in zip(objects, before, strict=True):
        for title, m in maps.items():
            torch.testing.assert_close(o.maps[title], m)
