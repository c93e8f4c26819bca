"""Denoising queries: which object each is a copy of, how far it was moved, and who sees whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vision_attn.detection.boxes import cxcywh_to_xyxy, pairwise_iou
from vision_attn.detection.denoising import make_denoising

CLASSES, QUERIES = 11, 5


def targets(counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in counts:
        centre = 0.3 + 0.4 * torch.rand(n, 2, generator=generator)
        size = 0.05 + 0.3 * torch.rand(n, 2, generator=generator)
        labels = torch.randint(CLASSES, (n,), generator=generator)
        found.append({"labels": labels, "boxes": torch.cat([centre, size], 1)})
    return found


def make(given_targets, **options):
    sizes = {"num_classes": CLASSES, "num_queries": QUERIES, "groups": 3}
    return make_denoising(given_targets, **{**sizes, **options})


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    groups=st.integers(1, 4),
    contrastive=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_object_has_its_copies(counts, groups, contrastive, seed):
    wanted = targets(counts, seed)
    found = make(wanted, groups=groups, contrastive=contrastive)
    if max(counts) == 0:
        assert found is None
        return
    each = max(counts) * (2 if contrastive else 1)
    assert found.labels.shape == found.target.shape == (len(counts), groups * each)
    assert found.mask.shape == (groups * each + QUERIES,) * 2
    assert found.groups == groups
    assert ((found.boxes >= 0) & (found.boxes <= 1)).all()
    assert ((found.labels >= 0) & (found.labels < CLASSES)).all()
    assert (found.positive == (found.target >= 0)).all()
    assert (found.positive <= found.valid).all()
    for i, n in enumerate(counts):
        per_group = found.target[i].view(groups, each)
        assert (per_group[:, :n] == torch.arange(n)).all()
        assert (per_group[:, n:] == -1).all()
        assert found.valid[i].sum() == groups * n * (2 if contrastive else 1)


def test_without_noise_they_are_the_objects():
    wanted = targets([2, 4])
    found = make(wanted, label_noise=0.0, box_noise=0.0)
    for i, target in enumerate(wanted):
        chosen = found.target[i][found.positive[i]]
        torch.testing.assert_close(found.boxes[i][found.positive[i]], target["boxes"][chosen], rtol=0, atol=0)
        assert (found.labels[i][found.positive[i]] == target["labels"][chosen]).all()


def test_noise_stays_within_its_bounds():
    wanted = targets([6] * 8)
    found = make(wanted, groups=20, box_noise=0.4, label_noise=0.5)
    true = torch.stack([t["boxes"] for t in wanted]).repeat(1, 20, 1)
    shift = (found.boxes - true).abs() / torch.cat([true[..., 2:] / 2, true[..., 2:]], -1)
    assert 0.39 < shift.max() <= 0.4 + 1e-4
    labels = torch.stack([t["labels"] for t in wanted]).repeat(1, 20)
    changed = (labels != found.labels).float().mean()
    assert changed == pytest.approx(0.5 * (1 - 1 / CLASSES), abs=0.05)


def test_negatives_are_further_off_than_positives():
    wanted = targets([6] * 8)
    found = make(wanted, groups=10, box_noise=1.0, contrastive=True)
    true = cxcywh_to_xyxy(torch.stack([t["boxes"] for t in wanted]).repeat(1, 20, 1))
    overlap = pairwise_iou(cxcywh_to_xyxy(found.boxes)[:, :, None], true[:, :, None])[..., 0, 0]
    assert found.positive.float().mean() == 0.5
    assert overlap[found.positive].mean() > overlap[~found.positive].mean() + 0.2
    assert (found.boxes[..., 2:] >= 0).all()


@pytest.mark.parametrize("noise", [0.4, 0.9])
def test_corners_of_positives_move_less_than_those_of_negatives(noise):
    """By up to ``noise`` times half of the size, and by once to twice that: every corner, by both bounds, in all."""
    wanted = targets([5] * 7, seed=3)
    for target in wanted:  # small and in the middle: nothing is cut off at the border, and corners do not pass
        target["boxes"][:, 2:] *= 0.3
    found = make(wanted, groups=13, box_noise=noise, label_noise=0.0, contrastive=True)
    true = torch.stack([t["boxes"] for t in wanted]).repeat(1, 2 * 13, 1)
    half = (true[..., 2:] / 2).repeat(1, 1, 2)
    shift = (cxcywh_to_xyxy(found.boxes) - cxcywh_to_xyxy(true)).div(noise * half)  # (B, M, 4)
    negative = (torch.arange(2 * 13 * 5) % 10 >= 5).expand(7, -1)
    assert (found.positive == ~negative).all()
    kept = shift[~negative].abs()
    torch.testing.assert_close(kept.amax(0), torch.ones(4), rtol=0, atol=0.02)
    assert kept.max() <= 1 + 1e-4
    assert kept.min() < 0.02
    assert ((shift[~negative] > 0).float().mean(0) - 0.5).abs().max() < 0.1  # in both directions
    if noise <= 0.5:  # beyond that corners pass each other, and are put in order again
        far = shift[negative].abs()
        assert 1 - 1e-4 <= far.min() < 1.02
        assert 1.98 < far.max() <= 2 + 1e-4
        assert ((shift[negative] > 0).float().mean(0) - 0.5).abs().max() < 0.1


def test_who_sees_whom():
    found = make(targets([1, 2]), groups=3)
    group = [0, 0, 1, 1, 2, 2, *["learned"] * QUERIES]
    for i, asks in enumerate(group):
        for j, asked in enumerate(group):
            assert found.mask[i, j] == (asked in ("learned", asks))


def test_many_objects_make_fewer_groups():
    assert make(targets([9, 1]), groups=5, most=30).groups == 3
    assert make(targets([9, 1]), groups=5, most=4).groups == 1
    assert make(targets([9, 1]), groups=5, most=4, contrastive=True).labels.shape == (2, 18)
    assert make(targets([1]), groups=0) is None


def test_a_generator_decides():
    first, again, other = (
        make(targets([3, 2]), generator=torch.Generator().manual_seed(seed)).boxes for seed in (1, 1, 2)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert (first - other).abs().max() > 0
