"""Models to and from the Hugging Face Hub, with a card that says what they are.

``huggingface_hub`` is imported when it is needed and not before.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from vision_attn.atomic import atomic_write_text
from vision_attn.checkpoints.read import CONFIG_NAME, HUB, WEIGHTS_NAME, parse_json
from vision_attn.checkpoints.save import save_model
from vision_attn.errors import UserError, first_line

CARD_NAME = "README.md"
_TENSORS = ("*.bin", "*.pth", "*.pt", "*.npz", "*.ckpt")


def is_hub_name(path: str | Path) -> bool:
    """Whether a checkpoint is named like ``hf-hub:user/name``."""
    return str(path).startswith(HUB)


def download(name: str, *, token: str | None = None) -> Path:
    """The folder of a repository of the Hub, from the cache or the network.

    Only descriptions and tensors are fetched: never code. Where a repository has safetensors, nothing else is.

    Args:
        name: ``hf-hub:user/name`` or ``hf-hub:user/name@revision``.
        token: for private repositories; by default what ``hf auth login`` stored.

    Returns:
        A folder in the cache of huggingface_hub, or the only file of tensors in it; the layouts of ``load_model`` find
        out what it holds.

    Raises:
        UserError: no such repository, no access, no network, or huggingface_hub is missing.
    """
    hub = _hub()
    for prefix in HUB:
        name = name.removeprefix(prefix)
    repo, _, revision = name.partition("@")
    _check_name(repo)
    with _explained(f"hf-hub:{name}"):
        options: dict[str, Any] = {"revision": revision or None, "token": token}
        folder = Path(hub.snapshot_download(repo, allow_patterns=["*.json", "*.safetensors"], **options))
        if not any(folder.glob("*.safetensors")):
            folder = Path(hub.snapshot_download(repo, allow_patterns=["*.json", *_TENSORS], **options))
    files = [file for pattern in ("*.safetensors", *_TENSORS) for file in sorted(folder.glob(pattern))]
    return files[0] if len(files) == 1 else folder


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    folder: str | Path | None = None,
    runs: Sequence[str | Path] = (),
    data: str | None = None,
    metrics: Mapping[str, Any] | None = None,
    license: str | None = None,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload model",
) -> str:
    """Write a model and its card to a folder, and that folder to a repository of the Hub.

    Args:
        model: from ``create_model`` or ``load_model``.
        repo_id: ``user/name``; made when there is none.
        folder: where the files are written first, and stay; a temporary folder by default.
        runs: run folders of this model, one per seed: their ``summary.json`` fills the card.
        data: what it was trained on, when no run says so.
        metrics: further results for the card: a number, or a list of one number per seed, by name.
        license: of the weights, by the Hub's short name (``apache-2.0``, ``cc-by-4.0``).
        private: whether a new repository is private.
        token: by default what ``hf auth login`` stored.
        message: of the commit.

    Returns:
        The address of the commit or of the repository.

    Raises:
        UserError: the model or a run cannot be described, no access, no network, or huggingface_hub is missing.
    """
    hub = _hub()
    _check_name(repo_id)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if folder is None else Path(folder)
        write_repository(model, folder, repo_id, runs=runs, data=data, metrics=metrics, license=license)
        with _explained(repo_id):
            api = hub.HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=str(folder),
                commit_message=message,
                allow_patterns=[WEIGHTS_NAME, CONFIG_NAME, CARD_NAME],  # whatever else lies there stays there
            )
    return str(getattr(commit, "commit_url", None) or f"https://huggingface.co/{repo_id}")


def write_repository(
    model: nn.Module,
    folder: str | Path,
    repo_id: str,
    *,
    runs: Sequence[str | Path] = (),
    data: str | None = None,
    metrics: Mapping[str, Any] | None = None,
    license: str | None = None,
) -> Path:
    """The files of ``save_model`` and a ``README.md``, the card; arguments and errors as for ``push_to_hub``."""
    summaries = [_read_summary(Path(run)) for run in runs]
    results = _results(summaries, metrics or {})
    text = None
    if isinstance(getattr(model, "config", None), dict):
        text = card(model, repo_id, summaries=summaries, data=data, results=results, license=license)
    folder = save_model(model, folder)  # refuses a model without a configuration
    assert text is not None
    atomic_write_text(folder / CARD_NAME, text)
    return folder


def card(
    model: nn.Module,
    repo_id: str,
    *,
    summaries: Sequence[Mapping[str, Any]] = (),
    data: str | None = None,
    results: Mapping[str, Sequence[float]] | None = None,
    license: str | None = None,
) -> str:
    """The text of a model card: how to load the model, what it is, how it was trained and how well it does.

    Args:
        model: with ``.config``.
        repo_id: where it will lie.
        summaries: what ``summary.json`` of its runs say.
        data: what it was trained on.
        results: one number per seed, by name.
        license: of the weights.
    """
    config: dict[str, Any] = model.config  # type: ignore[assignment]
    known = {**(config.get("extra") or {}), **(summaries[0] if summaries else {})}
    recipe = known.get("recipe")
    data = data or known.get("data")
    seeds = [s["seed"] for s in summaries if "seed" in s] or ([known["seed"]] if "seed" in known else [])
    params = sum(p.numel() for p in model.parameters())
    size = " × ".join(map(str, config["preprocess"]["size"]))
    facts = {
        "model": f"`{config['name']}`, {params:,} parameters, images of {size} pixels",
        "arguments": _code(config["args"]),
        "classes": _classes(config),
        "data": _text(data) if data else "not stated",
        "recipe": f"`{_text(recipe)}`" if recipe else "not stated",
        "seeds": ", ".join(map(str, seeds)) or "not stated",
        "converted from": _text(known["layout"]) if "layout" in known else None,
        "licence": _text(license) if license else "not stated by those who uploaded it",
        "vision_attn": _text(known["version"]) if known.get("version") else None,
    }
    lines = [
        _front(config, license, data),
        f"# {_text(repo_id.split('/')[-1])}",
        "",
        "```python",
        "import vision_attn as va",
        f'model = va.load_model("hf-hub:{repo_id}")',
        'print(va.predict(model, "picture.jpg"))',
        "```",
        "",
        *(f"* {key}: {value}" for key, value in facts.items() if value),
        "",
        *_table(results or {}, len(seeds)),
        f"Preprocessing, done by `va.predict`: {_code(config['preprocess'])}",
        "",
    ]
    return "\n".join(lines)


def _front(config: Mapping[str, Any], license: str | None, data: str | None) -> str:
    """The YAML at the top by which the Hub finds a model."""
    import yaml

    kind = {"classification": "image-classification"}.get(config["task"])
    head: dict[str, Any] = {"license": license or "other", "library_name": "vision_attn"}
    if kind:
        head["pipeline_tag"] = kind
    head["tags"] = ["vision_attn", config["name"]]
    if data and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data):
        head["datasets"] = [data]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n"


def _table(results: Mapping[str, Sequence[float]], seeds: int) -> list[str]:
    if not results:
        return ["No results were given.", ""]
    lines = ["| result | value | seeds |", "|---|---|---|"]
    for name, values in results.items():
        value = f"{statistics.fmean(values):.4f}"
        if len(values) > 1:
            value += f" ± {statistics.stdev(values):.4f}"
        lines.append(f"| {_text(name)} | {value} | {len(values) if len(values) > 1 or seeds else 'not stated'} |")
    return [*lines, "", "Mean ± standard deviation over seeds where there are several.", ""]


def _classes(config: Mapping[str, Any]) -> str | None:
    labels = config.get("labels")
    if not labels:
        number = config["args"].get("num_classes")
        return None if number is None else str(number)
    shown = ", ".join(_text(label) for label in labels[:20])
    return f"{len(labels)}: {shown}{', …' if len(labels) > 20 else ''}"


def _text(value: Any) -> str:
    """One line of plain text: nothing in a name may become a link, a table or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(str(value).split()))


