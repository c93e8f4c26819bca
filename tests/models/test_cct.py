"""Compact transformers against a forward pass written as plain functions, and against the paper's numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.layers.pooling import SequencePool
from vision_attn.layers.tokenizer import ConvTokenizer

H, W, DIM, HEADS, DEPTH, CLASSES = 22, 18, 33, 3, 2, 7


def reference(state, x, *, convs=2, depth=DEPTH, heads=HEADS):
    """The forward pass of Hassani et al. 2021, from the paper's equations."""
    for i in range(convs):
        x = F.max_pool2d(F.conv2d(x, state[f"patch_embed.convs.{i}.weight"], padding=1).relu(), 3, 2, 1)
    b, d, h, w = x.shape
    x = x.reshape(b, d, h * w).permute(0, 2, 1) + state["pos_embed"]
    for i in range(depth):
        s = {k.removeprefix(f"blocks.{i}."): v for k, v in state.items() if k.startswith(f"blocks.{i}.")}
        y = F.layer_norm(x, (d,), s["norm1.weight"], s["norm1.bias"])
        q, k, v = (F.linear(y, part) for part in s["attn.qkv.weight"].chunk(3))
        mixed = torch.empty_like(q)
        for head in range(heads):
            cut = slice(head * d // heads, (head + 1) * d // heads)
            scores = torch.einsum("bnd,bmd->bnm", q[..., cut], k[..., cut]) / math.sqrt(d // heads)
            mixed[..., cut] = torch.einsum(
                "bnm,bmd->bnd", scores.exp() / scores.exp().sum(-1, keepdim=True), v[..., cut]
            )
        x = x + F.linear(mixed, s["attn.proj.weight"], s["attn.proj.bias"])
        y = F.layer_norm(x, (d,), s["norm2.weight"], s["norm2.bias"])
        y = F.gelu(F.linear(y, s["mlp.fc1.weight"], s["mlp.fc1.bias"]))
        x = x + F.linear(y, s["mlp.fc2.weight"], s["mlp.fc2.bias"])
    x = F.layer_norm(x, (d,), state["norm.weight"], state["norm.bias"])
    importance = (x @ state["pool.query"] + 0.37).exp()  # a bias of the pool changes nothing
    pooled = (importance[..., None] * x).sum(1) / importance.sum(1, keepdim=True)
    return F.linear(pooled, state["head.weight"], state["head.bias"])


def small(**more):
    args = {"num_classes": CLASSES, "img_size": (H, W), "embed_dim": DIM, "num_heads": HEADS, "depth": DEPTH}
    return va.create_model("cct_2_3x2_32", **{**args, "mlp_ratio": 5 / 3, "tokenizer": {"channels": 13}, **more})


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
def test_equals_the_papers_equations(kernel):
    model = small(attention={"kernel": kernel}).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    state = {k: v.detach().requires_grad_() for k, v in model.state_dict().items()}
    x = torch.randn(2, 3, H, W, dtype=torch.float64)
    expected = reference(state, x)
    actual = model(x)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((expected * weights).sum(), list(state.values()))
    own = dict(zip(state, grads, strict=True))
    (actual * weights).sum().backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, own[key], msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("cct_2_3x2_32", 0.28),
        ("cct_4_3x2_32", 0.48),
        ("cct_7_3x1_32", 3.76),
        ("cct_7_3x2_32", 3.85),
        ("cvt_7_4_32", 3.72),
    ],
)
def test_parameters_of_the_paper(name, millions):
    model = va.create_model(name, num_classes=10)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)
    assert sum(p.numel() for p in va.create_model("cct_14_7x2_224").parameters()) / 1e6 == pytest.approx(
        22.36, abs=0.01
    )


def test_other_image_sizes_resample_positions():
    model = small().eval()
    for size in ((H, W), (40, 12), (8, 8)):
        assert model(torch.randn(2, 3, *size)).shape == (2, CLASSES)
    flat = small().eval()
    with torch.no_grad():
        flat.pos_embed.copy_(torch.randn(DIM).expand_as(flat.pos_embed))  # the same everywhere stays the same
        torch.testing.assert_close(flat.position_at((4, 9))[0, 11], flat.pos_embed[0, 0])


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "none"])
def test_positions(kind):
    model = small(embed_dim=36, attention={"position": kind}).eval()
    learned = "pos_embed" in dict(model.named_parameters())
    assert learned == (kind == "learned")
    assert model(torch.randn(1, 3, 30, 26)).shape == (1, CLASSES)
    x = torch.randn(1, 3, H, W)
    tokens = model.embed(x) - model.patch_embed(x)
    assert (tokens.abs().max() == 0) == (kind == "none")


