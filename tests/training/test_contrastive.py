"""The symmetric loss of two encoders (MECHANISMS 32)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import vision_attn as va
from vision_attn.training.contrastive import ContrastiveLoss, DualEncoder, contrastive_loss

B, DIM = 5, 7


def embeddings(dtype=torch.float64):
    return [torch.randn(B, DIM, dtype=dtype, requires_grad=True) for _ in range(2)]


def by_hand(a, b, temperature):
    """For each row, minus the log of its partner's share; in both directions."""

    def cosine(u, v):
        return (u @ v) / (u.square().sum().sqrt() * v.square().sum().sqrt())

    total = 0.0
    for one, other in ((a, b), (b, a)):
        for i in range(B):
            shares = [(cosine(one[i], other[j]) / temperature).exp() for j in range(B)]
            total = total - (shares[i] / sum(shares)).log() / B
    return total / 2


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_equals_a_loop(temperature):
    a, b = embeddings()
    got, expected = contrastive_loss(a, b, temperature), by_hand(a, b, temperature)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(t, (a, b), retain_graph=True) for t in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


def test_is_symmetric_in_its_arguments():
    a, b = embeddings()
    one, other = contrastive_loss(a, b), contrastive_loss(b, a)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(t, (a, b)) for t in (one, other)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_values_that_are_known():
    a, b = embeddings()
    same = torch.ones(B, DIM)
    torch.testing.assert_close(contrastive_loss(same, same), torch.tensor(math.log(B)))
    torch.testing.assert_close(contrastive_loss(torch.eye(B), torch.eye(B), 0.01), torch.tensor(0.0))
    torch.testing.assert_close(contrastive_loss(3 * a, b), contrastive_loss(a, 0.1 * b))  # lengths do not matter
    order = torch.randperm(B)
    torch.testing.assert_close(contrastive_loss(a[order], b[order]), contrastive_loss(a, b))


def test_sixteen_bits_are_summed_in_thirty_two():
    a, b = embeddings(torch.bfloat16)
    loss = contrastive_loss(a, b, 0.01)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, contrastive_loss(a.float(), b.float(), 0.01), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(contrastive_loss(a.float(), b.float(), 0.01), loss, rtol=0, atol=0)
    zero = torch.zeros(B, DIM, requires_grad=True)
    contrastive_loss(zero, b.float()).backward()
    assert zero.grad.isfinite().all()


def test_temperature_is_learned_and_held():
    criterion = ContrastiveLoss(0.07)
    torch.testing.assert_close(criterion.temperature, torch.tensor(0.07))
    a, b = embeddings(torch.float32)
    torch.testing.assert_close(criterion(a, b), contrastive_loss(a, b, 0.07))
    criterion(a, b).backward()
    assert criterion.log_scale.grad.abs() > 0
    with torch.no_grad():
        criterion.log_scale.fill_(9.0)
    torch.testing.assert_close(criterion.eval().temperature, torch.tensor(0.01))
    torch.testing.assert_close(criterion.log_scale.detach(), torch.tensor(9.0))  # evaluation changes nothing
    criterion.train()(a, b)
    torch.testing.assert_close(criterion.log_scale.detach(), torch.tensor(math.log(100)))
    criterion.zero_grad()
    criterion(a, a.roll(1, 0)).backward()  # all wrong: less certainty would help
    assert criterion.log_scale.grad > 0


def test_what_does_not_fit():
    a, b = embeddings()
    with pytest.raises(ValueError, match=r"two \(B, D\) sets of embeddings, got \(5, 7\) and \(3, 7\)"):
        contrastive_loss(a, b[:3])
    with pytest.raises(ValueError, match=r"got \(5,\) and \(5,\)"):
        contrastive_loss(a[:, 0], b[:, 0])
    with pytest.raises(ValueError, match="temperature=0 is not positive"):
        contrastive_loss(a, b, 0)
    with pytest.raises(ValueError, match=r"temperature=0.001 must be at least 0.01"):
        ContrastiveLoss(0.001)


def small(name: str, width: int, **more):
    return va.create_model(name, num_classes=width, img_size=16, embed_dim=24, depth=2, num_heads=3, **more)


def test_two_models_learn_to_agree():
    """Two encoders of different kinds learn which upright picture belongs to which mirrored one."""
    towers = small("vit_tiny_patch16_224", DIM, patch_size=4), small("cct_2_3x2_32", DIM)
    model = DualEncoder(*towers, temperature=0.1)
    images = 2 * F.interpolate(torch.randn(5, 3, 2, 2), size=16, mode="bilinear")
    mirrored = images.flip(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    before = model.loss(images, mirrored)
    torch.testing.assert_close(before, contrastive_loss(towers[0](images), towers[1](mirrored), 0.1))
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(images, mirrored)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    assert before > 1
    assert loss < before / 2
    cosines = model(images, mirrored[:3])
    assert cosines.shape == (5, 3)
    assert cosines.abs().max() <= 1 + 1e-6
    torch.testing.assert_close(cosines.argmax(0), torch.arange(3))


def test_encoders_of_one_or_two_widths():
    one = small("vit_tiny_patch16_224", DIM, patch_size=4)
    shared = DualEncoder(one, one)
    assert len(list(shared.parameters())) == len(list(one.parameters())) + 1
    images = torch.randn(3, 3, 16, 16)
    assert shared(images, images).shape == (3, 3)
    with pytest.raises(ValueError, match="differ in width: 7 and 13"):
        DualEncoder(one, small("cct_2_3x2_32", 13))(images, images)
