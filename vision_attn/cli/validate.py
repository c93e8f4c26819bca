"""``vision-attn validate``: accuracy or average precision of a checkpoint on the validation split."""

from __future__ import annotations


def run(argv: list[str]) -> int:
    """Print ``val/acc`` or ``val/ap``, and ``val/loss``; see :mod:`vision_attn.cli.evaluate`."""
    from vision_attn.cli.evaluate import evaluate

    return evaluate("validate", argv)
