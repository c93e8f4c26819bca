"""The files of a study, and the study read back from them.

::

    study.json             what was asked for, and on what: configuration, hashes, version, command, machine, models
    trials/<id>/           as cells/<id>/: the trainings that chose the learning rates
    cells/<id>/cell.json   what the training is
    cells/<id>/curve.csv   evaluations along the trajectory
    cells/<id>/result.json how it ended; written last, so a cell without it was not finished
    cells/<id>/looks.json  where its attention or its receptive field reaches (some cells)
    cells/<id>/error.txt   where an unexpected error came from
    learning_rates.csv, runs.csv, curves.csv, looks.json, contrast.json, report.html, figures/

Every JSON file carries ``config_hash``, ``data_hash``, ``version`` and ``code`` (a hash of the sources), every CSV file
a column for each. Files of older studies have no ``code``; it may differ between cells, the others may not.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vision_attn.atomic import atomic_write_text
from vision_attn.contrast.identity import code_hash
from vision_attn.errors import UserError

IDENTITY = ("config_hash", "data_hash", "version")
"""What all files of a study have in common."""
STAMP = (*IDENTITY, "code")
CURVE = ("step", "train_loss", "train_acc", "val_loss", "val_acc")
TRIAL_SEED = 1000
"""Seed of the trials that choose learning rates: none of the study's own, which count from 0."""
_MEASURED = ("train_acc", "train_loss", "val_acc", "val_loss", "turn_step", "turn_loss", "turn_rise")
_TESTED = ("test_acc", "test_loss", "gap_acc", "gap_loss", "ece")
CELL_COLUMNS = ("id", "model", "role", "size", "images", "arm", "noise", "seed", "lr", "steps")


@dataclass(frozen=True)
class Cell:
    """One training of the grid.

    Attributes:
        id: readable and unique, e.g. ``cct_2_3x2_32-05pct-none-n0-s1``; the name of its folder.
        model: the model's display name.
        role: the place of the model in the configuration, from 0.
        size: share of the training images, 0 ... 1.
        images: how many that are.
        arm: regularisation: ``none``, ``flip_crop``, ``full`` or one of the user's.
        noise: share of the training labels that were shuffled.
        seed: of the subset, the wrong labels, the first weights, the order and the augmentation.
        lr: peak learning rate; 0 while it is not chosen yet.
        steps: optimizer steps.
    """

    id: str
    model: str
    role: int
    size: float
    images: int
    arm: str
    noise: float
    seed: int
    lr: float
    steps: int


@dataclass
class Result:
    """How a training ended.

    Attributes:
        cell: which training.
        status: ``done`` or ``failed``.
        reason: why it failed, in words; empty otherwise.
        values: name -> number. Accuracies in 0 ... 1, losses in nats, all in evaluation mode on images without
            augmentation, after the last step:

            ``train_acc train_loss``: on the training subset with the labels it was trained with;
            ``train_clean_acc train_clean_loss``: with the true labels (the same where nothing was shuffled);
            ``val_acc val_loss test_acc test_loss``; ``gap_acc`` = train − test; ``gap_loss`` = test − train (with wrong
            labels these compare given labels with true ones, so the report leaves them out there);
            ``turn_step``: the evaluated step with the lowest validation loss; ``turn_loss`` that loss; ``turn_rise``:
            the last validation loss minus it; ``ece``: expected calibration error on the test set, 15 bins;
            ``memorised``: share of the wrong training labels that the model gives back (only with noise; guessing
            gives back 1 / classes of them);
            ``best_step best_val_acc best_val_loss best_test_acc best_test_loss``: of the evaluated step with highest
            validation accuracy, as with early stopping;
            ``params macs steps seconds``. ``seconds`` is the only one that a second run does not repeat.
        curve: rows ``step train_loss train_acc val_loss val_acc`` along the trajectory, measured in the same way; the
            training images among them are ``eval_images`` of the subset, balanced over classes, so the last row's
            training values may differ a little from ``train_acc``, which counts all.
        code: hash of the sources that made it; empty in older studies. Not compared: the numbers are what counts.
    """

    cell: Cell
    status: str
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    code: str = field(default="", compare=False)

    @property
    def done(self) -> bool:
        """Whether it has values."""
        return self.status == "done"


