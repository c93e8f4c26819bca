"""Files of torch.save, or nearly, that were made to do harm: builders for ``test_safety``."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile

import torch

import vision_attn as va

GB10 = 10 * 2**30


def small(**more):
    args = {"num_classes": 7, "img_size": 16, "embed_dim": 12, "num_heads": 3, "depth": 2}
    model = va.create_model("cct_2_3x2_32", **{**args, "tokenizer": {"channels": 5}, **more})
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    return model.eval()


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def lightning(model, **more):
    state = {f"model.{k}": v for k, v in model.state_dict().items()}
    content = {"pytorch-lightning_version": "2.6.4", "state_dict": state}
    return {**content, "hyper_parameters": {"config": model.config}, **more}


def zipped(path, pickled, records=(), **extra):
    """A file in torch's format with any pickle and any records."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", pickled)
        archive.writestr("m/version", "3\n")
        for key, content in dict(records).items():
            archive.writestr(f"m/data/{key}", content)
        for name, content in extra.items():
            archive.writestr(name, content)
    return path


def text(value):
    """The instruction that puts a string on the pickle's stack."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value):
    raw = pickle.encode_long(value)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(numel, key="0", kind="FloatStorage", view=b""):
    """A persistent id of ``numel`` numbers."""
    return (
        b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(numel) + view + b"tQ"
    )


def tensor(numel, shape, stride, offset=0, **more):
    rest = numbers(shape) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(numel, **more) + number(offset) + rest + b"tR"


def state_dict(value):
    return b"\x80\x02}" + text("head.weight") + value + b"s."


def legacy(content, keys=b"]", after=b""):
    """A file in torch's format before 1.6."""
    magic, version = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)
    system = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
    return magic + version + system + content + b"\x80\x02" + keys + b"." + after


ATTACKS = {}


def attack(match):
    """Registers a function that builds a file in a folder, and what the error says of it."""

    def add(function):
        ATTACKS[function.__name__] = (function, match)
        return function

    return add


@attack("needs (os|posix).system to be imported, which could run code")
def runs_a_command(folder):
    torch.save({"state_dict": {}, "evil": Runs(folder / "trace")}, folder / "a.pt")
    return folder / "a.pt"


@attack("needs (os|posix).system to be imported, which could run code")
def runs_a_command_in_the_old_format(folder):
    torch.save({"a": Runs(folder / "trace")}, folder / "a.pt", _use_new_zipfile_serialization=False)
    return folder / "a.pt"


@attack("needs (os|posix).system to be imported, which could run code")
def runs_a_command_in_our_own_format(folder):
    torch.save(lightning(small(), callbacks=Runs(folder / "trace")), folder / "best.ckpt")
    return folder / "best.ckpt"


@attack("is a Python pickle but not one of torch.save")
def plain_pickle(folder):
    (folder / "a.pkl").write_bytes(pickle.dumps(Runs(folder / "trace")))
    return folder / "a.pkl"


@attack("(is a Python pickle but not one of torch.save|needs .* to be imported)")
def plain_pickle_of_protocol_2(folder):
    (folder / "a.pkl").write_bytes(pickle.dumps(Runs(folder / "trace"), 2))
    return folder / "a.pkl"


@attack("needs eval to be imported, which could run code")
def calls_eval(folder):
    return zipped(folder / "a.pt", b"\x80\x02cbuiltins\neval\n" + text("1+1") + b"\x85R.")


