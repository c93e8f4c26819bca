from __future__ import annotations

import csv
import dataclasses
import json
import re

import pytest

from vision_attn.contrast import runner, training
from vision_attn.contrast.config import DataChoice
from vision_attn.contrast.report import write_report
from vision_attn.contrast.results import CURVE, TRIAL_SEED, Result, load_study
from vision_attn.contrast.runner import claimed, make_plan, open_folder, other_code, run_study
from vision_attn.contrast.training import Outcome
from vision_attn.errors import UserError


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    """Statistics and figures have tests of their own."""
    monkeypatch.setattr(runner, "report", lambda study: None)


@pytest.fixture(scope="module")
def finished(plan, here, tmp_path_factory):
    """The tiny study, run without interruption."""
    folder = tmp_path_factory.mktemp("study") / "whole"
    open_folder(folder, plan, "the command", "settings\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "report", lambda study: None)
        return run_study(plan, folder, here(plan))


def rows(study):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in study.frame()]


def rows_of(study):
    """Without the code that made them."""
    return [{key: value for key, value in row.items() if key != "code"} for row in rows(study)]


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_study_is_whole_and_every_file_says_what_it_is_of(plan, finished):
    assert finished.missing == []
    assert [result.status for result in finished.results] == ["done"] * len(plan.cells)
    assert all(cell.lr > 0 for cell in finished.cells)
    chosen = {(row["model"], row["size"]): row["lr"] for row in finished.learning_rates if row["chosen"]}
    assert {(cell.model, cell.size): cell.lr for cell in finished.cells} == chosen
    assert set(finished.looks) == {"vit", "cnn"}
    looked_at = {result.cell.id: result.cell for result in finished.results}
    for model, seen in finished.looks.items():
        assert (looked_at[seen["cell"]].model, looked_at[seen["cell"]].seed) == (model, seen["seed"])
    assert finished.facts["command"] == "the command"
    assert not {"hostname", "host", "node"} & set(finished.facts["machine"])
    for path in finished.folder.rglob("*.json"):
        assert json.loads(path.read_text()).items() >= plan.stamp.items(), path
    for path in finished.folder.rglob("*.csv"):
        with path.open() as file:
            assert all(row.items() >= plan.stamp.items() for row in csv.DictReader(file)), path


