from __future__ import annotations

import dataclasses

import pytest
import yaml

from vision_attn.cli.contrast import configuration
from vision_attn.contrast.config import ARMS, Arm, ContrastConfig, DataChoice, ModelChoice, NoiseChoice
from vision_attn.data.config import AugmentConfig
from vision_attn.errors import UserError
from vision_attn.training.optimizers import OptimizerConfig

TWO = {"a": ModelChoice("resnet8_cifar"), "b": ModelChoice("resnet20_cifar")}


def test_the_defaults_are_the_protocol():
    config = ContrastConfig(models=TWO)
    assert config.sizes == [0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0]
    assert config.arms == ["none", "flip_crop", "full"]
    assert [config.seeds_at(size) for size in config.sizes] == [5, 5, 5, 3, 3, 3, 3]
    assert config.noise.levels == [0.2, 0.4]
    assert config.noise_sizes == [1.0]
    assert config.match == 0.25


def test_the_arms():
    none, flip_crop, full = (ARMS[name](4) for name in ("none", "flip_crop", "full"))
    assert none.augment.changed() == {}
    assert (none.label_smoothing, none.weight_decay) == (0, 0)
    assert flip_crop.augment.changed() == {"flip": True, "crop_padding": 4}
    assert (flip_crop.label_smoothing, flip_crop.weight_decay) == (0, 0)
    assert full.augment.mixes
    assert full.label_smoothing > 0
    assert full.weight_decay > 0
    config = ContrastConfig(models=TWO, arm_settings={"mild": Arm(weight_decay=0.3)}, arms=["none", "mild"])
    assert config.optimizer_of("a", "mild", 0.01, (32, 32)).weight_decay == 0.3
    assert config.optimizer_of("a", "none", 0.01, (32, 32)).weight_decay == 0.0
    assert ContrastConfig(models=TWO).arm("flip_crop", (8, 16)).augment.crop_padding == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {"a": TWO["a"]}}, "two or more"),
        ({"sizes": [0.1, 1.5]}, "sizes"),
        ({"sizes": [0.1, 0.1]}, "different shares"),
        ({"arms": ["none", "flip_corp"]}, "Did you mean flip_crop"),
        ({"steps": [1, 2]}, "7 numbers"),
        ({"steps": 0}, "steps is 0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"match": True}, "match is True"),
        ({"match": -0.1}, "match"),
        ({"noise": NoiseChoice(sizes=[0.3])}, "noise.sizes"),
        ({"noise": NoiseChoice(levels=[1.0])}, "noise.levels"),
        ({"noise": NoiseChoice(arms=["mild"])}, "noise.arms"),
        ({"learning_rates": []}, "learning_rates"),
        ({"learning_rates": [1e-3, 1e-3]}, "different numbers"),
        ({"models": {**TWO, "b": ModelChoice("resnet8_cifar", learning_rates=[0.1])}}, "same number of trials"),
        ({"precision": "16-true"}, "precision"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        ContrastConfig(**{"models": TWO, **changes})


def test_the_hash_changes_with_the_question_not_with_the_place(tiny):
    config = tiny()
    moved = dataclasses.replace(config, data=DataChoice("digits", root="/elsewhere", download=False))
    assert config.hash() == moved.hash()
    others = [
        dataclasses.replace(config, seeds=2),
        dataclasses.replace(config, data=DataChoice("digits", val_fraction=0.2)),
        dataclasses.replace(config, arm_settings={"none": Arm(AugmentConfig(flip=True))}),
        dataclasses.replace(config, optimizer=OptimizerConfig(warmup=0.3)),
        dataclasses.replace(config, threads=2),
    ]
    assert len({config.hash(), *(other.hash() for other in others)}) == 6


def test_a_written_configuration_is_read_back_as_the_same(tiny, tmp_path):
    config = tiny(
        optimizer=OptimizerConfig("sgd", momentum=0.8),
        arm_settings={"mild": Arm(AugmentConfig(erase=0.5, erase_fill="noise"), 0.1, 0.2)},
        arms=["none", "mild"],
        steps=[3, 4],
    )
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(config.tree()))
    again, paths = configuration(["--config", str(path)])
    assert again == config
    assert again.hash() == config.hash()
    assert paths == [path]


def test_quick_is_small_and_valid(tiny):
    config = ContrastConfig(models=TWO, steps=[1, 2, 3, 500, 500, 500, 900])
    quick = config.quick()
    assert quick.sizes == [0.05, 0.25]
    assert quick.steps == [3, 150]
    assert quick.arms == ["none"]
    assert quick.noise.levels == []
    assert {quick.rates_of(name) == [1e-3, 3e-3] for name in quick.models} == {True}
    assert quick.hash() != config.hash()
    assert tiny(sizes=[0.3], noise=NoiseChoice(levels=[])).quick().sizes == [0.3]
