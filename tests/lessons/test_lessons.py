"""Every lesson runs in both languages, and its numbers are those that theory or the sources give."""

from __future__ import annotations

import re
import string

import pytest
from PIL import Image

from vision_attn.certificates import ordered
from vision_attn.cli.main import main
from vision_attn.errors import UserError
from vision_attn.lessons import LANGUAGES, LESSONS, find
from vision_attn.lessons.registry import POSTS
from vision_attn.lessons.wording import Say, columns, wrap

NO_NUMBER = re.compile(r"(?<![A-Za-z])(nan|inf)(?![A-Za-z])")
SHOW_NAN = {"normalize", "mask"}  # whose point it is that a formula taken literally gives none
NOTHING_TO_CORRECT = {"causes", "patches", "pointer"}


@pytest.fixture(scope="module")
def computed():
    return {name: lesson.compute() for name, lesson in LESSONS.items()}


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_lesson_speaks_both_languages(name, language, computed):
    told = LESSONS[name].tell(language, computed[name])
    assert told.startswith("━━ ")
    assert not re.search(r"[{}]", told)
    assert bool(NO_NUMBER.search(told)) == (name in SHOW_NAN)
    assert max(columns(line) for line in told.split("\n")) <= 105
    chinese = len(re.findall(r"[\u4e00-\u9fff]", re.sub(r"[“《][^”》]*[”》]", "", told)))
    assert chinese > 100 if language == "zh" else chinese == 0


@pytest.mark.parametrize("name", LESSONS)
def test_both_languages_tell_the_same_numbers(name):
    """A number that one text has and the other lacks is a text that was forgotten."""
    fields = [
        {field for part in (text.body, text.wrong) for _, field, _, _ in string.Formatter().parse(part) if field}
        for text in LESSONS[name].texts.values()
    ]
    assert fields[0] == fields[1]
    assert len({bool(text.wrong) for text in LESSONS[name].texts.values()}) == 1


def test_a_number_that_is_none_is_seen():
    assert all(NO_NUMBER.search(text) for text in ("is nan", "nan, 0", "结果是nan，", "-inf", "nan"))
    assert not any(NO_NUMBER.search(text) for text in ("nanometre", "information", "finance"))


@pytest.mark.parametrize("name", LESSONS)
def test_lessons_that_correct_a_source_say_which_and_how(name):
    """All but three of the lessons follow a post that is wrong somewhere; a text must not lose that unnoticed."""
    assert set(LESSONS) >= NOTHING_TO_CORRECT
    for text in LESSONS[name].texts.values():
        assert bool(text.wrong.strip()) == (name not in NOTHING_TO_CORRECT)
        named = {field for _, field, _, _ in string.Formatter().parse(text.wrong) if field in POSTS["en"]}
        assert bool(named) == bool(text.wrong)


@pytest.mark.parametrize("name", LESSONS)
def test_every_lesson_draws(name, computed, tmp_path):
    LESSONS[name].draw(computed[name], tmp_path / "x.png", Say("en"))
    with Image.open(tmp_path / "x.png") as picture:
        assert min(picture.size) > 200
        assert picture.convert("L").getextrema()[0] < 100


def test_certificates_that_lessons_name_exist():
    from fnmatch import fnmatchcase

    known = [item.id for item in ordered()]
    for lesson in LESSONS.values():
        for proof in lesson.proofs:
            assert any(fnmatchcase(one, proof) for one in known), (lesson.name, proof)


def test_numbers_are_the_same_every_time(computed):
    for name in ("soft-hard", "heads", "queries", "shuffle"):
        assert LESSONS[name].tell("en", computed[name]) == LESSONS[name].tell("en")


def test_bird_and_apples(computed):
    bird, apples = computed["bird"], computed["apples"]
    assert [round(x, 3) for x in bird["share"]] == [0.118, 0.176, 0.059, 0.588, 0.059]
    assert bird["sums"] == [230, 170]
    assert bird["soft"][3] == pytest.approx(1)
    assert apples["dot"] == [6, 6, 7, 4]
    assert [round(x, 3) for x in apples["cosine"]] == [1, 0.866, 0.793, 0.392]
    assert [round(x, 3) for x in apples["claimed"]] == [0.452, 0.321, 0.226]
    assert apples["agree"] < 1e-12


def test_scores_and_normalizers(computed):
    scores, normal = computed["scores"], computed["normalize"]
    assert max(scores["identity"], scores["concat"], scores["location"]) < 1e-6 < scores["content"]
    assert "equal widths" in scores["refusal"]
    assert "not negative" in normal["refusal"]
    assert normal["plain"] == [1.5, -0.5]
    assert normal["naive"].startswith("nan")
    assert sum(normal["stable"]) == pytest.approx(1, abs=1e-3)


