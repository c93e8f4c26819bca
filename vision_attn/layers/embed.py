"""Images into tokens."""

from __future__ import annotations

from torch import Tensor, nn

from vision_attn.errors import UserError


def pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """``8`` → ``(8, 8)``; two numbers stay as they are."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def check_divisible(img_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """The grid (rows, columns) of patches of an image.

    Raises:
        UserError: the patch size does not divide the image size.
    """
    if img_size[0] % patch_size[0] or img_size[1] % patch_size[1]:
        fits = [p for p in range(2, min(img_size) + 1) if not img_size[0] % p and not img_size[1] % p]
        raise UserError(
            f"patch_size {patch_size[0]}×{patch_size[1]} does not divide the image size {img_size[0]}×{img_size[1]}; "
            f"patch sizes that do: {', '.join(map(str, fits)) or 'none but 1'}"
        )
    return img_size[0] // patch_size[0], img_size[1] // patch_size[1]


class PatchEmbed(nn.Module):
    """Cuts the image into patches and projects each one: (B, C, H, W) → (B, H/p · W/p, D).

    The convolution with stride p is the same as unfolding and a linear layer
    (Dosovitskiy et al. 2020, arXiv 2010.11929).
    """

    def __init__(self, patch_size: int | tuple[int, int], in_chans: int, embed_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.patch_size = pair(patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, self.patch_size, stride=self.patch_size, bias=bias)

    def grid(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of tokens for an image size."""
        return check_divisible(img_size, self.patch_size)

    def forward(self, x: Tensor) -> Tensor:
        self.grid((x.shape[-2], x.shape[-1]))
        return self.proj(x).flatten(2).transpose(1, 2)
