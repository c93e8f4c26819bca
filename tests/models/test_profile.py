"""Parameters and multiply-accumulates against published and hand-made counts."""

from __future__ import annotations

import json

import pytest
import torch

import vision_attn as va
from vision_attn.attention import Attention
from vision_attn.cli.main import main
from vision_attn.errors import UserError
from vision_attn.models.profile import citation, count_macs, profile


@pytest.mark.parametrize(
    ("name", "params", "macs"),
    [
        ("resnet20_cifar", 0.27e6, 40.6e6),  # He et al. 2016; 41 M as usually counted
        ("vit_tiny_patch16_224", 5.72e6, 1.254e9),  # timm's table: 5.7 M, 1.25 G with attention
        ("resnet50", 25.56e6, 4.09e9),  # timm's table: 25.6 M, 4.1 G
    ],
)
def test_published_counts(name, params, macs):
    found = profile(name)
    assert found.params == pytest.approx(params, rel=0.005)
    assert found.macs == pytest.approx(macs, rel=0.005)
    assert sum(part.macs for part in found.parts) == found.macs


def test_compact_transformer_by_hand():
    found = profile("cct_2_3x2_32")
    n, d = 64, 128
    tokenizer = 1024 * 27 * 64 + 256 * 9 * 64 * d
    attention = 2 * n * n * d  # what the paper's 33 M leave out, twice
    layer = n * (3 * d * d + d * d + 2 * d * d) + attention
    assert found.macs == tokenizer + 2 * layer + 2 * n * d + 10 * d
    assert found.macs - 2 * attention == pytest.approx(33e6, rel=0.01)


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
def test_counting_leaves_the_model_as_it_was(kernel):
    model = va.create_model("cct_2_3x2_32", num_classes=10, img_size=16, attention={"kernel": kernel}).train()
    before = [m.kernel for m in model.modules() if isinstance(m, Attention)]
    assert count_macs(model, (16, 16)) == profile("cct_2_3x2_32", img_size=16).macs
    assert [m.kernel for m in model.modules() if isinstance(m, Attention)] == before
    assert model.training
    assert next(model.parameters()).device == torch.device("cpu")


def test_citations():
    for name in va.list_models():
        assert citation(name).startswith("https://"), name
    assert citation("airbench_cifar").endswith("2404.00498")


def test_models_verb(capsys):
    assert main(["models", "cct_2*", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["cct_2_3x2_32"]
    assert main(["models", "resnet20_cifar", "--json", "--img_size", "8"]) == 0
    details = json.loads(capsys.readouterr().out)
    assert details["img_size"] == [8, 8]
    assert details["arguments"]["blocks"] == [3, 3, 3]
    assert main(["models", "resnet?_cifar"]) == 0
    table = capsys.readouterr().out
    assert "resnet8_cifar" in table
    assert "12.2 M" in table
    assert main(["models", "cct_4_3x2_32"]) == 0
    assert "482,122 parameters" in capsys.readouterr().out
    assert main(["models", "cct_4_3x3_32"]) == 2
    assert "Did you mean cct_4_3x2_32" in capsys.readouterr().err
    assert main(["models", "--jsn"]) == 2
    assert "--json" in capsys.readouterr().err


def test_unknown_names():
    with pytest.raises(UserError, match="unknown model"):
        profile("resnet51")
