"""The benchmarks against transformers' detector still run, and compare what is equal before they time it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    ("script", "options"),
    [("benchmark_detr", ["--padded", "--objects", "3"]), ("benchmark_criterion", ["--batch", "2", "--queries", "23"])],
)
def test_quick(script, options, tmp_path):
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--quick", "--threads", "1", *options]
    command += ["--json", str(tmp_path / "out.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    rows = [found] if script == "benchmark_detr" else found["rows"]
    assert len(rows) == (1 if script == "benchmark_detr" else 2)
    for row in rows:
        assert set(row["ms"]) == {"ours", "transformers"}
        assert row["speed_up"] == pytest.approx(row["ms"]["transformers"] / row["ms"]["ours"], rel=0.05)
