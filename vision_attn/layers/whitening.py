"""A first layer read off the data: patches of pixels, decorrelated."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class WhiteningConv(nn.Conv2d):
    """Frozen 2×2 convolution to every principal direction of a patch, each with both signs; only its bias learns.

    Jordan 2024 (arXiv 2404.00498). Until ``init_from`` has seen images it holds the cosine basis of the patch,
    which keeps all information but does not equalize it. (B, C, H, W) → (B, 8 C, H − 1, W − 1).

    Args:
        in_chans: C.
    """

    def __init__(self, in_chans: int) -> None:
        super().__init__(in_chans, 8 * in_chans, 2)
        self.weight.requires_grad_(False)
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]
        self._set(_cosine_basis(in_chans))

    @torch.no_grad()
    def _set(self, directions: Tensor) -> None:
        self.weight.copy_(torch.cat([directions, -directions]))

    @torch.no_grad()
    def init_from(self, images: Tensor, eps: float = 5e-4) -> None:
        """Makes the outputs for patches like those of ``images`` uncorrelated and of equal size.

        Args:
            images: (N, C, H, W), normalized training images; 5,000 are plenty.
            eps: added to the eigenvalues before their square roots, so that noise is not blown up.
        """
        chans = images.shape[1]
        patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1)  # (N, C, H - 1, W - 1, 2, 2)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, chans * 4)  # (P, C · 2 · 2)
        eigenvalues, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        directions = vectors.T / (eigenvalues.clamp_min(0) + eps).sqrt()[:, None]  # (C · 4, C · 4), one per row
        self._set(directions.flip(0).reshape(-1, chans, 2, 2))


def _cosine_basis(chans: int) -> Tensor:
    """Orthonormal cosine (DCT-II) basis of a (C, 2, 2) patch, (4 C, C, 2, 2).

    For three channels it is luminance, red against blue, and green against both: close to the principal
    components of natural patches, without having seen any.
    """

    def dct(n: int) -> Tensor:
        k, i = torch.arange(n)[:, None], torch.arange(n)[None, :]
        basis = torch.cos(math.pi / n * (i + 0.5) * k) * math.sqrt(2 / n)
        basis[0] /= math.sqrt(2)
        return basis

    return torch.einsum("ac,bh,dw->abdchw", dct(chans), dct(2), dct(2)).reshape(-1, chans, 2, 2)
