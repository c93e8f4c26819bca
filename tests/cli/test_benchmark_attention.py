"""``vision-attn benchmark attention`` on tiny lengths; no time is judged."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from vision_attn import attention_benchmark, attention_report, peak_memory
from vision_attn.attention_benchmark import (
    MECHANISMS,
    Row,
    count_flops,
    exponents,
    make_call,
    measure,
    memory_limit,
    speedups,
    square,
)
from vision_attn.benchmarking import fit_exponent
from vision_attn.cli.main import main

SHAPE = {"heads": 2, "width": 8, "batch": 1}
SMALL = {"window": 4, "block_size": 8, "rank": 8, "features": 8, "num_random": 1}


def small(name: str) -> dict:
    return {key: SMALL.get(key, value) for key, value in MECHANISMS[name].items()}


def test_writes_table_json_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = "explicit,fused,window,performer"
    arguments = ["--lengths", "[64,32]", "--mechanisms", names, "--heads", "2", "--width", "8", "--rounds", "1"]
    arguments += ["--backward", "--window", "4", "--features", "8", "--output", str(tmp_path / "new" / "folder")]
    assert main(["benchmark", "attention", *arguments]) == 0
    shown = capsys.readouterr().out
    folder = tmp_path / "new" / "folder"
    assert {path.name for path in folder.iterdir()} == {"table.md", "attention.json", "attention.png"}
    assert (folder / "attention.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((folder / "attention.json").read_text())
    rows = [Row(**row) for row in result["rows"]]
    assert [(r.mechanism, r.backward, r.tokens) for r in rows] == [
        (name, backward, n) for backward in (False, True) for name in names.split(",") for n in (32, 64)
    ]
    assert all(row.seconds and row.seconds > 0 and row.peak_bytes is not None and row.flops for row in rows)
    assert result["mechanisms"]["window"]["window"] == 4
    assert result["setting"]["heads"] == 2
    fits = {(e["mechanism"], e["backward"]): e for e in result["exponents"]}
    assert fits["explicit", False]["flops"] == pytest.approx(2)
    assert fits["performer", True]["flops"] == pytest.approx(1)
    table = (folder / "table.md").read_text()
    for text in ("time, ms, forward", "peak memory, MiB, forward and backward", "vs fused, 64 tokens"):
        assert text in shown
        assert text in table or text[0].upper() + text[1:] in table
    assert "- window: kernel = auto, pattern = window, window = 4" in table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mechanisms", "windw"], "Did you mean window"),
        (["--mechanisms", ","], "There are: explicit"),
        (["--lengths", "1024,a"], "give numbers of tokens"),
        (["--lengths", "0"], "give numbers of tokens"),
        (["--rounds", "0"], "--rounds must be 1 or more"),
        (["--window", "0"], "--window must be 1 or more"),
        (["--dtype", "int8"], "choose float32"),
        (["--device", "tpu"], "no such device"),
        (["--lenghts", "5"], "Did you mean --lengths?"),
    ],
)
def test_mistakes_are_told_in_a_line(capsys, tmp_path, arguments, says) -> None:
    assert main(["benchmark", "attention", "--output", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) <= 2


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_can_be_called(name) -> None:
    out = make_call(small(name), 64, heads=2, width=8)()
    assert out.shape == (1, 2, 64, 8)
    assert not out.requires_grad
    gradients = make_call(small(name), 64, heads=2, width=8, backward=True)()
    assert [g.shape for g in gradients] == [(1, 2, 64, 8)] * 3
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", MECHANISMS)
def test_flops_are_those_of_the_products(name, backward) -> None:
    n, product = 64, 2 * 2 * 64 * 8  # of one query or key with a row of width 8, in all heads
    counted = count_flops(make_call(small(name), n, **SHAPE, backward=backward))
    # two products per pair; backward four more, and one again where the scores were not kept
    expected = {"explicit": (2 + 4 * backward) * n, "fused": (2 + 5 * backward) * n, "tiled": (2 + 5 * backward) * n}
    if name == "performer":  # features of q and k, Σ φ(k) v and φ(q) times that, whatever N is
        expected["performer"] = (4 + 8 * backward) * 8
    if name in expected:
        assert counted == expected[name] * product
    else:
        assert counted is not None
        assert 8 * product < counted <= (2 + 5 * backward) * n * product + (4 * 8 * product)


def test_flops_fall_where_pairs_are_skipped() -> None:
    n, radius = 1024, 16
    pairs = n * (2 * radius + 1) - radius * (radius + 1)
    counted = count_flops(make_call({"pattern": "window", "window": radius, "kernel": "gathered"}, n, heads=1, width=4))
    assert counted is not None
    assert 2 * 2 * 4 * pairs < counted < 2 * 2 * 4 * n * n / 4


def test_a_mechanism_without_memory_is_noted_and_not_run(monkeypatch) -> None:
    monkeypatch.setattr(attention_benchmark, "in_child", lambda module, function, calls, threads: [1000] * len(calls))
    result = measure(["explicit", "fused"], [8, 512], rounds=1, heads=1, width=4, memory=1e-3)
    note = {(row["mechanism"], row["tokens"]): row["note"] for row in result["rows"]}
    assert [key for key, text in note.items() if text] == [("explicit", 512)]
    assert "needs about 0.0 GiB" in note["explicit", 512]
    assert result["rows"][1]["seconds"] is None
    assert result["speedups"][-1]["tokens"] == 512
    assert attention_report.notes(result)[0].startswith("explicit at 512 tokens: needs about")
    assert "Not measured:" in attention_report.markdown(result)


def test_the_limit_is_asked_for_or_free_memory() -> None:
    assert memory_limit(2) == 2 * 2**30
    assert 2**20 < memory_limit(None) < 2**50


def test_fitted_exponents() -> None:
    lengths = [16, 32, 64, 128]
    assert fit_exponent(lengths, [3 * n**1.25 for n in lengths]) == pytest.approx(1.25)
    assert fit_exponent([16], [1.0]) is None
    assert fit_exponent(lengths, [0, 0, 0, 1.0]) is None
    rows = [Row("a", False, n, seconds=n**2, peak_bytes=None if n == 16 else n, flops=7) for n in lengths]
    (entry,) = exponents(rows)
    assert entry["seconds"] == pytest.approx(2)
    assert entry["peak_bytes"] == pytest.approx(1)
    assert entry["flops"] == pytest.approx(0)
    assert entry["lengths"] == lengths


def test_speed_ups_are_at_4096_or_the_next_shorter() -> None:
    def rows(*lengths: int) -> list[Row]:
        seconds = {"explicit": 6.0, "fused": 3.0, "window": 1.5}
        return [Row(name, False, n, seconds=s * n) for name, s in seconds.items() for n in lengths]

    for lengths, at in (((2048, 4096, 8192), 4096), ((1024, 2048), 2048), ((8192, 16384), 8192)):
        found = {row["mechanism"]: row for row in speedups(rows(*lengths))}
        assert (found["window"]["explicit"], found["window"]["fused"], found["window"]["tokens"]) == (4.0, 2.0, at)
    assert speedups([Row("window", False, 4096, seconds=1.0)]) == []


def test_grids_are_nearly_square() -> None:
    assert [square(n) for n in (1024, 2048, 6, 7)] == [(32, 32), (32, 64), (2, 3), (1, 7)]


def test_what_ran_out_of_memory_is_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(attention_benchmark, "in_child", lambda module, function, calls, threads: [1000, None])
    result = measure(["fused"], [8, 16], rounds=1, heads=1, width=4)
    assert [(row["seconds"] is None, row["note"]) for row in result["rows"]] == [
        (False, ""),
        (True, "ran out of memory"),
    ]


# -- peak memory ------------------------------------------------------------------------------------


def test_peaks_are_those_of_the_calls_and_a_killed_one_has_none(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    calls = [{"megabytes": megabytes} for megabytes in (8, 64, 0)]
    small, large, killed = peak_memory.in_child("peak_calls", "takes", calls, threads=1)
    assert small == pytest.approx(8 * 2**20, rel=0.1)
    assert large == pytest.approx(64 * 2**20, rel=0.1)
    assert killed is None


def test_after_a_killed_call_another_child_goes_on(monkeypatch) -> None:
    asked = []

    def child(request: str, threads: int, timeout: float) -> tuple[str, int, str]:
        calls = [call["n"] for call in json.loads(request)["calls"]]
        asked.append(calls)
        fine = calls[: calls.index(0)] if 0 in calls else calls
        return "".join(f'{{"peak": {n}}}\n' for n in fine), -9 if 0 in calls else 0, ""

    monkeypatch.setattr(peak_memory, "_child", child)
    found = peak_memory.in_child("here", "takes", [{"n": n} for n in (1, 0, 2, 0, 0, 3)], threads=1)
    assert found == [1, None, 2, None, None, 3]
    assert asked == [[1, 0, 2, 0, 0, 3], [2, 0, 0, 3], [0, 3], [3]]


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_a_call_that_finds_no_memory_has_no_peak(kind, monkeypatch, capsys) -> None:
    def make(megabytes: int):
        def call() -> None:
            raise kind("out of memory") if megabytes else TypeError("no such thing")

        return call

    monkeypatch.setattr(attention_report, "make", make, raising=False)

    def serve(megabytes: int) -> None:
        request = {"module": "vision_attn.attention_report", "function": "make", "threads": 1}
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request | {"calls": [{"megabytes": megabytes}]})))
        peak_memory._serve()

    serve(1)
    assert capsys.readouterr().out == '{"peak": null}\n'
    with pytest.raises(TypeError, match="no such thing"):
        serve(0)


def test_an_error_in_the_child_is_told(monkeypatch) -> None:
    monkeypatch.setattr(peak_memory, "_child", lambda *_: ('{"peak": 7}\n', 1, "a\nTypeError: no such thing\n"))
    with pytest.raises(RuntimeError, match=r"measuring \{'n': 2\} failed: .*TypeError: no such thing"):
        peak_memory.in_child("here", "takes", [{"n": 1}, {"n": 2}], threads=1)