@dataclass
class Study:
    """A study as its folder tells it.

    Attributes:
        folder: where it lies.
        config: the configuration, a plain tree.
        facts: the rest of ``study.json``: ``config_hash data_hash version command machine models data started``.
            ``machine`` has ``cpu cores threads device torch python`` and so on, no host name. ``models`` is a list in
            the order of the roles: ``model`` (display name), ``name`` (in the zoo), ``args``, ``params``, ``macs``,
            ``kind`` (``attention`` or ``cnn``). ``data`` has ``name classes train val test img_size``. ``match`` tells
            the tolerance (False when unequal models were asked for), ``params_ratio`` and ``macs_ratio``.
        cells: all cells of the grid, finished or not.
        results: of the cells that ended, done or failed, in the order of the grid.
        looks: see ``looks.json``: model -> ``kind``, ``attention_distance`` (layer -> one number per head, pixels) or
            None, ``receptive_field`` (list of ``layer``, ``distance``, ``radius``, pixels), ``cell`` and ``seed``: of
            which training.
        learning_rates: one row per trial: ``model size arm lr val_acc val_loss status chosen at_edge``.
    """

    folder: Path
    config: dict[str, Any]
    facts: dict[str, Any]
    cells: list[Cell]
    results: list[Result]
    looks: dict[str, Any] = field(default_factory=dict)
    learning_rates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stamp(self) -> dict[str, str]:
        """Configuration hash, data hash, version, and the code that writes now: what every file carries."""
        return {**{key: str(self.facts[key]) for key in IDENTITY}, "code": code_hash()}

    @property
    def codes(self) -> dict[str, int]:
        """Hash of the sources -> how many trainings, trials among them, were made by these; "" where none is known."""
        made = [result.code for result in self.results] + [str(row.get("code", "")) for row in self.learning_rates]
        return dict(Counter(made))

    @property
    def models(self) -> list[str]:
        """Display names in the order of their roles."""
        return [model["model"] for model in self.facts["models"]]

    @property
    def missing(self) -> list[Cell]:
        """Cells that have not ended."""
        ended = {result.cell.id for result in self.results}
        return [cell for cell in self.cells if cell.id not in ended]

    def frame(self) -> list[dict[str, Any]]:
        """One flat row per result, the rows of ``runs.csv``: cell, status, reason, values, stamp."""
        return [
            {**asdict(r.cell), "status": r.status, "reason": r.reason, **r.values, **self.stamp, "code": r.code}
            for r in self.results
        ]

    def curve_frame(self) -> list[dict[str, Any]]:
        """One flat row per evaluation along a trajectory, the rows of ``curves.csv``."""
        keys = ("id", "model", "size", "arm", "noise", "seed")
        return [
            {**{key: getattr(result.cell, key) for key in keys}, **row, **self.stamp, "code": result.code}
            for result in self.results
            for row in result.curve
        ]

    def write_tables(self) -> None:
        """``runs.csv``, ``curves.csv``, ``learning_rates.csv`` and ``looks.json``."""
        rates = [{**row, **self.stamp, "code": row.get("code", "")} for row in self.learning_rates]
        tables = {"runs": self.frame(), "curves": self.curve_frame(), "learning_rates": rates}
        for name, rows in tables.items():
            write_csv(self.folder / f"{name}.csv", rows or [self.stamp])
        write_json(self.folder / "looks.json", {"models": self.looks, **self.stamp})


# -- one cell ---------------------------------------------------------------------------------------


def write_cell(folder: Path, cell: Cell, stamp: Mapping[str, str]) -> None:
    """Say that a cell is being worked on."""
    write_json(folder / cell.id / "cell.json", {**asdict(cell), **stamp})


def write_result(folder: Path, result: Result, stamp: Mapping[str, str], looks: dict[str, Any] | None = None) -> None:
    """Write what a cell gave; ``result.json`` comes last and makes it valid."""
    place = folder / result.cell.id
    # a training that failed before its first evaluation has one row, of nothing but the stamp
    write_csv(place / "curve.csv", [{**row, **stamp} for row in result.curve or [{}]], (*CURVE, *STAMP))
    if looks is not None:
        write_json(place / "looks.json", {**looks, **stamp})
    tree = {"status": result.status, "reason": result.reason, "values": result.values, **stamp}
    write_json(place / "result.json", tree)