def test_the_tables_hold_what_the_cells_hold(finished):
    with (finished.folder / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [run["id"] for run in runs] == [cell.id for cell in finished.cells]
    for run, result in zip(runs, finished.results, strict=True):
        assert {key: float(run[key]) for key in result.values} == result.values
        assert int(run["seed"]) == result.cell.seed
    with (finished.folder / "curves.csv").open() as file:
        curves = list(csv.DictReader(file))
    assert len(curves) == sum(len(result.curve) for result in finished.results)
    assert load_study(finished.folder) == finished


@pytest.mark.parametrize("after", [0, 3, 10])
def test_an_interrupted_study_goes_on_and_ends_the_same(plan, here, finished, tmp_path, after):
    assert not open_folder(tmp_path / "study", plan, "", "")
    broken_off = here(plan, stop_after=after)
    with pytest.raises(KeyboardInterrupt):
        run_study(plan, tmp_path / "study", broken_off)
    begun = load_study(tmp_path / "study")
    assert len(begun.missing) == len(plan.cells) - max(0, after - len(plan.trials))
    assert open_folder(tmp_path / "study", plan, "", "")
    rest = here(plan)
    ended = []
    study = run_study(plan, tmp_path / "study", rest, note=lambda cell, result, fresh: ended.append((cell.id, fresh)))
    assert len(rest.ran) == len(plan.trials) + len(plan.cells) - after  # nothing twice but the cell in flight
    assert [name for name, fresh in ended if fresh] == rest.ran
    assert len(ended) == len(plan.trials) + len(plan.cells)
    assert rows(study) == rows(finished)
    assert study.curve_frame() == finished.curve_frame()


def test_another_study_in_the_folder_is_refused(tiny, plan, finished):
    before = snapshot(finished.folder)
    other = make_plan(tiny(seeds=2, learning_rates=[1e-3]))
    with pytest.raises(UserError, match=r"seeds \(1 there, 2 here\)") as caught:
        open_folder(finished.folder, other, "", "")
    assert "learning_rates ([0.001, 0.01] there, [0.001] here)" in str(caught.value)
    data = dataclasses.replace(plan.data, hash="0123")
    with pytest.raises(UserError, match="other images"):
        open_folder(finished.folder, dataclasses.replace(plan, data=data), "", "")
    assert snapshot(finished.folder) == before


def test_another_version_is_refused(plan, finished, monkeypatch):
    monkeypatch.setattr(runner, "__version__", "99.0")
    with pytest.raises(UserError, match=r"made by version .*, this is 99\.0"):
        open_folder(finished.folder, plan, "", "")


def test_other_code_is_allowed_warned_about_and_kept_apart(plan, here, finished, tmp_path, monkeypatch):
    import shutil

    folder = tmp_path / "study"
    shutil.copytree(finished.folder, folder)
    assert other_code(folder) == ""
    lost = plan.cells[2]
    shutil.rmtree(folder / "cells" / lost.id)
    for module in (runner, training):
        monkeypatch.setattr(module, "code_hash", lambda: "0ther")
    assert open_folder(folder, plan, "", "")
    assert re.search(r"begun by other code \(\w{12}, now 0ther\)", other_code(folder))
    study = run_study(plan, folder, here(plan))
    assert {result.cell.id for result in study.results if result.code == "0ther"} == {lost.id}
    assert study.codes == {finished.facts["code"]: len(plan.cells) + len(plan.trials) - 1, "0ther": 1}
    with (folder / "runs.csv").open() as file:
        assert [row["id"] for row in csv.DictReader(file) if row["code"] == "0ther"] == [lost.id]


def test_a_study_from_before_there_was_a_code_hash_is_read_and_reported(plan, finished, tmp_path):
    import shutil

    folder = tmp_path / "study"
    shutil.copytree(finished.folder, folder)
    for path in folder.rglob("*.json"):
        tree = {key: value for key, value in json.loads(path.read_text()).items() if key != "code"}
        path.write_text(json.dumps(tree))
    for path in folder.rglob("curve.csv"):
        rows = [row.rpartition(",")[0] for row in path.read_text().splitlines()]
        path.write_text("\n".join(rows) + "\n")
    study = load_study(folder)
    assert rows_of(study) == rows_of(finished)
    assert set(study.codes) == {""}
    assert "not recorded" in other_code(folder)
    page = write_report(study, tmp_path / "report").read_text(encoding="utf-8")
    assert "not recorded" in page


def test_a_folder_with_other_things_is_refused(plan, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="other files and no study"):
        open_folder(tmp_path, plan, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="is a file"):
        open_folder(tmp_path / "thesis.tex", plan, "", "")


def test_a_broken_cell_stops_before_anything_is_trained(plan, here, finished, tmp_path):
    import shutil

    folder = tmp_path / "study"
    shutil.copytree(finished.folder, folder)
    cell = plan.cells[3]
    (folder / "cells" / cell.id / "result.json").write_text("{")
    shutil.rmtree(folder / "cells" / plan.cells[0].id)
    before = snapshot(folder)
    again = here(plan)
    with pytest.raises(UserError, match=rf"{cell.id}.*Remove the folder"):
        run_study(plan, folder, again)
    assert again.ran == []
    assert snapshot(folder) == before
    shutil.rmtree(folder / "cells" / cell.id)  # as the message says
    study = run_study(plan, folder, again)
    assert again.ran == [plan.cells[0].id, cell.id]
    assert rows(study) == rows(finished)


def test_failed_cells_are_kept_and_run_again_when_asked(tiny, here, tmp_path):
    plan = make_plan(tiny(learning_rates=[1e30]))
    open_folder(tmp_path / "study", plan, "", "")
    study = run_study(plan, tmp_path / "study", here(plan))
    assert {result.status for result in study.results} == {"failed"}
    assert len(study.results) == len(plan.cells)
    assert all(row["reason"] for row in study.frame())
    again, retried = here(plan), here(plan)
    run_study(plan, tmp_path / "study", again)
    assert again.ran == []
    run_study(plan, tmp_path / "study", retried, retry_failed=True)
    assert len(retried.ran) == len(plan.trials) + len(plan.cells)


def test_trials_are_run_again_only_where_none_worked(tiny, here, tmp_path):
    plan = make_plan(tiny(learning_rates=[1e-3, 1e30]))
    open_folder(tmp_path / "study", plan, "", "")
    study = run_study(plan, tmp_path / "study", here(plan))
    assert {result.status for result in study.results} == {"done"}
    assert [row["status"] for row in study.learning_rates].count("failed") == len(plan.trials) / 2
    again = here(plan)
    run_study(plan, tmp_path / "study", again, retry_failed=True)
    assert again.ran == []


VALUES = ("train_acc", "train_loss", "val_acc", "val_loss", "turn_step", "turn_loss", "turn_rise")
VALUES += ("test_acc", "test_loss", "gap_acc", "gap_loss", "ece")


class Pretended:
    """Trains nothing: the higher the rate, the better; cells of which ``fails`` is true fail."""

    def __init__(self, fails=lambda cell: False, stop_after=None):
        self.fails, self.stop_after, self.ran = fails, stop_after, []

    def run(self, cells, started):
        for cell in cells:
            started(cell)
            if len(self.ran) == self.stop_after:
                raise KeyboardInterrupt
            self.ran.append(cell.id)
            values = {**dict.fromkeys(VALUES, 0.5), "val_acc": cell.lr}
            good = Result(cell, "done", "", values, [dict.fromkeys(CURVE, 1.0)])
            yield cell, Outcome(Result(cell, "failed", "no luck") if self.fails(cell) else good)


def of_cnn(cell):
    return (cell.model, cell.size) == ("cnn", 0.1)


@pytest.fixture
def unlucky(plan, tmp_path):
    """A study in which every trial and cell of one model and size failed."""
    folder = tmp_path / "study"
    open_folder(folder, plan, "", "")
    study = run_study(plan, folder, Pretended(of_cnn))
    assert {result.cell.lr for result in study.results if not result.done} == {1e-3}  # the lowest, as none worked
    assert sum(not result.done for result in study.results) == sum(map(of_cnn, plan.cells)) > 1
    return folder


def check_lucky(plan, study):
    assert [result.status for result in study.results] == ["done"] * len(plan.cells)
    assert {cell.lr for cell in study.cells} == {1e-2}
    again = Pretended()
    assert run_study(plan, study.folder, again) == study
    assert again.ran == []


def test_another_rate_may_win_when_failed_trials_are_run_again(plan, unlucky):
    again = Pretended()
    study = run_study(plan, unlucky, again, retry_failed=True)
    assert set(again.ran) == {cell.id for cell in (*plan.trials, *plan.cells) if of_cnn(cell)}
    check_lucky(plan, study)


@pytest.mark.parametrize("retry_failed", [True, False])
@pytest.mark.parametrize("after", range(5))
def test_running_failed_cells_again_may_be_interrupted(plan, unlucky, after, retry_failed):
    with pytest.raises(KeyboardInterrupt):
        run_study(plan, unlucky, Pretended(stop_after=after), retry_failed=True)
    load_study(unlucky)  # nothing contradicts study.json
    study = run_study(plan, unlucky, Pretended(), retry_failed=retry_failed)
    if retry_failed or after:
        check_lucky(plan, study)
    else:  # the trial at the same rate as before was begun anew: nothing asks for its failed cells again
        assert {result.status for result in study.results} == {"done", "failed"}


def test_the_rate_of_cells_that_are_done_is_kept(plan, tmp_path):
    folder = tmp_path / "study"
    open_folder(folder, plan, "", "")

    def partly(cell):
        return of_cnn(cell) and (cell.seed == TRIAL_SEED or cell.arm == "flip_crop")

    run_study(plan, folder, Pretended(partly))
    again = Pretended()
    study = run_study(plan, folder, again, retry_failed=True)
    assert again.ran == [cell.id for cell in plan.cells if partly(cell)]  # and no trial
    assert [result.status for result in study.results] == ["done"] * len(plan.cells)
    assert {cell.lr for cell in study.cells if of_cnn(cell)} == {1e-3}


def test_a_broken_cell_is_found_before_failed_ones_are_dropped(plan, unlucky):
    broken = unlucky / "cells" / plan.cells[0].id
    (broken / "result.json").write_text("{")
    before = {path: data for path, data in snapshot(unlucky).items() if "trials" not in path.parts}
    with pytest.raises(UserError, match="Remove the folder"):
        run_study(plan, unlucky, Pretended(), retry_failed=True)
    assert {path: data for path, data in snapshot(unlucky).items() if "trials" not in path.parts} == before
    for path in broken.iterdir():
        path.unlink()
    broken.rmdir()
    check_lucky(plan, run_study(plan, unlucky, Pretended(), retry_failed=True))


@pytest.mark.parametrize("name", ["cells", "trials"])
def test_a_file_in_the_place_of_a_cell_stops_the_study(plan, tmp_path, name):
    folder = tmp_path / "study"
    open_folder(folder, plan, "", "")
    cell = (plan.cells if name == "cells" else plan.trials)[1]
    (folder / name).mkdir()
    (folder / name / cell.id).write_text("")
    with pytest.raises(UserError, match=rf"{cell.id} is a file"):
        run_study(plan, folder, Pretended())
    (folder / name / cell.id).unlink()
    run_study(plan, folder, Pretended())


def test_a_study_is_run_by_one_process_at_a_time(tmp_path):
    with claimed(tmp_path), pytest.raises(UserError, match="another process"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass


def test_data_that_cannot_be_found_is_refused(tiny):
    with pytest.raises(UserError, match="Unknown data set"):
        make_plan(tiny(data=DataChoice("digit")))
