"""Rows 16, 29, 33 and 38 on whole models: what reaches what, and whether they are who they say they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import record
from vision_attn.certificates.registry import FLOAT32_INSIDE, Setting, Skip, certificate, gaps, gradients, holds
from vision_attn.models import create_model

SMALL: dict[str, Any] = {"img_size": 35, "patch_size": 7, "embed_dim": 33, "num_heads": 3, "depth": 2}


def _vit(s: Setting, **options: Any) -> Any:
    words = {"kernel": s.kernel, **options.pop("attention", {})}
    return create_model("vit_tiny_patch16_224", num_classes=11, attention=words, **{**SMALL, **options})


def _same(ours: nn.Module, peer: nn.Module, images: Tensor) -> float:
    """Logits and gradients of the image."""
    images.requires_grad_()
    out, expected = ours(images), peer(images)
    return gaps((out, expected), (gradients(out, images)[0], gradients(expected, images)[0]))


@certificate("16b", "a pointer network's indices lie in 1 … n and none is named twice, for any n")
def pointer_indices(s: Setting) -> float:
    model = s.module(create_model("pointer_lstm", img_size=8, embed_dim=12, num_heads=3, depth=1))
    fine = []
    with torch.no_grad():
        for n in (1, 3, 8):
            order = model.order(s.randn(2, n, 3, 8, 8))
            fine.append(order.sort(1).values.tolist() == [list(range(n))] * 2)
    return holds(all(fine))


@certificate("29", "ViT: logits and gradients equal timm's with copied weights", kernel=True)
def equals_timm(s: Setting) -> float:
    import timm

    peer = s.module(timm.create_model("vit_tiny_patch16_224", num_classes=11, **SMALL))
    ours = _vit(s).to(s.device, s.dtype).eval()
    ours.load_state_dict(peer.state_dict())
    return _same(ours, peer, s.randn(2, 3, 35, 35))


TORCHVISION = {
    "class_token": "cls_token",
    "encoder.pos_embedding": "pos_embed",
    "conv_proj": "patch_embed.proj",
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
"""Words of torchvision's names -> ours."""


@certificate("29b", "ViT: logits and gradients equal torchvision's with copied weights", kernel=True)
def equals_torchvision(s: Setting) -> float:
    from torchvision.models import VisionTransformer

    peer = s.module(VisionTransformer(35, 7, 2, 3, 33, 132, num_classes=11))
    state = {}
    for name, value in peer.state_dict().items():
        for theirs, mine in TORCHVISION.items():
            name = name.replace(theirs, mine)
        state[name] = value
    ours = _vit(s).to(s.device, s.dtype).eval()
    ours.load_state_dict(state)
    return _same(ours, peer, s.randn(2, 3, 35, 35))


@certificate("29c", "ViT: logits and gradients equal transformers' with copied weights", kernel=True)
def equals_transformers(s: Setting) -> float:
    try:
        import transformers
    except ImportError:
        raise Skip("transformers is not installed") from None
    peer = s.module(transformers.ViTForImageClassification(_transformers_config(transformers)))
    ours = _vit(s).to(s.device, s.dtype).eval()
    ours.load_state_dict(_from_transformers(peer))
    return _same(ours, _Logits(peer), s.randn(2, 3, 35, 35))


