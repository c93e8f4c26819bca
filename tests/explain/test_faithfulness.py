"""What a map is worth: one that knows beats random maps, one that does not says so."""

from __future__ import annotations

import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain.faithfulness import (
    CAUSES,
    MOVED,
    RANDOM,
    RIVAL,
    Curve,
    Faithfulness,
    _Ask,
    faithfulness,
    gradient_times_input,
    joined,
    maps_for_each,
    mean_and_half,
    moved_map,
)


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
    found = faithfulness(Corner(), images, corner_maps(batch), seed=1)
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


class Somewhere(torch.nn.Module):
    """Says 1 if a block of each image is bright, wherever that block lies, and looks at nothing else."""

    def __init__(self, corners, side):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(4.0))
        self.masks = torch.zeros(len(corners), 1, 8, 8)
        for mask, (y, x) in zip(self.masks, corners.tolist(), strict=True):
            mask[0, :side, :side] = 1
            mask.copy_(mask.roll((y, x), (1, 2)))
        self.masks /= side**2

    def forward(self, x):
        masks = self.masks.repeat(len(x) // len(self.masks), 1, 1, 1)
        bright = (x * masks).sum((1, 2, 3)) / 3
        return torch.stack([-self.scale * bright, self.scale * bright], 1)


def blob(batch):
    """Smooth, in the middle, whatever the image."""
    y = torch.arange(8) - 3.5
    return torch.exp(-(y[:, None] ** 2 + y[None] ** 2) / 8).expand(batch, -1, -1)


@pytest.mark.parametrize(("batch", "runs"), [(1, 150), (6, 50)])
def test_a_smooth_map_that_knows_nothing_is_rarely_better_than_random(batch, runs):
    """The evidence is a block that lies anywhere; a blob hits it whole or not at all, which white noise never does."""
    beaten = {"verdict": 0, "white noise": 0}
    for run in range(runs):
        torch.manual_seed(run)
        model = Somewhere(torch.randint(8, (batch, 2)), 3)
        images = 0.5 + 0.5 * torch.rand(batch, 3, 8, 8)
        found = faithfulness(model, images, {"blob": blob(batch)}, seed=run, classes=torch.ones(batch).long(), steps=4)
        beaten["verdict"] += found.beats_random("blob")
        beaten["white noise"] += bool((found.curves["blob"].score.mean() > found.trials.mean(1)).all())
    allowed = 0.05 * runs + 2.33 * (0.05 * 0.95 * runs) ** 0.5  # 5 %, and what luck does in one of a hundred runs
    assert beaten["verdict"] <= allowed, beaten
    if batch == 1:  # the test is worth something: white noise alone is beaten far more often
        assert beaten["white noise"] > 2 * allowed, beaten


def test_a_smooth_map_that_knows_the_place_is_better_than_random():
    wins = 0
    for run in range(10):
        torch.manual_seed(run)
        corners = torch.randint(8, (6, 2))
        model = Somewhere(corners, 3)
        maps = torch.stack(
            [m.roll((y - 2, x - 2), (0, 1)) for m, (y, x) in zip(blob(6), corners.tolist(), strict=True)]
        )
        found = faithfulness(model, 0.5 + 0.5 * torch.rand(6, 3, 8, 8), {"m": maps}, classes=torch.ones(6).long())
        wins += found.beats_random("m")
    assert wins >= 9


def test_moved_maps_keep_values_and_neighbours():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    for shape in ((3, 5, 5), (3, 4, 7)):
        m = torch.rand(shape)
        seen = set()
        for _ in range(40):
            moved = moved_map(m, generator)
            assert moved.shape == m.shape
            torch.testing.assert_close(moved.flatten(1).sort(1)[0], m.flatten(1).sort(1)[0])
            # on the torus, the products of neighbours are those of the original, along one axis or the other
            around = [sorted(sum((x * x.roll(1, d)).sum((1, 2)) for d in (1, 2)).tolist()) for x in (m, moved)]
            assert around[0] == pytest.approx(around[1], rel=1e-5)
            seen.add(tuple(moved.flatten().tolist()))
        assert len(seen) > 35


def test_cells_that_are_alike_come_in_random_order():
    ask = _Ask(lambda x: x.mean((1, 2, 3)), torch.rand(2, 3, 8, 8), (8, 8), 4, 64, torch.Generator().manual_seed(0))
    m = torch.zeros(2, 64)
    m[:, 40:] = 1
    first, again = ask._ranks(m), ask._ranks(m)
    assert (first[:, 40:] < 24).all()
    assert not torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    # a map that is the same everywhere is a random map
    corner = torch.rand(40, 3, 16, 16) * 0.2
    corner[:, :, :8, :8] += 1
    found = faithfulness(Corner(), corner, {"same": torch.ones(40, 8, 8)})
    mean, low, high = found.lead("same")
    assert low < 0 < high
    assert abs(mean) < 0.05


def test_copies_of_the_set_are_few_at_a_time():
    sizes = []

    def answer(x):
        sizes.append(len(x))
        return x.mean((1, 2, 3))

    images = torch.rand(3, 3, 16, 16)
    faithfulness(Corner(), images, {"m": torch.rand(3, 8, 8)}, answer=answer, steps=8, trials=2, batch_size=12)
    assert max(sizes) <= 12
    watched = []
    model = Corner()
    model.register_forward_pre_hook(lambda module, x: watched.append(len(x[0])))
    torch.manual_seed(0)
    images = torch.rand(11, 3, 16, 16)
    found = faithfulness(model, images, {"m": torch.rand(11, 8, 8)}, steps=4, trials=4, batch_size=4)
    assert max(watched) <= 4
    assert found.curves["m"].deletion.shape == (11, 5)
    assert found.trials.shape == found.moved["m"].shape == (4, 11)


def test_curves_do_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    images, maps = torch.rand(5, 3, 16, 16), {"m": torch.rand(5, 8, 8)}
    one, two = (faithfulness(Corner(), images, maps, trials=3, batch_size=n) for n in (2, 64))
    for kind in ("deletion", "insertion"):
        torch.testing.assert_close(getattr(one.curves["m"], kind), getattr(two.curves["m"], kind))


def test_intervals_over_images():
    torch.manual_seed(0)
    images = torch.rand(9, 3, 16, 16)
    images[:, :, :8, :8] += 1
    found = faithfulness(Corner(), images, corner_maps(9))
    for over in (RANDOM, MOVED, RIVAL):
        mean, low, high = found.lead("knows", over)
        assert low < mean < high
    difference = (found.curves["knows"].score - found.curves[RIVAL].score).double()
    from scipy.stats import t

    wanted = t.interval(0.95, 8, float(difference.mean()), float(difference.std()) / 3)
    assert found.lead("knows", RIVAL)[1:] == pytest.approx(wanted)
    assert found.lead(RIVAL, RIVAL) == pytest.approx((0, 0, 0))
    mean, half = mean_and_half(found.curves["knows"].deletion)
    assert mean.shape == half.shape == (9,)
    # one image: maps that know nothing give an interval, another map gives none
    alone = faithfulness(Corner(), images[:1], {"m": torch.rand(1, 8, 8)})
    assert alone.lead("m", MOVED)[1] <= alone.lead("m", MOVED)[2]
    assert all(x != x for x in alone.lead("m", RIVAL)[1:])
    assert mean_and_half(alone.curves["m"].deletion)[1].isnan().all()


def test_how_many_maps_each_image_gets():
    assert [maps_for_each(19, b) for b in (1, 2, 4, 5, 64)] == [19, 10, 5, 4, 4]
    assert maps_for_each(3, 1) == maps_for_each(3, 64) == 3


def test_parts_are_joined():
    torch.manual_seed(0)
    parts = [faithfulness(Corner(), torch.rand(1, 3, 8, 8), {"m": torch.rand(1, 8, 8)}, trials=n) for n in (4, 6)]
    whole = joined(parts)
    assert isinstance(whole, Faithfulness)
    assert whole.trials.shape == whole.moved["m"].shape == (4, 2)
    torch.testing.assert_close(whole.curves["m"].score[1:], parts[1].curves["m"].score)


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
