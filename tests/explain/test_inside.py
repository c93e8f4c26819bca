"""How much of the cross-attention lies in a box, by a model whose attention is known."""

from __future__ import annotations

import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain.inside import _cover, attention_inside


def test_cells_partly_in_a_box():
    cells = _cover(torch.tensor([[0.25, 0.0, 0.625, 1.0], [0.0, 0.0, 1.0, 1.0]]), (2, 4))
    torch.testing.assert_close(cells[0], torch.tensor([[0, 1, 0.5, 0], [0, 1, 0.5, 0]]))
    assert (cells[1] == 1).all()


def test_mass_of_known_attention():
    torch.manual_seed(0)
    model = va.create_model("dn_detr_tiny", num_classes=3, num_queries=5, img_size=64).eval()
    image = torch.randn(3, 48, 64)
    with torch.no_grad():
        output = model(image[None])
    # the targets are the model's own answers, so all are correct
    chances = output["pred_logits"][0].sigmoid()
    query = int(chances.max(1).values.argmax())
    target = {"labels": chances[query].argmax()[None], "boxes": output["pred_boxes"][0, query][None]}
    found = attention_inside(model, [image], [target], threshold=0.0)
    assert list(found.mass) == [f"decoder.layers.{i}.cross_attn" for i in range(3)]
    maps = va.attention_maps(model, image[None], layers="decoder*cross*")
    x, y, w, h = target["boxes"][0].tolist()
    for name, mass in found.mass.items():
        weights = maps[name][0, :, query].mean(0).unflatten(0, (6, 8))
        expected = 0.0
        for row in range(6):
            for column in range(8):
                down = min(y + 0.75 * h, (row + 1) / 6, 1) - max(y - 0.75 * h, row / 6, 0)
                across = min(x + 0.75 * w, (column + 1) / 8, 1) - max(x - 0.75 * w, column / 8, 0)
                expected += float(weights[row, column]) * max(down, 0) * 6 * max(across, 0) * 8
        assert float(mass) == pytest.approx(expected, abs=1e-4)
        assert found.share(name) == float(expected > 0.5)
    with pytest.raises(UserError, match="not one detection"):
        attention_inside(model, [image], [target], threshold=0.999)
