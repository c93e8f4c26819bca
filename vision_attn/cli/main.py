"""``vision-attn``: finds the verb, runs it, and turns what a user can mend into one or two lines.

A verb is a module ``vision_attn/cli/<verb>.py`` with ``def run(argv: list[str]) -> int`` that returns the exit code.
It is imported only when it is used, so that ``--help`` answers at once. To add one, write the file and a line in
``VERBS``.
"""

from __future__ import annotations

import importlib
import io
import os
import sys

from vision_attn import __version__
from vision_attn.errors import UserError, closest

VERBS = {
    "fit": "train a model by a recipe, within a number of epochs or a time budget",
    "validate": "accuracy or average precision of a checkpoint on the validation split",
    "test": "accuracy or average precision of a checkpoint on the test split",
    "predict": "classes and probabilities, or objects and boxes, for images",
    "maps": "what a model looks at in images, as figures and one page, and what that is worth",
    "learn": "short lessons on attention, with numbers computed on the spot, in English and Chinese",
    "models": "list the models with their parameters and multiply-accumulates",
    "check": "attention mechanisms by their identities, a checkpoint against its library, a data set, padding",
    "convert": "a checkpoint of any layout into our format, or into that of timm, transformers or torchvision",
    "export": "a classifier as ONNX or torch.export program, checked against the original",
    "contrast": "which model overfits more: a study of several models on growing subsets of the same images",
    "benchmark": "measure attention kernels and models on this machine",
}

USAGE = """usage: vision-attn VERB [options]

{verbs}

  vision-attn VERB --help       what a verb takes
  vision-attn --version
  --debug                       with any verb: show where an error came from

examples:
  vision-attn fit --config recipes/digits_vit.yaml
  vision-attn fit --config cifar10_cct --budget 10m --model.optimizer.lr 1e-3
  vision-attn fit --config cifar10_cct --ckpt_path last          (go on with the newest run)
  vision-attn test --ckpt_path runs/digits_vit/0/checkpoints/best.ckpt
"""


def main(argv: list[str] | None = None) -> int:
    """Run ``vision-attn`` with ``argv`` (the program's own arguments when None).

    Returns:
        0 when all is well, 1 when a check found something, 2 when the call was wrong, 128 + n after signal n.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _never_fail_to_print()
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        print(USAGE.format(verbs="\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())), end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"vision-attn {__version__}")
        return 0
    try:
        return _run(argv[0], argv[1:], debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `| head`
        sys.stderr.close()
        return 141
    except Exception as error:
        if debug or not is_user_error(error):
            raise
        print(message(error), file=sys.stderr)
        return 2


def _run(verb: str, argv: list[str], debug: bool) -> int:
    if verb not in VERBS:
        kind = "option" if verb.startswith("-") else "verb"
        raise UserError(f"unknown {kind} {verb!r}.{closest(verb, VERBS)} `vision-attn --help` lists the verbs.")
    from vision_attn.cli.quiet import quiet

    _share_cores()
    with quiet(enabled=not debug):
        return int(importlib.import_module(f"vision_attn.cli.{verb}").run(argv) or 0)


def _never_fail_to_print() -> None:
    """A character that a terminal or log file has no code for becomes a question mark: no reason to end a training."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _share_cores() -> None:
    """On a machine that is busy with something else, let idle threads sleep soon instead of spinning.

    GNU OpenMP lets a thread that waits for the others spin for some 10 ms. Where the others do not get a core, that
    takes it from them: steps become up to ten times slower. It reads this setting when torch is loaded.
    """
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1):
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def is_user_error(error: BaseException) -> bool:
    """Whether the message alone tells a user what to do."""
    if isinstance(error, (ValueError, OSError)):
        return True
    # these two are named, not imported: importing them would cost seconds
    names = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    return bool(names & {"argparse.ArgumentError", "lightning.MisconfigurationException", "torch.OutOfMemoryError"})


def message(error: BaseException) -> str:
    """``error: ...``, in few lines."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if type(error).__name__ == "OutOfMemoryError":
        text = f"{text.split('.')[0]}. Try a smaller --data.batch_size or --trainer.precision bf16-mixed."
    hint = "" if isinstance(error, UserError) else " (--debug shows where)"
    return f"error: {text}{hint}"
