"""The rule of the house: queries meet keys in vision_attn/attention and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import vision_attn

ROOT = Path(vision_attn.__file__).parent
FORBIDDEN = {"scaled_dot_product_attention", "flex_attention", "MultiheadAttention"}
# Softmax over classes is no attention; these are the only places that may do it.
CLASS_SOFTMAX = {
    "inference.py",
    "training/pictures.py",
    "training/classifier.py",
    "detection/criterion.py",
    "detection/matcher.py",
    "detection/padding.py",
    "detection/postprocess.py",
    "contrast/measures.py",
}
LAYERS = ["attention", "layers", "models", "certificates", "data", "detection", "checkpoints", "explain", "training"]
LAYERS += ["contrast", "lessons", "cli"]
MAY_IMPORT = {
    "attention": set(),
    "layers": {"attention"},
    "models": {"attention", "layers", "detection"},  # detection: denoising queries
    "certificates": {"attention", "layers", "models", "training"},  # training: the contrastive loss
    "data": set(),
    "detection": {"attention", "layers", "data"},
    "checkpoints": {"attention", "layers", "models", "data"},  # data: the ways of resizing an image
    "explain": {"attention", "layers", "models", "checkpoints", "detection"},
    "training": {"attention", "layers", "models", "data", "detection", "checkpoints", "explain"},
    "lessons": {"attention", "layers", "models", "detection", "explain"},
}


def sources():
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in sorted(ROOT.rglob("*.py"))]


def called(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.name.split(".")[-1])
    return names


def test_attention_is_computed_in_the_core_only():
    outside = [(name, called(tree)) for name, tree in sources() if not name.startswith("attention/")]
    assert outside
    strays = {name: names & FORBIDDEN for name, names in outside if names & FORBIDDEN}
    assert not strays
    softmax = {name for name, names in outside if names & {"softmax", "Softmax", "log_softmax"}}
    # Pooling by attention is a softmax over keys too: it goes through the core's functions.
    assert softmax <= CLASS_SOFTMAX


def test_data_flows_one_way():
    wrong = []
    for name, tree in sources():
        room = name.split("/")[0]
        if room not in MAY_IMPORT:
            continue
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                package, _, target = module.partition(".")
                target = target.split(".")[0]
                if package == "vision_attn" and target in LAYERS and target not in {room, *MAY_IMPORT[room]}:
                    wrong.append(f"{name} imports {module}")
    assert not wrong


def test_the_core_imports_torch_and_nothing_of_ours():
    for name, tree in sources():
        if name.startswith("attention/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vision_attn"):
                    assert node.module.startswith("vision_attn.attention"), f"{name} imports {node.module}"
