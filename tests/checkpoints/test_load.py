"""Loading and saving: round trips, foreign layouts, changes on request, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings

import pytest
import torch
from safetensors.torch import save_file

import vision_attn as va
from vision_attn.checkpoints import read_state_dict
from vision_attn.checkpoints.read import CONFIG_KEY
from vision_attn.errors import UserError


def small(**more):
    args = {"num_classes": 7, "img_size": (16, 24), "embed_dim": 12, "num_heads": 3, "depth": 2}
    model = va.create_model("cct_2_3x2_32", **{**args, "tokenizer": {"channels": 5}, **more})
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.config["labels"] = [f"class {i}" for i in range(7)]
    model.config["preprocess"]["mean"] = [0.1, 0.2, 0.3]
    return model.eval()


@pytest.fixture
def model():
    return small()


@pytest.fixture
def x():
    return torch.randn(2, 3, 16, 24)


def lightning(model, **more):
    """What a Lightning checkpoint of ours holds, with the extras that trainers leave behind."""
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.4",
        "state_dict": {
            **{f"model.{k}": v for k, v in model.state_dict().items()},
            "metric.total": torch.tensor(3),
        },
        "hyper_parameters": {"config": model.config},
        "callbacks": {"EMA": {"decay": 0.9}},
        **more,
    }


def test_every_way_of_saving_gives_the_same_logits(model, x, tmp_path):
    expected = model(x)
    folder = va.save_model(model, tmp_path / "model")
    torch.save(lightning(model), tmp_path / "best.ckpt")
    torch.save(lightning(model), tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    compiled = lightning(model)
    compiled["state_dict"] = {f"model._orig_mod.{k}": v for k, v in model.state_dict().items()}
    torch.save(compiled, tmp_path / "compiled.ckpt")
    shutil.copy(folder / "model.safetensors", tmp_path / "alone.renamed")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copy(tmp_path / "best.ckpt", run / "checkpoints" / "best.ckpt")
    paths = [folder, folder / "model.safetensors", run, *(tmp_path / n for n in ("best.ckpt", "old.ckpt"))]
    for path in [*paths, tmp_path / "compiled.ckpt", tmp_path / "alone.renamed", str(folder)]:
        loaded = va.load_model(path)
        assert loaded.config == model.config
        torch.testing.assert_close(loaded(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", [0x80, int.from_bytes(b"PK", "little"), 0x280])
def test_safetensors_whose_length_looks_like_another_format(wanted, tmp_path):
    for padding in range(70_000):
        header = 8 * -(-(72 + padding) // 8)  # headers are padded to whole words
        if header & (0xFFFF if wanted > 0xFF else 0xFF) == wanted or padding == 0:
            save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors", metadata={"p": "x" * padding})
            state, meta = read_state_dict(tmp_path / "m.safetensors")
            assert meta["format"] == "safetensors"
            assert list(state) == ["w"]
            if (tmp_path / "m.safetensors").read_bytes()[:2] == wanted.to_bytes(2, "little"):
                break


def test_edited_labels_count_and_foreign_config_json_does_not(model, tmp_path):
    folder = va.save_model(model, tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    config["labels"] = list("abcdefg")
    (folder / "config.json").write_text(json.dumps(config))
    assert va.load_model(folder).config["labels"] == list("abcdefg")
    (folder / "config.json").write_text('{"architectures": ["Other"]}')
    assert va.load_model(folder).config == model.config
    (folder / "config.json").write_text('{"name": ')
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        va.load_model(folder)


def test_loading_leaves_the_random_state_alone(model, tmp_path):
    folder = va.save_model(model, tmp_path)
    torch.manual_seed(3)
    va.load_model(folder)
    after = torch.rand(3)
    torch.manual_seed(3)
    torch.testing.assert_close(after, torch.rand(3), rtol=0, atol=0)


def test_saving_tied_sliced_and_half_tensors(model, x, tmp_path):
    model.blocks[1].attn = model.blocks[0].attn  # tied
    model.head.weight = torch.nn.Parameter(torch.randn(9, 12)[2:])  # a view of something larger
    folder = va.save_model(model, tmp_path)
    assert (folder / "model.safetensors").stat().st_size < 60_000
    torch.testing.assert_close(va.load_model(folder)(x), model(x), rtol=0, atol=0)
    half = va.save_model(model.bfloat16(), tmp_path / "half")
    assert va.load_model(half).head.weight.dtype == torch.float32


def test_saving_needs_a_plain_configuration(model, tmp_path):
    with pytest.raises(UserError, match=r"Linear has no \.config"):
        va.save_model(torch.nn.Linear(2, 3), tmp_path / "a")
    model.config["extra"] = {"when": object()}
    with pytest.raises(UserError, match="plain values"):
        va.save_model(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_another_number_of_classes(model, x, tmp_path):
    folder = va.save_model(model, tmp_path)
    with pytest.warns(UserWarning, match=r"trained for 7 classes: the head \(head\.weight, head\.bias\).*for 5"):
        other = va.load_model(folder, num_classes=5)
    assert other(x).shape == (2, 5)
    assert other.config["args"]["num_classes"] == 5
    assert other.config["labels"] is None
    torch.testing.assert_close(other.forward_features(x), model.forward_features(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(va.load_model(folder, num_classes=7)(x), model(x))


@pytest.mark.parametrize("name", ["cct_2_3x2_32", "vit_tiny_patch16_224"])
def test_another_image_size(name, tmp_path):
    if name.startswith("vit"):
        model = va.create_model(
            name, num_classes=7, img_size=(8, 12), patch_size=4, embed_dim=12, depth=1, reg_tokens=2
        )
    else:
        model = small()
    folder = va.save_model(model.eval(), tmp_path)
    other = va.load_model(folder, img_size=(24, 16))
    assert other.config["args"]["img_size"] == [24, 16]
    assert other.config["preprocess"]["size"] == [24, 16]
    x = torch.randn(2, 3, 24, 16)
    torch.testing.assert_close(other(x), model(x))  # which resamples as it goes
    torch.testing.assert_close(
        va.load_model(folder, img_size=32)(torch.zeros(1, 3, 32, 32)).isfinite().all().item(), True
    )
    assert va.load_model(folder, img_size=32).config["args"]["img_size"] == 32


def test_bare_tensors_need_a_name(tmp_path):
    model = va.create_model("resnet8_cifar", num_classes=7, img_size=32).eval()
    for content in (model.state_dict(), {"state_dict": model.state_dict()}, {"model": dict(model.state_dict())}):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(UserError, match=r"conv1\.weight.*name="):
            va.load_model(tmp_path / "w.pt")
        loaded = va.load_model(tmp_path / "w.pt", name="resnet8_cifar")
        x = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(loaded(x), model(x))
    with pytest.raises(UserError, match=r"does not fit resnet20_cifar: of 116 tensors, 60 missing \(layer1\.1"):
        va.load_model(tmp_path / "w.pt", name="resnet20_cifar")


def test_name_must_not_contradict(model, tmp_path):
    folder = va.save_model(model, tmp_path)
    assert va.load_model(folder, name="cct_2_3x2_32")
    with pytest.raises(UserError, match="holds a cct_2_3x2_32, not a vit_tiny_patch16_224"):
        va.load_model(folder, name="vit_tiny_patch16_224")


def test_tensors_that_do_not_fit(model, tmp_path):
    ckpt = lightning(model)
    del ckpt["state_dict"]["model.norm.weight"]
    ckpt["state_dict"]["model.stray"] = torch.zeros(3)
    ckpt["state_dict"]["model.head.bias"] = torch.zeros(9)
    torch.save(ckpt, tmp_path / "a.ckpt")
    with pytest.raises(UserError) as caught:
        va.load_model(tmp_path / "a.ckpt")
    text = str(caught.value)
    for words in ("a.ckpt", "1 missing (norm.weight)", "1 unexpected (stray)", "head.bias [9], model [7]"):
        assert words in text
    assert len(text.splitlines()) == 1


def test_a_model_that_is_gone(model, tmp_path):
    model.config["name"] = "cct_2_3x3_32"
    with pytest.raises(UserError, match=r"cannot build its model.*Did you mean"):
        va.load_model(va.save_model(model, tmp_path))


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_nothing_is_executed(model, tmp_path):
    for zipped in (True, False):
        torch.save({"state_dict": {}, "evil": Evil()}, tmp_path / "e.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UserError, match=r"e\.pt needs .*exec to be imported, which could run code"):
            va.load_model(tmp_path / "e.pt")
    (tmp_path / "p.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"p\.pkl"):
        va.load_model(tmp_path / "p.pkl")


@pytest.mark.parametrize("format", ["ckpt", "old", "safetensors"])
def test_truncated_at_any_place(model, tmp_path, format):
    path = tmp_path / "whole"
    if format == "safetensors":
        path = va.save_model(model, path) / "model.safetensors"
    else:
        torch.save(lightning(model), path, _use_new_zipfile_serialization=format == "ckpt")
    content = path.read_bytes()
    broken = tmp_path / "broken.bin"
    for share in (0.0, 0.0002, 0.001, 0.01, 0.3, 0.9, 0.9999):
        broken.write_bytes(content[: int(share * len(content))])
        with pytest.raises(UserError, match=r"broken\.bin"):
            va.load_model(broken)


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "best.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match=r"No such checkpoint: .*bset\.ckpt.*Did you mean best\.ckpt"):
        va.load_model(tmp_path / "bset.ckpt")
    with pytest.raises(UserError, match="is empty"):
        va.load_model(tmp_path / "best.ckpt")
    (tmp_path / "t.txt").write_text("hello, this is a text file")
    with pytest.raises(UserError, match=r"t\.txt is no checkpoint"):
        va.load_model(tmp_path / "t.txt")
    (tmp_path / "f").mkdir()
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        va.load_model(tmp_path / "f")
    for content in ([1, 2], {"a": 1}, {}, torch.ones(3), {"state_dict": {"a": torch.ones(1), "b": "text"}}):
        torch.save(content, tmp_path / "n.pt")
        with pytest.raises(UserError, match=r"n\.pt"):
            va.load_model(tmp_path / "n.pt")
    torch.save({"pytorch-lightning_version": "2.6", "state_dict": {}}, tmp_path / "l.ckpt")
    with pytest.raises(UserError, match="not one of ours"):
        va.load_model(tmp_path / "l.ckpt")


def test_config_in_metadata_is_json(model, tmp_path):
    from safetensors import safe_open

    folder = va.save_model(model, tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as handle:
        assert json.loads(handle.metadata()[CONFIG_KEY]) == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("blocks", [(3, 3, 3), (1, 2, 1)])
def test_cifar_resnet_layout(blocks, tmp_path):
    model = va.create_model("resnet20_cifar", num_classes=10, blocks=list(blocks), width=5).eval()
    foreign = {f"module.{k.replace('head.', 'linear.')}": v for k, v in model.state_dict().items()}
    foreign = {k: v for k, v in foreign.items() if "num_batches" not in k}  # as torch 0.4 saved them
    torch.save({"state_dict": foreign, "best_prec1": 91.0}, tmp_path / "r.th", _use_new_zipfile_serialization=False)
    loaded = va.load_model(tmp_path / "r.th")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(loaded(x), model(x))
    assert loaded.config["labels"][3] == "cat"
    assert va.load_model(va.save_model(loaded, tmp_path / "ours")).config == loaded.config


@pytest.mark.parametrize(
    ("file", "correct"),
    [
        ("resnet20-12fca82f.th", 9173),
        pytest.param("resnet56-4bfd9763.th", 9339, marks=pytest.mark.slow),  # three times the arithmetic, the same code
    ],
)
def test_published_checkpoints_reach_their_accuracy(cifar10_root, file, correct):
    path = cifar10_root / "checkpoints" / file
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    model = va.load_model(path)
    with open(cifar10_root / "cifar-10-batches-py" / "test_batch", "rb") as stream:
        batch = pickle.load(stream, encoding="bytes")
    pixels = torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32)
    mean, std = (torch.tensor(model.config["preprocess"][key])[:, None, None] for key in ("mean", "std"))
    model = model.to(memory_format=torch.channels_last)
    right = 0
    with torch.inference_mode():
        for images, labels in zip(pixels.split(100), torch.tensor(batch[b"labels"]).split(100), strict=True):
            x = ((images.float() / 255 - mean) / std).to(memory_format=torch.channels_last)
            right += int((model(x).argmax(1) == labels).sum())
    assert right == correct  # of 10,000
