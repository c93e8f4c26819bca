"""The report and ``contrast.json``: complete, traceable, honest about what is missing."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

from vision_attn.contrast import figures, tables
from vision_attn.contrast.analysis import analyse, as_tree
from vision_attn.contrast.identity import code_hash
from vision_attn.contrast.report import write_report
from vision_attn.contrast.summary import summarise
from vision_attn.contrast.tables import show
from vision_attn.contrast.verdict import Rule
from vision_attn.contrast.wording import limits

synthetic = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("synthetic.py"))))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with two failed trainings."""
    folder = tmp_path_factory.mktemp("study")
    failed = ("vit-25pct-none-n0-s1", "resnet-100pct-none-n40-s0")
    write_report(synthetic.make_study(folder, failed=failed), folder)
    return folder


def text_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


# -- what is written --------------------------------------------------------------------------------


def test_all_files_carry_the_hashes_and_the_version(written: Path) -> None:
    from PIL import Image

    stamp = {"config_hash": "a0dc078c05829647", "data_hash": "8bf134adbab567f3", "version": "0.1.0"}
    stamp["code"] = code_hash()
    tree = json.loads((written / "contrast.json").read_text(encoding="utf-8"))
    page = text_of(written)
    pictures = sorted((written / "figures").glob("*.png"))
    assert len(pictures) == page.count("<figure>") > 10
    for key, value in stamp.items():
        assert tree[key] == value
        assert f'<meta name="{key}" content="{value}">' in page
        assert all(Image.open(path).info[key] == value for path in pictures)
    assert tree["command"] in page.replace("&#39;", "'")


def test_the_page_needs_nothing_from_outside(written: Path) -> None:
    page = text_of(written)
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    assert not re.findall(r"url\(|@import|<link(?! rel=\"icon\" href=\"data:)", page)
    assert "default-src 'none'" in page


def test_every_figure_names_its_columns_and_seeds(written: Path) -> None:
    sources = re.findall(r'<p class="source">(.*?)</p>', text_of(written))
    assert len(sources) == text_of(written).count("<figure>")
    columns = {key for r in synthetic.make_study(written).frame() for key in r}
    for source in sources:
        assert re.match(r"(runs|curves)\.csv: |looks\.json: ", source)
        if source.startswith("runs.csv"):
            named = source.removeprefix("runs.csv: ").split(", where")[0].split(", ")
            assert set(named) <= columns, source
            assert "; seeds " in source


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("learning_curve-none", "0–4 (63), 0, 2 (vit at 314), 0–2 (resnet at 314, 1,257)"),
        ("gap-none", "0–4 (63), 0, 2 (vit at 314), 0–2 (resnet at 314, 1,257)"),
        ("calibration-none", "0–4 (63), 0, 2 (vit at 314), 0–2 (resnet at 314, 1,257)"),
        ("learning_curve-full", "0–4 (63), 0–2 (314, 1,257)"),
        ("matched_gap-none", "0–4 (63), 0, 2 (314), 0–2 (1,257)"),
        ("trajectory-25pct-none", "0, 2 (vit), 0–2 (resnet)"),
        ("trajectory-25pct-full", "0–2"),
        ("noise_memorised-100pct-none", "0–2 (20%, vit at 40%), 1, 2 (resnet at 40%)"),
        ("noise_test_acc-100pct-none", "0–2 (0%, 20%, vit at 40%), 1, 2 (resnet at 40%)"),
    ],
)
def test_no_figure_claims_the_seeds_that_failed(written: Path, name: str, seeds: str) -> None:
    from PIL import Image

    source = Image.open(written / "figures" / f"{name}.png").info["Source"]
    assert source.endswith(f"; seeds {seeds}"), source


def test_the_look_at_attention_names_its_trainings(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, sizes=(1.0,), arms=("none",), noises=(0.0,))
    (old,) = figures.reach(analyse(study))
    assert "one training of each model" in old.source  # a study of an earlier version
    study.looks = {m: {**look, "cell": f"{m}-100pct-none-n0-s0", "seed": 0} for m, look in study.looks.items()}
    (panel,) = figures.reach(analyse(study))
    assert panel.source.endswith("trainings vit-100pct-none-n0-s0, seed 0; resnet-100pct-none-n0-s0, seed 0")


