"""ViT beside timm, torchvision and transformers, with copied, randomised weights (MECHANISMS 27 and 29)."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import vision_attn as va

SMALL = {"img_size": 35, "patch_size": 7, "embed_dim": 33, "num_heads": 3, "depth": 2}


def randomise(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, std=0.2)
    return module.double().eval()


def same_logits_and_gradients(ours: nn.Module, peer, images: Tensor) -> None:
    ours, x, y = ours.double().eval(), images.clone().requires_grad_(), images.clone().requires_grad_()
    got, expected = ours(x), peer(y)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    got.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"reg_tokens": 3}),
        ("vit_tiny_patch16_224", {"reg_tokens": 3, "no_embed_class": True}),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
        ("vit_tiny_patch16_224", {"global_pool": "avg", "init_values": 0.1}),
        ("vit_wee_patch16_reg1_gap_256", {}),
        ("vit_medium_patch16_reg4_gap_256", {}),
    ],
)
def test_equals_timm(name, options):
    peer = randomise(timm.create_model(name, num_classes=11, **SMALL, **options))
    ours = va.create_model(name, num_classes=11, **SMALL, **options)
    ours.load_state_dict(peer.state_dict())
    same_logits_and_gradients(ours, peer, torch.randn(2, 3, 35, 35, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deit_tiny_distilled_patch16_224", {"distilled": True}),
        ("vit_base_patch32_clip_quickgelu_224", {"pre_norm": True, "norm_eps": 1e-5, "act": "quick_gelu"}),
        ("vit_giant_patch14_dinov2", {"mlp": "swiglu", "mlp_ratio": 5.33334, "init_values": 1e-5}),
    ],
)
def test_parts_of_other_families_equal_timm(name, options):
    peer = randomise(timm.create_model(name, num_classes=11, **SMALL))
    ours = va.create_model("vit_tiny_patch16_224", num_classes=11, **SMALL, **options)
    ours.load_state_dict(peer.state_dict())
    same_logits_and_gradients(ours, peer, torch.randn(2, 3, 35, 35, dtype=torch.float64))


def test_qk_norm_equals_timm():
    peer = randomise(timm.create_model("vit_tiny_patch16_224", num_classes=11, **SMALL, qk_norm=True))
    ours = va.create_model("vit_tiny_patch16_224", num_classes=11, **SMALL, attention={"qk_norm": True})
    ours.load_state_dict(peer.state_dict())
    same_logits_and_gradients(ours, peer, torch.randn(2, 3, 35, 35, dtype=torch.float64))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch32_224"])
def test_named_sizes_have_timm_s_tensors(name):
    with torch.device("meta"):
        ours, peer = va.create_model(name), timm.create_model(name)
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (ours, peer)]
    assert shapes[0] == shapes[1]


def test_another_image_size_resamples_positions_as_timm_does():
    options = {**SMALL, "num_classes": 11, "reg_tokens": 2}
    peer = randomise(timm.create_model("vit_tiny_patch16_224", **options, dynamic_img_size=True))
    ours = va.create_model("vit_tiny_patch16_224", **options)
    ours.load_state_dict(peer.state_dict())
    same_logits_and_gradients(ours, peer, torch.randn(2, 3, 49, 21, dtype=torch.float64))


def test_equals_torchvision():
    from torchvision.models import VisionTransformer

    peer = randomise(VisionTransformer(35, 7, 2, 3, 33, 132, num_classes=11))
    state = peer.state_dict()
    ours = va.create_model("vit_tiny_patch16_224", num_classes=11, **SMALL)
    renamed = {
        "cls_token": state.pop("class_token"),
        "pos_embed": state.pop("encoder.pos_embedding"),
        "patch_embed.proj.weight": state.pop("conv_proj.weight"),
        "patch_embed.proj.bias": state.pop("conv_proj.bias"),
    }
    words = {
        "encoder.layers.encoder_layer_": "blocks.",
        "encoder.ln": "norm",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj": "attn.proj",
        "mlp.0": "mlp.fc1",
        "mlp.3": "mlp.fc2",
        "heads.head": "head",
    }
    for key, value in state.items():
        new = key
        for theirs, mine in words.items():
            new = new.replace(theirs, mine)
        renamed[new] = value
    ours.load_state_dict(renamed)
    same_logits_and_gradients(ours, peer, torch.randn(2, 3, 35, 35, dtype=torch.float64))


def test_equals_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=33,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=132,
        image_size=35,
        patch_size=7,
        num_labels=11,
        layer_norm_eps=1e-6,
    )
    peer = randomise(transformers.ViTForImageClassification(config))
    state = {key.removeprefix("vit."): value for key, value in peer.state_dict().items()}
    pick = lambda key: [v for k, v in state.items() if k.endswith(key)]  # noqa: E731
    ours = va.create_model("vit_tiny_patch16_224", num_classes=11, **SMALL)
    mine = ours.state_dict()
    new = {
        "cls_token": pick("cls_token")[0],
        "pos_embed": pick("position_embeddings")[0],
        "patch_embed.proj.weight": pick("projection.weight")[0],
        "patch_embed.proj.bias": pick("projection.bias")[0],
        "head.weight": state["classifier.weight"],
        "head.bias": state["classifier.bias"],
    }
    blocks = peer.vit.encoder.layer if hasattr(peer.vit, "encoder") else peer.vit.layers
    linears = [[m for m in block.modules() if isinstance(m, nn.Linear)] for block in blocks]
    norms = [[m for m in block.modules() if isinstance(m, nn.LayerNorm)] for block in blocks]
    for i, (linear, norm) in enumerate(zip(linears, norms, strict=True)):
        q, k, v, proj, fc1, fc2 = linear
        for what in ("weight", "bias"):
            new[f"blocks.{i}.attn.qkv.{what}"] = torch.cat([getattr(m, what) for m in (q, k, v)])
            for name, m in {
                "attn.proj": proj,
                "mlp.fc1": fc1,
                "mlp.fc2": fc2,
                "norm1": norm[0],
                "norm2": norm[1],
            }.items():
                new[f"blocks.{i}.{name}.{what}"] = getattr(m, what)
    final = [m for m in peer.vit.modules() if isinstance(m, nn.LayerNorm)][-1]
    new |= {"norm.weight": final.weight, "norm.bias": final.bias}
    assert new.keys() == mine.keys()
    ours.load_state_dict(new)
    images = torch.randn(2, 3, 35, 35, dtype=torch.float64)
    same_logits_and_gradients(ours, lambda x: peer(x).logits, images)


def test_patch_embedding_is_unfold_and_linear():
    """MECHANISMS 27."""
    embed = va.create_model("vit_tiny_patch16_224", **SMALL).patch_embed
    x = torch.randn(2, 3, 21, 35)
    patches = nn.functional.unfold(x, 7, stride=7).transpose(1, 2)
    expected = nn.functional.linear(patches, embed.proj.weight.flatten(1), embed.proj.bias)
    torch.testing.assert_close(embed(x), expected, rtol=1e-4, atol=1e-5)


def test_every_pixel_reaches_the_class_token_after_one_layer():
    model = va.create_model("vit_tiny_patch16_224", **{**SMALL, "depth": 1}, num_classes=5)
    x = torch.randn(1, 3, 35, 35, requires_grad=True)
    model(x).square().sum().backward()
    assert (x.grad.abs() > 0).all()


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
@pytest.mark.parametrize("no_embed_class", [False, True])
def test_positions_by_configuration(position, no_embed_class):
    model = va.create_model(
        "vit_tiny_patch16_224",
        **{**SMALL, "embed_dim": 36},
        num_classes=5,
        no_embed_class=no_embed_class,
        attention={"position": position},
    ).eval()
    learned = "pos_embed" in dict(model.named_parameters())
    assert learned == (position == "learned")
    x = torch.randn(2, 3, 35, 35)
    shuffled = x.view(2, 3, 5, 7, 35).flip(2).reshape(2, 3, 35, 35)  # patches change places, none changes
    moved = (model(x) - model(shuffled)).abs().max() > 1e-5
    assert moved == (position != "none")
    assert model(torch.randn(1, 3, 21, 49)).shape == (1, 5)


def test_drop_path_grows_with_depth_and_sleeps_in_evaluation():
    model = va.create_model("vit_tiny_patch16_224", **{**SMALL, "depth": 3}, num_classes=5, drop_path=0.4)
    rates = [getattr(block.drop_path, "p", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.2, 0.4])
    x = torch.randn(4, 3, 35, 35)
    assert (model(x) != model(x)).any()
    model.eval()
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 30, "patch_size": 7}, "does not divide the image size 30×30; patch sizes that do: 2, 3, 5"),
        ({"class_token": False}, "needs class_token=True"),
        ({"distilled": True, "global_pool": "avg"}, "distilled=True needs global_pool='token', not 'avg'"),
        ({"mlp": "glu"}, "mlp='glu': choose mlp or swiglu"),
        ({"mlp": "swiglu", "embed_dim": 33, "num_heads": 3, "mlp_ratio": 1}, "33 is odd; choose another mlp_ratio"),
        ({"act": "mish"}, "unknown activation 'mish'"),
        ({"global_pool": "max"}, "choose token, avg, attention, hierarchical"),
        ({"patch_sise": 8}, "Did you mean patch_size"),
        ({"attention": {"scor": "dot"}}, "Did you mean score"),
        ({"attention": {"score": "angle"}}, "unknown score 'angle'"),
        ({"attention": {"position": "spiral"}}, "unknown position 'spiral'"),
        ({"num_classes": 0}, "at least one class"),
    ],
)
def test_wrong_arguments_say_what_to_do(options, message):
    with pytest.raises(ValueError, match=message):
        va.create_model("vit_tiny_patch16_224", **options)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "cct_2_3x2_32"])
@pytest.mark.parametrize("pool", ["attention", "hierarchical"])
def test_pools_by_attention_at_any_size(name, pool):
    torch.manual_seed(0)
    size = {"patch_size": 4, "depth": 1} if name.startswith("vit") else {}
    model = va.create_model(name, num_classes=7, img_size=32, global_pool=pool, pool_region=3, **size).eval()
    for side in (32, 44):
        image = torch.randn(2, 3, side, side, requires_grad=True)
        logits = model(image)
        assert logits.shape == (2, 7)
        (gradient,) = torch.autograd.grad(logits.square().sum(), image)
        assert (gradient.abs().amax((0, 1)) > 0).all()  # the whole image is pooled, ragged regions too


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_lite_7_4_32"])
def test_a_class_token_is_not_made_blind(name):
    with pytest.raises(ValueError, match=r"it would see no patch\. Use global_pool='avg'"):
        va.create_model(name, attention={"pattern": "causal"})


def test_unknown_pool_is_refused_by_name():
    with pytest.raises(ValueError, match="global_pool='mean': choose token, avg, attention, hierarchical"):
        va.create_model("vit_tiny_patch16_224", global_pool="mean")
