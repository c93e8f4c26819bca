"""To the Hub and back, through a Hub that is a folder: no network is touched."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
import yaml

import vision_attn as va
from vision_attn.checkpoints.hub import write_repository
from vision_attn.cli.main import main
from vision_attn.errors import UserError

hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def model():
    model = va.create_model("cct_2_3x2_32", num_classes=3, img_size=16, embed_dim=12, num_heads=3, depth=1)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    model.config["labels"] = ["cat", "dog", "a|b <b>"]
    model.config["extra"] = {"recipe": "pets_cct", "seed": 3, "version": "0.1.0"}
    return model.eval()


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A Hub in a folder; ``asked`` says what was called."""

    class Fake:
        root = tmp_path / "the_hub"
        asked: list = []  # noqa: RUF012

    def download(repo, *, revision=None, token=None, allow_patterns=None):
        Fake.asked.append(("download", repo, revision, token, tuple(allow_patterns)))
        target = tmp_path / "cache" / repo
        target.mkdir(parents=True, exist_ok=True)
        for pattern in allow_patterns:
            for file in (Fake.root / repo).glob(pattern):
                shutil.copy(file, target / file.name)
        return str(target)

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo, *, private, exist_ok):
            Fake.asked.append(("create", repo, private, exist_ok, self.token))
            (Fake.root / repo).mkdir(parents=True, exist_ok=True)

        def upload_folder(self, *, repo_id, folder_path, commit_message, allow_patterns):
            Fake.asked.append(("upload", repo_id, commit_message))
            from pathlib import Path

            for file in Path(folder_path).iterdir():
                if file.name in allow_patterns:
                    shutil.copy(file, Fake.root / repo_id / file.name)

    Fake.asked = []
    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "HfApi", Api)
    return Fake


