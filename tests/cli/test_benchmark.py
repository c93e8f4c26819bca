"""``vision-attn benchmark kernels``: shows the table, measures, keeps a measurement. Tiny sizes; no time is judged."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from vision_attn import benchmarking
from vision_attn.attention import KERNELS, Request, kernel_table
from vision_attn.benchmarking import CANDIDATES, interleaved, matrix_share
from vision_attn.cli.main import main
from vision_attn.training import memory

TINY = ["--dtype", "float32", "--lengths", "[5,7]", "--batch", "2", "--heads", "3", "--width", "4", "--rounds", "1"]


def able(training: bool, kind: str) -> set[str]:
    """Those of the kernels to choose from that serve such a call."""
    request = Request("cpu", torch.float32, 2, 3, 3, 5, 5, 4, kind == "mask", kind == "bias", training)
    return {name for name in CANDIDATES if KERNELS[name].why_not(request) is None}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache folder of the test's own; the table in use is restored afterwards."""
    monkeypatch.delenv(kernel_table.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_table.load()
    yield
    monkeypatch.undo()
    kernel_table.load()


def test_measure_save_and_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["benchmark", "kernels", *TINY, "--save"]) == 0
    shown = capsys.readouterr().out
    path = kernel_table.user_path("cpu")
    assert path.is_file()
    assert str(path) in shown.replace("\n", "")
    assert all(name in shown for name in able(training=False, kind="plain"))
    file = tmp_path / "shown.json"
    assert main(["benchmark", "kernels", "--lengths", "[5]", "--json", str(file)]) == 0
    cells = json.loads(file.read_text())["cells"]
    assert set(cells) == {
        kernel_table.cell_name("float32", training, kind) for training in (True, False) for kind in kernel_table.KINDS
    }
    for name, cell in cells.items():
        assert list(cell) == ["5"]
        assert set(cell["5"]) == able(training="training" in name, kind=name.split()[2])
        assert all(ms > 0 for ms in cell["5"].values())


@pytest.mark.parametrize("option", ["--save", "--json"])
def test_a_full_disk_leaves_the_old_table_whole(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kernel_table.user_path("cpu") if option == "--save" else tmp_path / "shown.json"
    arguments = [*TINY, "--save"] if option == "--save" else ["--lengths", "[65]", "--json", str(path)]
    assert main(["benchmark", "kernels", *arguments]) == 0
    before, real = path.read_bytes(), Path.write_text

    def full(self: Path, text: str, *args: object, **options: object) -> int:
        real(self, text[: len(text) // 2], *args, **options)  # type: ignore[arg-type]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    capsys.readouterr()
    assert main(["benchmark", "kernels", *arguments]) == 2
    error = capsys.readouterr().err
    assert f"the disk is full: could not save {path} (the previous file is intact)" in error
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_measuring_alone_keeps_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["benchmark", "kernels", *TINY, "--measure", "--json", "-"]) == 0
    section = json.loads(capsys.readouterr().out)
    assert section["device"] == kernel_table.device_key("cpu")
    assert section["threads"] == torch.get_num_threads()
    assert list(tmp_path.iterdir()) == []


def test_the_first_length_finds_memory_at_hand_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: order.append("kept"))
    monkeypatch.setattr(benchmarking, "interleaved", lambda *a, **k: order.append("timed") or {"explicit": 1.0})
    assert main(["benchmark", "kernels", *TINY, "--measure"]) == 0
    assert order[:2] == ["kept", "timed"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kernel"], "Did you mean kernels?"),
        (["kernels", "--dtype", "bfloat17", "--measure"], "float32, bfloat16"),
        (["kernels", "--device", "tpu", "--measure"], "no such device"),
        (["kernels", "--device", "tpu"], "nothing was measured for tpu"),
        (["kernels", "--rounds", "0", "--measure"], "--rounds"),
        (["kernels", "--lengths", "[0]", "--measure"], "--lengths"),
        (["kernels", "--lenghts", "[5]"], "Did you mean --lengths?"),
    ],
)
def test_mistakes_are_told_in_a_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["benchmark", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) <= 2


def test_interleaved_takes_turns() -> None:
    calls: list[str] = []
    seconds = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warmup=2)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 15, 3)]
    assert len(calls) == 15
    assert set(rounds) == {"bca", "cab", "abc"}  # in turn, and each of them first now and then
    assert set(seconds) == set("abc")


def test_matrix_share() -> None:
    a = torch.randn(311, 307)
    assert matrix_share(lambda: a @ a.T) > 0
    assert matrix_share(lambda: a.exp().sin()) == 0
