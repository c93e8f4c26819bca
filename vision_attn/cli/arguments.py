"""What the small verbs share: parsing with complaints in one line, tables, JSON; light imports."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from vision_attn.errors import UserError, closest

if TYPE_CHECKING:
    from rich.console import Console


def make_parser(verb: str, description: str) -> ArgumentParser:
    """An empty parser for ``vision-attn VERB``."""
    return ArgumentParser(prog=f"vision-attn {verb}", description=description, exit_on_error=False, allow_abbrev=False)


def parse(parser: ArgumentParser, argv: list[str]) -> Namespace:
    """``parser.parse_args`` with near names for a misspelt option.

    Raises:
        UserError: whatever is wrong with the arguments.
    """
    try:
        return parser.parse_args(argv)
    except ArgumentError as error:
        text = " ".join(str(error).split())
        unknown = re.search(r"[Uu]nrecognized arguments?: (--[\w.-]+)", text)
        options = [name for action in parser._actions for name in action.option_strings]
        hint = closest(unknown[1], options, n=1) if unknown else ""
        raise UserError(f"{text}{hint or f' See {parser.prog} --help.'}") from error


def console(width: int = 120) -> Console:
    """Standard output for tables: as wide as the terminal, or as ``width`` columns where it is none."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(width=width, highlight=False)


def write_json(content: Any, path: str, what: str | None = None) -> None:
    """JSON to a file, or to standard output (``-``).

    Args:
        content: what :mod:`json` knows; anything else is written as its ``str``.
        path: of the file.
        what: was written, to be told on standard error once it is in the file.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
    encoding = getattr(sys.stdout, "encoding", None) if path == "-" else "utf-8"
    try:
        text.encode(encoding or "ascii")
    except UnicodeEncodeError:  # escapes say the same in any encoding
        text = json.dumps(content, indent=2, default=str)
    if path == "-":
        print(text)
        return
    from vision_attn.atomic import atomic_write_text

    atomic_write_text(path, f"{text}\n")
    if what is not None:
        print(f"{what} written to {path}", file=sys.stderr)