def read_result(folder: Path, cell: Cell, stamp: Mapping[str, str]) -> Result | None:
    """What a cell gave, or None when it has not ended.

    Args:
        folder: the parent of the cells' folders.
        cell: which one.
        stamp: what the files must carry.

    Raises:
        UserError: a file is unreadable, or belongs to another cell or study.
    """
    place = folder / cell.id
    for path in (folder, place):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file where a folder of trainings belongs: remove it; nothing was changed.")
    if not (place / "result.json").exists():
        return None
    kept = read_json(place / "cell.json", broken_cell(place))
    if {key: kept.get(key) for key in CELL_COLUMNS} != asdict(cell):
        raise UserError(f"{place / 'cell.json'} describes another training than the study. {broken_cell(place)}")
    tree = read_json(place / "result.json", broken_cell(place))
    if any(tree.get(key) != stamp[key] for key in IDENTITY):
        raise UserError(f"{place / 'result.json'} belongs to another study or version. {broken_cell(place)}")
    values = tree.get("values")
    if tree.get("status") not in ("done", "failed") or not isinstance(values, dict) or not _all_numbers(values):
        raise UserError(f"{place / 'result.json'} is incomplete. {broken_cell(place)}")
    curve = _read_curve(place)
    if tree["status"] == "done":
        needed = _MEASURED if cell.seed == TRIAL_SEED else (*_MEASURED, *_TESTED)
        lacking = [key for key in needed if key not in values] or ([] if curve else ["a curve"])
        if lacking:
            raise UserError(f"{place / 'result.json'} says done but lacks {', '.join(lacking)}. {broken_cell(place)}")
    return Result(cell, tree["status"], str(tree.get("reason", "")), values, curve, str(tree.get("code", "")))


def ended_at(folder: Path, cell: Cell, stamp: Mapping[str, str]) -> tuple[str, float] | None:
    """``done`` or ``failed``, and the learning rate at which a cell ended so, which need not be the one it has now.

    None for a cell that has not ended, and for whatever :func:`read_result` would refuse for another reason.

    Args:
        folder: the parent of the cells' folders.
        cell: which one; its rate does not matter.
        stamp: what the files must carry.
    """
    place = folder / cell.id
    try:
        kept, tree = read_json(place / "cell.json", ""), read_json(place / "result.json", "")
    except UserError:
        return None
    lr, status = kept.get("lr"), tree.get("status")
    same = {key: kept.get(key) for key in CELL_COLUMNS} == {**asdict(cell), "lr": lr}
    if not same or not isinstance(lr, float) or status not in ("done", "failed"):
        return None
    return (status, lr) if all(tree.get(key) == stamp[key] for key in IDENTITY) else None


def read_looks(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """``looks.json`` of a cell without its stamp, None where it has none."""
    path = folder / cell.id / "looks.json"
    if not path.exists():
        return None
    return {key: value for key, value in read_json(path, broken_cell(path.parent)).items() if key not in STAMP}


def write_trace(folder: Path, cell: Cell, trace: str, stamp: Mapping[str, str]) -> None:
    """``error.txt``: where an unexpected error came from."""
    head = "".join(f"# {key}: {value}\n" for key, value in stamp.items())
    atomic_write_text(folder / cell.id / "error.txt", head + trace)


def broken_cell(place: Path) -> str:
    """What to do about the folder of a cell that cannot be read."""
    return f"Remove the folder {place} to train this cell again; nothing was changed."


def _all_numbers(values: dict[str, Any]) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values.values())