def test_root_d_keeps_the_variance_at_one(computed):
    found = computed["sqrt-d"]
    for d, plain, scaled in zip(found["widths"], *found["variance"].values(), strict=True):
        assert plain == pytest.approx(d, rel=0.05)
        assert scaled == pytest.approx(1, rel=0.05)
    plain, scaled = found["slope"]["dot"], found["slope"]["scaled_dot"]
    assert plain[0] > plain[1] > plain[2]
    assert max(scaled) / min(scaled) < 1.05
    assert found["ratio"] > 2


def test_soft_attention_is_the_mean_of_hard_samples(computed):
    found = computed["soft-hard"]
    assert abs(found["mean"] - found["soft"]) < 4 * found["error"]
    assert not found["hard_gradient"]
    assert found["sigmas"] < 4
    assert sum(found["exact"]) == pytest.approx(0, abs=1e-5)


def test_weights_are_not_causes(computed):
    found = computed["causes"]
    assert found["effects"][0] < found["effects"][2]
    assert found["weights"][0] > found["weights"][2]
    assert found["moved"] < 1e-12 < found["swap"]
    # hiding a token leaves the others in proportion
    assert found["effects"] == pytest.approx([abs(4 / 3 - 1.1), abs(1.1 / 0.8 - 1.1), abs(0.7 / 0.9 - 1.1)])


def test_sequences(computed):
    shuffled, masked, matrix, heads, decoder = (
        computed[name] for name in ("shuffle", "mask", "matrix", "heads", "decoder")
    )
    assert max(shuffled["equivariant"], shuffled["together"], shuffled["mean"]) < 1e-6
    assert min(shuffled["different"], shuffled["alone"], shuffled["positions"]) > 0.1
    assert masked["mask"] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert masked["past"] == masked["hidden"] == masked["empty"] == 0 < masked["future"]
    assert masked["plain"] == "nan"
    assert matrix["same"] < 1e-12
    assert min(matrix["axis"], matrix["scale"]) > 0.1
    assert len(set(heads["params"])) == len(set(heads["macs"])) == 1
    assert heads["loop"] < 1e-5
    assert decoder["gaps"][0] < 1e-5 < 0.1 < decoder["gaps"][1]


def test_images(computed):
    patches, reach, windows, queries = (computed[name] for name in ("patches", "reach", "windows", "queries"))
    assert patches["tokens"] == 196
    assert max(patches["conv"], patches["lookup"], patches["onehot"]) < 1e-5
    assert reach["conv"] == [9, 25, 81, 289]
    assert reach["attn"] == 1024
    assert (windows["full"], windows["few"]) == (4096, 1024)
    assert (windows["still_count"], windows["moved_count"], windows["moved_share"]) == (16, 64, 1)
    assert windows["global_macs"] == pytest.approx(2.0, abs=0.01)
    assert windows["window_macs"] == pytest.approx(0.145, abs=0.001)
    assert max(queries["equivariant"], queries["twins"]) < 1e-5 < 1e-3 < queries["others"]
    assert queries["best"] == pytest.approx(queries["least"])


def test_costs(computed):
    cost, pointer = computed["cost"], computed["pointer"]
    assert cost["growth"]["full"] == pytest.approx(16)
    assert all(cost["growth"][name] == pytest.approx(4, abs=0.1) for name in ("window", "linformer", "performer"))
    assert pointer["order"] == "8, 6, 3, 1"


def test_unknown_names_are_answered_with_near_ones(capsys):
    with pytest.raises(UserError, match="Did you mean windows"):
        find("window")
    assert main(["learn", "brid"]) == 2
    assert "Did you mean bird?" in capsys.readouterr().err
    assert main(["learn", "bird", "--lang", "fr"]) == 2
    assert "en (English), zh (中文)" in capsys.readouterr().err


def test_command_line(capsys, tmp_path):
    assert main(["learn", "--list", "--lang", "zh"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(LESSONS)
    assert main(["learn", "bird", "mask", "--draw", str(tmp_path / "new")]) == 0
    out = capsys.readouterr()
    assert "0.588" in out.out
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"bird.png", "mask.png"}
    (tmp_path / "file").write_text("")
    assert main(["learn", "bird", "--draw", str(tmp_path / "file")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


def test_figures_are_english_where_no_font_has_chinese(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("vision_attn.lessons.wording._FONTS", ("No Such Font",))
    say = Say("zh")
    assert say.lacking
    assert say("query", "查询") == "query"
    assert main(["learn", "mask", "--lang", "zh", "--draw", str(tmp_path)]) == 0
    assert "没有找到中文字体" in capsys.readouterr().err
    monkeypatch.setattr("vision_attn.lessons.wording._FONTS", ("DejaVu Sans",))  # any font that is there
    assert Say("zh")("query", "查询") == "查询"


def test_chinese_is_wrapped_by_columns_and_never_before_its_punctuation():
    text = wrap("一" * 9 + "，" + "二" * 30 + "（abc），" + "x" * 10, 20)
    lines = text.split("\n")
    assert all(columns(line) <= 22 for line in lines)
    assert not any(line[0] in "，）。" for line in lines)
    assert "".join(lines) == "一" * 9 + "，" + "二" * 30 + "（abc），" + "x" * 10
