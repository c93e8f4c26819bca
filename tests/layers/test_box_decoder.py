"""The decoder of boxes equals DAB-DETR's by value, and knows rows from columns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import DabDetrConfig
from transformers.models.dab_detr.modeling_dab_detr import DabDetrDecoder

from vision_attn.layers.box_bias import BoxBias
from vision_attn.layers.box_decoder import LIMIT, MLP, BoxDecoder, Memory, Queries
from vision_attn.layers.sine import box_waves, grid_waves

D, H, L, B, N, ROWS, COLUMNS = 24, 3, 3, 2, 5, 7, 11
NAMES = {
    "self_attn.self_attn_query_content_proj": "self_attn.q",
    "self_attn.self_attn_query_pos_proj": "self_attn.q_pos",
    "self_attn.self_attn_key_content_proj": "self_attn.k",
    "self_attn.self_attn_key_pos_proj": "self_attn.k_pos",
    "self_attn.self_attn_value_proj": "self_attn.v",
    "self_attn.self_attn.output_proj": "self_attn.proj",
    "self_attn.self_attn_layer_norm": "norm1",
    "cross_attn.cross_attn_query_content_proj": "cross_attn.q",
    "cross_attn.cross_attn_query_pos_proj": "cross_attn.q_content_pos",
    "cross_attn.cross_attn_query_pos_sine_proj": "cross_attn.q_pos",
    "cross_attn.cross_attn_key_content_proj": "cross_attn.k",
    "cross_attn.cross_attn_key_pos_proj": "cross_attn.k_pos",
    "cross_attn.cross_attn_value_proj": "cross_attn.v",
    "cross_attn.cross_attn.output_proj": "cross_attn.proj",
    "cross_attn.cross_attn_layer_norm": "norm2",
    "mlp.final_layer_norm": "norm3",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "layernorm": "norm",
    "ref_point_head": "query_head",
    "query_scale": "query_scale",
    "ref_anchor_head": "size_head",
}


def ours_of(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in theirs.items():
        for name, own in NAMES.items():
            if f"{name}." in key and (key.startswith(f"{name}.") or f".{name}." in key):
                found[key.replace(f"{name}.", f"{own}.")] = value
                break
        else:
            raise AssertionError(key)
    return found


@pytest.mark.parametrize("refine", [False, True])
def test_the_decoder_equals_dab_detrs(refine):
    """Waves of the boxes, their weights by width and height, scaling by the content, and refined boxes."""
    torch.manual_seed(5)
    config = DabDetrConfig(
        hidden_size=D,
        decoder_layers=L,
        decoder_attention_heads=H,
        decoder_ffn_dim=2 * D,
        activation_function="relu",
        dropout=0.0,
        attn_implementation="eager",
    )
    peer = DabDetrDecoder(config).double().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    ours = BoxDecoder(
        D, H, L, reference="box", refine=refine, conditional=True, modulate=True, pre_norm=False, act="relu",
        mlp_ratio=2.0,
    ).double().eval()  # fmt: skip
    ours.load_state_dict(ours_of(peer.state_dict()))
    head = MLP(D, D, 4, 3).double()
    if refine:  # theirs takes what is not normalized
        peer.bbox_embed = nn.Sequential(peer.layernorm, head)
    content, tokens = torch.randn(B, N, D).double(), torch.randn(B, ROWS * COLUMNS, D).double()
    boxes = torch.cat([0.2 + 0.6 * torch.rand(B, N, 2), 0.1 + 0.5 * torch.rand(B, N, 2)], -1).double()
    keep = torch.ones(1, ROWS, COLUMNS, dtype=torch.bool)
    position = grid_waves(keep, D, dtype=torch.float64)
    with torch.no_grad():
        expected = peer(content, tokens, None, position.expand(B, -1, -1), boxes.logit())
        found, logits = ours(Queries(content, None, boxes.logit()), Memory(tokens, position, keep), head)
    torch.testing.assert_close(found, expected.intermediate_hidden_states, rtol=1e-4, atol=1e-4)
    if refine:
        references = expected.reference_points[1:]
        torch.testing.assert_close(logits[:-1].sigmoid(), references, rtol=1e-4, atol=1e-4)
        assert (references[0] - boxes).abs().max() > 0.05
    swapped = Queries(content, None, boxes[..., [0, 1, 3, 2]].logit())  # the comparison can tell width from height
    with torch.no_grad():
        other = ours(swapped, Memory(tokens, position, keep), head)[0]
    assert (other - found).abs().max() > 1e-2


def test_waves_of_boxes_have_the_row_first():
    boxes = torch.rand(B, N, 4, dtype=torch.float64)
    x, y, w, h = (box_waves(boxes[..., [i, i]], D)[..., : D // 2] for i in range(4))
    torch.testing.assert_close(box_waves(boxes, D), torch.cat([y, x, w, h], -1))
    torch.testing.assert_close(box_waves(boxes[..., :2], D), torch.cat([y, x], -1))


def test_box_bias_follows_the_paper():
    """Rows are scored by top and bottom, columns by left and right; every token by the sum."""
    torch.manual_seed(0)
    module = BoxBias(H, hidden_dim=13).double()
    boxes = torch.cat([torch.rand(B, N, 2), 0.1 + 0.4 * torch.rand(B, N, 2)], -1).double()
    rows, columns = torch.rand(B, ROWS).double(), torch.rand(B, COLUMNS).double()
    found = module(boxes, rows, columns)
    assert found.shape == (B, H, N, ROWS * COLUMNS)

    def score(mlp: nn.Module, at: float, low: float, high: float) -> torch.Tensor:
        gaps = [8 * (at - low), 8 * (at - high)]
        logs = [math.copysign(math.log2(abs(gap) + 1) / 3, gap) for gap in gaps]
        return mlp(torch.tensor(logs, dtype=torch.float64))

    for b in range(B):
        for n in range(N):
            x, y, w, h = boxes[b, n].tolist()
            for r in range(ROWS):
                for c in range(COLUMNS):
                    down = score(module.rows, float(rows[b, r]), y - h / 2, y + h / 2)
                    across = score(module.columns, float(columns[b, c]), x - w / 2, x + w / 2)
                    torch.testing.assert_close(found[b, :, n, r * COLUMNS + c], down + across)


@pytest.mark.parametrize("reference", ["point", "box"])
@pytest.mark.parametrize("depth", [1, 2])
def test_whatever_wants_a_gradient_has_one(reference, depth):
    """Also where there is one layer, whose query positions are scaled by nothing: several processes must agree."""
    box = {"modulate": True, "refine": True, "box_bias": True} if reference == "box" else {}
    decoder = BoxDecoder(D, H, depth, reference=reference, conditional=True, **box)
    assert any(key.startswith("query_scale.") for key in decoder.state_dict())  # checkpoints have it
    keep = torch.ones(1, ROWS, COLUMNS, dtype=torch.bool)
    memory = Memory(torch.randn(B, ROWS * COLUMNS, D), grid_waves(keep, D), keep)
    at = torch.randn(1, N, 4) if reference == "box" else None
    queries = Queries(torch.randn(B, N, D), None if reference == "box" else torch.randn(1, N, D), at)
    found, boxes = decoder(queries, memory, MLP(D, D, 4, 3))
    (found.square().sum() + boxes.square().sum()).backward()
    lost = [key for key, p in decoder.named_parameters() if p.requires_grad and p.grad is None]
    assert not lost


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("size", [-12.0, -60.0, 25.0])
def test_a_reference_far_out_is_one_at_the_limit(refine, size):
    """Whoever gives it: positions stay of a magnitude, and a learned one has a gradient by which it can come back."""
    torch.manual_seed(0)
    decoder = BoxDecoder(D, H, L, reference="box", refine=refine, conditional=True, modulate=True, box_bias=True)
    head = MLP(D, D, 4, 3, autocast=False)
    keep = torch.ones(1, ROWS, COLUMNS, dtype=torch.bool)
    memory = Memory(torch.randn(B, ROWS * COLUMNS, D), grid_waves(keep, D), keep)
    content = torch.randn(B, N, D)
    results = []
    for at in (size, math.copysign(LIMIT, size)):
        reference = torch.tensor([0.5, -1.5, at, at]).expand(1, N, 4).clone().requires_grad_()
        found, boxes = decoder(Queries(content, None, reference), memory, head)
        (gradient,) = torch.autograd.grad(boxes.sigmoid().sum() + found.square().sum(), reference)
        assert gradient.isfinite().all()
        assert (gradient[..., 2:] != 0).all()
        results.append((found, boxes, gradient))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_boxes_are_not_rounded_under_autocast(dtype):
    """Those that give logits of boxes; all others are as fast as the precision makes them."""
    torch.manual_seed(0)
    head, tokens = MLP(D, D, 4, 3, autocast=False), torch.randn(B, N, D, dtype=dtype)
    with torch.autocast("cpu", dtype):
        found, rounded = head(tokens), MLP(D, D, 4, 3)(tokens)
    torch.testing.assert_close(found, head(tokens.float()), rtol=0, atol=0)
    assert rounded.dtype == dtype
    assert found.to(dtype).float().sub(found).abs().max() > 0
    decoder = BoxDecoder(D, H, 1, reference="point", conditional=True)
    boxed = BoxDecoder(D, H, 1, reference="box", refine=True)
    keep = torch.ones(1, ROWS, COLUMNS, dtype=torch.bool)
    memory = Memory(torch.randn(B, ROWS * COLUMNS, D), grid_waves(keep, D), keep)
    position, reference = torch.randn(1, N, D), torch.randn(1, N, 4)
    with torch.autocast("cpu", dtype):
        at_points, points = decoder(Queries(torch.randn(B, N, D), position), memory, head)
        at_boxes, boxes = boxed(Queries(torch.randn(B, N, D), None, reference), memory, head)
    expected = head(at_points.float())
    expected = torch.cat([expected[..., :2] + decoder.point_head(position), expected[..., 2:]], -1)
    torch.testing.assert_close(points, expected, rtol=0, atol=0)
    torch.testing.assert_close(boxes, reference + head(at_boxes.float()), rtol=0, atol=0)
