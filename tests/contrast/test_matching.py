from __future__ import annotations

import json
import re

import pytest

from vision_attn.contrast.config import ModelChoice
from vision_attn.contrast.matching import check_match, measure_models, propose, ratios
from vision_attn.errors import UserError

CCT, RESNET = ModelChoice("cct_2_3x2_32"), ModelChoice("resnet20_cifar")


def test_the_compact_pair_is_of_one_size(tiny):
    config = tiny(models={"cct": CCT, "resnet": RESNET}, match=0.25)
    sizes = measure_models(config, 10, (32, 32))
    assert [size.kind for size in sizes] == ["attention", "cnn"]
    assert [round(size.params / 1e6, 2) for size in sizes] == [0.28, 0.27]
    found = check_match(config, sizes, 10, (32, 32))
    assert found["tolerance"] == 0.25
    assert 1 < found["params_ratio"] < found["macs_ratio"] < 1.25


def test_unequal_models_are_refused_with_numbers_and_a_proposal_that_works(tiny):
    wide = ModelChoice("vit_tiny_patch16_224", {"patch_size": 2, "embed_dim": 96, "depth": 3, "num_heads": 3})
    narrow = ModelChoice("resnet8_cifar", {"width": 14, "blocks": [2, 1, 1]})
    config = tiny(models={"cnn": narrow, "vit": wide}, match=0.25)
    sizes = measure_models(config, 10, (8, 8))
    with pytest.raises(UserError, match=r"differ by more than match=0\.25.*61,400 parameters") as caught:
        check_match(config, sizes, 10, (8, 8))
    text = str(caught.value)
    assert "match: false" in text
    assert "Equal enough" in text
    model, args = re.search(r"models\.(\w+)\.args (\{.*\}) \(", text).groups()
    proposed = {**config.models, model: ModelChoice(config.models[model].name, json.loads(args))}
    better = tiny(models=proposed, match=0.25)
    check_match(better, measure_models(better, 10, (8, 8)), 10, (8, 8))


def test_unequal_models_when_asked_for(tiny):
    config = tiny(models={"cct": CCT, "resnet": ModelChoice("resnet8_cifar")}, match=False)
    found = check_match(config, measure_models(config, 10, (32, 32)), 10, (32, 32))
    assert found["tolerance"] is False
    assert found["params_ratio"] > 3


def test_of_three_models_the_largest_and_the_smallest_count(tiny):
    small = ModelChoice("resnet8_cifar")
    config = tiny(models={"cct": CCT, "resnet": RESNET, "small": small}, match=0.25)
    sizes = measure_models(config, 10, (32, 32))
    params = [size.params for size in sizes]
    assert ratios(sizes)[0] == max(params) / min(params) > 3
    with pytest.raises(UserError, match=r"differ by more than match=0\.25 allows: cct .*, resnet .*, small ") as caught:
        check_match(config, sizes, 10, (32, 32))
    assert "models.small.args" in str(caught.value)  # what to change is the one that differs
    assert not re.search(r"models\.(cct|resnet)\.args", str(caught.value))
    equal = tiny(models={"cct": CCT, "resnet": RESNET, "again": RESNET}, match=0.25)
    found = check_match(equal, measure_models(equal, 10, (32, 32)), 10, (32, 32))
    two = tiny(models={"cct": CCT, "resnet": RESNET}, match=0.25)
    assert found == check_match(two, measure_models(two, 10, (32, 32)), 10, (32, 32))


def test_a_proposal_keeps_what_is_not_size(tiny):
    target = measure_models(tiny(models={"a": RESNET, "b": CCT}), 10, (32, 32))[0]
    found = propose(ModelChoice("swin_cifar_tiny", {"window_size": 2}), target, 10, (32, 32))
    assert found.args["window_size"] == 2
    assert max(ratios([found, target])) < 4
    assert propose(ModelChoice("airbench_cifar"), target, 10, (32, 32)) is None


@pytest.mark.parametrize(
    ("choice", "img_size", "message"),
    [
        (ModelChoice("resnet21_cifar"), (32, 32), r"models\.a: unknown model 'resnet21_cifar'.*resnet20_cifar"),
        (ModelChoice("resnet20_cifar", {"widht": 3}), (32, 32), r"models\.a: .*widht.*width"),
        (ModelChoice("pointer_lstm"), (8, 8), "no image classifier"),
        (ModelChoice("glimpse_small_32"), (32, 32), "REINFORCE"),
        (ModelChoice("resnet20_cifar"), (4, 4), r"models\.a: .*4"),
        (ModelChoice("vit_tiny_patch16_224"), (30, 30), r"models\.a: .*(patch|30)"),
        (ModelChoice("vgg11"), (8, 8), r"models\.a: vgg11 cannot take images of 8 x 8 pixels"),
    ],
)
def test_a_model_that_cannot_be_studied_is_refused(tiny, choice, img_size, message):
    with pytest.raises(UserError, match=message):
        measure_models(tiny(models={"a": choice, "b": RESNET}), 10, img_size)
