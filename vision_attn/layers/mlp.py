"""The feed-forward half of a transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}


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
