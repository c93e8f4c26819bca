"""Lessons by name: what they compute, say and draw.

A lesson is a function without arguments that computes numbers with the core and the models, and a text in every
language with places for them. The texts correct four posts about attention where these are wrong.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from vision_attn.errors import UserError, closest
from vision_attn.lessons.wording import Say, wrap

Numbers: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[[Numbers, Path, Say], None]

LANGUAGES = {"en": "English", "zh": "中文"}

POSTS: dict[str, dict[str, str]] = {
    "en": {
        "csdn": "“梳理一下注意力机制” (CSDN)",
        "principles": "“Self-attention 原理解析”",
        "mechanism": "“注意力机制” (study notes)",
        "attentions": "“Attentions” (Shihanmax's blog)",
    },
    "zh": {
        "csdn": "《梳理一下注意力机制》（CSDN）",
        "principles": "《Self-attention 原理解析》",
        "mechanism": "《注意力机制》（学习笔记）",
        "attentions": "《Attentions》（Shihanmax 的博客）",
    },
}
"""The posts that the lessons follow, by the word that stands for each in a text."""

_HEADINGS = {"en": ("Where the sources are wrong", "Proof"), "zh": ("原文有误", "验证")}


class _Fill(string.Formatter):
    """``str.format`` that prints a difference of exactly zero as 0, not as 0e+00."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "0" if format_spec == ".0e" and value == 0 else str(super().format_field(value, format_spec))


_FILL = _Fill()

LESSONS: dict[str, Lesson] = {}
"""All lessons in the order in which they are best read."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A lesson in one language. ``{name}`` and ``{name[0]:.3f}`` are places for numbers, ``{csdn}`` for a post.

    Attributes:
        title: one line.
        body: paragraphs, one line each; lines that begin with blanks are printed as they are.
        wrong: what a source says that is not so, and what is; empty where there is nothing to correct.
    """

    title: str
    body: str
    wrong: str = ""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """One lesson.

    Attributes:
        name: as on the command line.
        compute: its numbers.
        texts: language → text.
        draw: its picture.
        proofs: certificates of ``vision-attn check attention`` that prove what it says.
    """

    name: str
    compute: Callable[[], Numbers]
    texts: Mapping[str, Text]
    draw: Draw
    proofs: tuple[str, ...] = ()

    def tell(self, language: str = "en", numbers: Numbers | None = None) -> str:
        """The whole lesson, ready to be printed.

        Args:
            language: see ``LANGUAGES``.
            numbers: what ``compute`` gave; computed here when None.

        Raises:
            UserError: no such language.
        """
        check_language(language)
        text, (wrong, proof) = self.texts[language], _HEADINGS[language]
        values = {**POSTS[language], **(self.compute() if numbers is None else numbers)}
        colon = "：" if language == "zh" else ": "
        parts = [f"━━ {text.title}  [{self.name}]", wrap(_FILL.format(text.body.strip(), **values))]
        if text.wrong:
            parts.append(wrap(f"{wrong}{colon}{_FILL.format(text.wrong.strip(), **values)}"))
        if self.proofs:
            parts.append(f"{proof}{colon}vision-attn check attention --ids {','.join(self.proofs)}")
        return "\n\n".join(parts)


def lesson(
    name: str, *, en: Text, zh: Text, draw: Draw, proofs: tuple[str, ...] = ()
) -> Callable[[Callable[[], Numbers]], Callable[[], Numbers]]:
    """Registers what computes the numbers of a lesson under its name, with its texts and its picture."""

    def add(compute: Callable[[], Numbers]) -> Callable[[], Numbers]:
        LESSONS[name] = Lesson(name, compute, {"en": en, "zh": zh}, draw, proofs)
        return compute

    return add


def find(name: str) -> Lesson:
    """A lesson by name.

    Raises:
        UserError: there is none, with the names that are near and all there are.
    """
    if name not in LESSONS:
        raise UserError(f"there is no lesson {name!r}.{closest(name, LESSONS)} There are: {', '.join(LESSONS)}.")
    return LESSONS[name]


def check_language(language: str) -> None:
    """Refuses a language that there are no texts in.

    Raises:
        UserError: with the languages there are.
    """
    if language not in LANGUAGES:
        there = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        raise UserError(f"--lang {language}:{closest(language, LANGUAGES)} Lessons are in {there}.")
