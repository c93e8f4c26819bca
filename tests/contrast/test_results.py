from __future__ import annotations

import csv
import dataclasses
import json

import pytest

from vision_attn.contrast.results import (
    STAMP,
    TRIAL_SEED,
    Cell,
    Result,
    choose_rates,
    ended_at,
    load_study,
    rate_table,
    read_looks,
    read_result,
    write_cell,
    write_json,
    write_result,
    write_trace,
)
from vision_attn.errors import UserError

HASHES = dict(zip(STAMP, ("c0ffee", "deca7", "1.2.3", "5eed"), strict=True))
CELL = Cell("m-05pct-none-n0-s1", "m", 0, 0.05, 63, "none", 0.0, 1, 3e-3, 40)
CURVE = [
    {"step": 1.0, "train_loss": 2.1, "train_acc": 0.1, "val_loss": 2.3, "val_acc": 0.1},
    {"step": 40.0, "train_loss": 1 / 3, "train_acc": 0.9, "val_loss": 1e-17, "val_acc": 0.5},
]
VALUES = {"train_acc": 0.9, "train_loss": 1 / 3, "val_acc": 0.5, "val_loss": 1e-17, "test_acc": 1 / 3, "test_loss": 2.0}
VALUES |= {"turn_step": 40, "turn_loss": 1e-17, "turn_rise": 0.0, "gap_acc": 0.57, "gap_loss": 1.7, "ece": 0.1}


@pytest.fixture
def written(tmp_path):
    write_cell(tmp_path, CELL, HASHES)
    write_result(tmp_path, Result(CELL, "done", "", VALUES, CURVE), HASHES, {"kind": "cnn"})
    return tmp_path


def trial(model, size, lr, acc, loss, status="done"):
    cell = Cell(f"{model}{size}{lr}", model, 0, size, 10, "none", 0.0, 1000, lr, 5)
    return Result(cell, status, "", {"val_acc": acc, "val_loss": loss} if status == "done" else {})


def test_a_result_comes_back_with_every_digit(written):
    result = read_result(written, CELL, HASHES)
    assert result == Result(CELL, "done", "", VALUES, CURVE)
    assert result.code == "5eed"
    assert read_looks(written, CELL) == {"kind": "cnn"}
    for path in written.rglob("*.json"):
        assert json.loads(path.read_text()).items() >= HASHES.items()
    with (written / CELL.id / "curve.csv").open() as file:
        assert all(row.items() >= HASHES.items() for row in csv.DictReader(file))


