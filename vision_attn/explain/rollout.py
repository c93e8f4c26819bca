"""Attention through all layers: rollout and flow (Abnar and Zuidema 2020, arXiv 2005.00928).

Raw weights say how one layer mixes the tokens it is given, which are mixtures themselves by then. Rollout multiplies
the layers, with the residual connection as half of each; flow asks how much could pass if weights were pipes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.explain.chain import Chain, chain_of
from vision_attn.explain.maps import Images

CAPACITY = 2**30  # of a pipe of weight 1: flows are computed in whole numbers, of 32 bits
LARGEST = 4_000_000  # pipes of a flow
EXACT = 1e-6  # a flow that misses its upper bound by less is the largest


def rollout(model: nn.Module, images: Images, *, queries: list[int] | None = None) -> Tensor:
    """Attention rollout: the mean over heads of each layer, half of it the residual connection, multiplied up.

    Rows of attention that do not sum to 1 (normalizers ``bernoulli`` and ``linear_chain``) are divided by their sum, as
    in the paper. The maps of a Performer are implied ones, see ``implied_layers``, and so is what follows from them.

    Args:
        model: a ViT, CCT or Swin; left as it is.
        images: (B, C, H, W), normalized.
        queries: tokens after the last layer whose rows are wanted; by default one row, what the head reads (the class
            token, the last token, the mean, or the weights of its pool).

    Returns:
        (B, rows, columns) of patches, or (B, Q, rows, columns) for queries.

    Raises:
        UserError: a model of another kind, one with Linformer (its implied maps have negative entries), or no such
            token.
    """
    with torch.no_grad(), chain_of(model, images) as chain:
        start = None if queries is None else _rows(chain, queries)
        found = chain.follow(lambda name, rows: _through(chain, name, rows), start)
    return found[:, 0] if queries is None else found


def _rows(chain: Chain, queries: list[int]) -> Tensor:
    n = chain.readout.shape[-1]
    bad = [q for q in queries if not -n <= q < n]
    if bad:
        raise UserError(f"there is no token {bad[0]} after the last layer: it has {n}, 0 to {n - 1}.")
    return torch.eye(n, device=chain.readout.device)[queries].expand(len(chain.readout), -1, -1)


def _through(chain: Chain, name: str, rows: Tensor) -> Tensor:
    """Rows (B, Q, N) times half attention, half residual connection."""
    mixed = torch.zeros_like(rows)
    for start, mean in _means(chain, name):
        mixed += rows[..., start : start + mean.shape[1]] @ mean
    return (mixed + rows) / 2


def _means(chain: Chain, name: str) -> Iterator[tuple[int, Tensor]]:
    """(B, n, N) means over heads, some rows at a time; rows sum to 1."""
    for start, weights in chain.run.pieces(name):
        mean = weights.mean(1)
        yield start, mean / mean.sum(-1, keepdim=True).clamp_min(1e-12)


def flow(model: nn.Module, images: Images) -> Tensor:
    """Attention flow: the most that can pass from each patch to what the head reads, weights being capacities.

    One maximum flow for each patch of each image, over a graph with N² pipes for every layer, half of each node's
    capacity being its residual connection. For 12 layers and 196 patches that takes 6 s for each image on one core of
    an AMD EPYC, and 21 s where attention is very sharp (one run each on a busy machine; 23 to 27 s were all layers
    searched for every patch). Time grows with the third power of the number of patches.

    Deep models have little to show here: between its ends the graph has room for many times what can enter it, so that
    the flow is limited by the patch's own column of the first layer, or by the head, and is then 1 for all. Rollout
    does not saturate. As in ``rollout``, rows are made to sum to 1, and what follows from implied maps is implied.

    Args:
        model: a ViT or CCT; left as it is.
        images: (B, C, H, W), normalized.

    Returns:
        (B, rows, columns) of patches.

    Raises:
        UserError: a model of another kind, one whose grid changes from stage to stage, one with Linformer, or a graph
            that is too large.
    """
    with torch.no_grad(), chain_of(model, images) as chain:
        plane, n = chain.planes[-1], chain.readout.shape[-1]
        if any(p.grid != plane.grid or p.padding is not None for p in chain.planes):
            raise UserError("attention flow is for models of one grid, ViT and CCT; use rollout for a Swin.")
        pipes = len(chain.names) * n * n
        if pipes > LARGEST:
            raise UserError(
                f"attention flow over {n:,} tokens and {len(chain.names)} layers has {pipes:,} pipes (at most "
                f"{LARGEST:,}): give smaller images, or use rollout."
            )
        steps = np.zeros((len(chain.readout), len(chain.names), n, n), np.float32)
        for layer, name in enumerate(chain.names):
            for start, mean in _means(chain, name):
                steps[:, layer, start : start + mean.shape[1]] = mean.cpu().numpy() / 2
        steps[..., np.arange(n), np.arange(n)] += 0.5
        read = chain.readout[:, 0].cpu().numpy()
    found = np.stack([_flow(one, row, plane.prefix) for one, row in zip(steps, read, strict=True)])
    return torch.from_numpy(found).float().unflatten(1, plane.grid)


def _flow(steps: np.ndarray, read: np.ndarray, prefix: int) -> np.ndarray:
    """(L, N, N) capacities from tokens after a layer to tokens before it, and (N,) from the head to the last.

    Not all layers need be searched. A flow is the largest when it reaches a bound: no more can leave the head than it
    reads, and no more can reach a patch than its neighbours in the first layer are given. And what spreads from the
    head in proportion to the pipes never finds one too narrow, since rows sum to 1. So the largest flow through the
    first layers alone, from what has spread to them, will do where it reaches the bound.
    """
    steps, read = steps.astype(np.float64), read.astype(np.float64)
    layers, n, _ = steps.shape
    first = steps[0] if layers == 1 else np.minimum(steps[0], steps[1].sum(0)[:, None])
    bound = np.minimum(read.sum(), first.sum(0))
    value, left = np.zeros(n), np.arange(prefix, n)
    for searched in dict.fromkeys((-(-layers // 4), -(-layers // 2), layers)):
        spread = read
        for step in steps[searched:][::-1]:
            spread = spread @ step
        value[left] = np.minimum(_maximum_flows(steps[:searched], spread, left), bound[left])
        left = left[value[left] < bound[left] - EXACT]
    return value[prefix:]


def _maximum_flows(steps: np.ndarray, read: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """The flow to each of the tokens ``sinks`` by Dinic's algorithm."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    layers, n, _ = steps.shape
    # node 0 is the head; then the tokens after the last layer, …, at the end those before the first
    begin = 1 + np.arange(layers + 1)[:, None] * n + np.arange(n)
    tails = np.concatenate([np.zeros(n, np.int64), np.repeat(begin[:-1].ravel(), n)])
    heads = np.concatenate([begin[0], np.broadcast_to(begin[1:, None], (layers, n, n)).ravel()])
    capacity = np.rint(np.concatenate([read, steps[::-1].ravel()]) * CAPACITY).astype(np.int32)
    some = capacity > 0
    nodes = 1 + (layers + 1) * n
    graph = csr_matrix((capacity[some], (tails[some], heads[some])), shape=(nodes, nodes))
    return np.array([maximum_flow(graph, 0, int(begin[-1][sink])).flow_value / CAPACITY for sink in sinks])
