"""Lines of text in which Chinese characters are two columns wide, and words on figures in a font that has them."""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Iterator

WIDTH = 96  # columns
# a Chinese character with the punctuation that must not begin a line, or a run of anything else, or blanks
_PIECES = re.compile(
    r"[（《「“]*[\u2e80-\u9fff\uf900-\ufaff][，。；：、）》」”？！…]*"
    r"|[（《「]*[^\s\u2e80-\u9fff\uf900-\ufaff（《「]+[，。；：、）》」”？！…]*|[（《「]+|\s+"
)
_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "Source Han Sans CN",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans GB",
    "SimHei",
    "Droid Sans Fallback",
)


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def wrap(text: str, width: int = WIDTH) -> str:
    """Paragraphs, one line each, in lines of so many columns; lines that begin with blanks stay as they are."""
    return "\n".join(line if line.startswith(" ") else _fill(line, width) for line in text.split("\n"))


def _fill(paragraph: str, width: int) -> str:
    lines, line = [], ""
    for piece in _PIECES.findall(paragraph):
        if line and columns(line) + columns(piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece if line or piece.strip() else ""
    return "\n".join([*lines, line.rstrip()])


class Say:
    """Picks the words of a figure: Chinese where they are asked for and a font has them, English elsewhere.

    Args:
        language: ``en`` or ``zh``.

    Attributes:
        font: the Chinese font in use; None for English.
        lacking: whether Chinese was asked for and no font has it.
    """

    def __init__(self, language: str = "en") -> None:
        self.font = _chinese_font() if language == "zh" else None
        self.lacking = language == "zh" and self.font is None

    def __call__(self, en: str, zh: str) -> str:
        return zh if self.font else en

    @contextlib.contextmanager
    def fonts(self) -> Iterator[None]:
        """Figures drawn inside the block have the font."""
        import matplotlib

        with matplotlib.rc_context({"font.family": [self.font, "DejaVu Sans"]} if self.font else {}):
            yield


def _chinese_font() -> str | None:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return next((name for name in _FONTS if name in installed), None)