@pytest.mark.parametrize("pool", ["seq", "avg", "token"])
def test_pooling(pool):
    model = small(global_pool=pool).eval()
    x = model.forward_features(torch.randn(2, 3, H, W))
    assert x.shape[1] == math.prod(model.grid_size) + (pool == "token")
    torch.testing.assert_close(model.forward_head(x.expand(-1, -1, -1)), model.forward_head(x))
    if pool != "token":  # the order of the tokens does not matter any more
        torch.testing.assert_close(model.forward_head(x.flip(1)), model.forward_head(x))


def test_sequence_pool_is_a_mean_with_learned_weights():
    pool = SequencePool(11)
    x = torch.randn(2, 5, 11)
    torch.nn.init.zeros_(pool.query)
    torch.testing.assert_close(pool(x), x.mean(1))
    torch.nn.init.constant_(pool.query, 1e4)
    torch.testing.assert_close(pool(x), torch.stack([s[s.sum(-1).argmax()] for s in x]))
    with torch.autocast("cpu", torch.bfloat16):
        assert pool(x).isfinite().all()


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"n_layers": 1, "kernel_size": 5},
        {"n_layers": 3, "channels": [5, 7], "norm": True, "act": "gelu"},
        {"n_layers": 2, "stride": 2, "pool": "none", "act": "silu", "bias": True},
        {"n_layers": 1, "kernel_size": 4, "stride": 4, "padding": 0, "pool": "none", "act": "none"},
        {"pool_size": 2},
    ],
)
def test_tokenizer_grid_is_what_comes_out(args):
    tokenizer = ConvTokenizer(in_chans=2, embed_dim=11, **args)
    for size in ((8, 8), (17, 23), (32, 9)):
        rows, columns = tokenizer.grid(size)
        assert tokenizer(torch.randn(1, 2, *size)).shape == (1, rows * columns, 11)


def test_tokenizer_errors():
    with pytest.raises(UserError, match=r"takes no 'chanels'.*channels"):
        small(tokenizer={"chanels": 3})
    with pytest.raises(UserError, match="give 2 numbers"):
        small(tokenizer={"n_layers": 3, "channels": [5]})
    with pytest.raises(UserError, match="relu"):
        small(tokenizer={"act": "tanh"})
    with pytest.raises(UserError, match="too small"):
        va.create_model("cvt_7_4_32", img_size=3)
    with pytest.raises(UserError, match="global_pool"):
        small(global_pool="max")


@pytest.mark.parametrize("pool_first", [False, True])
def test_whitened_deep_tokenizer(pool_first):
    tokenizer = {"whiten": True, "norm": True, "stage_depth": 2, "pool_size": 2, "pool_first": pool_first}
    model = va.create_model("cct_2_3x2_32", num_classes=CLASSES, embed_dim=20, num_heads=2, tokenizer=tokenizer)
    x = torch.randn(7, 3, 32, 32)
    model.init_whitening(x, eps=0.0)
    patches = model.patch_embed.whiten(x)[:, :12].movedim(1, -1).flatten(0, 2)
    torch.testing.assert_close(patches.T @ patches / len(patches), torch.eye(12), rtol=0, atol=1e-3)
    # 32 pixels, 31 after whitening, halved twice
    assert model.grid_size == (7, 7)
    assert model.patch_embed(x).shape == (7, 49, 20)
    model(x).square().sum().backward()
    frozen = [name for name, p in model.named_parameters() if p.grad is None]
    assert frozen == ["patch_embed.whiten.weight"]


def test_what_follows_the_first_convolution_of_a_stage_begins_as_the_identity():
    tokenizer = ConvTokenizer(embed_dim=11, channels=7, stage_depth=3, act="none").eval()
    shallow = ConvTokenizer(embed_dim=11, channels=7, act="none").eval()
    shallow.load_state_dict(tokenizer.state_dict(), strict=False)
    for stage in tokenizer.refine:
        for layer in stage:
            torch.nn.init.zeros_(layer[0].bias)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(tokenizer(x), shallow(x))