def lines_of(sketch: Any) -> dict[str, tuple[list[float], list[float]]]:
    """What a figure shows: label -> x and y of its means."""
    axis = Figure().subplots()
    sketch.paint(axis)
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()}


@pytest.mark.parametrize(
    ("draw", "column", "transform"),
    [
        (figures.learning_curves, "test_acc", lambda x: 1 - x),
        (figures.gaps, "gap_acc", lambda x: x),
        (figures.calibration, "ece", lambda x: x),
    ],
)
def test_figures_show_the_means_of_runs_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Any, column: str, transform: Any
) -> None:
    study = synthetic.make_study(tmp_path, failed=("vit-25pct-none-n0-s1",))
    study.write_tables()
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if row["status"] == "done" and float(row["noise"]) == 0]
    monkeypatch.setattr(figures, "draw", lambda sketches, stamp: sketches)
    sketches = draw(analyse(study))
    assert len(sketches) == 2
    for sketch in sketches:
        arm = sketch.name.rpartition("-")[2]
        shown = lines_of(sketch)
        for model in study.models:
            rows = [row for row in table if (row["model"], row["arm"]) == (model, arm)]
            found = {int(row["images"]): [] for row in rows}
            for row in rows:
                found[int(row["images"])].append(transform(float(row[column])))
            wanted = [sum(values) / len(values) for _, values in sorted(found.items())]
            x, y = shown[model]
            assert x == pytest.approx(sorted(found), rel=0.05)  # moved aside a little
            assert y == pytest.approx(wanted)


def test_wrong_labels_are_shown_as_runs_csv_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = synthetic.make_study(tmp_path)
    monkeypatch.setattr(figures, "draw", lambda sketches, stamp: sketches)
    (sketch,) = [s for s in figures.memorisation(analyse(study)) if "memorised" in s.name]
    shown = lines_of(sketch)
    rows = [row for row in study.frame() if row["noise"] > 0]
    for model in study.models:
        wanted = [
            sum(values) / len(values)
            for noise in (0.2, 0.4)
            if (values := [row["memorised"] for row in rows if (row["model"], row["noise"]) == (model, noise)])
        ]
        assert shown[model] == (pytest.approx([20, 40]), pytest.approx(wanted))
    assert shown["guessing"][1][0] == pytest.approx(1 / synthetic.CLASSES)


def test_stars_say_the_same_as_the_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = synthetic.make_study(tmp_path, gaps=(0.9, 0.5), noise_sd=0.08, failed=("vit-25pct-none-n0-s1",))
    analysis = analyse(study)
    monkeypatch.setattr(figures, "draw", lambda sketches, stamp: sketches)
    seen = set()
    for sketch in figures.matched_gaps(analysis):
        axis = Figure().subplots()
        sketch.paint(axis)
        stars = {text.xy[0]: text.get_text() for text in axis.texts}
        for verdict in (v for v in analysis.verdicts if v.arm == sketch.name.rpartition("-")[2]):
            wanted = ("★" if verdict.stands(0.05) else "☆") if verdict.decided else None
            assert stars.get(verdict.images) == wanted
            seen.add(wanted)
    assert {"★", "☆"} <= seen
    monkeypatch.undo()
    assert "✱" not in write_report(study, tmp_path).read_text(encoding="utf-8")


def test_failed_trainings_are_listed_with_their_reason_and_left_out(written: Path) -> None:
    page = text_of(written)
    assert page.count("the loss became NaN at step 37") == 2
    tree = json.loads((written / "contrast.json").read_text(encoding="utf-8"))
    assert [f["id"] for f in tree["cells"]["failed"]] == ["vit-25pct-none-n0-s1", "resnet-100pct-none-n40-s0"]
    (group,) = [
        e for e in tree["estimates"] if (e["model"], e["images"], e["arm"], e["noise"]) == ("vit", 314, "none", 0)
    ]
    assert group["seeds"] == [0, 2]
    (verdict,) = [v for v in tree["verdicts"] if (v["images"], v["arm"]) == (314, "none")]
    assert verdict["seeds"] == [0, 2]


