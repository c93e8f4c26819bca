"""What is gathered about a model: which maps, over which images, within which memory, and what is left out."""

from __future__ import annotations

import pytest
import torch

import vision_attn as va
from vision_attn.explain import insight, maps
from vision_attn.explain.faithfulness import MOVED, RIVAL
from vision_attn.explain.insight import clouds_of, look
from vision_attn.explain.views import NOT_MEASURED, Choice

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 2, "num_classes": 3}


def seen(model, images, more=(), **choice):
    shown = [(image * 50 + 128).clamp(0, 255).byte() for image in images]
    return look(model, images, shown, [f"p{i}" for i in range(len(images))], Choice(**choice), more)


def detector(std=0.3):
    torch.manual_seed(0)
    model = va.create_model("detr_tiny", num_classes=3, img_size=32, num_queries=30, enc_layers=1, dec_layers=2).eval()
    torch.nn.init.normal_(model.queries.position, std=1.0)
    torch.nn.init.normal_(model.class_embed.weight, std=std)
    torch.nn.init.zeros_(model.class_embed.bias)
    return model


@pytest.mark.parametrize("images", [1, 3])
def test_a_glimpse_model_is_looked_at_without_grad_cam(images):
    """Its glimpses run as several images through the layers: no map of them belongs to one image."""
    torch.manual_seed(0)
    found = seen(va.create_model("glimpse_small_32", num_classes=3), list(torch.randn(images, 3, 32, 32)))
    assert all("Grad-CAM" not in picture.summaries for picture in found.pictures)
    assert any("no Grad-CAM" in note or "grad-cam" in note for note in found.notes)
    assert found.pictures[0].layers


def test_whatever_gives_other_than_one_map_for_each_image_is_left_out(monkeypatch):
    monkeypatch.setattr(insight, "grad_cam", lambda model, x: torch.rand(3 * len(x), 16, 16))
    found = seen(va.create_model("vit_tiny_patch16_224", **VIT), [torch.randn(3, 16, 16)], trials=2)
    assert "Grad-CAM" not in found.pictures[0].summaries
    assert any("gives 3 maps for 1 images" in note for note in found.notes)


@pytest.mark.parametrize(("choice", "there"), [("auto", False), ("yes", True), ("no", False)])
def test_flow_is_chosen(choice, there, monkeypatch):
    monkeypatch.setattr(insight, "FLOW_WORK", 16**3 - 1)
    found = seen(va.create_model("vit_tiny_patch16_224", **VIT), [torch.randn(3, 16, 16)], trials=0, flow=choice)
    assert ("flow" in found.pictures[0].summaries) == there
    assert any("--flow yes" in note for note in found.notes) == (choice == "auto")
    monkeypatch.setattr(insight, "FLOW_WORK", 16**3)
    found = seen(va.create_model("vit_tiny_patch16_224", **VIT), [torch.randn(3, 16, 16)], trials=0, flow=choice)
    assert ("flow" in found.pictures[0].summaries) == (choice != "no")


def test_the_last_layer_is_that_of_the_choice():
    torch.manual_seed(0)
    model = va.create_model("vit_tiny_patch16_224", **VIT)
    images = torch.randn(2, 3, 16, 16)
    whole = va.attention_maps(model, images)
    found = seen(model, list(images), trials=0).pictures[1].summaries
    torch.testing.assert_close(
        found["class token, last layer"], whole["blocks.1.attn"][1, :, 0, 1:].mean(0).unflatten(0, (4, 4))
    )
    found = seen(model, list(images), trials=0, layers="blocks.0*", heads=[2], queries=[3, 7]).pictures[1].summaries
    title = "chosen queries, blocks.0.attn"
    wanted = whole["blocks.0.attn"][1, 2, [3, 7], 1:].mean(0).unflatten(0, (4, 4))
    torch.testing.assert_close(found[title], wanted)


def test_asking_for_fewer_layers_or_queries_helps(monkeypatch):
    """What is refused says so; with the advice taken, everything that is shown fits."""
    model = va.create_model("vit_tiny_patch16_224", **VIT)
    row = 4 * 3 * 17  # bytes of one query's weights in all heads
    monkeypatch.setattr(maps, "free_memory", lambda device: row * 17 * 2 - 2)
    with pytest.raises(va.errors.UserError, match="Ask for fewer"):
        seen(model, [torch.randn(3, 16, 16)], trials=0)
    found = seen(model, [torch.randn(3, 16, 16)] * 2, trials=0, queries=[0, 5])
    assert {"chosen queries, last layer", "rollout", "gradient-weighted relevance"} <= set(found.pictures[0].summaries)