def _code(value: Any) -> str:
    return "`" + json.dumps(value, ensure_ascii=False).replace("`", "'") + "`"


def _read_summary(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    if not path.is_file():
        raise UserError(f"{run} holds no summary.json: not the folder of a run.")
    content = parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} is no summary of a run.")
    return content


def _results(summaries: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """One number per seed: those of the runs that all have, and those given.

    Raises:
        UserError: runs of different recipes, or a result that is no number.
    """
    recipes = {(s.get("recipe"), s.get("config_hash")) for s in summaries}
    if len(recipes) > 1:
        different = ", ".join(sorted({str(recipe) for recipe, _ in recipes}))
        raise UserError(f"these runs do not belong together, so their results have no mean: {different}")
    names = [key for key in (summaries[0] if summaries else {}) if key.startswith(("val/", "test/"))]
    found = {key: [s[key] for s in summaries] for key in names if all(key in s for s in summaries)}
    for key, value in metrics.items():
        found[key] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for key, values in found.items():
        if not values or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            raise UserError(f"metrics: {key} must be a number, or a list of one number per seed")
    return found


def _check_name(repo: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo) or ".." in repo or "--" in repo:
        raise UserError(f"{repo!r} is no repository of the Hub: write user/name.")


def _hub() -> Any:
    """The package, when somebody needs it.

    Raises:
        UserError: it is missing.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError("the Hub needs huggingface_hub: pip install 'vision_attn[hub]'") from error
    return huggingface_hub


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns what goes wrong between here and the Hub into a line that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(f"{name} is gated: accept its terms on its page, then log in: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{name}: no such repository, or no access to it. If it is private, log in (hf auth login) or give token=."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name}: the repository has no such revision.") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"{name} needs a token: log in (hf auth login) or give token=.") from error
    except errors.HFValidationError as error:
        raise UserError(f"{name} is no repository of the Hub: write user/name.") from error
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise UserError(
                f"{name}: the Hub refuses the token ({status}). Give one that may do this: hf auth login, or token=."
            ) from error
        raise UserError(f"{name}: the Hub answers {status or 'with an error'}: {first_line(error, 200)}") from error
    except OSError as error:
        if error.filename is not None:  # a file of ours, not the network
            raise
        raise UserError(
            f"{name}: the Hub cannot be reached, and it is not in the cache: {first_line(error, 200)}"
        ) from error
    except Exception as error:
        # the libraries below raise errors of their own for a network that is not there
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
            raise
        raise UserError(f"{name}: the Hub cannot be reached: {first_line(error, 200)}") from error
