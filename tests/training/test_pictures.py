"""Pictures are written for any number of classes, rows and mistakes."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from vision_attn.data import DetectionData
from vision_attn.training import detection_pictures, pictures


def size(path):
    with Image.open(path) as image:
        image.load()
        return image.size


@pytest.mark.parametrize("rows", [0, 1, 60])
def test_learning_curves(tmp_path, rows):
    data = [{"step": n, "lr": 1e-3, "train/loss": 2.0, "val/acc": 0.5, "val/loss": 1.0} for n in range(rows)]
    pictures.learning_curves(data, tmp_path / "curves.png", "title")
    assert size(tmp_path / "curves.png")[0] > 1000


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_confusion_matrix(tmp_path, classes):
    counts = torch.randint(0, 7, (classes, classes)) + torch.eye(classes).long() * 50
    counts[1] = 0  # a class without images
    pictures.confusion_matrix(counts, [f"class {n}" for n in range(classes)], tmp_path / "confusion.png", "title: ")
    width, height = size(tmp_path / "confusion.png")
    assert width > 600
    assert height > 600


def test_perfect_confusion_of_many_classes(tmp_path):
    pictures.confusion_matrix(torch.eye(30).long(), [str(n) for n in range(30)], tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").is_file()


@pytest.mark.parametrize("right", [0, 3, 40])
def test_predictions(tmp_path, right):
    truth = torch.arange(40) % 3
    guess = torch.where(torch.arange(40) < right, truth, (truth + 1) % 3)
    probabilities = torch.nn.functional.one_hot(guess, 3) * 0.7 + 0.1
    images = torch.randint(0, 256, (40, 3, 5, 7), dtype=torch.uint8)
    pictures.predictions(
        images, probabilities, truth, ["a", "b", "a very long class name"], tmp_path / "p.png", "title"
    )
    assert size(tmp_path / "p.png")[0] > 1000


@pytest.mark.parametrize("captions", [None, ["x"] * 11])
def test_image_grid(tmp_path, captions):
    images = torch.randint(0, 256, (11, 3, 7, 5), dtype=torch.uint8)
    pictures.image_grid(images, tmp_path / "grid.png", "title", captions)
    assert (tmp_path / "grid.png").is_file()


def test_no_window_and_no_global_state(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    pictures.learning_curves([], tmp_path / "curves.png")
    assert dict(matplotlib.rcParams) == before


def test_one_of_several_processes_looks_at_all_images(make_run, tmp_path, monkeypatch):
    """The pictures are drawn by one process: its share of the images is not what their titles speak of."""
    run = make_run(tmp_path)
    monkeypatch.setattr("vision_attn.data.base.rank_and_world", lambda: (0, 2))
    whole = run.data.split("val")
    assert sum(len(batch["label"]) for batch in run.data.val_dataloader()) == len(whole) // 2
    images, probabilities, truth = pictures.look(run.module, run.data, "cpu", 10_000)
    assert len(images) == len(probabilities) == len(whole)
    torch.testing.assert_close(truth, whole.labels, rtol=0, atol=0)


def test_one_of_several_processes_looks_at_all_objects(write_coco, tmp_path, monkeypatch):
    write_coco(tmp_path, {"train2017": 3, "val2017": 5})
    data = DetectionData("coco", root=tmp_path, img_size=48)
    monkeypatch.setattr("vision_attn.data.base.rank_and_world", lambda: (0, 2))
    assert sum(len(batch["image_id"]) for batch in data.val_dataloader()) == 3

    class Blind(torch.nn.Module):
        model, max_detections = SimpleNamespace(config={}, classification="softmax"), 9

        def forward(self, images, mask):
            n = len(images)
            return {"pred_logits": torch.zeros(n, 4, 4), "pred_boxes": torch.full((n, 4, 4), 0.5)}

    found = detection_pictures.look(Blind(), data, "cpu", 1000)
    assert found.images == 5
