"""What is shown of a layer: which queries, where they lie, and keys that are pooled."""

from __future__ import annotations

import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain.views import Choice, Clouds, _pooled, layer_views, run_one


def views(model, image, **choice):
    chosen = Choice(**choice)
    with torch.no_grad(), run_one(model, image, chosen) as run:
        return layer_views(run, chosen)


def swin():
    return va.create_model("swin_cifar_tiny", img_size=20, num_classes=3).eval()


@pytest.mark.parametrize("shape", [(2, 3, 64, 64), (3, 37, 53), (2, 33, 8)])
def test_pooling_keeps_sums_whatever_the_signs(shape):
    """Implied maps have negative entries: sums near zero must not be divided by."""
    torch.manual_seed(0)
    m = torch.randn(shape)
    m -= m.mean((-2, -1), keepdim=True) - 1e-9  # sums next to nothing
    found = _pooled(m)
    assert max(found.shape[-2:]) <= 32
    torch.testing.assert_close(found.sum((-2, -1)), m.sum((-2, -1)), atol=1e-3, rtol=0)
    assert found.abs().max() <= m.abs().amax() * 5
    positive = torch.rand(shape)
    assert (_pooled(positive) > 0).all()
    if shape[-1] == 64:  # whole cells: sums of two by two
        torch.testing.assert_close(_pooled(m), m.unflatten(-1, (32, 2)).unflatten(-3, (32, 2)).sum((-1, -3)))


def test_a_query_that_is_padding_is_refused_by_name():
    model, image = swin(), torch.randn(3, 20, 20)
    seen = views(model, image)
    padded = next(view.name for view in seen if view.query_grid == (5, 5))
    n = next(iter(va.attention_maps(model, image[None], layers=padded).values())).shape[2]
    assert n > 25
    where = va.attention_maps(model, image[None], layers=padded).planes[padded][0]
    fill = next(i for i in range(n) if i not in set(where.places().flatten().tolist()))
    with pytest.raises(UserError) as caught:
        views(model, image, layers=padded, queries=[fill])
    assert f"query {fill} of {padded} is no patch but padding: its 5 × 5 patches" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2
    # patches are counted on the filled grid
    patch = int(where.places()[1, 2])
    (view,) = views(model, image, layers=padded, queries=[patch])
    assert view.labels == ["row 1, column 2"]
    assert all(view.labels for view in seen)


def test_heads_and_queries_of_glimpses_keep_their_numbers():
    model = va.create_model("glimpse_small_32", num_classes=3).eval()
    (view,) = views(model, torch.randn(3, 32, 32), queries=[2, 0])
    assert view.labels == ["query 2", "query 0"]
    (whole,) = views(model, torch.randn(3, 32, 32))
    assert whole.labels == ["query 0", "query 1", "query 2"]


def test_most_used_queries_and_kinds_of_boxes():
    boxes = torch.tensor([[0.5, 0.5, 0.1, 0.1], [0.5, 0.5, 0.9, 0.3], [0.5, 0.5, 0.3, 0.9]]).expand(4, 3, 4)
    clouds = Clouds(boxes, torch.tensor([0, 3, 1, 3]))
    assert clouds.most_used(20) == [1, 3, 2]
    assert clouds.most_used(2) == [1, 3]
    assert clouds.kinds(1).tolist() == [0, 1, 2]
