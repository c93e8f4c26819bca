from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vision_attn.data import ImageData
from vision_attn.data.cifar import read_pickle
from vision_attn.errors import UserError

TRAIN = [f"data_batch_{number}" for number in range(1, 6)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A foreign CIFAR-10 folder: the right form, 11 images per file."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*TRAIN, "test_batch"]:
        write(folder / name, {"data": pixels(), "labels": [number % 10 for number in range(11)]})
    write(folder / "batches.meta", {"label_names": [f"kind {number}" for number in range(10)]})
    return tmp_path


def pixels(count: int = 11) -> np.ndarray:
    return torch.randint(0, 256, (count, 3072), dtype=torch.uint8).numpy()


def write(path: Path, content: Any) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.filterwarnings("always")
def test_foreign_folder_is_read_with_a_warning(root: Path) -> None:
    data = ImageData("cifar10", root=root)
    assert data.labels[3] == "kind 3"
    with pytest.warns(UserWarning, match=r"data_batch_1, data_batch_2.*not the official CIFAR10 files"):
        data.setup("fit")
    train, val = data.split("train"), data.split("val")
    assert train is not None
    assert val is not None
    assert (len(train), len(val)) == (49, 6)
    assert val.ids.tolist() == list(range(49, 55))
    assert "test" not in data._splits


@pytest.mark.filterwarnings("ignore")
def test_val_fraction(root: Path) -> None:
    everything = ImageData("cifar10", root=root, val_fraction=0.0)
    everything.setup("fit")
    assert everything.val_dataloader() == []
    assert len(everything.required("train")) == 55
    assert len(ImageData("cifar10", root=root, val_fraction=0.2).required("val")) == 11


def test_nothing_is_run_by_a_pickle(root: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    write(root / "cifar-10-batches-py" / "data_batch_1", {"data": Evil(), "labels": []})
    with pytest.raises(UserError, match="data_batch_1 is damaged"):
        ImageData("cifar10", root=root).setup("fit")
    assert not (tmp_path / "owned").exists()
    for harmful in (
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        pickle.dumps(np.array([{}], dtype=object), protocol=2),
    ):
        with pytest.raises(pickle.UnpicklingError):
            read_pickle(harmful)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_survive_the_plain_unpickler(protocol: int) -> None:
    array = np.arange(35, dtype=np.uint8).reshape(5, 7)
    back = read_pickle(pickle.dumps({"data": array, "labels": [1, 2]}, protocol=protocol))
    assert back["labels"] == [1, 2]
    np.testing.assert_array_equal(back["data"], array)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999])
def test_truncated_file(root: Path, kept: float) -> None:
    path = root / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(UserError) as raised:
        ImageData("cifar10", root=root).setup("fit")
    message = str(raised.value)
    assert str(path) in message
    assert "damaged" in message
    assert "cifar-10-python.tar.gz" in message
    assert message.count("\n") == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"data": pixels(), "labels": [1]},
        {"data": pixels(), "labels": [10] * 11},
        {"data": pixels()[:, :-1], "labels": [1] * 11},
        {"data": pixels().astype(np.float32), "labels": [1] * 11},
        {"labels": [1] * 11},
    ],
    ids=["list", "few-labels", "label-10", "short-rows", "floats", "no-data"],
)
def test_wrong_content(root: Path, content: Any) -> None:
    write(root / "cifar-10-batches-py" / "test_batch", content)
    with pytest.raises(UserError, match="test_batch is damaged"):
        ImageData("cifar10", root=root).setup("test")


def test_missing_data_says_how_to_get_it(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    with pytest.raises(UserError, match=r"cifar-100-python\.tar\.gz .*VISION_ATTN_DATA"):
        ImageData("cifar100", root=empty, download=False)
    (root / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(UserError, match="lacks data_batch_4"):
        ImageData("cifar10", root=root, download=False)

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", no_network)
    data = ImageData("cifar10", root=empty)  # the names and number of classes are known all the same
    assert (data.num_classes, data.labels[3], data.img_size) == (10, "cat", (32, 32))
    with pytest.raises(UserError, match=r"no route to host.*Unpack https://.*cifar-10-python\.tar\.gz"):
        data.prepare_data()


def test_environment_names_the_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISION_ATTN_DATA", str(root))
    assert ImageData("cifar10", download=False).labels[0] == "kind 0"


@pytest.mark.filterwarnings("error")
def test_official_cifar10(cifar10_root: Path) -> None:
    data = ImageData("cifar10", root=cifar10_root)
    data.setup("fit")
    train, val = data.required("train"), data.required("val")
    assert (len(train), len(val)) == (45000, 5000)
    # the first training image is the frog that everybody has seen
    assert data.labels[int(train.labels[0])] == "frog"
    assert train.images[0, :, 0, 0].tolist() == [59, 62, 63]
    mean = train.images.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(mean, torch.tensor(data.preprocess["mean"]), atol=2e-3, rtol=0)
