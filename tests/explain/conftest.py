"""What the tests of this folder share."""

from __future__ import annotations

import contextlib

import pytest

from vision_attn.explain import figures


class Drawn:
    """Figures as they were when they were saved: what stands above them, and their axes, by the name of the file."""

    def __init__(self, monkeypatch):
        self.found = {}
        original = figures.figure

        @contextlib.contextmanager
        def spy(path, *args, **kwargs):
            with original(path, *args, **kwargs) as (drawn, axes):
                yield drawn, axes
                self.found[path.name] = " ".join(drawn.get_suptitle().split()), axes

        monkeypatch.setattr(figures, "figure", spy)

    def __getitem__(self, name):
        return self.found[name]


@pytest.fixture
def drawn(monkeypatch):
    return Drawn(monkeypatch)
