"""The kernel is chosen by the measured table, the user's own before ours; nothing here depends on the clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from pathlib import Path

import pytest
import torch

import vision_attn as va
from vision_attn.atomic import atomic_write_text
from vision_attn.attention import KERNELS, Request, attend, choose_kernel, kernel_table
from vision_attn.attention.kernel_table import KINDS, cell_name, device_key, fastest

ALL = list(KERNELS)
BASE = Request("cpu", torch.bfloat16, 2, 3, 3, 65, 65, 8, training=True)


def section(cells: dict[str, dict[str, dict[str, float]]], device: str = "cpu") -> dict:
    return {"device": device_key(device), "cells": cells}


def write(path: Path, one: dict) -> None:
    atomic_write_text(path, kernel_table.with_section(path, one))


@pytest.fixture
def user_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a user's own table, and afterwards the shipped one again."""
    path = tmp_path / "mine.json"
    monkeypatch.setenv(kernel_table.VARIABLE, str(path))

    def install(*sections: dict) -> Path:
        for one in sections:
            write(path, one)
        kernel_table.load()
        return path

    yield install
    monkeypatch.undo()
    kernel_table.load()


def test_shipped_table_names_kernels_and_dtypes_that_exist() -> None:
    sections = kernel_table.read_sections(kernel_table.SHIPPED)
    assert {s["device"] for s in sections} >= {"cpu/avx512_bf16", "cpu/avx512", "cpu/avx2"}
    for one in sections:
        for name, cell in one["cells"].items():
            dtype, stage, kind = name.split()
            assert isinstance(getattr(torch, dtype), torch.dtype)
            assert stage in ("training", "forward")
            assert kind in KINDS
            assert {int(n) for n in cell} >= {16, 49, 65, 128, 197, 257, 512, 1024, 2048}
            assert all(set(times) <= set(KERNELS) for times in cell.values())


def test_shipped_times_are_plausible() -> None:
    """Forward takes less than forward and backward, no mask hardly more than a mask: else the machine was not ready."""
    for section in kernel_table.read_sections(kernel_table.SHIPPED):
        cells = section["cells"]
        for name, by_length in cells.items():
            for length, times in by_length.items():
                for kernel, time in times.items():
                    where = (section["device"], name, length, kernel)
                    assert (
                        time < 0.9 * cells[name.replace("forward", "training")][length][kernel] or "training" in name
                    ), where
                    assert time < 1.5 * cells[name.replace("plain", "mask")][length][kernel], where


def test_every_request_gets_an_able_kernel_and_always_the_same() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for device, dtype, training, n, (mask, bias), dropout, able in itertools.product(
        ("cpu", "cuda", "mps"),
        dtypes,
        (True, False),
        (1, 65, 100_000),
        ((False, False), (True, False), (False, True), (True, True)),
        (0.0, 0.1),
        (ALL, ["explicit"], ["sdpa"]),
    ):
        request = Request(device, dtype, 2, 3, 3, n, n, 8, mask, bias, training, dropout)
        assert fastest(request, able) in able
        assert fastest(request, able) == fastest(request, list(reversed(able)))


def test_choice_follows_the_table(user_table) -> None:
    cell = {"10": {"explicit": 1.0, "sdpa": 4.0}, "1000": {"explicit": 40.0, "sdpa": 10.0}}
    user_table(section({cell_name("bfloat16", True, "plain"): cell}))

    def at(n: int, m: int, **changes) -> str:
        return fastest(dataclasses.replace(BASE, queries=n, keys=m, **changes), ALL)

    assert at(1, 1) == at(10, 10) == at(80, 80) == "explicit"  # they cross at 100, half-way in logarithms
    assert at(120, 120) == at(1000, 1000) == at(4000, 4000) == "sdpa"
    assert at(20, 80) == "explicit"
    assert at(200, 800) == "sdpa"  # cross-attention: √(N · M)
    assert fastest(dataclasses.replace(BASE, queries=2000, keys=2000), ["explicit"]) == "explicit"
    swapped = {n: {"explicit": times["sdpa"], "sdpa": times["explicit"]} for n, times in cell.items()}
    user_table(section({cell_name("bfloat16", True, "mask"): swapped, cell_name("bfloat16", False, "bias"): swapped}))
    assert at(10, 10) == "explicit"
    assert at(10, 10, mask=True) == "sdpa"
    assert at(10, 10, bias=True, training=False) == at(10, 10, bias=True, mask=True, training=False) == "sdpa"