@pytest.mark.parametrize("attention", [{"pattern": "performer"}, {"pattern": "linformer", "rank": 5}])
def test_maps_that_are_implied_are_called_so(attention):
    model = va.create_model("vit_tiny_patch16_224", **VIT, attention=attention)
    found = seen(model, [torch.randn(3, 16, 16)], trials=2)
    titles = [name for name in found.pictures[0].summaries if name != "Grad-CAM"]
    assert titles
    assert all(name.endswith(" (implied)") for name in titles)
    assert all(" (implied)" in found.title(name) for name in titles)
    plain = seen(va.create_model("vit_tiny_patch16_224", **VIT), [torch.randn(3, 16, 16)], trials=0)
    assert not any("implied" in name for name in plain.pictures[0].summaries)


def test_maps_that_were_not_measured_say_so():
    model = va.create_model("vit_tiny_patch16_224", **VIT)
    found = seen(model, [torch.randn(3, 16, 16)], trials=0)
    assert any(note.startswith(NOT_MEASURED) for note in found.notes)
    assert found.honesty == NOT_MEASURED
    found = seen(model, [torch.randn(3, 16, 16)], trials=19)
    assert not any(note.startswith(NOT_MEASURED) for note in found.notes)
    assert found.honesty.startswith("class token, last layer: ")
    assert "Single layers and heads were not compared" in found.honesty


def test_a_detector_is_measured_over_the_whole_set():
    model = detector()
    images = list(torch.randn(5, 3, 32, 32))
    found = seen(model, images[:1], images[1:], trials=19, steps=2, threshold=0.3)
    assert [bool(picture.detections) for picture in found.pictures] == [True]
    assert len(found.worth.random.deletion) == 5
    assert len(found.worth.trials) == 4  # fewer for each image of a set
    for name in found.pictures[0].detections[0].maps:
        assert name in found.worth.curves
        assert all(x == x for x in found.worth.lead(name, MOVED))
        assert all(x == x for x in found.worth.lead(name, RIVAL))


def test_clouds_know_which_queries_detected_something():
    from vision_attn.detection.postprocess import postprocess

    model = detector()
    images = list(torch.randn(4, 3, 32, 32))
    with torch.no_grad():
        scores = torch.cat([model(image[None])["pred_logits"].softmax(-1)[0, :, :3].amax(1) for image in images])
    threshold = float(scores.sort()[0][-10])  # a few of 30 queries are surer
    found = clouds_of(model, images, threshold)
    wanted = torch.zeros(30, dtype=torch.long)
    for i, image in enumerate(images):
        with torch.no_grad():
            out = model(image[None])
        torch.testing.assert_close(found.boxes[:, i], out["pred_boxes"][0])
        detected = postprocess(out, [(1, 1)], model.classification, threshold=threshold)[0]["queries"]
        for query in set(detected.tolist()):
            wanted[query] += 1
    assert torch.equal(found.found, wanted)
    assert 0 < int((wanted > 0).sum()) < 30
    assert found.most_used(3)[0] == int(wanted.argmax())


def test_layers_off_the_image_are_named():
    torch.manual_seed(0)
    found = seen(detector(), [torch.randn(3, 32, 32)], trials=0)
    names = {layer.name for layer in found.pictures[0].layers}
    assert not any("self_attn" in name and name.startswith("decoder") for name in names)
    note = next(note for note in found.notes if "are not shown" in note)
    assert "decoder.layers.0.self_attn, decoder.layers.1.self_attn" in note
    vit = seen(va.create_model("vit_tiny_patch16_224", **VIT), [torch.randn(3, 16, 16)], trials=0)
    assert not any("are not shown" in note for note in vit.notes)


def test_maps_that_time_has_no_room_for_are_left_out_and_named(monkeypatch):
    monkeypatch.setattr(insight, "seconds_each", lambda *_: 1.0)
    told = []
    few = seen(detector(), [torch.randn(3, 32, 32)], threshold=0.05, minutes=7, tell=told.append)
    measured = [name for name in few.worth.curves if name != RIVAL]
    everything = list(few.pictures[0].detections[0].maps)
    assert "relevance" in measured
    assert len(measured) < len(everything)
    (note,) = [note for note in few.notes if "--minutes" in note]
    assert all((name in note) == (name not in measured) for name in everything)
    assert len(told) == 1

    none = seen(detector(), [torch.randn(3, 32, 32)], threshold=0.05, minutes=0.1)
    assert none.worth is None
    assert any("--minutes" in note for note in none.notes)


def test_of_a_classifier_too_only_what_there_is_time_for(monkeypatch):
    monkeypatch.setattr(insight, "seconds_each", lambda *_: 1.0)
    model = va.create_model("vit_tiny_patch16_224", **VIT)
    few = seen(model, [torch.randn(3, 16, 16)], minutes=7)
    assert 1 <= len(few.worth.curves) - 1 < len(few.pictures[0].summaries)
    assert seen(model, [torch.randn(3, 16, 16)], minutes=0.1).worth is None
