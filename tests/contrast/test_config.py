from __future__ import annotations

import dataclasses

import pytest
import yaml

from vision_attn.attention.config import AttentionConfig
from vision_attn.cli.contrast import configuration
from vision_attn.contrast.config import ARMS, Arm, ContrastConfig, DataChoice, ModelChoice, NoiseChoice
from vision_attn.data.config import AugmentConfig
from vision_attn.errors import UserError
from vision_attn.training.optimizers import OptimizerConfig

INF, NAN = float("inf"), float("nan")
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
        ({"learning_rates": [1e-3, INF]}, r"learning_rates is \[0\.001, inf\]: expected one or more positive"),
        ({"learning_rates": [1e-3, NAN]}, "learning_rates"),
        ({"learning_rates": [1e-3, 0.0]}, "learning_rates"),
        (
            {"models": {m: dataclasses.replace(TWO[m], learning_rates=[-0.1]) for m in TWO}},
            r"models\.a\.learning_rates is \[-0\.1\]",
        ),
        ({"sizes": [0.1, NAN]}, "sizes"),
        ({"match": INF}, "match"),
        ({"match": NAN}, "match"),
        ({"small_size": 0.0}, "small_size is 0.0: expected a share"),
        ({"small_size": 1.5}, "small_size"),
        ({"small_size": NAN}, "small_size"),
        ({"device": "gpu"}, "device is 'gpu': expected auto, cpu or cuda"),
        ({"device": "cuda:x"}, "device"),
        ({"device": ""}, "device"),
        ({"seeds": 1001}, "seeds is 1001: expected 1 to 1000"),
        ({"small_seeds": 1001}, "small_seeds"),
        ({"arm_settings": {"mild": Arm(label_smoothing=1.0)}}, r"arm_settings\.mild\.label_smoothing is 1\.0"),
        ({"arm_settings": {"mild": Arm(label_smoothing=-0.1)}}, "label_smoothing"),
        ({"arm_settings": {"mild": Arm(label_smoothing=NAN)}}, "label_smoothing"),
        ({"arm_settings": {"mild": Arm(weight_decay=-0.1)}}, r"arm_settings\.mild\.weight_decay is -0\.1"),
        ({"arm_settings": {"mild": Arm(weight_decay=INF)}}, "weight_decay"),
        ({"models": {**TWO, "b": ModelChoice("resnet8_cifar", {"rates": [0.1, NAN]})}}, r"models\.b\.args\.rates\[1\]"),
        ({"noise": NoiseChoice(levels=[0.2, NAN])}, "noise.levels"),
        ({"noise": NoiseChoice(levels=[0.2, 0.2])}, "noise.levels"),
        ({"noise": NoiseChoice(seeds=0)}, "noise.seeds is 0: expected 1 to 1000"),
        ({"noise": NoiseChoice(seeds=-2)}, "noise.seeds"),
        ({"noise": NoiseChoice(seeds=1001)}, "noise.seeds"),
        ({"noise": NoiseChoice(arms=[])}, "noise.arms"),
        ({"noise": NoiseChoice(arms=["none", "none"])}, "noise.arms"),
        ({"noise": NoiseChoice(sizes=[1.0, 1.0])}, "noise.sizes"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        ContrastConfig(**{"models": TWO, **changes})


def test_the_edges_of_what_is_allowed():
    for changes in (
        {"small_size": 1.0, "device": "cuda:1", "seeds": 1000, "match": 0},
        {"arm_settings": {"mild": Arm(label_smoothing=0.99, weight_decay=0.0)}},
        {"models": {**TWO, "b": ModelChoice("vit", attention=AttentionConfig())}},
    ):
        ContrastConfig(**{"models": TWO, **changes})


@pytest.mark.parametrize("levels", [[], [0.0]])
def test_without_wrong_labels_the_rest_of_their_arm_is_not_looked_at(levels):
    noise = NoiseChoice(levels=levels, sizes=[0.3], arms=["none"], seeds=0)
    config = ContrastConfig(models=TWO, arms=["flip_crop"], noise=noise)
    assert config.noise == noise
    with pytest.raises(UserError, match=r"noise\.sizes"):
        dataclasses.replace(config, noise=dataclasses.replace(noise, levels=[0.1]))


@pytest.mark.parametrize("where", ["optimizer", "models.b.optimizer"])
def test_what_no_training_would_use_of_an_optimizer_is_refused(where):
    def study(**settings):
        chosen = OptimizerConfig("sgd", **settings)
        if where == "optimizer":
            return ContrastConfig(models=TWO, optimizer=chosen)
        return ContrastConfig(models={**TWO, "b": dataclasses.replace(TWO["b"], optimizer=chosen)})

    with pytest.raises(UserError, match=rf"^{where}\.lr is 0\.01.*learning_rates"):
        study(lr=0.01)
    with pytest.raises(UserError, match=rf"^{where}\.weight_decay is 0\.1.*arm_settings\.NAME\.weight_decay"):
        study(weight_decay=0.1)
    study(momentum=0.8, warmup=0.1)
    config = study(lr=0.02, min_lr=0.01)  # such a floor could not be had otherwise
    assert config.optimizer_of("b", "none", 0.1, (8, 8)).min_lr == 0.01


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rule.alpha 2", "rule.alpha is 2"),
        ("--rule.fits 0", "rule.fits is 0"),
        ("--rule.turned=-0.1", "rule.turned is -0.1"),
        ("--rule.informative .nan", "rule.informative is nan"),
        ("--optimizer.lr 0.01", "optimizer.lr is 0.01"),
        ("--models.b.optimizer.weight_decay 0.2", "models.b.optimizer.weight_decay is 0.2"),
        ("--arm_settings.mild.label_smoothing 1", "arm_settings.mild.label_smoothing is 1"),
        ("--noise.seeds 0", "noise.seeds is 0"),
        ("--models.a.learning_rates [.inf,1,2]", "models.a.learning_rates is"),
        ("--small_size 2", "small_size is 2"),
        ("--device gpu", "device is 'gpu'"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(tmp_path, words, message):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(ContrastConfig(models=TWO).tree()))
    with pytest.raises(UserError) as caught:
        configuration(["--config", str(path), *words.split()])
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) <= 2


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
    other = ContrastConfig(models=TWO, arms=["flip_crop", "none"]).quick()
    assert (other.arms, other.noise) == (["flip_crop"], NoiseChoice(levels=[], arms=["flip_crop"]))
    mild = tiny(arm_settings={"mild": Arm()}, arms=["mild"], noise=NoiseChoice(levels=[])).quick()
    assert mild.arms == ["mild"]
