"""``vision-attn test``: accuracy or average precision of a checkpoint on the test split."""

from __future__ import annotations


def run(argv: list[str]) -> int:
    """Print ``test/acc`` or ``test/ap``, and ``test/loss``; see :mod:`vision_attn.cli.evaluate`."""
    from vision_attn.cli.evaluate import evaluate

    return evaluate("test", argv)
