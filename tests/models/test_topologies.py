"""Bidirectional, causal, encoder-decoder: who may look at whom (MECHANISMS 33)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.models.profile import profile
from vision_attn.models.topologies import CausalTransformer, EncoderDecoder
from vision_attn.models.vit import VisionTransformer

NAMES = ("bert_tiny_patch4_32", "gpt_tiny_patch4_32", "t5_tiny_patch4_32")
GRID = (3, 5)
PATCH = 2
N = GRID[0] * GRID[1]


def build(name: str, **more) -> nn.Module:
    """Small, of random weights, in float64."""
    size = (GRID[0] * PATCH, GRID[1] * PATCH)
    args = {"num_classes": 7, "img_size": size, "patch_size": PATCH, "embed_dim": 24, "depth": 2, "num_heads": 3}
    model = va.create_model(name, **{**args, **more}).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def images(grid=GRID) -> torch.Tensor:
    return torch.randn(2, 3, grid[0] * PATCH, grid[1] * PATCH, dtype=torch.float64)


def edited(x: torch.Tensor, patch: int) -> torch.Tensor:
    """The images with other pixels in one patch."""
    x, (row, column) = x.clone(), divmod(patch, GRID[1])
    x[:, :, PATCH * row : PATCH * (row + 1), PATCH * column : PATCH * (column + 1)] += 1
    return x


def reach(model: VisionTransformer, token: int) -> torch.Tensor:
    """(N,) which patches of the image an encoded token depends on."""
    x = images().requires_grad_()
    (seen,) = torch.autograd.grad(model.forward_features(x)[:, token].square().sum(), x)
    return nn.functional.max_pool2d(seen.abs().sum(1), PATCH).amax(0).flatten() > 0


@pytest.mark.parametrize("pattern", [{}, {"pattern": "window", "window": 3}, {"position": "rope"}])
@pytest.mark.parametrize("global_pool", ["avg", "last"])
def test_causal_hides_the_future(pattern, global_pool):
    """A change of a later patch leaves the earlier tokens as they are, exactly; and changes what comes after."""
    model = build("gpt_tiny_patch4_32", global_pool=global_pool, attention=pattern)
    x = images()
    before, after = model.forward_features(x), model.forward_features(edited(x, 7))
    assert before.shape == (2, N, 24)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=0)
    assert ((after - before)[:, 7:10].abs().amax(-1) > 1e-6).all()
    assert (model(x) - model(edited(x, N - 1))).abs().max() > 1e-6
    expected = before[:, -1] if global_pool == "last" else before.mean(1)
    torch.testing.assert_close(model(x), model.head(expected))


@pytest.mark.parametrize("attention", [{"pattern": "linformer", "rank": 4}, {"pattern": "performer", "features": 16}])
def test_encoder_of_low_rank_has_positions_of_tokens(attention):
    """Linformer and Performer form no pairs that could have a relative position."""
    model = build("t5_tiny_patch4_32", attention=attention)
    assert model.pos_embed.shape == (1, N, 24)
    assert model(images()).isfinite().all()
    with pytest.raises(ValueError, match="never forms a pair"):
        build("t5_tiny_patch4_32", attention={**attention, "position": "t5"})


def test_causal_sees_all_of_the_past_and_a_window_part_of_it():
    torch.testing.assert_close(reach(build("gpt_tiny_patch4_32"), 8), torch.arange(N) <= 8)
    windowed = build("gpt_tiny_patch4_32", depth=1, attention={"pattern": "window", "window": 3})
    torch.testing.assert_close(reach(windowed, 8), (torch.arange(N) <= 8) & (torch.arange(N) >= 5))


def test_bidirectional_sees_everything():
    model = build("bert_tiny_patch4_32", depth=1)
    for token in (0, 1, N):  # the class token, the first and the last patch
        assert reach(model, token).all()
    assert type(model) is VisionTransformer


def test_encoder_decoder_topology():
    """Patches all see each other; a query sees itself, those before it, and all patches."""
    model = build("t5_tiny_patch4_32", depth=1, num_queries=5)
    assert reach(model, 0).all()
    with torch.no_grad():
        maps = va.attention_maps(model, images())
    shapes = {name: tuple(weights.shape) for name, weights in maps.items()}
    assert shapes == {
        "blocks.0.attn": (2, 3, N, N),
        "decoder.layers.0.self_attn": (2, 3, 5, 5),
        "decoder.layers.0.cross_attn": (2, 3, 5, N),
    }
    own = maps["decoder.layers.0.self_attn"]
    torch.testing.assert_close(own > 0, torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 3, 5, 5))
    assert (maps["decoder.layers.0.cross_attn"] > 0).all()
    x = images().requires_grad_()
    model(x).square().sum().backward()
    assert (x.grad.abs().amax((0, 1)) > 0).all()


def test_t5_has_relative_positions_everywhere_but_between_decoder_and_encoder():
    model = build("t5_tiny_patch4_32")
    assert model.pos_embed is None
    attention = {name: module for name, module in model.named_modules() if name.endswith("attn")}
    has = {name: module.position is not None for name, module in attention.items()}
    assert has == {name: "cross" not in name for name in attention}
    kinds = {type(module.position).__name__ for name, module in attention.items() if has[name]}
    assert kinds == {"T5Bias"}
    other = build("t5_tiny_patch4_32", attention={"position": "learned"})
    assert other.pos_embed.shape == (1, N, 24)
    assert all(module.position is None for name, module in other.named_modules() if name.endswith("attn"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "attention",
    [
        {"score": "cosine", "kernel": "explicit"},
        {"score": "additive", "num_kv_heads": 1, "qk_norm": True},
        {"pattern": "window", "window": 2},
        {"position": "rope"},
        {"position": "relative_bias", "tie_kv": True},
        {"position": "sinusoidal", "normalizer": "hard"},
    ],
    ids=str,
)
def test_mechanisms_by_name(name, attention):
    model = build(name, attention=attention)
    out = model(images())
    assert out.shape == (2, 7)
    assert out.isfinite().all()
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", NAMES)
def test_other_image_sizes(name):
    model = build(name)
    assert model(images((5, 7))).shape == (2, 7)
    with pytest.raises(UserError, match="does not divide the image size"):
        build(name, img_size=9)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_names(name):
    with torch.device("meta"):
        model = va.create_model(name, num_classes=10)
    assert model.img_size == (32, 32)
    costs = profile(name)  # alike, so that what differs is the topology
    assert 2e6 < costs.params < 4e6
    assert 1e8 < costs.macs < 3e8
    learned = dict(model.named_parameters())
    assert {"pos_embed", "queries", "cls_token"} & learned.keys() <= model.no_weight_decay()


def test_what_makes_no_sense():
    with pytest.raises(UserError, match="global_pool='token': choose 'avg' or 'last'"):
        build("gpt_tiny_patch4_32", global_pool="token")
    with pytest.raises(ValueError, match=r"'performer' mixes all keys .* cannot be causal"):
        build("gpt_tiny_patch4_32", attention={"pattern": "performer"})
    with pytest.raises(UserError, match="num_queries=0: the decoder needs at least one"):
        build("t5_tiny_patch4_32", num_queries=0)
    with pytest.raises(UserError, match=r"takes no argument 'causal'"):
        build("t5_tiny_patch4_32", causal=True)


def test_a_causal_model_is_the_bidirectional_one_with_a_mask():
    """The same weights, and all that differs is who may look at whom."""
    args = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    full, causal = build("bert_tiny_patch4_32", depth=1, **args), build("gpt_tiny_patch4_32", depth=1)
    causal.load_state_dict(full.state_dict())
    x = images()
    torch.testing.assert_close(causal.forward_features(x)[:, -1], full.forward_features(x)[:, -1])  # it sees all
    assert (causal.forward_features(x)[:, 0] - full.forward_features(x)[:, 0]).abs().max() > 1e-3


def test_last_decoded_layer_is_the_stack_by_hand():
    model = build("t5_tiny_patch4_32")
    x = images()
    encoded = model.embed(x)
    for block in model.blocks:
        encoded = block(encoded, layout=model.layout(GRID))
    encoded = model.norm(encoded)
    tokens = model.queries.expand(2, -1, -1)
    for layer in model.decoder.layers:
        tokens = layer(tokens, encoded)
    expected = model.head(model.decoder.norm(tokens).mean(1))
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_classes_are_what_the_names_build():
    assert isinstance(build("gpt_tiny_patch4_32"), CausalTransformer)
    assert isinstance(build("t5_tiny_patch4_32"), EncoderDecoder)