def test_there_and_back(model, fake, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    (local / "secret.txt").write_text("mine")
    address = va.push_to_hub(model, "user/pets", folder=local, private=True, token="t", license="apache-2.0")
    assert address == "https://huggingface.co/user/pets"
    assert fake.asked == [("create", "user/pets", True, True, "t"), ("upload", "user/pets", "Upload model")]
    assert {p.name for p in local.iterdir()} == {"model.safetensors", "config.json", "README.md", "secret.txt"}
    assert {p.name for p in (fake.root / "user/pets").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    loaded = va.load_model("hf-hub:user/pets@main")
    assert fake.asked[-1][:4] == ("download", "user/pets", "main", None)
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in fake.asked[-1][4])
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
    assert loaded.config == model.config


def test_without_a_folder_nothing_stays(model, fake, tmp_path):
    va.push_to_hub(model, "user/pets")
    assert (fake.root / "user/pets/README.md").is_file()


def front(text):
    _, head, rest = text.split("---\n", 2)
    return yaml.safe_load(head), rest


def test_the_card_says_what_is_known(model, tmp_path):
    runs = []
    for seed, accuracy in ((3, 0.9), (4, 0.8), (5, 0.7)):
        run = tmp_path / f"run{seed}"
        run.mkdir()
        summary = {"recipe": "pets_cct", "seed": seed, "config_hash": "c", "test/acc": accuracy, "val/acc": 0.5}
        (run / "summary.json").write_text(json.dumps(summary))
        runs.append(run)
    folder = write_repository(
        model, tmp_path / "m", "user/pets", runs=runs, data="cifar10", metrics={"robust/acc": 0.25}, license="cc-by-4.0"
    )
    head, text = front((folder / "README.md").read_text())
    assert head == {
        "license": "cc-by-4.0",
        "library_name": "vision_attn",
        "pipeline_tag": "image-classification",
        "tags": ["vision_attn", "cct_2_3x2_32"],
        "datasets": ["cifar10"],
    }
    code = text.split("```python\n")[1].split("```")[0].splitlines()
    assert len(code) == 3
    assert code[1] == 'model = va.load_model("hf-hub:user/pets")'
    assert "| test/acc | 0.8000 ± 0.1000 | 3 |" in text
    assert "| robust/acc | 0.2500 | 1 |" in text
    for words in ("recipe: `pets\\_cct`", "seeds: 3, 4, 5", "data: cifar10", "licence: cc-by-4.0", "16 × 16"):
        assert words in text
    assert "3: cat, dog, a\\|b \\<b\\>" in text


def test_the_card_does_not_invent(model, tmp_path):
    model.config["extra"] = {}
    text = (write_repository(model, tmp_path, "user/pets") / "README.md").read_text()
    assert front(text)[0]["license"] == "other"
    for words in (
        "data: not stated",
        "recipe: not stated",
        "seeds: not stated",
        "licence: not stated by those who uploaded it",
        "No results were given",
    ):
        assert words in text


def test_runs_that_do_not_belong_together(model, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"recipe": name, "test/acc": 0.5}))
    with pytest.raises(UserError, match="do not belong together, so their results have no mean: a, b"):
        write_repository(model, tmp_path / "m", "u/p", runs=[tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match="holds no summary"):
        write_repository(model, tmp_path / "m", "u/p", runs=[tmp_path])
    (tmp_path / "a" / "summary.json").write_text("[")
    with pytest.raises(UserError, match="is not valid JSON"):
        write_repository(model, tmp_path / "m", "u/p", runs=[tmp_path / "a"])
    (tmp_path / "a" / "summary.json").write_text("[]")
    with pytest.raises(UserError, match="is no summary of a run"):
        write_repository(model, tmp_path / "m", "u/p", runs=[tmp_path / "a"])
    with pytest.raises(UserError, match="acc must be a number"):
        write_repository(model, tmp_path / "m", "u/p", metrics={"acc": "good"})
    assert not (tmp_path / "m").exists()
    with pytest.raises(UserError, match=r"has no \.config"):
        write_repository(torch.nn.Linear(2, 3), tmp_path / "m", "u/p")


@pytest.mark.parametrize("name", ["pets", "user/", "user/a/b", "../x", "user/..", "user/a b", ""])
def test_names_of_repositories(name, model, fake):
    with pytest.raises(UserError, match="write user/name"):
        va.push_to_hub(model, name)
    with pytest.raises(UserError, match="write user/name"):
        va.load_model(f"hf-hub:{name}")
    assert fake.asked == []


def response(status):
    import importlib.util

    httpx = next(importlib.import_module(m) for m in ("httpx2", "httpx") if importlib.util.find_spec(m))
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/x"))


def failures():
    from huggingface_hub import errors

    return [
        (lambda: errors.RepositoryNotFoundError("x", response=response(404)), "no such repository, or no access"),
        (lambda: errors.GatedRepoError("x", response=response(403)), "is gated: accept its terms"),
        (lambda: errors.RevisionNotFoundError("x", response=response(404)), "has no such revision"),
        (lambda: errors.LocalTokenNotFoundError("x"), "needs a token: log in"),
        (lambda: errors.HfHubHTTPError("x", response=response(401)), r"refuses the token \(401\)"),
        (lambda: errors.HfHubHTTPError("x", response=response(500)), "answers 500"),
        (lambda: errors.LocalEntryNotFoundError("no connection"), "cannot be reached, and it is not in the cache"),
        (lambda: errors.OfflineModeIsEnabled("offline"), "cannot be reached, and it is not in the cache"),
        (lambda: errors.HFValidationError("x"), "write user/name"),
    ]


@pytest.mark.parametrize("number", range(len(failures())))
def test_what_goes_wrong_on_the_way(number, model, fake, monkeypatch, capsys):
    make, match = failures()[number]

    def fails(*args, **kwargs):
        raise make()

    monkeypatch.setattr(hub, "snapshot_download", fails)
    monkeypatch.setattr(hub.HfApi, "upload_folder", fails)
    with pytest.raises(UserError, match=match):
        va.load_model("hf-hub:user/pets")
    with pytest.raises(UserError, match=match):
        va.push_to_hub(model, "user/pets")
    assert main(["predict", "x.png", "--ckpt_path", "hf-hub:user/pets"]) == 2
    assert main(["test", "--ckpt_path", "hf-hub:user/pets"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 2


def test_without_the_package(model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: va.push_to_hub(model, "user/pets"), lambda: va.load_model("hf-hub:user/pets")):
        with pytest.raises(UserError, match=r"needs huggingface_hub: pip install 'vision_attn\[hub\]'"):
            call()
    assert write_repository(model, tmp_path, "user/pets").is_dir()  # the folder can be written without


def test_a_file_that_is_no_safetensors(model, fake):
    """Repositories of others often hold one .bin or .pth; it is fetched only where there is nothing better."""
    there = fake.root / "user/old"
    there.mkdir(parents=True)
    content = {"pytorch-lightning_version": "2.6", "hyper_parameters": {"config": model.config}}
    torch.save({**content, "state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}, there / "some.ckpt")
    (there / "code.py").write_text("raise SystemExit")
    loaded = va.load_model("hf_hub:user/old")
    x = torch.randn(1, 3, 16, 16)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
    assert len(fake.asked) == 2
    assert not any(pattern in ("*", "*.py") for _, _, _, _, patterns in fake.asked for pattern in patterns)
