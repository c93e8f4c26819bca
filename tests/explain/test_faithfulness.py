"""What a map is worth: one that knows beats random maps, one that does not says so."""

from __future__ import annotations

import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain.faithfulness import CAUSES, RIVAL, Curve, faithfulness, gradient_times_input


class Corner(torch.nn.Module):
    """Says 1 if the upper left quarter is bright, and looks at nothing else."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(4.0))

    def forward(self, x):
        bright = x[:, :, : x.shape[2] // 2, : x.shape[3] // 2].mean((1, 2, 3))
        return torch.stack([-self.scale * bright, self.scale * bright], 1)


def corner_maps(batch):
    knows = torch.zeros(batch, 8, 8)
    knows[:, :4, :4] = 1 + torch.rand(batch, 4, 4)
    return {"knows": knows, "wrong": 1 / (1 + knows), "random": torch.rand(batch, 8, 8)}


def test_too_few_random_maps_say_so_and_nothing_else():
    images = torch.rand(2, 3, 16, 16) * 0.2
    images[:, :, :8, :8] += 1
    found = faithfulness(Corner(), images, corner_maps(2), trials=3)
    assert not found.beats_random("knows")
    assert found.verdict("knows").startswith("3 random maps are too few to tell")


@pytest.mark.parametrize("batch", [1, 6])
def test_a_map_that_knows_beats_random_and_others_do_not(batch):
    torch.manual_seed(3)
    images = torch.rand(batch, 3, 16, 16) * 0.2
    images[:, :, :8, :8] += 1
    found = faithfulness(Corner(), images, corner_maps(batch))
    assert set(found.curves) == {"knows", "wrong", "random", RIVAL}
    assert found.beats_random("knows")
    assert found.beats_random(RIVAL)
    assert not found.beats_random("wrong")
    assert "NO BETTER THAN RANDOM" in found.verdict("wrong")
    assert found.verdict("knows").startswith("better than random (+")
    mean, low, high = found.lead("knows")
    assert 0 < low <= mean <= high
    assert found.lead("wrong")[2] < 0
    assert found.curves["knows"].deletion.shape == (batch, 9)
    # everything is there at the beginning, and nothing at the end
    torch.testing.assert_close(found.curves["knows"].deletion[:, 0], found.curves["wrong"].insertion[:, -1])
    torch.testing.assert_close(found.curves["knows"].deletion[:, -1], torch.full((batch,), 0.5))
    assert "not causes" in CAUSES


def test_random_maps_rarely_beat_random_maps():
    torch.manual_seed(0)
    images = torch.rand(1, 3, 16, 16)
    images[:, :, :8, :8] += 0.5
    wins = [faithfulness(Corner(), images, {"map": torch.rand(1, 8, 8)}, seed=i).beats_random("map") for i in range(60)]
    assert sum(wins) <= 9  # 3 of 60 are expected; more than 9 happen once in two thousand times


def test_area_of_known_curves():
    falls, rises = torch.linspace(1, 0, 5)[None], torch.linspace(0, 1, 5)[None]
    torch.testing.assert_close(Curve(falls, rises).score, torch.zeros(1))
    torch.testing.assert_close(Curve(torch.zeros(1, 5), torch.ones(1, 5)).score, torch.ones(1))


def test_gradient_times_input_of_a_linear_model():
    weight = torch.randn(3, 4, 5)
    images = torch.randn(2, 3, 4, 5)
    found = gradient_times_input(torch.nn.Identity(), images, lambda x: (x * weight).sum((1, 2, 3)))
    torch.testing.assert_close(found, (images * weight).abs().sum(1))


def test_the_model_is_left_as_it_was():
    model = va.create_model("cct_2_3x2_32", img_size=16, num_classes=5).train()
    faithfulness(model, torch.randn(2, 3, 16, 16), {"map": torch.rand(2, 16, 16)}, steps=2, trials=2)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"map 'm' \(3, 8, 8\) is not \(B, R, C\) of 2 images"):
        faithfulness(Corner(), torch.rand(2, 3, 16, 16), {"m": torch.rand(3, 8, 8)})
    with pytest.raises(UserError, match="no logits of classes"):
        faithfulness(torch.nn.Conv2d(3, 4, 1), torch.rand(2, 3, 16, 16), {"m": torch.rand(2, 8, 8)})