def test_the_protocol_and_every_option_are_printed(written: Path) -> None:
    page = text_of(written)
    for words in (
        "within 25",
        "Nested, class-balanced",
        "evaluated once per training, at the end: by the last weights, and by those of the evaluation",
        "They were tried under the arm none, without wrong labels, only; the rate chosen there is used for all other",
        "Regularisation none: no augmentation, no label smoothing, no weight decay",
        "randaugment 2",
        "label smoothing 0.1, weight decay 0.05",
        "Settings of the regularisation arms",
        "augment.crop_padding",
        "batch normalisation lag behind",
        "were written beside this page",
        "5 at 5 %; 3 at 25 %, 100 %",
        "eval_images",
        "small_seeds",
    ):
        assert words in page, words


def test_no_option_is_printed_that_no_training_used(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path)

    def names() -> set[str]:
        return {row[0].text for row in tables.config(study.config).rows}

    own = {**study.config["optimizer"], "name": "sgd"}
    study.config["models"]["vit"] |= {"optimizer": own, "learning_rates": [0.1]}
    shown = names()
    assert {"optimizer.name", "models.vit.optimizer.name", "learning_rates", "models.vit.learning_rates"} <= shown
    assert not [name for name in shown if name.endswith((".lr", ".weight_decay"))]
    assert {"optimizer.min_lr", "optimizer.warmup", "eval_images", "rule.alpha"} <= shown
    study.config["models"]["resnet"] |= {"optimizer": own, "learning_rates": [0.1]}  # then the study's own are not used
    shown = names()
    assert not {name for name in shown if name.startswith(("optimizer", "learning_rates"))}
    assert "models.resnet.optimizer.momentum" in shown


def test_the_limits_name_the_images_that_all_seeds_share(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, sizes=(1.0,), arms=("none",), noises=(0.0,))
    for eval_images, words in ((50, "the same 50 of 270 validation images"), (2000, "all 270 validation images")):
        study.config["eval_images"] = eval_images
        text = " ".join(limits(analyse(study)))
        assert f"the gaps that the verdicts compare on {words}, the test set whole (270 images)" in text
        assert "speak of other seeds, not of other validation images" in text
        assert f"an accuracy has a standard error of up to {50 / min(eval_images, 270) ** 0.5:.1f} points" in text
    write_report(study, tmp_path)
    assert "speak of other seeds, not of other validation images" in text_of(tmp_path)
    del study.config["eval_images"]  # a study of an earlier version
    assert "on all 270 validation images" in " ".join(limits(analyse(study)))


def test_the_limits_name_the_level_of_the_tests(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path)
    for alpha, shown in ((0.05, "5"), (0.01, "1"), (0.1, "10")):
        text = " ".join(limits(analyse(study, Rule(alpha=alpha)))).replace("\u00a0", " ")
        assert f"A single verdict is wrong in at most {shown} % of cases" in text
        assert f"intervals, p and these {shown} % speak of other seeds" in text
        assert "intervals are 95 % ones whatever that level is" in text


def test_the_table_has_the_bootstrap_beside_the_test(tmp_path: Path) -> None:
    analysis = analyse(synthetic.make_study(tmp_path, sizes=(0.25, 1.0), arms=("none",), noises=(0.0,)))
    table = tables.verdicts(analysis)
    names = [column.name for column in table.columns]
    styles = {"Δ gap, loss": ("gap_loss", "+.3f"), "Δ gap, accuracy": ("gap_acc", "+points")}
    styles |= {"Δ rise": ("rise", "+.3f"), "Δ plain gap": ("naive", "+points")}
    by_place = {(v.arm, f"{v.images:,}"): v for v in analysis.verdicts}
    for row in table.rows:
        verdict = by_place[row[names.index("arm")].text, row[names.index("images")].text]
        for name, (key, style) in styles.items():
            paired = getattr(verdict, key).paired
            ends = [show(end, style, unit=False) for end in (paired.low, paired.high) if end is not None]
            assert row[names.index(name)].below == (f"bootstrap [{', '.join(ends)}]" if ends else "")
            assert ends or key == "rise"  # no validation loss of this study rises
    assert "that of the t tests, on which the verdicts rest, and below it the bootstrap" in table.caption
    write_report(analysis.study, tmp_path)
    shown = sum(bool(entry.below) for row in table.rows for entry in row)
    assert text_of(tmp_path).count("<small>bootstrap [") == shown >= 3 * len(table.rows)
    assert "Verdicts rest on these t tests alone" in text_of(tmp_path)


