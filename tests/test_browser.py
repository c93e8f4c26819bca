"""The browser that other tests use sees what it has to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = """<!doctype html><html lang="en"><meta name="viewport" content="width=device-width"><title>t</title>
<p id="p">before</p><img alt="dot" src="data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==">
<script>document.getElementById('p').textContent = 'after'; %s</script></html>"""


def write(folder: Path, script: str = "") -> Path:
    path = folder / "page.html"
    path.write_text(PAGE % script, encoding="utf-8")
    return path


def test_a_good_page_has_no_errors_and_asks_for_nothing(browser: Any, tmp_path: Path) -> None:
    page = browser.open(write(tmp_path), width=390, height=844)
    assert page.errors == []
    assert page.requests == []
    assert page.overflow() == 0
    assert page.text() == "after"
    (picture,) = page.pictures()
    assert (picture["alt"], picture["natural"]) == ("dot", 1)


def test_errors_and_requests_are_seen(browser: Any, tmp_path: Path) -> None:
    page = browser.open(write(tmp_path, "new Image().src = 'http://example.invalid/x.png'; missing();"))
    page.refresh_logs()
    assert any("missing" in error for error in page.errors)
    assert page.requests == ["http://example.invalid/x.png"]


def test_javascript_can_be_switched_off_and_on(browser: Any, tmp_path: Path) -> None:
    assert browser.open(write(tmp_path), javascript=False).text() == "before"
    assert browser.open(write(tmp_path)).text() == "after"
