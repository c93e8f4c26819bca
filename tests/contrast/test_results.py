from __future__ import annotations

import csv
import json

import pytest

from vision_attn.contrast.results import (
    STAMP,
    Cell,
    Result,
    choose_rates,
    load_study,
    rate_table,
    read_looks,
    read_result,
    write_cell,
    write_json,
    write_result,
)
from vision_attn.errors import UserError

HASHES = dict(zip(STAMP, ("c0ffee", "deca7", "1.2.3"), strict=True))
CELL = Cell("m-05pct-none-n0-s1", "m", 0, 0.05, 63, "none", 0.0, 1, 3e-3, 40)
CURVE = [
    {"step": 1.0, "train_loss": 2.1, "train_acc": 0.1, "val_loss": 2.3, "val_acc": 0.1},
    {"step": 40.0, "train_loss": 1 / 3, "train_acc": 0.9, "val_loss": 1e-17, "val_acc": 0.5},
]


@pytest.fixture
def written(tmp_path):
    write_cell(tmp_path, CELL, HASHES)
    write_result(tmp_path, Result(CELL, "done", "", {"test_acc": 1 / 3}, CURVE), HASHES, {"kind": "cnn"})
    return tmp_path


def trial(model, size, lr, acc, loss, status="done"):
    cell = Cell(f"{model}{size}{lr}", model, 0, size, 10, "none", 0.0, 1000, lr, 5)
    return Result(cell, status, "", {"val_acc": acc, "val_loss": loss} if status == "done" else {})


def test_a_result_comes_back_with_every_digit(written):
    result = read_result(written, CELL, HASHES)
    assert result == Result(CELL, "done", "", {"test_acc": 1 / 3}, CURVE)
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