def test_a_model_that_could_not_be_looked_at_is_named(tmp_path: Path) -> None:
    failed = ("vit-100pct-none-n0-s0", "vit-100pct-full-n0-s0", "resnet-25pct-none-n0-s0")
    small: dict[str, Any] = {"sizes": (0.25, 1.0), "noises": (0.0,)}
    study = synthetic.make_study(tmp_path, failed=failed, **small)
    study.looks = {"resnet": study.looks["resnet"]}
    words = "vit, whose training vit-100pct-none-n0-s0 failed"
    (panel,) = figures.reach(analyse(study))
    assert panel.source.endswith(f"; not shown: {words}")
    study.looks = {}  # then there is no figure that could say so
    write_report(study, tmp_path)
    assert f"“How far the models look” could not be measured for {words}." in text_of(tmp_path)
    whole = synthetic.make_study(tmp_path, failed=failed[1:], **small)
    (panel,) = figures.reach(analyse(whole))
    assert "not shown" not in panel.source
    assert figures.not_looked_at(analyse(whole)) == []


def test_the_settings_of_the_arms_are_in_the_tree(written: Path) -> None:
    arms = json.loads((written / "contrast.json").read_text(encoding="utf-8"))["arms"]
    assert list(arms) == ["none", "full"]
    assert (arms["none"]["weight_decay"], arms["none"]["augment"]["flip"]) == (0, False)
    assert (arms["full"]["label_smoothing"], arms["full"]["augment"]["randaugment"]) == (0.1, 2)
    assert arms["full"]["augment"]["crop_padding"] == 1  # an eighth of 8 pixels


def test_the_trials_name_their_arm(tmp_path: Path) -> None:
    table = tables.rates(analyse(synthetic.make_study(tmp_path)))
    at = [column.name for column in table.columns].index("arm")
    assert {row[at].text for row in table.rows} == {"none"}


def test_no_word_claims_more_than_was_done(written: Path) -> None:
    page = text_of(written)
    for words in ("read once", "never turned", "loss turned and", "did not fit its images at all", "lie beside"):
        assert words not in page, words


def test_the_same_study_gives_the_same_files(written: Path, tmp_path: Path) -> None:
    failed = ("vit-25pct-none-n0-s1", "resnet-100pct-none-n40-s0")
    write_report(synthetic.make_study(tmp_path, failed=failed), tmp_path)
    for path in [written / "contrast.json", written / "report.html", *(written / "figures").glob("*.png")]:
        assert path.read_bytes() == (tmp_path / path.relative_to(written)).read_bytes(), path.name


def test_names_of_models_are_escaped(tmp_path: Path) -> None:
    study = synthetic.make_study(
        tmp_path, models=("<b>vit</b>", "res&net"), sizes=(1.0,), arms=("none",), noises=(0.0,)
    )
    write_report(study, tmp_path)
    assert "<b>vit" not in text_of(tmp_path)
    assert "&lt;b&gt;vit" in text_of(tmp_path)


# -- studies that are not complete ------------------------------------------------------------------


def test_one_seed_gets_no_interval(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, seeds=1, sizes=(0.25, 1.0), arms=("none",), noises=(0.0,))
    write_report(study, tmp_path)
    page = text_of(tmp_path)
    assert "no interval can be given" in page
    tree = json.loads((tmp_path / "contrast.json").read_text(encoding="utf-8"))
    assert all(e["test_acc"]["low"] is None and e["test_acc"]["note"] for e in tree["estimates"])
    assert {v["outcome"] for v in tree["verdicts"]} == {"inconclusive"}