@attack("is a TorchScript program, which would be run")
def torchscript(folder):
    path = zipped(folder / "a.pt", state_dict(tensor(1, [1], [1])), {"0": b"1234"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("m/constants.pkl", b"\x80\x02).")
        archive.writestr("m/code/__torch__.py", "import os")
    return path


@attack("points outside of it")
def zip_that_leaves_its_folder(folder):
    return zipped(folder / "a.pt", state_dict(tensor(1, [1], [1])), {"0": b"1234"}, **{"m/../../trace": "x"})


@attack("points outside of it")
def zip_with_an_absolute_path(folder):
    return zipped(folder / "a.pt", state_dict(tensor(1, [1], [1])), {"0": b"1234"}, **{str(folder / "trace"): "x"})


@attack("two records of one name")
def zip_with_two_of_a_name(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = zipped(folder / "a.pt", state_dict(tensor(1, [1], [1])), {"0": b"1234"})
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("m/data.pkl", b"\x80\x02}.")
    return path


@attack("compressed data")
def zip_bomb(folder):
    path = folder / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", state_dict(tensor(2**24, [2**24], [1])))
        archive.writestr("m/data/0", bytes(2**26))
    assert path.stat().st_size < 2**20
    return path


@attack("but not one of torch.save")
def any_zip(folder):
    path = folder / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<xml/>")
    return path


@attack("claims 10,737,418,240 bytes for the numbers '0', and holds 16")
def storage_that_claims_10_gb(folder):
    return zipped(folder / "a.pt", state_dict(tensor(GB10 // 4, [GB10 // 4], [1])), {"0": bytes(16)})


@attack("claims 10,737,418,240 bytes, and holds 16")
def tensor_that_claims_10_gb(folder):
    return zipped(folder / "a.pt", state_dict(tensor(4, [GB10 // 4], [1])), {"0": bytes(16)})


@attack("claims 10,737,418,240 bytes, and holds 16")
def one_number_repeated_to_10_gb(folder):
    return zipped(folder / "a.pt", state_dict(tensor(4, [GB10 // 4], [0])), {"0": bytes(16)})


@attack("tensor of shape .* reaches beyond its 16 bytes")
def tensor_that_begins_behind_its_end(folder):
    return zipped(folder / "a.pt", state_dict(tensor(4, [2], [1], offset=3)), {"0": bytes(16)})


@attack("impossible shape")
def tensor_of_negative_size(folder):
    return zipped(folder / "a.pt", state_dict(tensor(4, [-2, 2], [1, 1])), {"0": bytes(16)})


@attack("the numbers '7' are missing")
def tensor_without_numbers(folder):
    return zipped(folder / "a.pt", state_dict(tensor(4, [4], [1], key="7")), {"0": bytes(16)})


@attack("claims 10,737,418,240 bytes for the numbers '0', more than its own size")
def old_storage_that_claims_10_gb(folder):
    content = state_dict(tensor(GB10 // 4, [4], [1], view=b"N"))
    (folder / "a.pt").write_bytes(legacy(content, keys=b"]" + text("0") + b"a", after=struct.pack("<q", 4) + bytes(16)))
    return folder / "a.pt"


@attack("beyond the numbers '0'")
def old_view_that_leaves_its_storage(folder):
    view = b"(" + text("1") + number(2) + number(3) + b"t"
    content = state_dict(tensor(4, [3], [1], view=view))
    (folder / "a.pt").write_bytes(legacy(content, keys=b"]" + text("0") + b"a", after=struct.pack("<q", 4) + bytes(16)))
    return folder / "a.pt"


@attack("is truncated: its tensors need 24 bytes, and 16 are there")
def old_storage_that_is_not_there(folder):
    content = state_dict(tensor(4, [4], [1], view=b"N"))
    (folder / "a.pt").write_bytes(legacy(content, keys=b"]" + text("0") + b"a", after=struct.pack("<q", 4) + bytes(8)))
    return folder / "a.pt"


@attack("asks for an array of 10737418240 bytes")
def bytearray_of_10_gb(folder):
    return zipped(folder / "a.pt", b"\x80\x02cbuiltins\nbytearray\n" + number(GB10) + b"\x85R.")


@attack("unfolds to more than its own size")
def text_encoded_again_and_again(folder):
    parts = b"c_codecs\nencode\nq\x00" + text("x" * 2000) + b"q\x01" + text("latin1") + b"q\x02"
    return zipped(folder / "a.pt", b"\x80\x02](" + parts + b"h\x00h\x01h\x02\x86R" * 1000 + b"e.")


@attack("unfolds to more than its own size")
def list_counted_again_and_again(folder):
    parts = b"](" + b"K\x01" * 1000 + b"eq\x01ctorch\nSize\nq\x00"
    return zipped(folder / "a.pt", b"\x80\x02](" + parts + b"h\x00h\x01\x85R" * 1000 + b"e.")


@attack("(damaged or of another kind|needs torch.FloatTensor)")
def tensor_made_by_its_class(folder):
    return zipped(folder / "a.pt", b"\x80\x02ctorch\nFloatTensor\n" + number(GB10) + b"\x85R.")


@attack("makes a torch.Tensor")
def tensor_made_by_its_size(folder):
    return zipped(folder / "a.pt", b"\x80\x02ctorch\nTensor\n" + number(GB10) + b"\x85R.")


@attack("damaged or of another kind")
def instruction_that_torch_does_not_write(folder):
    return zipped(folder / "a.pt", b"\x80\x05\x96" + struct.pack("<Q", GB10) + b".")  # a bytearray of 10 GB


@attack("damaged or of another kind")
def pickle_without_an_end(folder):
    return zipped(folder / "a.pt", b"\x80\x02" + b"(" * 1000)


@attack("(truncated|no checkpoint)")
def truncated(folder):
    whole = io.BytesIO()
    torch.save(lightning(small()), whole)
    (folder / "a.ckpt").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    return folder / "a.ckpt"
