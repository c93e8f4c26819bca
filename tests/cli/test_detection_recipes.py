"""A dry run of every recipe for detectors, on tiny sets in the right layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from vision_attn.cli.main import main
from vision_attn.data import digit_scenes
from vision_attn.training import fitting

RECIPES = {
    path.stem: path
    for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    if "task: detection" in path.read_text(encoding="utf-8")
}
PROMISED = """digit_scenes_dn_detr digit_scenes_vanilla_detr bccd_dn_detr coco_320_dn_detr coco_detr_resnet50
    coco_dn_detr_resnet50 coco_dn_detr_resnet50_12ep coco_subset_10pct coco_subset_vehicles"""
COCO = {1: "person", 2: "bicycle", 3: "car", 4: "motorcycle", 6: "bus", 7: "train", 8: "truck"}
SMALL = {"embed_dim": 24, "num_heads": 3, "enc_layers": 1, "dec_layers": 2, "num_queries": 11, "mlp_ratio": 2.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory, write_coco) -> Path:
    """COCO, coco-320 and bccd in small."""
    root = tmp_path_factory.mktemp("data")
    write_coco(root, {"train2017": 20, "val2017": 3}, COCO, side=56)
    write_coco(root / "coco-320", {"train2017": 17, "val2017": 3}, COCO, seed=1)
    write_coco(root / "bccd", {"train": 9, "val": 3, "test": 3}, {0: "platelets", 1: "rbc", 2: "wbc"}, seed=2)
    return root


def small(name: str) -> list[str]:
    """Options that make a recipe's images and model small, and nothing else."""
    argv = ["--data.batch_size", "2", "--data.num_workers", "0", "--trainer.accelerator", "cpu"]
    for key, value in SMALL.items():
        argv += [f"--model.args.{key}", str(value)]
    if "resnet50" in RECIPES[name].read_text(encoding="utf-8"):
        argv += ["--model.args.backbone", "resnet18", "--model.args.backbone_weights", "null"]
        argv += ["--data.img_size", "64", "--data.max_size", "96", "--data.augment.scales", "[48, 64]"]
        argv += ["--data.augment.crop_scales", "[48]", "--data.augment.crop_size", "[32, 48]"]
    return argv


def test_the_promised_recipes_exist():
    assert set(PROMISED.split()) <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_to_expect(name):
    text = RECIPES[name].read_text(encoding="utf-8")
    head = text.split("\ntask:")[0]
    assert f"vision-attn fit --config recipes/{name}.yaml" in head
    tree = yaml.safe_load(text)
    if tree["model"].get("args", {}).get("backbone_weights"):
        assert "Expected from the literature, not measured here: " in head
        assert "--trainer.devices 8" in head
        assert "--trainer.devices 1" in head


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run(name, root, tmp_path, monkeypatch):
    monkeypatch.setenv("VISION_ATTN_DATA", str(root))
    monkeypatch.setattr(fitting, "draw", lambda *args: None)  # pictures are tested elsewhere, and take the most time
    monkeypatch.setattr(digit_scenes, "COUNTS", {"train": 8, "val": 3, "test": 3})
    argv = ["fit", "--config", str(RECIPES[name]), "--trainer.fast_dev_run", "true", *small(name)]
    assert main([*argv, "--trainer.default_root_dir", str(tmp_path)]) == 0
    run = tmp_path / name / "0"
    summary = json.loads((run / "summary.json").read_text())
    assert {"val/ap", "val/ap50", "params", "macs"} <= set(summary)
    assert (run / "model.safetensors").is_file()
    config = json.loads((run / "config.json").read_text())
    assert len(config["labels"]) == len(config["category_ids"]) == config["args"]["num_classes"]
    if name == "coco_subset_vehicles":
        assert config["category_ids"] == [2, 3, 4, 6, 7, 8]
