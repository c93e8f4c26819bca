"""``vision-attn check attention``: a line each, exit codes, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vision_attn.certificates import ordered, registry
from vision_attn.certificates.registry import EXACT, certificate
from vision_attn.cli.main import main

FIELDS = {"id", "name", "passed", "error", "tolerance", "device", "dtype", "kernel"}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch):
    """A registry with one that holds, one that fails in float32 alone, and one that needs a kernel of its own."""
    monkeypatch.setattr(registry, "CERTIFICATES", {})
    certificate("2", "holds", dtypes=EXACT)(lambda s: 0.0)
    certificate("3b", "fails in float32", dtypes=EXACT, tolerance=0.5)(
        lambda s: 0.75 if s.dtype == torch.float32 else 0.0
    )

    @certificate("10", "asks for hard attention", dtypes=(torch.float32,), kernel=True)
    def hard(s):
        q = s.randn(1, 1, 3, 4)
        return 0.0 * float(s.attend(q, q, q, normalizer="hard").sum())


def check(*arguments: str) -> int:
    return main(["check", "attention", *arguments])


def test_two_rows_by_id(capsys):
    assert check("--ids", "20,20b") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["20", "20b"]
    assert all(line.rstrip().endswith("holds") for line in lines[:-1])
    assert lines[-1] == "2 certificates in 6 settings: 6 hold"


def test_a_failure_is_named_and_the_code_is_1(few, capsys):
    assert check() == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["3b", "fails", "in", "float32", "7.5e-01", "5.0e-01", "float32", "FAILS"]
    assert "1 fail (3b)" in lines[-1]
    assert check("--ids", "3b", "--dtype", "float64") == 0
    assert check("--ids", "2") == 0


def test_skipped_is_not_passed_and_says_why(few, capsys):
    assert check("--kernel", "sdpa", "--ids", "10", "--json", "-") == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)
    assert row["passed"] is None
    assert row["error"] is None
    assert "'hard'" in row["reason"]
    assert "skipped: kernel sdpa: it computes softmax only" in captured.err
    assert "1 skipped, for the reasons given" in captured.err
    assert check("--dtype", "float16", "--ids", "2") == 0
    assert "skipped: it is stated for float64, float32" in capsys.readouterr().out


def test_json_to_a_file_and_to_stdout(few, capsys, tmp_path: Path):
    file = tmp_path / "result.json"
    assert check("--json", str(file)) == 1
    assert "fails in float32" in capsys.readouterr().out
    rows = json.loads(file.read_text())
    assert [(row["id"], row["dtype"], row["passed"]) for row in rows] == [
        ("2", "float64", True),
        ("2", "float32", True),
        ("3b", "float64", True),
        ("3b", "float32", False),
        ("10", "float32", True),
    ]
    assert all(row.keys() >= FIELDS for row in rows)
    assert {row["device"] for row in rows} == {"cpu"}
    assert [row["kernel"] for row in rows] == ["any", "any", "any", "any", "auto"]
    assert check("--json", "-") == 1
    assert json.loads(capsys.readouterr().out) == rows


def test_shell_patterns(capsys):
    assert check("--ids", "3*,20b", "--dtype", "float64", "--json", "-") == 0
    found = [row["id"] for row in json.loads(capsys.readouterr().out)]
    assert found == [item.id for item in ordered() if item.id.startswith("3") or item.id == "20b"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["attentoin"], "Did you mean attention?"),
        (["attention", "--kernel", "sdap"], "Did you mean sdpa?"),
        (["attention", "--dtype", "bfloat17"], "Did you mean bfloat16"),
        (["attention", "--dtype", "int8"], "Choose one of float64, float32, bfloat16, float16"),
        (["attention", "--device", "warp9"], "no such device"),
        (["attention", "--ids", "20,777"], "--ids 777: no certificate has that id"),
        (["attention", "--ids", ","], "no certificate has that id"),
        (["attention", "--kernal", "sdpa"], "Did you mean --kernel?"),
        (["attention", "--ids", "2", "--json", "/dev/null/a.json"], "/dev/null"),
    ],
)
def test_wrong_calls_are_told_in_a_line(capsys, arguments, says):
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) <= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_told(capsys):
    assert check("--device", "cuda") == 2
    assert "--device cuda: this machine has no such device" in capsys.readouterr().err


def test_help(capsys):
    assert main(["check"]) == 2
    assert main(["check", "--help"]) == 0
    assert "attention   Every attention mechanism" in capsys.readouterr().out
