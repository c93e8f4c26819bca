"""Rollout and flow follow what the head really reads, through stages and padding, and refuse what they cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.explain import flow, relevance, rollout
from vision_attn.explain.rollout import _flow, _maximum_flows

SMALL = {"img_size": (12, 20), "patch_size": 4, "embed_dim": 12, "num_heads": 3, "depth": 3, "num_classes": 5}


def build(name, std=0.2, **more):
    model = va.create_model(name, **more).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model, torch.randn(2, 3, *model.img_size)


@pytest.mark.parametrize("size", [(24, 40), (36, 28), (28, 36)])
def test_rollout_of_a_swin_by_matrices_written_out(size):
    model, images = build("swin_cifar_tiny", 0.1, img_size=size, num_classes=5)
    maps = va.attention_maps(model, images)
    product = after = None
    for name in reversed(maps):
        plane = maps.planes[name][0]
        real = plane.places().flatten()
        attention = maps[name].mean(1)[:, real][:, :, real]  # what goes to padding is lost
        step = 0.5 * attention + 0.5 * torch.eye(len(real))
        if product is None:
            product = torch.full((2, 1, len(real)), 1 / len(real))
        elif after != plane.grid:
            product = product @ unmerged(after, plane.grid)
        product, after = product @ step, plane.grid
    assert after == (size[0] // 2, size[1] // 2)
    torch.testing.assert_close(rollout(model, images), product[:, 0].unflatten(1, after), rtol=1e-4, atol=1e-7)


def unmerged(after, before):
    """(tokens after a merging, tokens before): each shares equally with the up to four that it was made of."""
    found = torch.zeros(after[0] * after[1], before[0] * before[1])
    for row in range(before[0]):
        for column in range(before[1]):
            found[row // 2 * after[1] + column // 2, row * before[1] + column] = 1
    return found / found.sum(1, keepdim=True)


@pytest.mark.parametrize("pool", ["last", "avg"])
def test_a_causal_transformer_reads_its_last_token_or_their_mean(pool):
    words = {key: value for key, value in SMALL.items() if key != "depth"}
    model, images = build("gpt_tiny_patch4_32", **words, depth=2, global_pool=pool)
    product = torch.eye(15).expand(2, -1, -1)
    for m in va.attention_maps(model, images).values():
        product = (0.5 * m.mean(1) + 0.5 * torch.eye(15)) @ product
    expected = product[:, -1] if pool == "last" else product.mean(1)
    torch.testing.assert_close(rollout(model, images), expected.unflatten(1, (3, 5)))
    found = relevance(model, images)
    assert found.shape == (2, 3, 5)
    if pool == "last":  # the last token's own relevance is counted once, that of others only through attention
        assert (found[:, 2, 4] >= 1).all()


def test_a_head_that_reads_decoded_queries_is_no_chain():
    model, images = build("t5_tiny_patch4_32", img_size=16, depth=1)
    for make in (rollout, flow, relevance):
        with pytest.raises(UserError, match=r"does not read patches but what decoder\.layers\.0\.cross_attn makes"):
            make(model, images)


def test_implied_maps_with_negative_entries_are_refused_and_others_followed():
    linformer, images = build("vit_tiny_patch16_224", **SMALL, attention={"pattern": "linformer", "rank": 4})
    for make in (rollout, flow, relevance):
        with pytest.raises(UserError, match=r"blocks\.0\.attn.*linformer.*negative entries"):
            make(linformer, images)
    performer, images = build("vit_tiny_patch16_224", **SMALL, attention={"pattern": "performer"})
    torch.testing.assert_close(rollout(performer, images, queries=[0]).sum((2, 3)) <= 1, torch.ones(2, 1).bool())
    for make in (rollout, flow, relevance):
        assert (make(performer, images) >= 0).all()


@pytest.mark.parametrize("normalizer", ["bernoulli", "linear_chain"])
def test_rows_that_do_not_sum_to_one_are_divided_by_their_sum(normalizer):
    model, images = build(
        "vit_tiny_patch16_224", **SMALL, class_token=False, global_pool="avg", attention={"normalizer": normalizer}
    )
    product = torch.eye(15).expand(2, -1, -1)
    for m in va.attention_maps(model, images).values():
        mean = m.mean(1)
        product = (0.5 * mean / mean.sum(-1, keepdim=True) + 0.5 * torch.eye(15)) @ product
    found = rollout(model, images)
    torch.testing.assert_close(found, product.mean(1).unflatten(1, (3, 5)))
    torch.testing.assert_close(found.sum((1, 2)), torch.ones(2))
    assert (flow(model, images) <= 1).all()


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sharp", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("token", [True, False])
def test_flows_through_few_layers_are_those_through_all(layers, sharp, token):
    rng = np.random.default_rng(layers)
    n = 13
    steps = np.exp(rng.normal(0, sharp, (layers, n, n)) + rng.normal(0, sharp, (layers, 1, n)))
    steps = 0.5 * steps / steps.sum(-1, keepdims=True) + 0.5 * np.eye(n)
    read = np.eye(n)[0] if token else np.full(n, 1 / n)
    expected = _maximum_flows(steps, read, np.arange(1, n))
    np.testing.assert_allclose(_flow(steps, read, 1), expected, atol=2e-6)


def test_flow_over_the_patches_of_a_vit_of_224_pixels():
    """196 patches, in three layers: seconds and not minutes, see the docstring of ``flow`` for twelve."""
    model, images = build("vit_tiny_patch16_224", 0.05, depth=3, embed_dim=24, num_classes=5)
    found = flow(model, images[:1])
    assert found.shape == (1, 14, 14)
    assert ((found > 0) & (found <= 1 + 1e-6)).all()
    with pytest.raises(UserError, match=r"pipes \(at most 4,000,000\).*use rollout"):
        flow(build("vit_tiny_patch16_224", depth=12, embed_dim=24, patch_size=8, num_classes=5)[0], images[:1])
