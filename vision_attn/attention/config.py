"""The words by which a user chooses a mechanism: the same in Python, in a recipe and on the command line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class AttentionConfig:
    """What ``attention={...}`` may say. ``None`` keeps the model's own default.

    Attributes:
        score: how a query is compared with a key; see ``vision_attn.attention.SCORES``.
        normalizer: how scores become weights; see ``vision_attn.attention.NORMALIZERS``.
        position: how tokens learn where they are: ``learned``, ``sinusoidal`` or ``none``.
        num_kv_heads: key/value heads shared by the query heads (Ainslie et al. 2023, arXiv 2305.13245);
            must divide the number of heads.
        qk_norm: normalize queries and keys per head before the score (Dehghani et al. 2023, arXiv 2302.05442).
        kernel: who does the arithmetic: ``auto`` or a name of ``vision_attn.attention.KERNELS``.
        dropout: probability of dropping an attention weight in training, 0 ≤ p < 1.
    """

    score: str | None = None
    normalizer: str | None = None
    position: str | None = None
    num_kv_heads: int | None = None
    qk_norm: bool | None = None
    kernel: str | None = None
    dropout: float | None = None

    @classmethod
    def of(cls, value: AttentionConfig | Mapping[str, Any] | None) -> AttentionConfig:
        """Reads a dictionary, another configuration or nothing.

        Raises:
            ValueError: a key is not one of the attributes above.
        """
        if value is None:
            return cls()
        if isinstance(value, AttentionConfig):
            return value
        known = [field.name for field in dataclasses.fields(cls)]
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ValueError(f"attention has no option {key!r}.{hint} It takes: {', '.join(known)}.")
        return cls(**value)

    def chosen(self) -> dict[str, Any]:
        """Only what was chosen, as plain types."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    def for_layer(self) -> dict[str, Any]:
        """What an ``Attention`` layer takes; a position that is added to the tokens is the model's business."""
        return {key: value for key, value in self.chosen().items() if key != "position"}
