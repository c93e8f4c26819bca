"""A real browser for pages that the project writes: headless Chromium, cut off from every network.

Use the fixture ``browser`` of ``tests/conftest.py``; it skips, visibly, where there is no Chromium or no selenium::

    def test_page(browser, tmp_path):
        page = browser.open(tmp_path / "report.html")
        assert not page.errors
        assert not page.requests
        page.driver.find_element("css selector", "th").click()
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--proxy-server=http://127.0.0.1:9",  # nobody listens there: a page that asks for a host gets an error, and is seen
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # this machine: pages that are served
)
LOCAL = ("file:", "data:", "blob:", "about:")

# Pictures that were drawn: <img>, <canvas> and inline <svg> with an extent and, for images, decoded pixels
_PICTURES = """
return Array.from(document.querySelectorAll('img, canvas, svg[role=img]')).map(function (e) {
  var box = e.getBoundingClientRect();
  return {kind: e.tagName.toLowerCase(), id: e.id, alt: e.getAttribute('alt') || e.getAttribute('aria-label') || '',
          width: box.width, height: box.height, natural: e.naturalWidth === undefined ? box.width : e.naturalWidth};
});
"""


@dataclass
class Page:
    """What the browser made of one file.

    Attributes:
        driver: selenium's, at the page.
        errors: messages of the console at level SEVERE and uncaught exceptions.
        requests: addresses the page asked for that are neither the file itself nor inline data.
    """

    driver: Any
    errors: list[str]
    requests: list[str]

    def refresh_logs(self) -> None:
        """Add what happened since the page was opened (after clicks, for instance)."""
        self.errors += [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                address = message["params"]["request"]["url"]
                if not address.startswith(LOCAL):
                    self.requests.append(address)

    def pictures(self) -> list[dict[str, Any]]:
        """``kind id alt width height natural`` of every ``<img>``, ``<canvas>`` and ``<svg role="img">``."""
        return self.driver.execute_script(_PICTURES)

    def overflow(self) -> float:
        """How many pixels the page is wider than its window; 0 on a page that fits."""
        script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return float(self.driver.execute_script(script))

    def text(self) -> str:
        """The visible text."""
        return self.driver.find_element("tag name", "body").text

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """A PNG of the page, down to its end unless ``whole`` is false."""
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def print_pdf(self, path: Path) -> Path:
        """The page as it would be printed on A4."""
        pdf = self.driver.execute_cdp_cmd(
            "Page.printToPDF", {"printBackground": True, "paperWidth": 8.27, "paperHeight": 11.69}
        )
        path.write_bytes(base64.b64decode(pdf["data"]))
        return path


class Browser:
    """Headless Chromium with a fresh profile."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: str | Path, *, width: int = 1280, height: int = 900, javascript: bool = True) -> Page:
        """Show a file.

        Args:
            path: an HTML file (or an address on this machine).
            width: of the window, CSS pixels; 390 is a phone.
            height: of the window, CSS pixels.
            javascript: whether the page's scripts may run.
        """
        address = path if isinstance(path, str) and "://" in path else Path(path).resolve().as_uri()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not javascript})
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(address)
        page = Page(self.driver, [], [])
        page.refresh_logs()
        return page


def why_not() -> str | None:
    """Why no browser can be had here, or None."""
    if find_chromium() is None or shutil.which("chromedriver") is None:
        return "no Chromium with chromedriver (on Debian: apt install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    return None


def find_chromium() -> str | None:
    """The browser's executable."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def start() -> Iterator[Browser]:
    """A browser until the block ends; skips the test where there is none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = find_chromium() or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(prefix="va-browser-") as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = Service(shutil.which("chromedriver"), env={**os.environ, "HOME": profile})
        driver = webdriver.Chrome(options=options, service=service)
        try:
            driver.set_page_load_timeout(60)
            yield Browser(driver)
        finally:
            driver.quit()
