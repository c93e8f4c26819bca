"""The last layer of a ViT computes only what the head reads; nobody can tell from the results."""

from __future__ import annotations

import pytest
import torch

import vision_attn as va
from vision_attn.layers.encoder import EncoderLayer

B, N, D, H, FIRST = 2, 7, 15, 3, 5


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("extras", [True, False])
def test_first_tokens_of_a_layer(pre_norm: bool, extras: bool) -> None:
    layer = EncoderLayer(D, H, pre_norm=pre_norm).double()
    x = torch.randn(B, N, D, dtype=torch.float64)
    pos = bias = mask = None
    if extras:
        pos, bias = torch.randn(1, N, D, dtype=torch.float64), torch.randn(H, N, N, dtype=torch.float64)[None]
        mask = torch.rand(N, N) < 0.6
    whole = layer(x, pos=pos, bias=bias, mask=mask)[:, :FIRST]
    rows = None if bias is None else bias[:, :, :FIRST]
    part = layer(x, pos=pos, bias=rows, mask=None if mask is None else mask[:FIRST], first=FIRST)
    torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("registers", [0, 2])
def test_same_logits_and_gradients(registers: int) -> None:
    size = {"embed_dim": 12, "depth": 2, "num_heads": 3, "img_size": 8, "patch_size": 4, "reg_tokens": registers}
    model = va.create_model("vit_tiny_patch16_224", num_classes=5, **size).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    images = torch.randn(B, 3, 8, 8, dtype=torch.float64)

    def results(all_tokens: bool) -> list[torch.Tensor]:
        model.all_tokens = all_tokens  # type: ignore[assignment]
        logits = model(images)
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    torch.testing.assert_close(results(False), results(True), rtol=1e-9, atol=1e-9)


def test_last_layer_computes_one_token_unless_it_is_watched() -> None:
    model = va.create_model("vit_tiny_patch16_224", num_classes=5, embed_dim=12, depth=2, img_size=8, patch_size=4)
    seen: list[int] = []
    model.blocks[-1].register_forward_hook(lambda _m, _i, out: seen.append(out.shape[1]))  # type: ignore[index, union-attr]
    model(torch.randn(B, 3, 8, 8))
    maps = va.attention_maps(model, torch.randn(B, 3, 8, 8))
    assert seen == [1, 5]
    assert maps["blocks.1.attn"].shape == (B, 3, 5, 5)
