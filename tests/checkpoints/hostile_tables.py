"""Safetensors, arrays and JSON that were made to do harm: builders for ``test_safety``."""

from __future__ import annotations

import io
import json
import os
import runpy
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import vision_attn as va
from vision_attn.checkpoints.read import CONFIG_KEY

PICKLES = runpy.run_path(str(Path(__file__).with_name("hostile_pickles.py")))
GB10, small, Runs, lightning = (PICKLES[name] for name in ("GB10", "small", "Runs", "lightning"))


def config(folder, change):
    """The folder of a saved model whose config.json was changed."""
    path = va.save_model(small(), folder)
    content = json.loads((path / "config.json").read_text())
    change(content)
    (path / "config.json").write_text(json.dumps(content))
    return path


def safetensors(path, header, body=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + body)
    return path


def claim(dtype="F32", shape=(2, 2), end=16):
    return {"head.weight": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, end]}}


ATTACKS = {}


def attack(match):
    """Registers a function that builds a file in a folder, and what the error says of it."""

    def add(function):
        ATTACKS[function.__name__] = (function, match)
        return function

    return add


@attack("is no checkpoint, or a truncated one")
def safetensors_truncated(folder):
    path = va.save_model(small(), folder / "whole") / "model.safetensors"
    (folder / "a.safetensors").write_bytes(path.read_bytes()[:-100])
    return folder / "a.safetensors"


@attack("is no checkpoint, or a truncated one")
def safetensors_header_longer_than_the_file(folder):
    return safetensors(folder / "a.safetensors", claim(), bytes(16), length=90_000_000)


@attack("is no checkpoint, or a truncated one")
def safetensors_header_of_exabytes(folder):
    return safetensors(folder / "a.safetensors", claim(), bytes(16), length=2**63)


@attack("is no checkpoint, or a truncated one")
def safetensors_header_shorter_than_it_is(folder):
    return safetensors(folder / "a.safetensors", claim(), bytes(16), length=20)


