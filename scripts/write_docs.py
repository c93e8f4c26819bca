#!/usr/bin/env python
"""Writes the parts of docs/mechanisms.md that come from the code and from measurements, between their markers.

python scripts/write_docs.py            # write them
python scripts/write_docs.py --check    # exit code 1 where the file is not what the code says
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def first_line(thing: object) -> str:
    """The first sentence of a docstring, as a cell of a table."""
    text = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def meanings(kind: str) -> dict[str, object]:
    """Word → the function, class or object that has the docstring."""
    from vision_attn.attention import KERNELS, NORMALIZERS, SCORES
    from vision_attn.attention.linear import Linformer, Performer
    from vision_attn.attention.patterns import PATTERNS
    from vision_attn.attention.positions import LAYER_POSITIONS

    low_rank = {"linformer": Linformer, "performer": Performer}
    kernels = {name: type(kernel) for name, kernel in KERNELS.items()}
    tables = {
        "score": SCORES, "normalizer": NORMALIZERS, "pattern": {**PATTERNS, **low_rank}, "position": LAYER_POSITIONS,
        "kernel": kernels,
    }  # fmt: skip
    return dict(tables[kind])


def words() -> str:
    """Every word with the first sentence of its docstring."""
    from vision_attn.attention.compatibility import choices

    lines = []
    for kind, names in choices().items():
        found = meanings(kind)
        lines += [f"**{kind.capitalize()}**", "", "| word | what it is |", "|---|---|"]
        lines += [f"| `{name}` | {first_line(found[name]) if name in found else PLAIN[name]} |" for name in names]
        if kind == "position":
            lines += [f"| `{name}` | {text} |" for name, text in ADDED.items()]
        lines.append("")
    return "\n".join(lines)


PLAIN = {"full": "Every query meets every key.", "none": "No position inside the layer."}
ADDED = {
    "learned": "Added to the tokens: a learned table, resampled for other grids.",
    "sinusoidal": "Added to the tokens: sines and cosines of row and column.",
    "sinusoidal_1d": "Added to the tokens: sines and cosines of the place in the sequence.",
}


def compatibility() -> str:
    """One table per pair of families, with numbered reasons."""
    from vision_attn.attention.compatibility import choices, objection, pairs, with_pattern

    reasons: dict[str, int] = {}

    def cell(reason: str | None) -> str:
        if reason is None:
            return "✓"
        reason = re.sub(r"^kernel '\w+' cannot serve this request: ", "", reason)
        reason = re.sub(r"softmax(?: only)?, not '\w+'", "softmax, not this normalizer", reason)
        reason = re.sub(r"^pattern '\w+' says", "a pattern says", reason)
        return str(reasons.setdefault(reason, len(reasons) + 1))

    lines = []
    for rows, columns in (
        ("score", "kernel"), ("normalizer", "kernel"), ("pattern", "kernel"), ("position", "kernel"),
        ("score", "normalizer"), ("pattern", "normalizer"), ("pattern", "position"),
    ):  # fmt: skip
        names = choices()[columns]
        lines += [
            f"| {rows} \\ {columns} | " + " | ".join(f"`{n}`" for n in names) + " |",
            "|---" * (len(names) + 1) + "|",
        ]
        found: dict[str, list[str]] = {}
        for row, _, reason in pairs(rows, columns):
            found.setdefault(row, []).append(cell(reason))
        lines += [f"| `{row}` | " + " | ".join(cells) + " |" for row, cells in found.items()] + [""]
    uses: dict[str, Callable[[str, str], str | None]] = {
        "causal mask": lambda kind, name: objection(mask="causal", **with_pattern({kind: name})),
        "padding mask": lambda kind, name: objection(mask="padding", **with_pattern({kind: name})),
        "cross-attention": lambda kind, name: objection(cross=True, **with_pattern({kind: name})),
        "training": lambda kind, name: objection(train=True, **with_pattern({kind: name})),
        "dropout of weights": lambda kind, name: objection(train=True, dropout=0.1, **with_pattern({kind: name})),
    }
    lines += ["| mechanism | " + " | ".join(uses) + " |", "|---" * (len(uses) + 1) + "|"]
    for kind, names in choices().items():
        for name in names:
            if name not in ("full", "none") and (kind, name) != ("kernel", "favor"):
                lines.append(
                    f"| {kind} `{name}` | " + " | ".join(cell(use(kind, name)) for use in uses.values()) + " |"
                )
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items()), ""]
    return "\n".join(lines)


def costs() -> str:
    """Times, memory and exponents, as ``vision-attn benchmark attention --backward`` measured them."""
    path = DOCS / "attention_costs.json"
    if not path.exists():
        return "Not measured yet.\n"
    runs = json.loads(path.read_text(encoding="utf-8"))
    first, again = runs["first"], runs["again"]
    setting = first["setting"]
    lines = [
        f"`vision-attn benchmark attention --backward`: batch {setting['batch']}, {setting['heads']} heads of "
        f"{setting['width']}, {setting['dtype']}, {setting['threads']} threads of an AMD EPYC (AVX2), nothing else "
        f"running, median of {setting['rounds']} interleaved rounds. Neighbourhoods, ranks and features are of about "
        "128 keys. Exponents are fitted from 1,024 to 16,384 tokens; for the five that promise a linear cost "
        f"in a second run of {again['setting']['rounds']} rounds with freed memory kept by the C library, as `fit` "
        "does. (In the first run, without that, fetching pages made the exponents of time with backward 1.07 to 1.28.)",
    ]
    columns = ("mechanism", "ms at 1,024", "4,096", "16,384", "MiB at 16,384", "time ~ N^", "memory ~ N^")
    columns += ("explicit / it", "fused / it")
    for backward in (False, True):
        lines += ["", "**Forward and backward**" if backward else "**Forward**", ""]
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|---" + "|---:" * (len(columns) - 1) + "|")
        lines += [cost_row(name, backward, first, again) for name in first["mechanisms"]]
    return "\n".join([*lines, "", "![Cost against the number of tokens](attention_costs.png)"]) + "\n"


def cost_row(name: str, backward: bool, first: dict, again: dict) -> str:  # type: ignore[type-arg]
    """One mechanism as a row of the table."""

    def find(result: dict, table: str, **more: object) -> dict:  # type: ignore[type-arg]
        wanted = {"mechanism": name, "backward": backward, **more}
        return next((row for row in result[table] if all(row[k] == v for k, v in wanted.items())), {})

    at = [find(first, "rows", tokens=n) for n in (1024, 4096, 16384)]
    fit = find(again, "exponents") or find(first, "exponents")
    faster = find(first, "speedups")
    cells = [f"{1e3 * row['seconds']:,.0f}" if row.get("seconds") else "–" for row in at]
    cells.append(f"{at[2]['peak_bytes'] / 2**20:,.0f}" if at[2].get("peak_bytes") else "–")
    cells += [f"{fit[key]:.2f}" for key in ("seconds", "peak_bytes")]
    cells += [f"{faster[key]:.1f}×" for key in ("explicit", "fused")]
    return f"| {name} | " + " | ".join(cells) + " |"


def study() -> str:
    """What ``scripts/study_mechanisms.py`` found."""
    path = DOCS / "study_mechanisms.json"
    if not path.exists():
        return "Not measured yet.\n"
    sys.path.insert(0, str(ROOT / "scripts"))
    from study_mechanisms import describe

    text = describe(json.loads(path.read_text(encoding="utf-8")))
    return text + "\n![Accuracy beside cost](study_mechanisms.png)\n"


PARTS = {"words": words, "compatibility": compatibility, "costs": costs, "study": study}


def written(text: str) -> str:
    """The document with every part written anew."""
    for name, part in PARTS.items():
        pattern = re.compile(rf"(<!-- {name}:[^>]*-->\n).*?(<!-- end -->)", re.S)
        if not pattern.search(text):
            raise ValueError(f"the document has no part {name!r} between <!-- {name}: … --> and <!-- end -->")
        body = part().rstrip("\n")
        text = pattern.sub(lambda found, body=body: f"{found[1]}\n{body}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where something would change")
    options = parser.parse_args()
    path = DOCS / "mechanisms.md"
    old = path.read_text(encoding="utf-8")
    new = written(old)
    if options.check:
        print(f"{path}: " + ("as the code says" if new == old else "not what the code says; run scripts/write_docs.py"))
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
