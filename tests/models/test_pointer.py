"""The pointer network: what it points at is there, is pointed at once, and is no padding."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.layers.pointer import Pointer
from vision_attn.models import description, model_defaults
from vision_attn.models.pointer import PointerNetwork, pointed_at

CHANS, HEIGHT, WIDTH, DIM = 3, 11, 8, 14
TINY = {"img_size": (HEIGHT, WIDTH), "embed_dim": DIM, "num_heads": 7, "depth": 2, "encoder_args": {"width": 3}}
DECODERS = ("lstm", "transformer")


def tiny(seed: int = 0, **options) -> PointerNetwork:
    """A small network with random values everywhere, in evaluation mode and float64."""
    torch.manual_seed(seed)
    model = PointerNetwork(**{**TINY, **options}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def strips(batch: int, n: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, n, CHANS, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)


MODELS = {(decoder, once): tiny(decoder=decoder, no_repeat=once) for decoder in DECODERS for once in (True, False)}


# -- properties -------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    decoder=st.sampled_from(DECODERS),
    once=st.booleans(),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    extra=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_what_is_pointed_at_is_there(decoder, once, lengths, extra, seed):
    model, n = MODELS[decoder, once], max(lengths) + extra
    with torch.no_grad():
        log_weights = model(strips(len(lengths), n, seed), torch.tensor(lengths))
    assert log_weights.shape == (len(lengths), n, n)
    assert not log_weights.isnan().any()
    for rows, order, length in zip(log_weights, pointed_at(log_weights).tolist(), lengths, strict=True):
        assert all(0 <= index < length for index in order[:length])
        assert order[length:] == [-1] * (n - length)
        if once:
            assert sorted(order[:length]) == list(range(length))
        weights = rows.exp()
        torch.testing.assert_close(weights[:length].sum(-1), torch.ones(length, dtype=torch.float64))
        assert (weights[:, length:] == 0).all()  # padding
        assert (weights[length:] == 0).all()  # steps beyond the end
        assert once or (weights[:length, :length] > 0).all()


@pytest.mark.parametrize("decoder", DECODERS)
def test_padding_changes_nothing(decoder):
    model, images, lengths = MODELS[decoder, True], strips(3, 5), [5, 2, 3]
    with torch.no_grad():
        padded = model(images, torch.tensor(lengths))
        other = images.clone()
        for row, length in enumerate(lengths):
            other[row, length:] = 1e3
            alone = model(images[row, :length])
            torch.testing.assert_close(padded[row, :length, :length], alone)
        torch.testing.assert_close(model(other, torch.tensor(lengths)), padded, rtol=0, atol=0)
        mask = torch.arange(5) < torch.tensor(lengths)[:, None]
        torch.testing.assert_close(model(images, mask), padded, rtol=0, atol=0)


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(6)), seed=st.integers(0, 100))
def test_without_positions_a_shuffle_shuffles_the_tokens(order, seed):
    model = EQUIVARIANT
    images, order = strips(2, 6, seed), list(order)
    with torch.no_grad():
        tokens = model.encode(images)
        torch.testing.assert_close(model.encode(images[:, order]), tokens[:, order], rtol=1e-10, atol=1e-10)
        # and the same images are pointed at
        places = torch.tensor(order)
        torch.testing.assert_close(places[model.order(images[:, order])], model.order(images))


EQUIVARIANT = tiny(attention={"position": "none"})


def test_positions_break_that():
    model, images, order = MODELS["lstm", True], strips(2, 5), [4, 2, 0, 1, 3]
    with torch.no_grad():
        assert (model.encode(images[:, order]) - model.encode(images)[:, order]).abs().max() > 1e-3


# -- identities -------------------------------------------------------------------------------------


def test_pointer_equals_the_formula_of_the_paper():
    pointer = Pointer(5, hidden=11).double()
    queries, elements = torch.randn(2, 3, 5).double(), torch.randn(2, 7, 5).double()
    mask = torch.rand(2, 3, 7) > 0.3
    mask[..., 0] = True
    w_d, w_e, v = pointer.score.query[0], pointer.score.key[0], pointer.score.v[0]
    expected = torch.full((2, 3, 7), float("-inf"), dtype=torch.float64)
    for b in range(2):
        for t in range(3):
            allowed = [j for j in range(7) if mask[b, t, j]]
            u = torch.stack([v @ torch.tanh(w_e @ elements[b, j] + w_d @ queries[b, t]) for j in allowed])
            expected[b, t, allowed] = (u.exp() / u.exp().sum()).log()
    torch.testing.assert_close(pointer(queries, elements, mask), expected)


@pytest.mark.parametrize("score", ["additive", "concat", "dot", "scaled_dot", "cosine", "general"])
def test_every_score_that_sees_the_elements_can_point(score):
    pointer = Pointer(6, score=score)
    elements = torch.randn(2, 5, 6, requires_grad=True)
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[0, :, 4] = False
    mask[1, 2] = False
    weights = pointer(torch.randn(2, 3, 6), elements, mask)
    sums = torch.ones(2, 3)
    sums[1, 2] = 0
    torch.testing.assert_close(weights.exp().sum(-1), sums)
    weights[mask].sum().backward()
    assert elements.grad.isfinite().all()
    assert all(p.grad.abs().max() > 0 for p in pointer.parameters())


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("decoder", DECODERS)
def test_greedy_decoding_is_teacher_forcing_with_its_own_choices(decoder, once):
    model, images, lengths = MODELS[decoder, once], strips(3, 5, seed=3), torch.tensor([5, 4, 1])
    with torch.no_grad():
        greedy = model(images, lengths)
        forced = model(images, lengths, pointed_at(greedy))
    steps = torch.arange(5) < lengths[:, None]
    torch.testing.assert_close(forced[steps], greedy[steps])


def test_repeats_are_possible_when_they_are_allowed():
    orders = [MODELS["lstm", False].order(strips(8, 6, seed)) for seed in range(3)]
    assert any(len(set(row)) < 6 for order in orders for row in order.tolist())


def test_one_sequence_needs_no_batch():
    model, images = MODELS["lstm", True], strips(1, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(images[0]), model(images)[0], rtol=0, atol=0)
        assert model.order(images[0]).shape == (4,)
        assert model.order(images[0, :1]).tolist() == [0]


def test_one_set_of_parameters_for_any_length():
    with torch.no_grad():
        for n in (1, 2, 13, 64):
            assert sorted(MODELS["lstm", True].order(strips(1, n)[0]).tolist()) == list(range(n))


# -- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_parameter_learns_and_padding_teaches_nothing(decoder):
    model = tiny(decoder=decoder).train()
    images = strips(3, 4).requires_grad_()
    target = torch.tensor([[2, 0, 1, 3], [1, 0, -1, -1], [0, -1, -1, -1]])
    log_weights = model(images, target >= 0, target)
    torch.nn.functional.nll_loss(log_weights.flatten(0, 1), target.flatten(), ignore_index=-1).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    assert images.grad[0].abs().amax((1, 2, 3)).min() > 0
    assert (images.grad[1, 2:] == 0).all()
    assert (images.grad[2, 1:] == 0).all()


def test_places_in_training_are_in_order_and_differ():
    model = tiny(position_range=9, attention={"position": "learned"}).train()
    with torch.no_grad():
        model.pos_embed.copy_(torch.arange(9.0)[:, None].expand(-1, DIM))
        drawn = torch.stack([model._positions(None, 5, 4)[..., 0] for _ in range(20)])  # (20, 5, 4)
        assert (drawn.diff(dim=-1) > 0).all()
        assert drawn.unique().tolist() == list(range(9))
        model.eval()
        assert model._positions(None, 5, 3)[..., 0].tolist() == [[1, 4, 7]]
        keep = torch.tensor([[True, True, True], [True, False, False]])
        assert model._positions(keep, 2, 3)[:, :, 0].tolist() == [[1, 4, 7], [4, 8, 8]]


@pytest.mark.parametrize(
    "attention",
    [
        {"score": "cosine"},
        {"score": "additive", "normalizer": "hard"},
        {"pattern": "causal"},
        {"pattern": "window", "window": 1},
        {"position": "t5"},
        {"position": "rope_1d"},
        {"position": "learned", "num_kv_heads": 1, "qk_norm": True},
        {"kernel": "explicit", "dropout": 0.1},
    ],
    ids=str,
)
def test_every_mechanism_of_the_core_serves_the_encoder(attention):
    model = tiny(attention=attention)
    order = model.order(strips(2, 5), torch.tensor([5, 3]))
    assert sorted(order[0].tolist()) == list(range(5))
    assert sorted(order[1].tolist()) == [-1, -1, 0, 1, 2]


# -- zoo --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", va.list_models(task="sorting"))
def test_it_is_saved_loaded_listed_and_looked_into(name, tmp_path):
    model = va.create_model(name, img_size=8, embed_dim=16, attention={"score": "cosine"}).eval()
    assert model.config["task"] == "sorting"
    assert json.loads(json.dumps(model.config)) == model.config
    loaded = va.load_model(va.save_model(model, tmp_path))
    assert loaded.config == model.config
    images = torch.randn(2, 5, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)
    maps = va.attention_maps(model, images, layers="blocks.*")
    assert all(weights.shape == (2, 4, 5, 5) for weights in maps.values())
    assert len(maps) == 2
    assert description(name).endswith(".")
    assert "img_size" in model_defaults(name)
    with pytest.raises(UserError, match="has no classes"):
        va.load_model(tmp_path, num_classes=7)


def test_predict_puts_images_in_order():
    model = va.create_model("pointer_lstm", img_size=8)
    pixels = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    steps = va.predict(model, list(pixels))
    assert [step.place for step in steps] == [0, 1, 2, 3]
    assert sorted(step.index for step in steps) == [0, 1, 2, 3]
    assert all(step.source == f"image {step.index}" for step in steps)
    assert 0 < steps[0].score <= 1
    assert steps[-1].to_dict() == {"place": 3, "index": steps[-1].index, "score": 1.0, "source": steps[-1].source}
    assert model.training


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decoder": "gru"}, "decoder='gru': choose 'lstm' or 'transformer'"),
        ({"encoder": "resnet8_cifr"}, "unknown model.*resnet8_cifar"),
        ({"pointer_score": "location"}, "cannot point at what it sees"),
        ({"pointer_score": "adition"}, "unknown score"),
        ({"position_range": 0}, "position_range=0"),
        ({"attention": {"position": "spiral"}}, "position 'spiral'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_choices_that_make_no_sense(options, words):
    with pytest.raises(ValueError, match=words):
        tiny(**options)


def test_inputs_that_make_no_sense():
    model = MODELS["lstm", True]
    with pytest.raises(ValueError, match=r"\(B, n, C, H, W\).*\(3, 11, 8\)"):
        model(torch.randn(3, 11, 8))
    with pytest.raises(ValueError, match=r"mask \(2, 4\) must be \(B, n\) = \(2, 5\)"):
        model(strips(2, 5), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="padding stands at the end"):
        model(strips(1, 3), torch.tensor([[True, False, True]]))
    with pytest.raises(ValueError, match=r"target \(2, 4\) must be \(B, n\) = \(2, 5\)"):
        model(strips(2, 5), None, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(UserError, match=r"65 images.*position_range=64"):
        model(strips(1, 65))