def test_a_study_without_any_result_still_has_a_page(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, sizes=(0.25, 1.0))
    study.results, study.looks, study.learning_rates = [], {}, []
    write_report(study, tmp_path)
    page = text_of(tmp_path)
    assert "Not finished" in page
    assert "not run" in page
    assert "no training of vit and resnet ended" in page
    assert "4 comparisons of 4 have no results" in page


def test_all_trainings_of_a_model_may_fail(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, sizes=(1.0,), arms=("none",), noises=(0.0,))
    for result in study.results:
        if result.cell.model == "resnet":
            result.status, result.reason, result.values = "failed", "out of memory", {}
    write_report(study, tmp_path)
    assert "no training of resnet ended" in text_of(tmp_path)


def test_unmatched_models_are_called_so(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, sizes=(1.0,), arms=("none",), noises=(0.0,))
    study.facts["match"] = {"tolerance": False, "params_ratio": 3.2, "macs_ratio": 1.1}
    write_report(study, tmp_path)
    assert "not matched: parameters differ by a factor of 3.20" in text_of(tmp_path)


def test_three_models_are_compared_in_pairs(tmp_path: Path) -> None:
    study = synthetic.make_study(
        tmp_path,
        models=("vit", "resnet", "mixer"),
        gaps=(1.2, 0.5, 0.5),
        floors=(0.02, 0.01, 0.01),
        sizes=(0.25, 1.0),
        arms=("none",),
        noises=(0.0,),
    )
    write_report(study, tmp_path)
    tree = json.loads((tmp_path / "contrast.json").read_text(encoding="utf-8"))
    assert [(v["a"], v["b"]) for v in tree["verdicts"]] == [
        (a, b) for a, b in (("vit", "resnet"), ("vit", "mixer"), ("resnet", "mixer")) for _ in range(2)
    ]
    assert "Which overfits most" in text_of(tmp_path)


# -- words and numbers ------------------------------------------------------------------------------


def test_the_summary_says_what_the_verdicts_say(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, gaps=(1.2, 0.5))
    analysis = analyse(study)
    assert {v.outcome for v in analysis.verdicts} == {"more"}
    first, second = summarise(analysis)
    assert "vit overfits more than resnet in all 6 comparisons" in first
    assert "for no others without a test" in first
    assert "53.5 % training" in second
    assert "These are other images" in second


def test_the_summary_claims_no_difference_without_one(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, gaps=(0.5, 0.5), noise_sd=0.1, draw=7)
    text = " ".join(summarise(analyse(study)))
    assert "No difference in overfitting between vit and resnet could be shown" in text
    assert "overfits more" not in text


def test_the_summary_keeps_apart_what_stands_only_by_itself(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, gaps=(0.9, 0.5), noise_sd=0.08, failed=("vit-25pct-none-n0-s1",))
    analysis = analyse(study)
    weak = [v for v in analysis.verdicts if v.decided and v.p_study > 0.05]
    firm = [v for v in analysis.verdicts if v.decided and v.p_study <= 0.05]
    assert weak
    assert firm
    text = summarise(analysis)[0]
    assert f"in {len(firm)} of 6 comparisons" in text
    assert "Significant by itself only: vit overfits more in 1 of 6 comparisons (314 images, arm none)" in text


def test_the_summary_speaks_of_underfitting(tmp_path: Path) -> None:
    study = synthetic.make_study(
        tmp_path, gaps=(0.3, 0.3), floors=(1.2, 1.1), sizes=(0.25, 1.0), arms=("none",), noises=(0.0,)
    )
    text = " ".join(summarise(analyse(study)))
    assert "In all 2 comparisons both underfit" in text
    assert "vit, too, got fewer than 75% of its training images right" in text


def test_what_has_no_p_of_the_study_does_not_stand(tmp_path: Path) -> None:
    analysis = analyse(synthetic.make_study(tmp_path, gaps=(1.2, 0.5)))
    alone = [dataclasses.replace(verdict, p_study=None) for verdict in analysis.verdicts]
    text = summarise(dataclasses.replace(analysis, verdicts=alone))[0]
    assert "At equal training loss" not in text
    assert "Significant by themselves only" in text


