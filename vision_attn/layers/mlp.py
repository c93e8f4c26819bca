"""The feed-forward half of a transformer layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GeluTanh(nn.GELU):
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415), as in SigLIP."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


class QuickGelu(nn.Module):
    """x σ(1.702 x), the other approximation of that paper, with which OpenAI trained CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu_tanh": GeluTanh,
    "quick_gelu": QuickGelu,
}


def activation(name: str) -> nn.Module:
    """An activation by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; there are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


class Mlp(nn.Module):
    """Linear, activation, linear: (B, N, D) → (B, N, D), each token by itself."""

    def __init__(self, dim: int, hidden_dim: int, *, act: str = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = activation(act)
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class SwiGlu(nn.Module):
    """SiLU(x W₁) · (x W₂), then a linear layer: (B, N, D) → (B, N, D) (Shazeer 2020, arXiv 2002.05202).

    W₁ and W₂ are the two halves of one matrix, ``fc1``, as DINOv2 and timm keep them.

    Args:
        dim: D.
        hidden_dim: rows of ``fc1``: the product has half as many entries.
        dropout: after the product and after the last layer.

    Raises:
        ValueError: ``hidden_dim`` is odd.
    """

    def __init__(self, dim: int, hidden_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if hidden_dim % 2:
            raise ValueError(f"swiglu cuts its hidden width in two, and {hidden_dim} is odd; choose another mlp_ratio")
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.SiLU()
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden_dim // 2, dim)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.drop2(self.fc2(self.drop1(self.act(gate) * value)))


def make_mlp(kind: str, dim: int, hidden_dim: int, *, act: str = "gelu", dropout: float = 0.0) -> nn.Module:
    """``mlp`` or ``swiglu``, which has an activation of its own.

    Raises:
        ValueError: another kind.
    """
    if kind == "mlp":
        return Mlp(dim, hidden_dim, act=act, dropout=dropout)
    if kind == "swiglu":
        return SwiGlu(dim, hidden_dim, dropout=dropout)
    raise ValueError(f"mlp={kind!r}: choose mlp or swiglu")
