"""Rows 15, 16, 24–27 and 32: what layers make of attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import causal_mask
from vision_attn.attention.normalizers import log_weights
from vision_attn.certificates.registry import (
    Setting,
    certificate,
    gap,
    gaps,
    gradients,
    holds,
)
from vision_attn.layers.decoder import DecoderLayer
from vision_attn.layers.embed import PatchEmbed
from vision_attn.layers.encoder import EncoderLayer
from vision_attn.layers.gated import GatedCrossAttention
from vision_attn.layers.pointer import Pointer
from vision_attn.layers.pooling import AttentionPool, HierarchicalPool, SequencePool
from vision_attn.training.contrastive import contrastive_loss

DIM, HEADS = 21, 3


@certificate("15", "hierarchical pooling: weights in regions times weights of regions sum to 1", kernel=True)
def hierarchy(s: Setting) -> float:
    pool, x = s.module(HierarchicalPool(DIM, (2, 3), kernel=s.kernel)), s.randn(2, 35, DIM)
    found = pool.weights(x, (5, 7))  # regions at the edges are smaller
    one = torch.ones(2, device=x.device, dtype=x.dtype)
    mixed = torch.einsum("bn,bnd->bd", found.product, x)
    return gaps((found.product.sum(1), one), (found.regions.sum(1), one), (pool(x, (5, 7)), mixed))


@certificate(
    "16", "a pointer's output is its attention: a distribution over n inputs, for any n", dtypes=(torch.float32,)
)
def pointer(s: Setting) -> float:
    errors = []
    for n in (1, 5, 23):
        layer = s.module(Pointer(11))
        queries, elements = s.randn(2, 3, 11), s.randn(2, n, 11)
        mask = torch.ones(2, 3, n, dtype=torch.bool, device=queries.device)
        out = layer(queries, elements, mask).double()  # computed in float32
        errors += [gap(out.exp().sum(-1), torch.ones_like(out[..., 0])), holds(out.shape == (2, 3, n))]
        a, b = (
            torch.einsum("bnd,ad->bna", t, w[0]) for t, w in ((queries, layer.score.query), (elements, layer.score.key))
        )
        scores = ((a[:, :, None] + b[:, None]).tanh() * layer.score.v[0]).sum(-1)
        errors.append(gap(out, log_weights(scores).double()))
    return max(errors)


def _copy_attention(ours: nn.Module, peer: nn.Module) -> None:
    """The weights of a torch attention layer into one of ours."""
    with torch.no_grad():
        for what in ("weight", "bias"):
            getattr(ours.qkv, what).copy_(getattr(peer, f"in_proj_{what}"))
            getattr(ours.proj, what).copy_(getattr(peer.out_proj, what))


def _copy_rest(ours: nn.Module, peer: nn.Module, norms: int) -> None:
    names = {"mlp.fc1": "linear1", "mlp.fc2": "linear2", **{f"norm{i}": f"norm{i}" for i in range(1, norms + 1)}}
    for mine, theirs in names.items():
        ours.get_submodule(mine).load_state_dict(peer.get_submodule(theirs).state_dict())


@certificate("24", "encoder layer, pre- and post-norm, is PyTorch's with copied weights, gradients too", kernel=True)
def encoder_layer(s: Setting) -> float:
    pairs = []
    for pre_norm in (False, True):
        peer = s.module(nn.TransformerEncoderLayer(DIM, HEADS, 34, dropout=0.0, batch_first=True, norm_first=pre_norm))
        words = {"kernel": s.kernel}
        ours = EncoderLayer(
            DIM, HEADS, mlp_ratio=34.5 / DIM, act="relu", norm_eps=1e-5, pre_norm=pre_norm, attention=words
        ).to(s.device, s.dtype)
        _copy_attention(ours.attn, peer.self_attn)
        _copy_rest(ours, peer, 2)
        x, keep = s.randn(2, 7, DIM, grad=True), torch.ones(2, 7, dtype=torch.bool, device=s.device)
        keep[1, 5:] = False
        out, expected = ours(x, mask=keep[:, None, None]), peer(x, src_key_padding_mask=~keep)
        pairs += [(out, expected), (gradients(out, x)[0], gradients(expected, x)[0])]
    return gaps(*pairs)


@certificate("25", "decoder layer, self → cross → FFN, is PyTorch's with copied weights, gradients too", kernel=True)
def decoder_layer(s: Setting) -> float:
    pairs = []
    for pre_norm in (False, True):
        peer = s.module(nn.TransformerDecoderLayer(DIM, HEADS, 34, dropout=0.0, batch_first=True, norm_first=pre_norm))
        words = {"kernel": s.kernel}
        ours = DecoderLayer(
            DIM,
            HEADS,
            mlp_ratio=34.5 / DIM,
            act="relu",
            norm_eps=1e-5,
            pre_norm=pre_norm,
            causal=True,
            attention=words,
            cross_attention=words,
        ).to(s.device, s.dtype)
        _copy_attention(ours.self_attn, peer.self_attn)
        _copy_attention(ours.cross_attn, peer.multihead_attn)
        _copy_rest(ours, peer, 3)
        x, context = s.randn(2, 7, DIM, grad=True), s.randn(2, 11, DIM, grad=True)
        out, expected = ours(x, context), peer(x, context, tgt_mask=~causal_mask(7, device=x.device))
        pairs += [(out, expected), *zip(gradients(out, x, context), gradients(expected, x, context), strict=True)]
    return gaps(*pairs)


@certificate("26", "context vector c = Σ αᵢhᵢ: pooling by a learned query", kernel=True)
def context_vector(s: Setting) -> float:
    x = s.randn(2, 7, DIM)
    pool = s.module(SequencePool(DIM, kernel=s.kernel))
    hidden = s.module(AttentionPool(DIM, hidden=13, kernel=s.kernel))
    alpha = log_weights((x @ pool.query).float() if s.dtype == torch.bfloat16 else x @ pool.query).exp().to(x.dtype)
    return gaps(
        (pool(x), torch.einsum("bn,bnd->bd", alpha, x)), (hidden(x), torch.einsum("bn,bnd->bd", hidden.weights(x), x))
    )


@certificate("26b", "the mean is pooling by a query of zeros; a class token is one-hot weights", kernel=True)
def mean_is_attention(s: Setting) -> float:
    x, pool = s.randn(2, 7, DIM), s.module(SequencePool(DIM, kernel=s.kernel), std=0.0)
    class_token_only = (torch.arange(7, device=x.device) == 0)[None]  # (1, 7): one query, seven keys
    first = s.attend(x[:, None, :1], x[:, None], x[:, None], mask=class_token_only)
    return gaps((pool(x), x.mean(1)), (first[:, 0, 0], x[:, 0]))


@certificate("27", "patch embedding: a convolution with stride p is unfolding and a linear layer")
def patch_embedding(s: Setting) -> float:
    embed, x = s.module(PatchEmbed((2, 3), 5, DIM)), s.randn(2, 5, 14, 33)
    patches = F.unfold(x, (2, 3), stride=(2, 3)).mT
    return gap(embed(x), F.linear(patches, embed.proj.weight.flatten(1), embed.proj.bias))


@certificate("27b", "one-hot vectors times a matrix of embeddings are its rows, looked up")
def lookup(s: Setting) -> float:
    table, words = s.randn(13, DIM), torch.tensor([[4, 0, 12], [7, 7, 1]], device=s.device)
    return gap(F.one_hot(words, 13).to(table.dtype) @ table, F.embedding(words, table))


@certificate("32", "contrastive loss: symmetric, ln B where embeddings say nothing, 0 for perfect ones")
def contrastive(s: Setting) -> float:
    a, b = s.randn(7, 11), s.randn(7, 11)
    same = torch.ones_like(a)
    chance, perfect = (
        contrastive_loss(same, same),
        contrastive_loss(torch.eye(7, device=a.device), torch.eye(7, device=a.device), 0.01),
    )
    return max(
        gap(contrastive_loss(a, b), contrastive_loss(b, a)),
        gap(chance, torch.full_like(chance, 7.0).log()),
        float(perfect),
    )


@certificate("32b", "gated cross-attention begins as the identity, exactly, and learns through its gates", kernel=True)
def zero_gate(s: Setting) -> float:
    layer, x, context = (
        GatedCrossAttention(DIM, HEADS, attention={"kernel": s.kernel}),
        s.randn(2, 7, DIM),
        s.randn(2, 5, DIM),
    )
    layer = layer.to(s.device, s.dtype)
    out = layer(x, context)
    moved = gradients(out, layer.attn_gate, layer.mlp_gate)
    unchanged: Tensor = out == x
    return holds(bool(unchanged.all()) and all(float(g.abs()) > 0 for g in moved))
