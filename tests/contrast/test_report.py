"""The report and ``contrast.json``: complete, traceable, honest about what is missing."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from vision_attn.contrast.analysis import analyse, as_tree
from vision_attn.contrast.report import write_report
from vision_attn.contrast.summary import summarise
from vision_attn.contrast.tables import show

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
    # the failed seed is not claimed
    assert any("0, 2 (314)" in source for source in sources)


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
        "read once",
        "5 at 5 %; 3 at 25 %, 100 %",
        "eval_images",
        "small_seeds",
    ):
        assert words in page, words


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
    assert "vit did not fit them either" in text


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
        (1.5e-05, ".3g", "1.5e-05"),
        (float("nan"), ".3g", "–"),
    ],
)
def test_numbers_as_text(value: float, style: str, text: str) -> None:
    assert show(value, style) == text
