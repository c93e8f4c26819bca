"""Parsing for the small verbs: light imports, and complaints in one line."""

from __future__ import annotations

import re

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from vision_attn.errors import UserError, closest


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