def test_a_cell_without_result_has_not_ended(tmp_path):
    assert read_result(tmp_path, CELL, HASHES) is None
    write_cell(tmp_path, CELL, HASHES)
    assert read_result(tmp_path, CELL, HASHES) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", "{"),
        ("result.json", "[]"),
        ("result.json", b"\xff\xfe"),
        ("result.json", json.dumps({"status": "done", **HASHES})),
        ("result.json", json.dumps({"status": "odd", "values": {}, **HASHES})),
        ("result.json", json.dumps({"status": "done", "values": {"test_acc": "0.5"}, **HASHES})),
        ("result.json", json.dumps({"status": "done", "values": {"x": float("nan")}, **HASHES})),
        ("result.json", json.dumps({"status": "done", "values": {}, **HASHES, "data_hash": "other"})),
        ("result.json", json.dumps({"status": "done", "values": {}, **HASHES})),
        ("result.json", json.dumps({"status": "done", "values": {**VALUES, "ece": None}, **HASHES})),
        *(
            (
                "result.json",
                json.dumps({"status": "done", "values": {k: VALUES[k] for k in VALUES if k != key}, **HASHES}),
            )
            for key in VALUES
        ),
        ("curve.csv", "step,train_loss,train_acc,val_loss,val_acc\n"),
        ("cell.json", ""),
        ("cell.json", None),
        ("cell.json", json.dumps({**vars(CELL), "lr": 0.1})),
        ("curve.csv", "step,loss\n1,2\n"),
        ("curve.csv", None),
    ],
)
def test_a_broken_cell_is_named_and_left_alone(written, name, content):
    path = written / CELL.id / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {p: p.read_bytes() for p in written.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=rf"{CELL.id}.*Remove the folder"):
        read_result(written, CELL, HASHES)
    assert {p: p.read_bytes() for p in written.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", ["", CELL.id])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, name):
    folder = tmp_path / "cells"
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("years of work")
    with pytest.raises(UserError, match=r"is a file where a folder of trainings belongs: remove it") as caught:
        read_result(folder, CELL, HASHES)
    assert str(caught.value).startswith(str(path))
    assert path.read_text() == "years of work"


def test_how_a_cell_ended_is_known_whatever_its_rate_is_now(written):
    now = dataclasses.replace(CELL, lr=0.1)
    assert ended_at(written, now, HASHES) == ("done", CELL.lr)
    write_result(written, Result(CELL, "failed", "NaN at once"), HASHES)
    assert ended_at(written, now, HASHES) == ("failed", CELL.lr)
    assert ended_at(written, dataclasses.replace(CELL, steps=41), HASHES) is None
    assert ended_at(written, CELL, {**HASHES, "version": "9"}) is None
    assert ended_at(written, dataclasses.replace(CELL, id="other"), HASHES) is None
    (written / CELL.id / "result.json").write_text("{")
    assert ended_at(written, CELL, HASHES) is None  # read_result says what is wrong


def test_what_a_finished_cell_lacks_is_named(written):
    tree = {"status": "done", "values": {k: v for k, v in VALUES.items() if k not in ("ece", "turn_rise")}, **HASHES}
    write_json(written / CELL.id / "result.json", tree)
    with pytest.raises(UserError, match=r"says done but lacks turn_rise, ece\. Remove the folder"):
        read_result(written, CELL, HASHES)


def test_a_trial_needs_no_test_set_and_a_failed_cell_no_values(tmp_path):
    tried = dataclasses.replace(CELL, id="trial", seed=TRIAL_SEED)
    values = {k: v for k, v in VALUES.items() if not k.startswith(("test", "gap", "ece"))}
    for result in (Result(tried, "done", "", values, CURVE), Result(CELL, "failed", "NaN at once")):
        write_cell(tmp_path, result.cell, HASHES)
        write_result(tmp_path, result, HASHES)
        assert read_result(tmp_path, result.cell, HASHES) == result


def test_a_curve_without_rows_and_a_trace_carry_the_stamp(tmp_path):
    write_cell(tmp_path, CELL, HASHES)
    write_result(tmp_path, Result(CELL, "failed", "NaN at once"), HASHES)
    write_trace(tmp_path, CELL, "Traceback: somewhere\n", HASHES)
    with (tmp_path / CELL.id / "curve.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row.items() >= HASHES.items()
    text = (tmp_path / CELL.id / "error.txt").read_text()
    assert text.endswith("Traceback: somewhere\n")
    assert all(f"# {key}: {value}\n" in text for key, value in HASHES.items())
    assert read_result(tmp_path, CELL, HASHES).curve == []


def test_cells_may_come_from_other_code_or_from_before_there_was_a_hash(written):
    other = {**HASHES, "code": "0ther"}
    assert read_result(written, CELL, other).code == "5eed"
    identity = {key: HASHES[key] for key in STAMP if key != "code"}
    write_result(written, Result(CELL, "done", "", VALUES, CURVE), identity)
    assert read_result(written, CELL, HASHES).code == ""


def test_no_study_no_crash(tmp_path):
    with pytest.raises(UserError, match=r"holds no study"):
        load_study(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UserError, match=r"study\.json is broken"):
        load_study(tmp_path)
    write_json(tmp_path / "study.json", {**HASHES, "config": {}})
    with pytest.raises(UserError, match=r"lacks cells, trials, models"):
        load_study(tmp_path)
    write_json(tmp_path / "study.json", {**HASHES, "config": {}, "models": [], "trials": [], "cells": [{"id": "x"}]})
    with pytest.raises(UserError, match="not of this version"):
        load_study(tmp_path)


def test_the_rate_with_the_highest_validation_accuracy_is_chosen():
    trials = [
        trial("a", 0.1, 1e-3, 0.5, 1.0),
        trial("a", 0.1, 1e-2, 0.7, 1.0),
        trial("a", 0.1, 1e-1, 0.7, 0.9),
        trial("a", 0.5, 1e-3, 0.5, 1.0),
        trial("a", 0.5, 1e-2, 0, 0, "failed"),
        trial("b", 0.1, 1e-2, 0, 0, "failed"),
        trial("b", 0.1, 1e-3, 0, 0, "failed"),
        trial("b", 0.5, 1e-3, 0.1, 2.0),
        trial("b", 0.5, 1e-2, 0.3, 2.0),
        trial("b", 0.5, 1e-1, 0.2, 2.0),
    ]
    assert choose_rates(trials) == {("a", 0.1): 1e-1, ("a", 0.5): 1e-3, ("b", 0.1): 1e-3, ("b", 0.5): 1e-2}
    table = rate_table(trials)
    assert [row["chosen"] for row in table].count(True) == 4
    assert {(row["model"], row["size"]): row["at_edge"] for row in table if row["chosen"]} == {
        ("a", 0.1): True,
        ("a", 0.5): True,
        ("b", 0.1): True,
        ("b", 0.5): False,
    }
    assert table[4]["status"] == "failed"