@attack("is no checkpoint, or a truncated one")
def safetensors_that_claims_10_gb(folder):
    return safetensors(folder / "a.safetensors", claim(shape=[GB10 // 4], end=GB10), bytes(16))


@attack("is no checkpoint, or a truncated one")
def safetensors_of_another_shape_than_size(folder):
    return safetensors(folder / "a.safetensors", claim(shape=[2**40, 2**40]), bytes(16))


@attack("is no checkpoint, or a truncated one")
def safetensors_of_an_unknown_type(folder):
    return safetensors(folder / "a.safetensors", claim(dtype="F33"), bytes(16))


@attack("is no checkpoint, or a truncated one")
def safetensors_with_a_deep_header(folder):
    return safetensors(folder / "a.safetensors", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", bytes(16))


@attack("vision_attn_config is not valid JSON")
def safetensors_with_a_broken_configuration(folder):
    save_file(small().state_dict(), folder / "a.safetensors", metadata={CONFIG_KEY: '{"name": '})
    return folder / "a.safetensors"


@attack("vision_attn_config is not valid JSON")
def safetensors_with_a_deep_configuration(folder):
    save_file(small().state_dict(), folder / "a.safetensors", metadata={CONFIG_KEY: "[" * 100_000})
    return folder / "a.safetensors"


@attack("must be a table with 'name' and 'args'")
def configuration_that_is_a_list(folder):
    save_file(small().state_dict(), folder / "a.safetensors", metadata={CONFIG_KEY: "[1, 2]"})
    return folder / "a.safetensors"


@attack("too large or nested too deeply")
def configuration_that_holds_itself(folder):
    model = small()
    many = [0]
    for _ in range(18):
        many = [many] * 40
    model.config["extra"] = {"many": many}
    torch.save(lightning(model), folder / "a.ckpt")
    return folder / "a.ckpt"


@attack("holds no dictionary of tensors")
def checkpoint_with_text_for_tensors(folder):
    model = small()
    torch.save({**lightning(model), "state_dict": {"model.head.weight": "text"}}, folder / "a.ckpt")
    return folder / "a.ckpt"


def foreign(folder, **told):
    """A tiny ViT in transformers' layout, with a config.json that says what it likes."""

    def t(*shape):
        return torch.randn(*shape)

    layer = "vit.encoder.layer.0."
    state = {"vit.embeddings.cls_token": t(1, 1, 16), "vit.embeddings.position_embeddings": t(1, 17, 16)}
    state |= {"vit.embeddings.patch_embeddings.projection.weight": t(16, 3, 4, 4)}
    state |= {f"{layer}attention.attention.{n}.weight": t(16, 16) for n in ("query", "key", "value")}
    state |= {f"{layer}intermediate.dense.weight": t(32, 16), "classifier.weight": t(7, 16), "classifier.bias": t(7)}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16, "model_type": "vit", **told}))
    return folder


@attack("do not make sense|cannot build|does not fit|do not divide")
def foreign_configuration_with_words_for_numbers(folder):
    return foreign(folder, num_attention_heads="many")


@attack("do not make sense|cannot build|does not fit|do not divide|absurd")
def foreign_configuration_with_absurd_numbers(folder):
    return foreign(folder, num_attention_heads=10**12, image_size=-4)


@attack("do not make sense|cannot build|does not fit|no square|absurd|whole numbers")
def foreign_configuration_of_an_absurd_size(folder):
    return foreign(folder, num_attention_heads=2, image_size=[{"a": 1}, "b"])


@attack("do not make sense|nothing that says which model")
def foreign_tensors_without_axes(folder):
    names = ["conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer3.0.conv2.weight", "linear.weight"]
    torch.save({name: torch.tensor(1.0) for name in names}, folder / "a.pt")
    return folder / "a.pt"


@attack("is no array of")
def npz_that_claims_10_gb(folder):
    array = io.BytesIO()
    np.save(array, np.zeros(4, np.float32))
    raw = array.getvalue().replace(b"(4,), }", b"(4444444444,), }"[:16])
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("a.npy", raw)
    return folder / "a.npz"


@attack("(is no array of|no array of numpy)")
def npz_with_objects(folder):
    np.savez(folder / "a.npz", a=np.array([Runs(folder / "trace")], dtype=object))
    return folder / "a.npz"


@attack("no checkpoint")
def picture(folder):
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    return folder / "a.png"


@attack("is empty")
def empty_file(folder):
    (folder / "a.pt").write_bytes(b"")
    return folder / "a.pt"


@attack("holds no model.safetensors")
def folder_with_a_configuration_alone(folder):
    path = va.save_model(small(), folder / "model")
    (path / "model.safetensors").unlink()
    return path


@attack("neither a file nor a folder")
def pipe(folder):
    os.mkfifo(folder / "a.ckpt")
    return folder / "a.ckpt"


def changes():
    """Configurations with one absurd value each."""

    def set_arg(key, value):
        return lambda c: c["args"].__setitem__(key, value)

    def set_preprocess(key, value):
        return lambda c: c["preprocess"].__setitem__(key, value)

    return {
        "wide": (set_arg("embed_dim", 10**9), "embed_dim=1000000000 is absurd"),
        "deep": (set_arg("depth", 10**6), "far larger than the .* tensors that are there"),
        "deeper": (set_arg("depth", 10**12), "depth=1000000000000 is absurd"),
        "unspeakable": (set_arg("depth", 10**400), "depth=.* is absurd"),
        "wide_tokenizer": (lambda c: c["args"]["tokenizer"].__setitem__("channels", 10**9), "tokenizer.channels"),
        "wider_than_the_file": (set_arg("embed_dim", 3 * 2**16), "does not fit .*of another shape"),
        "negative_width": (set_arg("embed_dim", -12), "cannot build its model"),
        "text_for_a_number": (set_arg("embed_dim", "many"), "cannot build its model"),
        "nothing_for_a_number": (set_arg("depth", None), "cannot build its model"),
        "no_heads": (set_arg("num_heads", 0), "cannot build its model"),
        "many_classes": (set_arg("num_classes", 10**9), "(absurd|labels)"),
        "no_classes": (set_arg("num_classes", -3), "cannot build its model"),
        "huge_image": (set_arg("img_size", 10**6), "img_size is 1000000 × 1000000 pixels"),
        "negative_image": (set_arg("img_size", -16), "img_size is -16 × -16 pixels"),
        "image_of_text": (set_arg("img_size", "16"), "img_size must be one or two whole numbers"),
        "image_of_three_sides": (set_arg("img_size", [16, 16, 16]), "img_size must be one or two whole numbers"),
        "unknown_argument": (set_arg("embed_dims", 12), "takes no argument 'embed_dims'.*Did you mean"),
        "other_file": (set_arg("checkpoint_path", "/etc/passwd"), "'checkpoint_path' may not be an argument"),
        "unknown_word": (lambda c: c["args"].__setitem__("attention", {"score": "cosinus"}), "unknown score 'cosinus'"),
        "list_for_a_table": (lambda c: c["args"].__setitem__("attention", [1]), "cannot build its model"),
        "unknown_model": (
            lambda c: c.__setitem__("name", "cct_2_3x2_23"),
            "unknown model 'cct_2_3x2_23'.*Did you mean",
        ),
        "unknown_task": (lambda c: c.__setitem__("task", "cooking"), "unknown task 'cooking'"),
        "unknown_key": (lambda c: c.__setitem__("label", ["a"]), "unknown key 'label'.*Did you mean labels"),
        "huge_preprocessing": (set_preprocess("size", [10**6, 10**6]), "preprocess.size is 1000000 × 1000000"),
        "no_deviation": (set_preprocess("std", [0.0, 1.0, 1.0]), "preprocess.std must be positive"),
        "text_for_means": (set_preprocess("mean", ["a", "b", "c"]), "preprocess.mean must be a list"),
        "means_of_two_channels": (set_preprocess("mean", [0.5, 0.5]), "2 numbers for images of 3 channels"),
        "means_that_are_no_numbers": (set_preprocess("mean", [float("nan")] * 3), "holds nan, which is no number"),
        "unknown_interpolation": (set_preprocess("interpolation", "magic"), "unknown preprocess.interpolation 'magic'"),
        "interpolation_of_a_list": (
            set_preprocess("interpolation", ["bicubic"]),
            "unknown preprocess.interpolation list",
        ),
        "no_crop": (set_preprocess("crop_pct", 1e-9), "crop_pct must be a share of the image"),
        "preprocess_of_text": (lambda c: c.__setitem__("preprocess", "x"), "preprocess must be a table"),
        "labels_of_numbers": (lambda c: c.__setitem__("labels", [1] * 7), "labels must be a list of names"),
        "labels_of_others": (lambda c: c.__setitem__("labels", ["a", "b"]), "2 labels for 7 classes"),
    }
