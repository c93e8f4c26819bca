"""The report in a real browser: nothing fails, nothing is asked for, everything is drawn, tables sort."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vision_attn.contrast.report import write_report

synthetic = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("synthetic.py"))))
SIZES = [(1280, 900), (390, 844)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    return write_report(synthetic.make_study(folder, gaps=(0.9, 0.5), noise_sd=0.08), folder)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_no_error_no_request_and_every_figure_drawn(browser: Any, report: Path, width: int, height: int) -> None:
    page = browser.open(report, width=width, height=height)
    page.refresh_logs()
    assert page.errors == []
    assert page.requests == []
    assert page.overflow() == 0  # wide tables scroll in their own frame
    pictures = page.pictures()
    assert len(pictures) == len(list((report.parent / "figures").glob("*.png")))
    for picture in pictures:
        assert picture["natural"] > 0, picture["alt"]
        assert picture["width"] > 250, picture["alt"]
        assert picture["height"] > 180, picture["alt"]
        assert picture["alt"]


def column(page: Any, name: str) -> list[str]:
    """The texts of a column of the table of verdicts."""
    script = """
      var table = document.querySelector('#verdicts table.data');
      var names = Array.from(table.tHead.rows[0].cells).map(c => c.textContent.trim());
      var at = names.indexOf(arguments[0]);
      return Array.from(table.tBodies[0].rows).map(r => r.cells[at].textContent.trim());
    """
    return page.driver.execute_script(script, name)


def click(page: Any, name: str) -> str:
    """Click the title of a column; what screen readers are told after that."""
    for head in page.driver.find_elements("css selector", "#verdicts table.data th"):
        if head.text.strip().startswith(name):
            head.find_element("tag name", "button").click()
            return head.get_attribute("aria-sort")
    raise AssertionError(f"no column {name}")


def test_tables_sort_by_number_and_by_word(browser: Any, report: Path) -> None:
    page = browser.open(report)
    before = column(page, "images")
    assert before == ["63", "314", "1,257", "63", "314", "1,257"]
    assert click(page, "images") == "ascending"
    assert column(page, "images") == ["63", "63", "314", "314", "1,257", "1,257"]
    assert click(page, "images") == "descending"
    assert column(page, "images")[0] == "1,257"
    assert click(page, "p") == "ascending"
    numbers = [0.0 if text.startswith("<") else float(text) for text in column(page, "p")]
    assert numbers == sorted(numbers)
    click(page, "arm")
    assert column(page, "arm") == sorted(column(page, "arm"))
    click(page, "Δ gap, loss")
    differences = [float(text.split()[0].replace("−", "-")) for text in column(page, "Δ gap, loss")]
    assert differences == sorted(differences)
    page.refresh_logs()
    assert page.errors == []


def test_the_keyboard_sorts_too(browser: Any, report: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    page = browser.open(report)
    button = page.driver.find_element("css selector", "#verdicts table.data th:nth-child(3) button")
    button.send_keys(Keys.ENTER)
    assert column(page, "images")[:2] == ["63", "63"]


def test_everything_can_be_read_without_javascript(browser: Any, report: Path) -> None:
    plain = browser.open(report, javascript=False)
    text = plain.text()
    for words in (
        "Does vit overfit more than resnet?",
        "At equal training loss",
        "Protocol",
        "The rule of the verdicts",
    ):
        assert words in text
    heads = plain.driver.find_elements("css selector", "#verdicts table.data th")
    assert [head.text for head in heads][:3] == ["verdict", "arm", "images"]
    folds = plain.driver.find_elements("css selector", "details")
    folds[0].find_element("tag name", "summary").click()
    assert "vit-100pct-full-n0-s2" in plain.text()


def test_it_prints(browser: Any, report: Path, tmp_path: Path) -> None:
    pdf = browser.open(report).print_pdf(tmp_path / "report.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert 3 <= pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") <= 40
