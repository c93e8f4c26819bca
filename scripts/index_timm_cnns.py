"""Writes ``vision_attn/checkpoints/timm_cnns.json``: a fingerprint of the tensors of every CNN of the timm installed.

python scripts/index_timm_cnns.py        (some minutes: every model is built once, without memory for its weights)
"""

from __future__ import annotations

import json
import warnings

import timm
import torch

from vision_attn.checkpoints.timm_cnn import HEAD_NAMES, INDEX, fingerprint
from vision_attn.models.timm_cnn import _GATES, _QUERY_KEY


def main() -> None:
    """Builds them all, and says what was left out."""
    warnings.simplefilter("ignore")
    marks: dict[str, str] = {}
    skipped, odd = 0, []
    for name in timm.list_models():
        with torch.device("meta"):
            try:
                model = timm.create_model(name, pretrained=False)
            except Exception:  # some initialisations need values: these few are left out, and ask for a name
                skipped += 1
                continue
        kinds = {type(module).__name__ for module in model.modules()}
        if any(_QUERY_KEY.search(kind) and not _GATES.match(kind) for kind in kinds) or not any(
            isinstance(module, torch.nn.Conv2d) for module in model.modules()
        ):
            continue
        head = model.default_cfg.get("classifier")
        if head not in HEAD_NAMES:
            odd.append(f"{name} ({head})")
            continue
        marks[name] = fingerprint({key: tuple(value.shape) for key, value in model.state_dict().items()}, head)
    INDEX.write_text(json.dumps({"timm": timm.__version__, "cnns": marks}, indent=0, sort_keys=True) + "\n")
    print(f"{len(marks)} CNNs; {skipped} could not be built; heads of other names: {', '.join(odd) or 'none'}")


if __name__ == "__main__":
    main()
