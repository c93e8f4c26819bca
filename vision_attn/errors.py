"""Errors that a user can cause, and the words that help to mend them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """Something the caller can mend: the message says what is wrong, where, and what to do.

    The command line prints the message alone and exits with 2; ``--debug`` shows the traceback.
    """


def closest(name: str, candidates: Iterable[str], n: int = 3) -> str:
    """A hint naming the candidates spelt most like ``name``, or an empty string.

    Args:
        name: what was asked for.
        candidates: what exists.
        n: how many names to offer at most.

    Returns:
        `` Did you mean a, b?`` with a leading space, ready to be appended to a message.
    """
    near = difflib.get_close_matches(name, list(candidates), n=n, cutoff=0.5)
    return f" Did you mean {', '.join(near)}?" if near else ""


def first_line(error: BaseException, most: int | None = None) -> str:
    """The first line of what an error says, its type where it says nothing.

    Args:
        error: of a library, whose message may be pages long.
        most: characters of it.
    """
    return str(error).strip().split("\n")[0][:most] or type(error).__name__


def refuse_nan(fine: Sequence[int], names: Sequence[str] | None) -> None:
    """Refuse the predictions of a batch unless all are numbers.

    Args:
        fine: of every image, whether its are.
        names: of the images; None for their places.

    Raises:
        UserError: naming the images.
    """
    if all(fine):
        return
    bad = [i for i, ok in enumerate(fine) if not ok]
    called = [names[i] if names is not None else f"image {i} of the batch" for i in bad[:3]]
    raise UserError(
        f"{', '.join(called)}{', …' * (len(bad) > 3)}: predictions are NaN. The weights have probably diverged: try an "
        "earlier checkpoint."
    )
