"""Attention through all layers: rollout and flow (Abnar and Zuidema 2020, arXiv 2005.00928).

Raw weights say how one layer mixes the tokens it is given, which are mixtures themselves by then. Rollout multiplies
the layers, with the residual connection as half of each; flow asks how much could pass if weights were pipes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.explain.chain import Chain, chain_of
from vision_attn.explain.maps import Images

CAPACITY = 2**20  # of a pipe of weight 1: flows are computed in whole numbers
LARGEST = 4_000_000  # pipes of a flow


def rollout(model: nn.Module, images: Images, *, queries: list[int] | None = None) -> Tensor:
    """Attention rollout: the mean over heads of each layer, half of it the residual connection, multiplied up.

    Args:
        model: a ViT, CCT or Swin; left as it is.
        images: (B, C, H, W), normalized.
        queries: tokens after the last layer whose rows are wanted; by default one row, what the head reads (the class
            token, the mean, or the weights of its pool).

    Returns:
        (B, rows, columns) of patches, or (B, Q, rows, columns) for queries.

    Raises:
        UserError: a model of another kind, or no such token.
    """
    with torch.no_grad(), chain_of(model, images) as chain:
        start = None if queries is None else _rows(chain, queries)
        found = chain.follow(lambda name: _step(chain, name), start)
    return found[:, 0] if queries is None else found


def _rows(chain: Chain, queries: list[int]) -> Tensor:
    n = chain.readout.shape[-1]
    bad = [q for q in queries if not -n <= q < n]
    if bad:
        raise UserError(f"there is no token {bad[0]} after the last layer: it has {n}, 0 to {n - 1}.")
    return torch.eye(n, device=chain.readout.device)[queries].expand(len(chain.readout), -1, -1)


def _step(chain: Chain, name: str) -> Tensor:
    """(B, N, N): half attention, half residual connection; rows sum to 1."""
    mean = chain.run.weights(name).mean(1)
    return mean.mul_(0.5).add_(torch.eye(mean.shape[-1], device=mean.device), alpha=0.5)


def flow(model: nn.Module, images: Images) -> Tensor:
    """Attention flow: the most that can pass from each patch to what the head reads, weights being capacities.

    One maximum flow for each patch of each image, over a graph with N² pipes for every layer, half of each node's
    capacity being its residual connection. Time grows with the third power of the number of patches.

    Args:
        model: a ViT or CCT; left as it is.
        images: (B, C, H, W), normalized.

    Returns:
        (B, rows, columns) of patches.

    Raises:
        UserError: a model of another kind, one whose grid changes from stage to stage, or a graph that is too large.
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
        steps = torch.stack([_step(chain, name) for name in chain.names], 1).cpu().numpy()  # (B, L, N, N)
        read = chain.readout[:, 0].cpu().numpy()
    found = np.stack([_flow(one, row, plane.prefix) for one, row in zip(steps, read, strict=True)])
    return torch.from_numpy(found).float().unflatten(1, plane.grid)


def _flow(steps: np.ndarray, read: np.ndarray, prefix: int) -> np.ndarray:
    """(L, N, N) capacities from tokens after a layer to tokens before it, and (N,) from the head to the last."""
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
    return np.array([maximum_flow(graph, 0, int(sink)).flow_value / CAPACITY for sink in begin[-1][prefix:]])
