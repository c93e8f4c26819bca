"""``vision-attn benchmark attention``: what each mechanism costs as the sequence grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vision_attn.atomic import atomic_write_text
from vision_attn.cli.arguments import console, make_parser, parse, write_json
from vision_attn.errors import UserError, closest

NARROWEST = 110  # columns, where the output is no terminal: nothing is cut off
CHANGES = ("window", "rank", "features", "num_random", "block_size")


def attention(argv: list[str]) -> int:
    """Time, peak memory and FLOPs of every attention mechanism against the number of tokens.

    Raises:
        UserError: wrong arguments.
    """
    parser = make_parser(
        "benchmark attention",
        "Measure time, peak memory and FLOPs of every attention mechanism against the number of tokens N, fit the "
        "exponents in N, and write table.md, attention.json and attention.png. Memory is the resident memory at the "
        "peak of a call in a fresh process (on a GPU: of the allocator), without the inputs.",
    )
    parser.add_argument("--lengths", type=str, default="1024,2048,4096,8192,16384", help="numbers of tokens")
    parser.add_argument("--mechanisms", type=str | None, default=None, help="names with commas (default: all)")
    parser.add_argument("--backward", action="store_true", help="measure forward and backward as well")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved timings of which the median counts")
    parser.add_argument("--threads", type=int | None, default=None, help="CPU threads (default: PyTorch's)")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--dtype", type=str, default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--batch", type=int, default=1, help="sequences per call")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--width", type=int, default=64, help="head width")
    parser.add_argument("--memory", type=float | None, default=None, help="GiB a call may take (default: 2/3 of free)")
    parser.add_argument("--window", type=int | None, default=None, help="radius for window, longformer and bigbird")
    parser.add_argument("--rank", type=int | None, default=None, help="of linformer")
    parser.add_argument("--features", type=int | None, default=None, help="of performer")
    parser.add_argument("--num_random", type=int | None, default=None, help="random blocks of bigbird")
    parser.add_argument("--block_size", type=int | None, default=None, help="tokens in a block of bigbird")
    parser.add_argument("--output", type=str, default="runs/benchmark_attention", help="folder to write to")
    options = parse(parser, argv)
    lengths = _lengths(options.lengths)
    for name in ("rounds", "batch", "heads", "width", "threads", *CHANGES):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} must be 1 or more, got {value}")

    import torch
    from rich.console import Console

    from vision_attn import attention_benchmark, attention_report
    from vision_attn.training.memory import keep_freed_memory

    names = _mechanisms(options.mechanisms, list(attention_benchmark.MECHANISMS))
    kind = options.device.split(":")[0]
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise UserError(f"--device {options.device}: this machine has no such device that PyTorch can use")
    if options.dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {options.dtype}: choose float32, bfloat16 or float16")
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()  # as fit does: else large tensors are fetched from the system, page by page, at every call
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)  # before the measurement, which is long
    with Console(stderr=True).status("measuring") as status:
        result = attention_benchmark.measure(
            names,
            lengths,
            backward=options.backward,
            rounds=options.rounds,
            device=options.device,
            dtype=options.dtype,
            batch=options.batch,
            heads=options.heads,
            width=options.width,
            memory=options.memory,
            changes={name: getattr(options, name) for name in CHANGES if getattr(options, name) is not None},
            progress=lambda text: status.update(f"measuring {text}"),
        )
    write_json(result, str(folder / "attention.json"))
    atomic_write_text(folder / "table.md", attention_report.markdown(result))
    attention_report.draw(result, folder / "attention.png")
    _show(result)
    print(f"wrote {folder / 'table.md'}, {folder / 'attention.json'} and {folder / 'attention.png'}")
    return 0


def _words(text: str) -> list[str]:
    return [word.strip(" '\"") for word in text.strip("[] ").split(",") if word.strip()]


def _lengths(text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdigit() and int(word) for word in words):
        raise UserError(f"--lengths {text}: give numbers of tokens, 1 or more, as in 1024,2048,4096")
    return sorted({int(word) for word in words})


def _mechanisms(text: str | None, known: list[str]) -> list[str]:
    names = known if text is None else list(dict.fromkeys(_words(text)))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        asked = unknown[0] if unknown else text
        raise UserError(f"--mechanisms {asked}: unknown.{closest(str(asked), known)} There are: {', '.join(known)}.")
    return names


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    from vision_attn import attention_report

    out = console(NARROWEST)
    out.print(attention_report.title(result["setting"]), soft_wrap=True)
    for caption, head, body in attention_report.tables(result):
        table = Table()
        for i, name in enumerate(head):
            table.add_column(name, justify="right" if i else "left")
        for row in body:
            table.add_row(*row)
        out.print(f"\n{caption}", soft_wrap=True)  # not as its title, which would be broken to its width
        out.print(table)
    for note in attention_report.notes(result):
        out.print(f"not measured: {note}", soft_wrap=True)