def test_exceptions_to_the_table(user_table) -> None:
    cells = {cell_name("float32", True, "plain"): {"64": {"explicit": 1.0, "sdpa": 9.0}}}
    cells[cell_name("bfloat16", True, "plain")] = {"64": {"explicit": 9.0, "sdpa": 1.0}}
    user_table(section(cells), section(cells, "cuda"))
    single = dataclasses.replace(BASE, dtype=torch.float32)
    assert fastest(single, ALL) == "explicit"
    assert fastest(dataclasses.replace(single, batch=2**20), ALL) == "sdpa"  # the weights would fill the memory
    assert fastest(BASE, ALL) == "sdpa"
    assert fastest(dataclasses.replace(BASE, dropout=0.1), ALL) == "explicit"  # no fused dropout on a CPU
    assert fastest(dataclasses.replace(BASE, dropout=0.1, device="cuda"), ALL) == "sdpa"


def test_unmeasured_devices_have_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "_rankings", {})
    monkeypatch.setattr(kernel_table, "_multiplies_bfloat16", False)
    assert fastest(BASE, ALL) == "sdpa"
    monkeypatch.setattr(kernel_table, "_multiplies_bfloat16", True)
    assert fastest(BASE, ALL) == "explicit"
    assert fastest(dataclasses.replace(BASE, queries=2000), ALL) == "explicit"
    assert fastest(dataclasses.replace(BASE, queries=2000, keys=2000), ALL) == "sdpa"
    assert fastest(dataclasses.replace(BASE, dtype=torch.float32), ALL) == "sdpa"
    assert fastest(dataclasses.replace(BASE, device="cuda"), ALL) == "sdpa"


def test_auto_uses_the_users_table(user_table) -> None:
    request = dataclasses.replace(BASE, dtype=torch.float32, training=False)
    for winner, loser in (("explicit", "sdpa"), ("sdpa", "explicit")):
        user_table(section({cell_name("float32", False, "plain"): {"65": {winner: 1.0, loser: 2.0}}}))
        assert choose_kernel("auto", request).name == winner


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 99, "sections": []}', '{"format": 1}', '{"format": 1, "sections": [{"device": "x"}]}',
     '{"format": 1, "sections": [{"device": "cpu", "cells": {"float32 forward plain": {"65": {"sdpa": -1}}}}]}',
     '{"format": 1, "sections": [{"device": "cpu", "cells": {"float32 forward plain": {}}}]}',
     '{"format": 1, "sections": [{"device": "cpu", "cells": {"float99 sideways": {"65": {"sdpa": 1}}}}]}'],
)  # fmt: skip
def test_damaged_user_table_is_ignored_with_a_warning(user_table, tmp_path: Path, text: str) -> None:
    before = dict(kernel_table._rankings)
    (tmp_path / "mine.json").write_text(text)
    with pytest.warns(UserWarning, match=r"mine\.json is no kernel table"):
        user_table()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fastest(BASE, ALL) in ALL
    assert kernel_table._rankings == before  # the shipped table serves


def test_cache_folder_and_file_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(kernel_table.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kernel_table.user_path("cpu")
    assert path.is_relative_to(tmp_path)
    assert f"{torch.get_num_threads()}-threads" in path.name
    assert torch.__version__.split("+")[0] in path.name
    assert kernel_table.user_path("cuda") != path


def test_writing_merges_cells_and_devices(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    one, two = {"65": {"sdpa": 1.5, "explicit": 2.0}}, {"65": {"sdpa": 3.0, "explicit": 2.0}}
    write(path, section({"float32 forward plain": one, "float32 training plain": one}))
    write(path, section({"float32 forward plain": two}))
    write(path, section({"float32 forward plain": one}, "cuda"))
    cpu, cuda = kernel_table.read_sections(path)
    assert cpu["cells"] == {"float32 forward plain": two, "float32 training plain": one}
    assert cuda["device"] == "cuda"
    assert list(path.parent.iterdir()) == [path]
    assert json.loads(path.read_text())["format"] == kernel_table.FORMAT


def small_vit() -> torch.nn.Module:
    return va.create_model(
        "vit_tiny_patch16_224", num_classes=5, img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=3
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_choice_compiles_in_one_graph(backend: str) -> None:
    torch.compiler.reset()
    model, images = small_vit(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(images), model(images))
    compiled(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.randn(3, 3, 8, 8)).shape, torch.Size([3, 5]))


def test_exported_graph_does_not_depend_on_this_machine(user_table) -> None:
    cell = {"5": {"explicit": 1.0, "sdpa": 9.0}}
    user_table(section({cell_name("float32", t, "plain"): cell for t in (True, False)}))
    model, images = small_vit().eval(), torch.randn(2, 3, 8, 8)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
    assert "scaled_dot_product_attention" in str(program.graph)
    more = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(program.module()(more), model(more))


def test_length_may_vary_under_compile() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda q: attend(q, q, q), fullgraph=True, backend="eager")
    for n in (5, 7, 11):
        q = torch.randn(2, 3, n, 4)
        torch._dynamo.mark_dynamic(q, 2)
        torch.testing.assert_close(compiled(q), attend(q, q, q))