def _transformers_config(transformers: Any) -> Any:
    return transformers.ViTConfig(
        hidden_size=33,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=132,
        image_size=35,
        patch_size=7,
        num_labels=11,
        layer_norm_eps=1e-6,
    )


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def _from_transformers(peer: nn.Module) -> dict[str, Tensor]:
    """Our names, by the order of the modules: theirs differ from one version to the next."""
    state = peer.state_dict()

    def ending(name: str) -> Tensor:
        return next(value for key, value in state.items() if key.endswith(name))

    new = {"cls_token": ending("cls_token"), "pos_embed": ending("position_embeddings")}
    linears = [m for m in peer.modules() if isinstance(m, nn.Linear)]
    norms = [m for m in peer.modules() if isinstance(m, nn.LayerNorm)]
    patches = next(m for m in peer.modules() if isinstance(m, nn.Conv2d))
    for what in ("weight", "bias"):
        parts = {"patch_embed.proj": patches, "norm": norms[-1], "head": linears[-1]}
        for i in range(2):
            q, k, v, proj, fc1, fc2 = linears[6 * i : 6 * i + 6]
            new[f"blocks.{i}.attn.qkv.{what}"] = torch.cat([getattr(m, what) for m in (q, k, v)])
            parts |= {f"blocks.{i}.attn.proj": proj, f"blocks.{i}.mlp.fc1": fc1, f"blocks.{i}.mlp.fc2": fc2}
            parts |= {f"blocks.{i}.norm1": norms[2 * i], f"blocks.{i}.norm2": norms[2 * i + 1]}
        new |= {f"{name}.{what}": getattr(module, what) for name, module in parts.items()}
    return new


@certificate("29d", "ViT: after a single layer the class token depends on every pixel of the image", kernel=True)
def global_field(s: Setting) -> float:
    model, x = s.module(_vit(s, depth=1)), s.randn(1, 3, 35, 35, grad=True)
    return holds(bool((gradients(model(x), x)[0] != 0).all()))


def _reach(model: Any, s: Setting) -> Tensor:
    """(N, N): whether encoded token i depends on patch j."""
    x = s.randn(1, 3, 6, 8, grad=True)
    features = model.forward_features(x)
    rows = []
    for token in range(features.shape[1]):
        (seen,) = torch.autograd.grad(features[0, token].square().sum(), x, retain_graph=True)
        rows.append(F.max_pool2d(seen.abs().sum(1), 2).flatten() > 0)
    return torch.stack(rows)


def _topology(s: Setting, name: str) -> Any:
    size: dict[str, Any] = {
        "img_size": (6, 8),
        "patch_size": 2,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 7,
    }
    return s.module(create_model(name, **size, attention={"kernel": s.kernel}), std=0.5)


@certificate("33", "BERT's topology: every token depends on every patch", kernel=True)
def bidirectional(s: Setting) -> float:
    return holds(bool(_reach(_topology(s, "bert_tiny_patch4_32"), s).all()))


@certificate("33b", "GPT's topology: token i depends on patches up to i and on no later one", kernel=True)
def causal(s: Setting) -> float:
    reach = _reach(_topology(s, "gpt_tiny_patch4_32"), s)
    return holds(bool((reach == torch.ones_like(reach).tril()).all()))


@certificate("33c", "T5's topology: patches see each other, queries see patches and earlier queries", kernel=True)
def encoder_decoder(s: Setting) -> float:
    model, images = _topology(s, "t5_tiny_patch4_32"), s.randn(1, 3, 6, 8)
    with torch.no_grad(), record(model) as recorder:
        model(images)
    maps = recorder.maps()
    names = ("blocks.0.attn", "decoder.layers.0.self_attn", "decoder.layers.0.cross_attn")
    encoder, own, cross = (maps[name] > 0 for name in names)
    return holds(bool(encoder.all() and cross.all() and (own == torch.ones_like(own).tril()).all()))


@certificate(
    "38",
    "maps come out of any kernel: rows sum to 1, and mix to its output",
    tolerance=FLOAT32_INSIDE,
    kernel=True,
)
def recorded(s: Setting) -> float:
    model, images = s.module(_vit(s, attention={"num_kv_heads": 1})), s.randn(2, 3, 35, 35)
    with torch.no_grad():
        before = model(images)
        with record(model) as recorder:
            watched = model(images)
        maps = recorder.maps()
        first = model.blocks[0].attn
        tokens = model.blocks[0].norm1(model.embed(images))
        _, _, v = first._project(tokens, None, None, None)
        mixed = (maps["blocks.0.attn"].to(v.dtype) @ v.expand(-1, 3, -1, -1)).transpose(1, 2).flatten(2)
    rows = maps["blocks.1.attn"].sum(-1)
    # maps are float32, whatever the model is
    ones = torch.ones_like(rows)
    return gaps((watched, before), (rows, ones), (first.proj(mixed), first(tokens)))
