"""The glimpse model: what it sees is what it drew, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import vision_attn as va
from vision_attn.attention.normalizers import collect_log_probs
from vision_attn.errors import UserError
from vision_attn.models.glimpse import patches


def model(**kwargs):
    torch.manual_seed(0)
    small = {"num_classes": 7, "img_size": (20, 28), "in_chans": 2, "num_glimpses": 5, "embed_dim": 12}
    built = va.create_model("glimpse_small_32", **{**small, **kwargs})
    with torch.no_grad():  # queries start small: let places differ
        built.query.normal_()
    return built


def images(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 2, 20, 28, generator=torch.Generator().manual_seed(1))


def test_places_are_squares_of_the_image_row_by_row():
    net, x = model(), images()
    assert net.grid((20, 28)) == (4, 6)
    corners = net.corners((20, 28))
    expected = [x[:, :, y : y + 8, x0 : x0 + 8].flatten(1) for y, x0 in corners.tolist()]
    assert_close(patches(x, 8, 4), torch.stack(expected, 1), rtol=0, atol=0)


def test_there_is_one_key_per_place_and_it_sees_coarse_pixels_only():
    net, x = model(), images()
    assert net.view(x).shape == (3, 24, 12)
    fine = torch.zeros(2, 20, 28)
    fine[:, ::2, ::2], fine[:, 1::2, 1::2] = 1.0, -1.0  # averages out over 2 x 2 pixels
    assert_close(net.view(x + fine), net.view(x), rtol=1e-4, atol=1e-5)


def test_only_what_was_looked_at_reaches_the_logits():
    net = model().eval()
    x = images()
    before, places = net(x), net.weights(x)
    assert_close(places.sum(-1), torch.ones(3, 5))
    seen = torch.zeros(3, 20, 28, dtype=torch.bool)
    for image, glimpses in enumerate(places.argmax(-1).tolist()):
        for y, x0 in net.corners((20, 28))[glimpses].tolist():
            seen[image, y : y + 8, x0 : x0 + 8] = True
    assert not seen.flatten(1).all(1).any()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x)
    assert (gradient.abs().sum(1) > 0)[seen].float().mean() > 0.9
    assert (gradient.abs().sum(1)[~seen] == 0).all()
    # hidden pixels may change, as long as the coarse view stays the same
    hidden = (torch.nn.functional.max_pool2d(seen[:, None].float(), 2) == 0).repeat_interleave(2, 2)
    fine = torch.zeros(20, 28)
    fine[::2, ::2], fine[1::2, 1::2] = 1.0, -1.0
    assert_close(net(x + fine * hidden.repeat_interleave(2, 3)), before, rtol=1e-4, atol=1e-5)


def test_training_draws_places_and_evaluation_takes_the_best_none_twice():
    net, x = model(), images()
    torch.manual_seed(0)
    drawn = [net.weights(x).argmax(-1) for _ in range(20)]
    assert len({tuple(places.flatten().tolist()) for places in drawn}) == 20
    net.eval()
    best = net.weights(x).argmax(-1)
    scores = net.query.detach() @ net.view(x).detach().mT
    assert_close(best[:, 0], scores[:, 0].argmax(-1))
    assert_close(best[:, 1], scores[:, 1].scatter(1, best[:, :1], float("-inf")).argmax(-1))
    for places in [*drawn, best]:
        assert all(len(set(row)) == 5 for row in places.tolist())
    assert_close(net(x), net(x), rtol=0, atol=0)


def test_draws_without_repetition_have_the_probabilities_they_say():
    net, x = model(num_glimpses=2), images(1)
    first, second = (net.query.detach() @ net.view(x).detach()[0].T / 12**0.5).log_softmax(-1)
    with collect_log_probs() as draws:
        places = net.weights(x.expand(50, -1, -1, -1)).argmax(-1)
    a, b = places.T
    assert_close(draws[0][:, 0, 0], first[a], rtol=1e-4, atol=1e-5)
    expected = second[b] - torch.log1p(-second[a].exp())  # the second chooses among what is left
    assert_close(draws[1][:, 0, 0], expected, rtol=1e-4, atol=1e-5)


def test_the_view_learns_from_the_draws_and_the_rest_from_the_logits():
    net = model().train()
    with collect_log_probs() as draws:
        logits = net(images())
    assert [d.shape for d in draws] == [(3, 1, 1)] * 5
    logits.square().sum().backward()
    chooses = {name for name, p in net.named_parameters() if p.grad is None}
    assert {name.split(".")[0] for name in chooses} == {"view", "query"}
    torch.stack(draws).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in net.parameters())


@pytest.mark.parametrize("normalizer", ["softmax", "straight_through", "hard", "bernoulli", "linear_chain"])
def test_other_normalizers(normalizer):
    net = model(attention={"normalizer": normalizer, "score": "additive"}).train()
    with collect_log_probs() as draws:
        logits = net(images())
    assert not draws
    logits.sum().backward()
    assert (net.query.grad is None) == (normalizer == "hard")
    assert net.weights(images()).shape == (3, 5, 24)


def test_another_size_of_image():
    assert model()(torch.randn(3, 2, 41, 33)).shape == (3, 7)


def test_what_does_not_fit_is_said():
    with pytest.raises(UserError, match=r"glimpse_size=24 is larger than the image \[20, 28\]"):
        model(glimpse_size=24)
    with pytest.raises(UserError, match="coarse=3 must divide glimpse_size=8 and stride=4"):
        model(coarse=3)
    for number in (0, 25):
        with pytest.raises(UserError, match=rf"num_glimpses={number}: the image \[20, 28\] has 1 to 24 places"):
            model(num_glimpses=number)
    with pytest.raises(UserError, match=r"attention\.kernel means nothing to it; it takes: score, temperature"):
        model(attention={"kernel": "explicit"})
