"""The words by which a user chooses a mechanism: the same in Python, in a recipe and on the command line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from vision_attn.attention.positions import LAYER_POSITIONS, TOKEN_POSITIONS

LOW_RANK = ("linformer", "performer")
"""Words for ``pattern`` that stand for an approximation of all pairs rather than a choice of pairs."""

SCORE_OPTIONS = ("temperature", "max_keys", "hidden")
PATTERN_OPTIONS = (
    "window",
    "shift",
    "stride",
    "num_global",
    "num_random",
    "block_size",
    "seed",
    "rank",
    "features",
    "redraw",
)


@dataclasses.dataclass
class AttentionConfig:
    """What ``attention={...}`` may say. ``None`` keeps the model's own default.

    Attributes:
        score: how a query is compared with a key; see ``vision_attn.attention.SCORES``.
        temperature: of the ``cosine`` score: a number, or ``learned``.
        max_keys: of the ``location`` score: one learned row per key position, for so many keys.
        hidden: of the ``additive`` and ``concat`` scores: their hidden width.
        normalizer: how scores become weights; see ``vision_attn.attention.NORMALIZERS``.
        pattern: which pairs may meet; see ``vision_attn.attention.PATTERNS``, and ``linformer`` and ``performer``.
        window: radius of ``window``, ``window_2d`` and ``longformer``: tokens on each side. Of ``shifted_windows`` the
            side of a window.
        shift: of ``shifted_windows``: rows and columns by which the windows are moved.
        stride: of ``strided``.
        num_global: of ``longformer`` and ``bigbird``: global tokens beside class and register tokens.
        num_random: of ``bigbird``: random blocks per block of queries.
        block_size: of ``bigbird``.
        seed: of what is drawn: ``bigbird``'s blocks, ``performer``'s features.
        rank: of ``linformer``: keys are shortened to so many.
        features: of ``performer``: random features per head.
        redraw: of ``performer``: training steps after which the features are drawn anew; 0 is never.
        position: how tokens learn where they are; see ``vision_attn.attention.POSITIONS``.
        num_kv_heads: key/value heads shared by the query heads (Ainslie et al. 2023, arXiv 2305.13245);
            must divide the number of heads.
        kv_heads: another word for ``num_kv_heads``.
        qk_norm: normalize queries and keys per head before the score (Dehghani et al. 2023, arXiv 2302.05442).
        tie_kv: the keys are the values.
        two_step: a second projection per head after the first.
        kernel: who does the arithmetic: ``auto`` or a name of ``vision_attn.attention.KERNELS``.
        dropout: probability of dropping an attention weight in training, 0 ≤ p < 1.
    """

    score: str | None = None
    temperature: float | str | None = None
    max_keys: int | None = None
    hidden: int | None = None
    normalizer: str | None = None
    pattern: str | None = None
    window: int | None = None
    shift: int | None = None
    stride: int | None = None
    num_global: int | None = None
    num_random: int | None = None
    block_size: int | None = None
    seed: int | None = None
    rank: int | None = None
    features: int | None = None
    redraw: int | None = None
    position: str | None = None
    num_kv_heads: int | None = None
    kv_heads: int | None = None
    qk_norm: bool | None = None
    tie_kv: bool | None = None
    two_step: bool | None = None
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
                raise ValueError(f"attention has no option {key!r}.{_near(key, known)} It takes: {', '.join(known)}.")
        return cls(**value)

    def chosen(self) -> dict[str, Any]:
        """Only what was chosen, as plain types.

        Raises:
            ValueError: ``kv_heads`` and ``num_kv_heads`` contradict each other.
        """
        given = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        if "kv_heads" in given:
            heads = given.pop("kv_heads")
            if given.setdefault("num_kv_heads", heads) != heads:
                raise ValueError(f"kv_heads={heads} and num_kv_heads={self.num_kv_heads} are one thing; give one")
        return given

    def for_layer(self) -> dict[str, Any]:
        """What an ``Attention`` layer takes; a position that is added to the tokens is the model's business."""
        given = self.chosen()
        if given.get("position") in TOKEN_POSITIONS:
            del given["position"]
        return given

    def for_tokens(self, default: str) -> str:
        """The position to be added to the tokens: none where the position acts inside the layers."""
        if self.position is None:
            return default
        return "none" if self.position in LAYER_POSITIONS else self.position


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of an ``Attention`` layer by whom they belong to: the score, the pattern.

    Raises:
        ValueError: a keyword that belongs to nobody.
    """
    known = (*SCORE_OPTIONS, *PATTERN_OPTIONS)
    for key in options:
        if key not in known:
            raise ValueError(f"an attention layer has no option {key!r}.{_near(key, known)}")
    score = {key: value for key, value in options.items() if key in SCORE_OPTIONS}
    return score, {key: value for key, value in options.items() if key in PATTERN_OPTIONS}


def _near(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""
