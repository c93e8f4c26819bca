"""Scripts that no other test runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def runs(tmp_path):
    for name, scale in (("dn", 1.0), ("vanilla", 0.1)):
        folder = tmp_path / "runs" / name / "0"
        folder.mkdir(parents=True)
        rows = [f"{i},{100 * i},{60.0 * i},0.1,{scale * i / 10 if i % 2 else ''}" for i in range(1, 6)]
        (folder / "metrics.csv").write_text("epoch,step,seconds,lr,val/ap\n" + "\n".join(rows) + "\n")
    return tmp_path / "runs"


def compare(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "compare_runs.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_runs_are_compared(runs, tmp_path):
    output = tmp_path / "docs" / "curves.png"
    done = compare("--metric", "val/ap", "--output", output, f"denoising={runs / 'dn' / '0'}", runs / "vanilla" / "0")
    assert done.returncode == 0, done.stderr
    first, second, path = done.stdout.splitlines()
    assert first.startswith("denoising (")
    assert first.endswith("val/ap 0.5000 at step 500, 5.0 min")
    assert second.startswith("vanilla (")
    assert "0.0500" in second
    assert path == str(output)
    with Image.open(output) as picture:
        assert picture.width > 1000


def test_what_cannot_be_compared_is_named(runs, tmp_path):
    output = tmp_path / "curves.png"
    missing = compare("--output", output, tmp_path / "nothing")
    other = compare("--metric", "val/acc", "--output", output, runs / "dn" / "0")
    assert (missing.returncode, other.returncode) == (2, 2)
    assert "no run folder" in missing.stderr
    assert "there are val/ap" in other.stderr
    assert not output.exists()
