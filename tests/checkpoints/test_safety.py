"""Files made to do harm: nothing runs, nothing large is allocated, nothing is written, and there is one clear error."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import vision_attn as va
from vision_attn.checkpoints.claims import check_model
from vision_attn.checkpoints.vetting import vet
from vision_attn.cli.main import main
from vision_attn.errors import UserError

TABLES = runpy.run_path(str(Path(__file__).with_name("hostile_tables.py")))
PICKLES = TABLES["PICKLES"]
ATTACKS = {**PICKLES["ATTACKS"], **TABLES["ATTACKS"]}
CHANGES = TABLES["changes"]()
small, lightning = PICKLES["small"], PICKLES["lightning"]


def build(name, folder):
    if name in CHANGES:
        return TABLES["config"](folder / "model", CHANGES[name][0]), CHANGES[name][1]
    return ATTACKS[name][0](folder), ATTACKS[name][1]


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("name", [*ATTACKS, *CHANGES])
def test_one_clear_error(name, tmp_path, capsys, monkeypatch):
    path, match = build(name, tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    before = contents(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is assumed about somebody else's files
        with pytest.raises(UserError, match=match) as caught:
            va.load_model(path)
    message = str(caught.value)
    assert path.name in message or "model" in message
    assert len(message.splitlines()) == 1
    assert len(message) < 700
    # ours and not torch's advice to switch the protection off
    assert "weights_only" not in message
    for argv in (["test", "--ckpt_path", str(path)], ["predict", "x.png", "--ckpt_path", str(path)]):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ")
        assert "Traceback" not in out + err
        assert len(err.strip().splitlines()) <= 2
    assert contents(tmp_path) == before


def test_nothing_beyond_the_file_is_allocated(tmp_path):
    """All of them in one process that may take half a gigabyte more than it has once everything is imported."""
    paths = []
    for name in [*ATTACKS, *CHANGES]:
        (tmp_path / name).mkdir()
        paths.append(str(build(name, tmp_path / name)[0]))
    child = """
import resource, sys, warnings
import torch, safetensors.torch, timm, vision_attn as va
from vision_attn.errors import UserError
torch.set_num_threads(1)
warnings.simplefilter("ignore")
va.load_model(sys.argv[1])
status = open("/proc/self/status").read()
now = int(status.split("VmSize:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + 2**29, now + 2**29))
for path in sys.argv[2:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        va.load_model(path)
    except UserError as error:
        if "memory" in str(error).replace(path, "").lower():
            print("out of memory:", path)
    else:
        print("loaded:", path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > 100_000:  # kilobytes
        print("took", grown, "kB:", path)
print("done")
"""
    whole = va.save_model(small(), tmp_path / "whole")
    result = subprocess.run(
        [sys.executable, "-c", child, str(whole), *paths], capture_output=True, text=True, timeout=900, check=False
    )
    assert result.stdout.strip() == "done", result.stdout + result.stderr[-2000:]


@pytest.mark.parametrize("old", [False, True])
def test_honest_files_pass(old, tmp_path):
    """Everything that people save: shared, sliced, expanded and empty tensors, all types, and what trainers add."""
    torch.manual_seed(3)
    base = torch.randn(7, 11)
    types = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
    content = {
        "state_dict": OrderedDict(a=base, b=base[2:5, 3:], c=base.t(), d=base[0].expand(5, 11), e=torch.zeros(0, 3)),
        "types": [base.to(kind) for kind in types],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(3.5),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}]},
        "plain": [1, -(2**40), 2**80, 1.5, True, None, "text", b"bytes", {1, 2}, torch.Size([2, 3]), torch.float32, 2j],
        "device": torch.device("cpu"),
    }
    if not old:
        content["small"] = base.to(torch.float8_e4m3fn)
    content["state_dict"]._metadata = OrderedDict([("", {"version": 1})])
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    vet(tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.testing.assert_close(found["state_dict"]["b"], base[2:5, 3:])


def test_a_model_without_memory_is_the_model():
    model = small()
    found = check_model(model.config, model.state_dict(), "x")
    assert {k: v.shape for k, v in found.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert all(p.is_meta for p in found.parameters())


MECHANISMS = [
    {"score": "cosine", "temperature": "learned"},
    {"score": "additive", "hidden": 5},
    {"score": "location", "max_keys": 30},
    {"normalizer": "sampled"},
    {"pattern": "window", "window": 2},
    {"pattern": "bigbird", "block_size": 2},
    {"pattern": "linformer", "rank": 3},
    {"pattern": "performer", "features": 7},
    {"position": "sinusoidal"},
    {"position": "relative_bias"},
    {"position": "rope"},
    {"position": "t5"},
    {"num_kv_heads": 1, "qk_norm": True, "two_step": True},
]


@pytest.mark.parametrize("attention", MECHANISMS, ids=lambda words: "-".join(map(str, words.values())))
def test_every_mechanism_can_be_checked_without_memory(attention, tmp_path):
    model = va.create_model(
        "vit_tiny_patch16_224",
        num_classes=7,
        img_size=20,
        patch_size=4,
        embed_dim=24,
        num_heads=2,
        depth=1,
        attention=attention,
    ).eval()
    loaded = va.load_model(va.save_model(model, tmp_path))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0)


def test_a_run_folder_may_not_name_classes(tmp_path, capsys, monkeypatch):
    """``test`` takes the configuration beside a checkpoint, which may choose numbers and names but import nothing."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    torch.save(lightning(small()), run / "checkpoints" / "best.ckpt")
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = "task: classification\ntrainer:\n  plugins:\n  - class_path: evil_module.Evil\n"
    (run / "config.yaml").write_text(recipe)
    assert main(["test", "--ckpt_path", str(run / "checkpoints" / "best.ckpt")]) == 2
    assert "names classes to import (class_path)" in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()


def test_torch_load_is_never_called_without_protection():
    """Every ``torch.load`` and every Lightning call that loads says weights_only=True, and nothing unpickles."""
    root = Path(va.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            words = {k.arg: k.value for k in node.keywords}
            name = ast.unparse(node.func)
            if name == "torch.load":
                assert isinstance(words.get("weights_only"), ast.Constant), path
                assert words["weights_only"].value is True, path
            assert name not in ("pickle.load", "pickle.loads", "joblib.load", "torch.jit.load", "dill.load"), path
            assert not (name.endswith("np.load") and "allow_pickle" in words), path
