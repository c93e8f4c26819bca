"""Exported files compute what the model computes, say how to feed them, and are not kept when they do not."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

import vision_attn as va
from vision_attn import exporting
from vision_attn.cli.main import main
from vision_attn.errors import UserError
from vision_attn.exporting import describe, export_model
from vision_attn.models import model_defaults

MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(MISSING), reason=f"the extra `export` is not installed: {', '.join(MISSING)}")
FORMATS = [pytest.param("onnx", marks=needs_onnx), "torch-export"]

VIT = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2}
CCT = {"img_size": (16, 12), "embed_dim": 24, "depth": 1, "num_heads": 2, "tokenizer": {"channels": 5}}
SWIN = {"img_size": (16, 24), "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 3], "window_size": 4}
SMALL = {
    "vit": ("vit_tiny_patch16_224", VIT),
    "cct": ("cct_2_3x2_32", CCT),
    "cnn": ("resnet8_cifar", {"img_size": 16, "width": 5}),
    "gpt": ("gpt_tiny_patch4_32", VIT),
    "t5": ("t5_tiny_patch4_32", VIT),
    "swin": ("swin_cifar_tiny", SWIN),
    "swin v2": ("swinv2_tiny_window8_256", {**SWIN, "patch_size": 2, "window_size": 4}),
}


def build(name, **args):
    """The model with random values everywhere: zero heads and unit norms would hide a mistake."""
    model = va.create_model(name, **{"num_classes": 7, **args}).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for key, b in model.named_buffers():  # those of a formula, which no checkpoint holds, stay as they are
            if b.is_floating_point() and key in model.state_dict():
                b.add_(0.1 * torch.rand_like(b))
    model.config["labels"] = [f"class {i}" for i in range(7)]
    return model


def small(family, **more):
    name, args = SMALL[family]
    return build(name, **{**args, **more})


def run_file(path, to, images):
    if to == "torch-export":
        return torch.export.load(path).module()(images)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("family", SMALL)
def test_every_family(family, to, tmp_path):
    model = small(family)
    path = tmp_path / f"m{exporting.FORMATS[to]}"
    found = export_model(model, path, to=to)
    assert found.path == path
    assert found.tells
    assert found.relative < 1e-4
    assert {shape[0] for shape in found.checked} == {1, 2, 5}
    images = torch.randn(3, 3, *model.config["preprocess"]["size"])
    with torch.no_grad():
        torch.testing.assert_close(run_file(path, to, images), model(images), rtol=1e-4, atol=1e-5)
    beside = {f"{path.name}.json"} if to == "torch-export" else set()
    assert {p.name for p in tmp_path.iterdir()} == {path.name} | beside


SIZES = {
    "learned": ("vit", None),
    "sinusoidal": ("vit", {"position": "sinusoidal"}),
    "rope": ("vit", {"position": "rope"}),
    "cct": ("cct", None),
    "cnn": ("cnn", None),
}


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        pytest.param("learned", "onnx", marks=needs_onnx),
        pytest.param("cnn", "onnx", marks=needs_onnx),
        *((kind, "torch-export") for kind in SIZES),
    ],
)
def test_any_size(kind, to, tmp_path):
    family, attention = SIZES[kind]
    model = small(family, **({"attention": attention} if attention else {}))
    path = tmp_path / "m.file"
    found = export_model(model, path, to=to, dynamic_size=True)
    assert len({shape[2:] for shape in found.checked}) == 4
    rows, columns = found.step
    images = torch.randn(2, 3, 16 + rows, 12 + 4 * columns if family != "cnn" else 16 + columns)
    with torch.no_grad():
        torch.testing.assert_close(run_file(path, to, images), model(images), rtol=1e-4, atol=1e-5)


MECHANISMS = [
    {"score": "cosine", "temperature": "learned"},
    {"pattern": "window_2d", "window": 1},
    {"position": "rope"},
]
ALL_MECHANISMS = [
    *({"score": score} for score in ("dot", "general", "location")),
    *({"score": score, "hidden": 5} for score in ("additive", "concat")),
    *({"normalizer": name} for name in ("hard", "sampled", "straight_through", "bernoulli", "linear_chain")),
    {"pattern": "window", "window": 1},
    {"pattern": "strided", "stride": 2},
    {"pattern": "longformer", "window": 1, "num_global": 1},
    {"pattern": "bigbird", "block_size": 1, "num_random": 1},
    {"pattern": "linformer", "rank": 3},
    {"pattern": "performer", "features": 7},
    *({"position": name} for name in ("none", "sinusoidal_1d", "relative_bias", "t5", "rope_1d")),
    {"num_kv_heads": 1, "qk_norm": True, "two_step": True},
]


@needs_onnx
@pytest.mark.parametrize(
    "attention",
    [*MECHANISMS, *(pytest.param(words, marks=pytest.mark.slow) for words in ALL_MECHANISMS)],
    ids=lambda words: "-".join(map(str, words.values())),
)
def test_mechanisms_to_onnx(attention, tmp_path):
    found = export_model(small("vit", attention=attention), tmp_path / "m.onnx")
    assert found.relative < 1e-4


def test_kernels_are_given_back(tmp_path):
    model = small("vit", attention={"pattern": "window", "window": 1, "kernel": "gathered"})
    export_model(model, tmp_path / "m.pt2", to="torch-export")
    assert [block.attn.kernel for block in model.blocks] == ["gathered"]


@needs_onnx
def test_metadata_says_how_to_use_it(tmp_path):
    import onnx

    model = small("vit")
    export_model(model, tmp_path / "m.onnx")
    export_model(model, tmp_path / "m.pt2", to="torch-export")
    file = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(file)
    told = {p.key: p.value for p in file.metadata_props}
    assert json.loads(told["labels"]) == model.config["labels"]
    assert json.loads(told["preprocess"]) == model.config["preprocess"]
    assert told["model"] == "vit_tiny_patch16_224"
    batch, *rest = file.graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param
    assert [d.dim_value for d in rest] == [3, 8, 12]
    assert json.loads((tmp_path / "m.pt2.json").read_text()) == json.loads(json.dumps(describe(model)))
    steps = " ".join(describe(model)["preprocess_steps"])
    assert "8 × 12" in steps
    assert "divide by 255" in steps


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_that_differs_is_not_kept(to, tmp_path, monkeypatch):
    path = tmp_path / "m.file"
    path.write_text("the previous one")
    model, true = small("cnn"), exporting._runner
    with torch.no_grad():
        program = exporting._program(model, to, False, "the model")
    monkeypatch.setattr(exporting, "_program", lambda *a: program)  # made once
    for change, match in (
        (lambda y: y + 0.01 * y.abs().max(), "differs by .*relative 1.0e-02.*was not kept"),
        (lambda y: y * float("nan"), "differs by nan"),
        (lambda y: y[:, :3], "differs by inf"),
    ):
        monkeypatch.setattr(exporting, "_runner", lambda *a, change=change: lambda x: change(true(*a)(x)))
        with pytest.raises(UserError, match=match):
            export_model(model, path, to=to)
        assert path.read_text() == "the previous one"
        assert [p.name for p in tmp_path.iterdir()] == ["m.file"]

    def fails(images):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(exporting, "_runner", lambda *a: fails)
    with pytest.raises(UserError, match=r"cannot be run on images \(1, 3, 16, 16\).*no such operator"):
        export_model(model, path, to=to)


def test_what_cannot_be_exported_is_named(tmp_path, monkeypatch):
    from vision_attn.attention import normalizers

    with pytest.raises(UserError, match="does sorting: only classifiers can be exported"):
        export_model(va.create_model("pointer_transformer"), tmp_path / "m.pt2", to="torch-export")
    with pytest.raises(UserError, match="has no configuration"):
        export_model(torch.nn.Linear(2, 3), tmp_path / "m.pt2", to="torch-export")
    with pytest.raises(UserError, match="--to onxx: Did you mean onnx"):
        export_model(small("cnn"), tmp_path / "m", to="onxx")

    def looks(scores):  # depends on the values in a way that no graph can hold
        return scores.softmax(-1) if scores.max().item() > 0 else scores.softmax(-1) * 1.0

    monkeypatch.setitem(normalizers.NORMALIZERS, "looks", looks)
    model = small("vit", attention={"normalizer": "looks", "score": "cosine"})
    with pytest.raises(UserError, match=r"the model: normalizer 'looks' cannot be exported to torch-export\. \("):
        export_model(model, tmp_path / "m.pt2", to="torch-export")
    assert not list(tmp_path.iterdir())


def test_a_size_that_is_fixed_is_named(tmp_path):
    model = small("vit", attention={"position": "relative_bias"})
    with pytest.raises(UserError, match="position 'relative_bias' cannot be exported with --dynamic-size"):
        export_model(model, tmp_path / "m.pt2", to="torch-export", dynamic_size=True)
    assert not list(tmp_path.iterdir())


def test_a_model_of_one_size_says_so(tmp_path):
    model = small("vit", attention={"score": "location", "max_keys": 7})
    with pytest.raises(UserError, match=r"takes no images of any size, so leave out --dynamic-size.*max_keys=7"):
        export_model(model, tmp_path / "m.pt2", to="torch-export", dynamic_size=True)


def test_without_the_packages(tmp_path, monkeypatch, capsys):
    folder = va.save_model(small("cnn"), tmp_path / "model")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnxruntime" else find(name, *a))
    assert main(["export", str(folder), "--to", "onnx"]) == 2
    assert "needs onnxruntime: pip install 'vision_attn[export]'" in capsys.readouterr().err
    assert main(["export", str(folder), "--to", "torch-export"]) == 0


@pytest.mark.parametrize("to", FORMATS)
def test_the_verb(to, tmp_path, capsys):
    folder = va.save_model(small("cct"), tmp_path / "model")
    assert main(["export", str(folder), "--to", to]) == 0
    out, err = capsys.readouterr()
    path = folder / f"model{exporting.FORMATS[to]}"
    assert path.is_file()
    assert f"written to {path}" in out
    assert "largest difference of logits" in out
    assert err == ""
    output = tmp_path / "deep" / "m.x"
    argv = ["export", str(folder), "--to", to, "--output", str(output), "--img_size", "20", "--dynamic-size"]
    assert main(argv) == 0
    assert "2 × 3 × 22 × 20" in capsys.readouterr().out
    assert output.is_file()


def test_a_head_of_zeros_proves_little(tmp_path, capsys):
    model = small("cnn")
    torch.nn.init.zeros_(model.head.weight)
    assert main(["export", str(va.save_model(model, tmp_path)), "--to", "torch-export"]) == 0
    assert "do not depend on the image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--to", "onxx"], "--to onxx: Did you mean onnx"),
        ([], "required"),
        (["--to", "torch-export", "--outptu", "x"], "--output"),
        (["--to", "torch-export", "--output", "."], "is a folder: give a file"),
        (["--to", "torch-export", "--output", "MODEL/model.safetensors"], "written over itself"),
    ],
)
def test_wrong_calls(words, match, tmp_path, capsys):
    folder = va.save_model(small("cnn"), tmp_path)
    ckpt = folder / "model.safetensors"
    before = ckpt.read_bytes()
    assert main(["export", str(ckpt), *(w.replace("MODEL", str(folder)) for w in words)]) == 2
    err = capsys.readouterr().err
    assert match in err
    assert "Traceback" not in err
    assert ckpt.read_bytes() == before
    assert main(["export", str(tmp_path / "none"), "--to", "torch-export"]) == 2
    assert "No such checkpoint" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", va.list_models(task="classification"))
def test_the_whole_zoo(name, to, tmp_path):
    defaults = model_defaults(name)
    args = {"img_size": 16}
    if isinstance(defaults.get("patch_size"), int):
        args |= {"img_size": (2 * defaults["patch_size"], 3 * defaults["patch_size"])}
    if isinstance(defaults.get("depth"), int) and "embed_dim" in defaults:
        args |= {"depth": 2, "embed_dim": 16 * defaults["num_heads"]}
    if "widths" in defaults:
        args |= {"widths": [11, 13, 17]}
    elif "width" in defaults:
        args |= {"width": 5}
    found = export_model(build(name, **args), tmp_path / "m.file", to=to)
    assert found.relative < 1e-4
