"""``vision-attn learn``: short lessons on attention, their numbers computed on the spot."""

from __future__ import annotations

import sys
from pathlib import Path

from vision_attn.cli.arguments import make_parser, parse
from vision_attn.errors import UserError


def run(argv: list[str]) -> int:
    """Print the lessons named on the command line, or all of them.

    Raises:
        UserError: there is no such lesson or language, or pictures cannot be written there.
    """
    parser = make_parser("learn", "Short lessons on attention whose numbers are computed while you read.")
    parser.add_argument("lessons", nargs="*", help="names of lessons; all by default")
    parser.add_argument("--lang", type=str, default="en", help="en or zh")
    parser.add_argument("--draw", type=str | None, default=None, help="folder to draw the lessons' pictures into")
    parser.add_argument("--list", action="store_true", help="only list the lessons")
    options = parse(parser, argv)

    from vision_attn.lessons import LESSONS, find
    from vision_attn.lessons.registry import check_language

    check_language(options.lang)
    chosen = [find(name) for name in options.lessons] or list(LESSONS.values())
    if options.list:
        width = max(len(lesson.name) for lesson in chosen)
        print("\n".join(f"{lesson.name:<{width}}  {lesson.texts[options.lang].title}" for lesson in chosen))
        return 0
    if options.draw is not None and Path(options.draw).exists() and not Path(options.draw).is_dir():
        raise UserError(f"--draw {options.draw} is a file; name a folder.")
    from vision_attn.lessons.wording import Say

    say = Say(options.lang) if options.draw else None
    if say is not None and say.lacking:
        print("没有找到中文字体，图中的文字用英文（可安装 fonts-noto-cjk）。", file=sys.stderr)
    for number, lesson in enumerate(chosen):
        numbers = lesson.compute()
        print(("\n\n" if number else "") + lesson.tell(options.lang, numbers), flush=True)
        if say is not None:
            path = Path(options.draw) / f"{lesson.name}.png"
            with say.fonts():
                lesson.draw(numbers, path, say)
            print(f"\n→ {path}")
    return 0