def test_the_summary_says_what_became_of_wrong_labels(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path)
    shares = {
        (0, 0.2): (0.9, 0.91, 0.92),
        (1, 0.2): (0.04, 0.05, 0.06),
        (0, 0.4): (0.5, 0.6, 0.4),
        (1, 0.4): (0.5,) * 3,
    }
    for result in study.results:
        if result.cell.noise:
            result.values["memorised"] = shares[result.cell.role, result.cell.noise][result.cell.seed]
    text = summarise(analyse(study))[0].replace("\u00a0", " ")
    assert (
        "With 20 % wrong labels at 1,257 images (arm none) vit gives back 91.0 % of them and resnet gives back 5.0 % "
        "of them. With 40 % wrong labels (arm none) vit gives back 50.0 % of them and resnet gives back 50.0 % of them "
        "(no significant difference). Guessing alone would give back 10 %."
    ) in text
    clean = synthetic.make_study(tmp_path, noises=(0.0,))
    assert "wrong labels" not in summarise(analyse(clean))[0]


def test_noisy_rows_have_accuracies_against_both_labels_and_no_gap(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path)
    for result in study.results:
        if result.cell.noise:
            result.values |= {"train_clean_acc": 0.8125, "train_clean_loss": 0.5}
    analysis = analyse(study)
    tree = as_tree(analysis, [])
    for entry in tree["estimates"]:
        assert ("gap_acc" in entry) == ("gap_loss" in entry) == (entry["noise"] == 0)
        assert ("train_clean_acc" in entry) == (entry["noise"] > 0)
    assert not any(d["measure"].startswith("gap") and d["noise"] for d in tree["differences"])
    table = tables.results(analysis)
    names = [column.name for column in table.columns]
    for row in table.rows:
        noisy = row[names.index("wrong labels")].sort > 0
        assert (row[names.index("gap")].text == "–") == noisy
        assert row[names.index("training, true labels")].text == ("81.2 %" if noisy else "–")


def test_no_interval_leaves_what_is_possible(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, arms=("none",), noises=(0.0,), sizes=(1.0,))
    extreme = [
        {"test_acc": 0.2, "gap_acc": 0.98, "turn_step": 1.0, "test_loss": 0.01, "turn_rise": 0.02, "ece": 0.9},
        {"test_acc": 0.99, "gap_acc": -0.9, "turn_step": 400.0, "test_loss": 9.0, "turn_rise": 5.0, "ece": 0.0},
        {"test_acc": 0.98, "gap_acc": 0.99, "turn_step": 390.0, "test_loss": 0.01, "turn_rise": 6.0, "ece": 0.1},
    ]
    for result in study.results:
        result.values |= extreme[result.cell.seed] | {"turn_loss": 0.1}
        if result.cell.role:
            result.values["test_acc"] = 1 - result.values["test_acc"]
    tree = as_tree(analyse(study), [])
    bounds = {"test_acc": (0, 1), "ece": (0, 1), "gap_acc": (-1, 1), "turn_step": (0, 400)}
    bounds |= {"test_loss": (0, math.inf), "turn_rise": (0, math.inf)}
    for entry in tree["estimates"]:
        for key, (low, high) in bounds.items():
            assert low <= entry[key]["low"] <= entry[key]["high"] <= high, key
            assert entry[key]["low"] == low or entry[key]["high"] == high, key  # it would have left without care
    for row in tree["differences"]:
        if row["measure"] in bounds and (span := bounds[row["measure"]][1] - bounds[row["measure"]][0]):
            for key in ("paired", "difference"):
                assert row[key]["low"] is None or -span <= row[key]["low"] <= row[key]["high"] <= span
    for key in ("naive", "gap_acc"):
        for verdict in analyse(study).verdicts:
            interval = getattr(verdict, key).difference
            assert interval.low is None or -2 <= interval.low <= interval.high <= 2


