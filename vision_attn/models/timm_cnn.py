"""Any convolutional net of timm by its name, as one more baseline."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from vision_attn.errors import UserError, closest

# Classes of timm in which queries meet keys. Gates on channels or places (squeeze-excite, CBAM, split attention)
# have none and stay: a ResNeSt or an EfficientNet is a CNN.
_QUERY_KEY = re.compile(r"Attn|Attention|NonLocal|LambdaLayer|MHSA|SHSA|SHMA|GPSA|LiteMLA")
_GATES = re.compile(r"^(Light)?(Channel|Spatial)Att|^(SplitAttn|SelectiveKernelAttn|BilinearAttnTransform)$")


def timm_names(pattern: str = "*") -> list[str]:
    """Names of timm's models that match a shell pattern; convolutional or not."""
    import timm

    return timm.list_models(pattern)


def create_timm_cnn(name: str, *, num_classes: int, in_chans: int = 3, **kwargs: Any) -> nn.Module | None:
    """Build a CNN of timm (https://github.com/huggingface/pytorch-image-models), with fresh weights.

    Args:
        name: timm's name, e.g. ``resnet50`` or ``convnext_tiny``.
        num_classes: outputs.
        in_chans: channels of the images.
        **kwargs: handed to timm (``drop_rate``, ``drop_path_rate``, …).

    Returns:
        The model, or ``None`` when timm has none of that name.

    Raises:
        UserError: the model attends (ours exist for that), or timm does not take one of ``kwargs``.
    """
    import timm

    if not timm.is_model(name.split(".")[0]):
        return None
    _refuse_attention(name)
    try:
        model: Any = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_chans, **kwargs)
    except TypeError as error:
        raise UserError(f"timm's {name} does not take these arguments ({', '.join(kwargs)}): {error}") from error
    settings = model.default_cfg
    model.head_name = settings.get("classifier", "head")  # load_model replaces it for other classes
    model.img_size = list(settings.get("input_size", (3, 224, 224))[1:])  # what it was made for, when nobody says
    return model


def _refuse_attention(name: str) -> None:
    """Raise when a timm model is built on attention, naming a model of ours that is like it.

    Raises:
        UserError: always for such a model.
    """
    import timm

    with torch.device("meta"):
        try:
            model = timm.create_model(name, pretrained=False)
        except NotImplementedError:  # some initialisations need values; they do not matter here
            model = timm.create_model(name, pretrained=False, num_classes=0)
    kinds = {type(module).__name__ for module in model.modules()}
    attending = sorted(kind for kind in kinds if _QUERY_KEY.search(kind) and not _GATES.match(kind))
    if attending:
        from vision_attn.models.registry import list_models

        raise UserError(
            f"{name} is an attention model of timm ({attending[0]}); only its CNNs are taken as they are."
            f"{closest(name, list_models()) or ' See `vision-attn models` for ours.'}"
        )