def _read_curve(place: Path) -> list[dict[str, float]]:
    path = place / "curve.csv"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row[CURVE[0]] != ""]
        return [{key: float(row[key]) for key in CURVE} for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is broken. {broken_cell(place)}") from error


# -- the whole study --------------------------------------------------------------------------------


def load_study(folder: str | Path) -> Study:
    """Read a study, finished or not.

    Raises:
        UserError: the folder holds no study, or one of its files is broken; the message names it.
    """
    folder = Path(folder)
    facts = read_study_json(folder)
    cells = [Cell(**row) for row in facts.pop("cells")]
    trials = [Cell(**row) for row in facts.pop("trials")]
    config = facts.pop("config")
    stamp = {key: facts[key] for key in IDENTITY}
    ended = [read_result(folder / "cells", cell, stamp) for cell in cells]
    results = [result for result in ended if result is not None]
    looks = {}
    for result in results:
        if (seen := read_looks(folder / "cells", result.cell)) is not None:
            looks[result.cell.model] = {**seen, "cell": result.cell.id, "seed": result.cell.seed}
    tried = [read_result(folder / "trials", cell, stamp) for cell in trials]
    rates = rate_table([result for result in tried if result is not None])
    return Study(folder, config, facts, cells, results, looks, rates)


def read_study_json(folder: Path) -> dict[str, Any]:
    """``study.json`` as a tree.

    Raises:
        UserError: there is none, or it is broken.
    """
    path = folder / "study.json"
    if not path.exists():
        raise UserError(f"{folder} holds no study: there is no study.json. `vision-attn contrast --output` makes one.")
    tree = read_json(path, "The study cannot be read without it; take another --output to start anew.")
    lacking = [key for key in (*IDENTITY, "config", "cells", "trials", "models") if key not in tree]
    known = {f.name for f in fields(Cell)}
    rows = [row for key in ("cells", "trials") for row in tree.get(key, [])]
    if lacking or any(set(row) != known for row in rows):
        what = f"it lacks {', '.join(lacking)}" if lacking else "its cells are not of this version"
        raise UserError(f"{path} is no study of this version: {what}. Take another --output.")
    return tree


def choose_rates(trials: Iterable[Result]) -> dict[tuple[str, float], float]:
    """The learning rate of every (model, size): the highest validation accuracy after the last step.

    Equal accuracies are told apart by the lower validation loss. Trials that failed are out; where all did, the lowest
    rate is taken, and the cells will say themselves what happened to them.
    """
    groups: dict[tuple[str, float], list[Result]] = {}
    for trial in trials:
        groups.setdefault((trial.cell.model, trial.cell.size), []).append(trial)
    chosen = {}
    for key, group in groups.items():
        done = [trial for trial in group if trial.done]
        best = max(done, key=lambda t: (t.values["val_acc"], -t.values["val_loss"]), default=None)
        chosen[key] = best.cell.lr if best else min(trial.cell.lr for trial in group)
    return chosen


def rate_table(trials: list[Result]) -> list[dict[str, Any]]:
    """One row per trial; ``at_edge`` where the rate chosen is the lowest or highest of at least two tried."""
    chosen = choose_rates(trials)
    rows = []
    for trial in trials:
        cell = trial.cell
        tried = [t.cell.lr for t in trials if (t.cell.model, t.cell.size) == (cell.model, cell.size)]
        best = chosen[cell.model, cell.size] == cell.lr
        rows.append(
            {key: getattr(cell, key) for key in ("model", "size", "images", "arm", "seed", "lr", "steps")}
            | {key: trial.values.get(key, "") for key in ("val_acc", "val_loss")}
            | {"status": trial.status, "reason": trial.reason, "chosen": best}
            | {"at_edge": best and len(tried) > 1 and cell.lr in (min(tried), max(tried)), "code": trial.code}
        )
    return rows


# -- files ------------------------------------------------------------------------------------------


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UserError: the file is missing or no JSON object; ``advice`` ends the message.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is broken or missing. {advice}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is broken: a JSON object was expected. {advice}")
    return tree


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """A JSON object, whole or not at all; numbers keep every digit, and there is no NaN."""
    atomic_write_text(path, json.dumps(tree, indent=1, allow_nan=False) + "\n")


def write_csv(path: Path, rows: list[dict[str, Any]], columns: Iterable[str] | None = None) -> None:
    """Rows as CSV, whole or not at all; numbers keep every digit.

    Args:
        path: the file.
        rows: need not have the same keys; what a row lacks stays empty.
        columns: their order; all keys in the order of their first appearance by default.
    """
    names = list(columns) if columns is not None else list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write_text(path, text.getvalue())