def test_losses_that_did_not_turn_are_counted_and_are_no_step(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, arms=("none",), noises=(0.0,), sizes=(1.0,))
    steps = {0: (100.0, 0.5), 1: (200.0, 0.4), 2: (400.0, 0.0)}  # the last one is the end: it never turned
    for result in study.results:
        step, rise = steps[result.cell.seed]
        result.values |= {"turn_step": step, "turn_rise": rise, "turn_loss": 1.0}
    analysis = analyse(study)
    for group in analysis.groups:
        assert (group.turned, len(group.runs)) == (2, 3)
        assert group.estimates["turn_step"].mean == pytest.approx(150)
        assert group.estimates["turn_rise"].n == 3
    table = tables.results(analysis)
    at = [column.name for column in table.columns].index("turned")
    assert {row[at].text for row in table.rows} == {"2 of 3"}
    (row,) = [d for d in analysis.differences if d.measure == "turn_step"]
    assert row.seeds == (0, 1)


def test_the_table_says_at_which_steps_gaps_are_compared(tmp_path: Path) -> None:
    analysis = analyse(synthetic.make_study(tmp_path, arms=("none",), noises=(0.0,), sizes=(1.0,)))
    (verdict,) = analysis.verdicts
    means = [sum(at["step"] for at in verdict.matched[m].values()) / 3 for m in ("vit", "resnet")]
    table = tables.verdicts(analysis)
    names = [column.name for column in table.columns]
    assert table.rows[0][names.index("at steps")].text == f"{means[0]:,.0f} / {means[1]:,.0f}"


def test_trainings_of_different_code_are_pointed_out(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, arms=("none",), noises=(0.0,), sizes=(1.0,))
    page = write_report(study, tmp_path).read_text(encoding="utf-8")
    assert "by the same code" not in page  # a study of an earlier version
    assert "not recorded" in page
    study.learning_rates = []
    for result in study.results:
        result.code = "aaaa" if result.cell.seed else "bbbb"
    page = write_report(study, tmp_path).read_text(encoding="utf-8")
    assert "Not all trainings were made by the same code" in page
    assert "2 by bbbb; 4 by aaaa" in page
    assert json.loads((tmp_path / "contrast.json").read_text())["code_of_trainings"] == {"bbbb": 2, "aaaa": 4}
    assert {row["code"] for row in study.frame()} == {"aaaa", "bbbb"}


def test_numbers_have_one_kind_of_minus(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path)
    for table in (tables.fits(analyse(study)), tables.verdicts(analyse(study)), tables.results(analyse(study))):
        for row in table.rows:
            for column, entry in zip(table.columns, row, strict=True):
                assert not column.number or "-" not in entry.text + entry.range + entry.below


def test_two_cnns_are_not_held_against_numbers_of_a_vit(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, sizes=(1.0,), arms=("none",), noises=(0.0,))
    study.facts["models"][0]["kind"] = "cnn"
    assert len(summarise(analyse(study))) == 1


def test_differences_are_of_the_seeds_that_both_ended(tmp_path: Path) -> None:
    study = synthetic.make_study(tmp_path, failed=("vit-25pct-none-n0-s1",))
    tree = as_tree(analyse(study), [])
    (row,) = [
        d
        for d in tree["differences"]
        if (d["images"], d["arm"], d["noise"], d["measure"]) == (314, "none", 0, "test_acc")
    ]
    values = {
        (r.cell.model, r.cell.seed): r.values["test_acc"]
        for r in study.results
        if r.done and r.cell.images == 314 and r.cell.arm == "none"
    }
    wanted = sum(values["vit", s] - values["resnet", s] for s in (0, 2)) / 2
    assert row["seeds"] == [0, 2]
    assert row["difference"]["mean"] == pytest.approx(wanted)
    json.dumps(tree, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (0.5123, "percent", "51.2 %"),
        (-0.02, "+points", "−2.0"),
        (0.2, "share", "20 %"),
        (-0.0301, "+.3f", "−0.030"),
        (-1.5e-05, ".3g", "−1.5e−05"),
        (float("nan"), ".3g", "–"),
    ],
)
def test_numbers_as_text(value: float, style: str, text: str) -> None:
    assert show(value, style) == text
