"""Keeps the chatter of the libraries below us away from users; errors and our own warnings still show."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

_CHATTER = (
    r".*does not have many workers.*",
    r".*number of training batches .* is smaller than the logging interval.*",
    r".*available but not used.*",
    r".*module\(s\) in eval mode.*",
    r".*args parameter is intended to run from within Python.*",
    r".*saving a checkpoint outside the 'fit' stage.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*sync_dist=True.*",
    r".*Tensor Cores.*",
    r".*lr_scheduler\.step\(\).*",
    r".*srun.*",
    r".*set_epoch.*",
    r".*across ranks is zero.*",
)


@contextlib.contextmanager
def quiet(enabled: bool = True) -> Iterator[None]:
    """Filter known remarks of Lightning, torch and jsonargparse inside the ``with`` block."""
    if not enabled:
        yield
        return
    os.environ.setdefault("POSSIBLE_USER_WARNINGS", "off")  # Lightning's own switch for advice in form of warnings
    disabled = logging.root.manager.disable
    # not by the level of Lightning's loggers: importing Lightning sets that anew
    logging.disable(logging.INFO)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        for pattern in _CHATTER:
            warnings.filterwarnings("ignore", message=f"(?s){pattern}")
        try:
            yield
        finally:
            logging.disable(disabled)
