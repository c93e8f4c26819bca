"""REINFORCE: the estimate is right, the baseline helps, and any model with sampled attention trains."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import vision_attn as va
from vision_attn.attention import attend
from vision_attn.attention.normalizers import collect_log_probs, sampled
from vision_attn.training.classifier import Classifier
from vision_attn.training.interrupt import Interrupted
from vision_attn.training.reinforce import Baseline, Reinforce, draws_keys, log_prob, surrogate

H, N, M = 2, 2, 3  # four rows of three keys: 81 ways to draw


def losses(weights: torch.Tensor) -> torch.Tensor:
    """(B,) some loss of one-hot weights (B, H, N, M) in which the rows do not add up."""
    rates = torch.linspace(-1, 2, H * N * M, dtype=torch.float64).view(H, N, M)
    return (weights * rates).sum((1, 2, 3)).square() + weights[:, 0, 0, 1] * weights[:, 1, 1, 2]


def enumerated(scores: torch.Tensor) -> torch.Tensor:
    """The gradient of the expected loss, by going through every way to draw."""
    scores = scores.clone().requires_grad_()
    log_p = scores.log_softmax(-1).view(H * N, M)
    total = torch.zeros((), dtype=torch.float64)
    for keys in itertools.product(range(M), repeat=H * N):
        index = torch.tensor(keys)
        p = log_p[torch.arange(H * N), index].sum().exp()
        total = total + p * losses(F.one_hot(index, M).double().view(1, H, N, M))[0]
    return torch.autograd.grad(total, scores)[0]


def estimates(scores: torch.Tensor, draws: int, baseline: float) -> torch.Tensor:
    """(draws, H, N, M) single estimates of that gradient."""
    copies = scores.expand(draws, -1, -1, -1).clone().requires_grad_()
    with collect_log_probs() as drawn:
        weights = sampled(copies)
    value = losses(weights)
    loss = surrogate(-value, torch.full_like(value, -baseline), log_prob(drawn, draws))
    return torch.autograd.grad(loss, copies)[0] * draws


def test_the_estimate_equals_the_enumerated_gradient_within_its_standard_error():
    torch.manual_seed(0)
    scores = torch.randn(1, H, N, M, dtype=torch.float64)
    expected = enumerated(scores)[0]
    mean = float(losses(sampled(scores.expand(4000, -1, -1, -1))).mean())
    spread = {}
    for baseline in (0.0, mean):
        each = estimates(scores, 20_000, baseline)
        error = each.std(0) / len(each) ** 0.5
        z = (each.mean(0) - expected) / error
        assert z.abs().max() < 4, baseline  # twelve numbers: beyond 4 once in more than a thousand seeds
        assert z.square().mean() < 3  # and they are no further off, taken together, than their error says
        assert (expected.abs() > 3 * error).any()  # an estimate that is always zero would not pass
        spread[baseline] = float(each.var(0).sum())
    assert spread[mean] < 0.7 * spread[0.0]  # a baseline is there to make it less noisy


def test_values_learn_by_the_ordinary_gradient_and_scores_by_the_surrogate():
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 2, n, 7, requires_grad=True) for n in (3, 11, 11))
    with collect_log_probs() as draws:
        out = attend(q, k, v, normalizer="sampled")
    per_image = out.square().mean((1, 2, 3))
    assert torch.autograd.grad(per_image.sum(), (q, k), retain_graph=True, allow_unused=True) == (None, None)
    (to_values,) = torch.autograd.grad(per_image.sum(), v, retain_graph=True)
    assert to_values.abs().max() > 0
    loss = surrogate(-per_image, torch.zeros(5), log_prob(draws, 5))
    to_q, to_k, to_v = torch.autograd.grad(loss, (q, k, v), allow_unused=True)
    assert to_v is None
    assert to_q.abs().max() > 0
    assert to_k.abs().max() > 0


def test_draws_are_summed_over_layers_heads_rows_and_windows():
    plain, windows = torch.randn(3, 2, 5), torch.randn(3 * 4, 2, 5)
    expected = plain.sum((1, 2)) + windows.view(3, 4, 2, 5).sum((1, 2, 3))
    assert_close(log_prob([plain, windows], 3), expected)
    with pytest.raises(ValueError, match="drew no key: its layers must be in training mode"):
        log_prob([], 3)


def test_the_baseline_learns_what_to_expect_and_gives_nothing_to_the_image():
    torch.manual_seed(0)
    reinforce = Reinforce(in_chans=2)
    image = torch.randn(64, 2, 8, 12, requires_grad=True)
    # soft labels, of which the model always names class 1: the reward is a function of the image
    share = 0.5 + image.detach()[:, 1, :2, :3].mean((1, 2)) / 4
    label = torch.stack([1 - share, share, torch.zeros(64)], dim=1)
    logits = torch.tensor([0.0, 1.0, 0.0]).expand(64, 3)
    optimizer = torch.optim.Adam(reinforce.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        log_p = torch.zeros(64, 1, 1, requires_grad=True)
        reinforce(image, logits, label, [log_p]).backward()
        optimizer.step()
    assert image.grad is None
    assert_close(reinforce.baseline(image), share, rtol=0, atol=0.02)
    assert log_p.grad.abs().max() < 0.02 / 64  # nothing is better or worse than expected
    assert Baseline(3)(torch.randn(5, 3, 2, 2)).shape == (5,)  # images smaller than the coarse view


def test_the_reward_is_being_right():
    reinforce = Reinforce(in_chans=2)  # its baseline is zero at first
    logits, label = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 3.0]]), torch.tensor([1, 1, 1])
    log_p = torch.zeros(3, 5, 7, requires_grad=True)
    reinforce(torch.randn(3, 2, 8, 8), logits, label, [log_p]).backward()
    expected = torch.tensor([-1.0, 0.0, -1.0])[:, None, None].expand(3, 5, 7) / 3
    assert_close(log_p.grad, expected)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "cct_2_3x2_32", "glimpse_small_32"])
def test_draws_keys_says_which_models_do(name):
    args = {"num_classes": 7, "img_size": 32} | ({"patch_size": 16} if "vit" in name else {})
    assert draws_keys(va.create_model(name, attention={"normalizer": "sampled"}, **args))
    assert not draws_keys(va.create_model(name, attention={"normalizer": "straight_through"}, **args))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_vit_with_sampled_attention_trains_and_resumes(make_run, tmp_path, optimizer):
    vit = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3}
    options = {"model": ("vit_tiny_patch16_224", vit), "attention": {"normalizer": "sampled"}, "max_images": 57}
    options["optimizer"] = {"name": optimizer, "lr": 1e-3, "weight_decay": 0.0}
    start = make_run(tmp_path, **options).module
    query_keys = [p.detach().clone() for n, p in start.model.named_parameters() if "qkv.weight" in n]
    run = make_run(tmp_path, max_epochs=2, **options).fit()
    assert isinstance(run.module, Classifier)
    assert float(run.module.reinforce.baseline.linear.bias.detach().abs()) > 0
    moved = [p for n, p in run.module.model.named_parameters() if "qkv.weight" in n]
    for before, after in zip(query_keys, moved, strict=True):
        rows = slice(0, 2 * before.shape[0] // 3)  # queries and keys: cross-entropy alone would not move them
        assert (before[rows] - after.detach()[rows]).abs().max() > 1e-5
    with pytest.raises(Interrupted) as stopped:
        make_run(tmp_path / "stopped", stop_at=2, max_epochs=2, **options).fit()
    again = make_run(tmp_path / "stopped", resume=stopped.value.path.parents[1], max_epochs=2, **options)
    again.fit(stopped.value.path)
    assert_close(again.checkpoint()["state_dict"], run.checkpoint()["state_dict"], rtol=0, atol=0)
    loaded = va.load_model(run.folder.path / "checkpoints" / "last.ckpt")
    assert draws_keys(loaded)


def test_a_model_that_draws_nothing_is_trained_as_before(make_run, tmp_path):
    run = make_run(tmp_path, max_images=19, max_epochs=1).fit()
    assert run.module.reinforce is None
    assert not [key for key in run.module.state_dict() if "reinforce" in key]
