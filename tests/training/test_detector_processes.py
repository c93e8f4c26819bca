"""Two processes that train a detector together take the step that one would take on all images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import vision_attn as va
from vision_attn.detection.criterion import Criterion

CLASSES = 5
SMALL = {"embed_dim": 24, "num_heads": 3, "enc_layers": 1, "num_queries": 7, "mlp_ratio": 2.0}
SWITCHES = {
    "groups, selection, denoising": {"query_groups": 2, "query_selection": True, "dn_groups": 3, "dec_layers": 2},
    "one conditional layer": {"conditional": True, "modulate": True, "dec_layers": 1, "dn_groups": 2},
}


def build(switch: str) -> torch.nn.Module:
    torch.manual_seed(2)
    noise = {"dn_label_noise": 0.0, "dn_box_noise": 0.0}  # which every process would draw by itself
    model = va.create_model("dn_detr_tiny", num_classes=CLASSES, **SMALL, **SWITCHES[switch], **noise).double().train()
    model.backbone.eval()  # statistics are each process's own
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def batch() -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Four images; those of the second process have no object at all."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(4, 3, 40, 56, generator=generator).double()
    targets = []
    for n in (3, 2, 0, 0):
        boxes = torch.cat([0.3 + 0.4 * torch.rand(n, 2, generator=generator), 0.1 + 0.2 * torch.rand(n, 2)], 1)
        targets.append({"labels": torch.arange(n) % CLASSES, "boxes": boxes.double()})
    for target in targets:
        target["boxes"][:, 2:] = 0.2
    return images, targets


def _process(rank: int, folder: Path, switch: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    images, targets = batch()
    model = DistributedDataParallel(build(switch))
    criterion, own = Criterion(CLASSES, classification="sigmoid").train(), slice(2 * rank, 2 * rank + 2)
    for _ in range(2):  # the second step is where an unused parameter of the first is complained of
        model.zero_grad()
        criterion(model(images[own], None, targets[own]), targets[own])["loss"].backward()
    torch.save({name: p.grad for name, p in model.module.named_parameters() if p.requires_grad}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("switch", SWITCHES)
def test_gradients_are_those_of_one_process(tmp_path, switch):
    torch.multiprocessing.start_processes(_process, (tmp_path, switch), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    model = build(switch)
    images, targets = batch()
    Criterion(CLASSES, classification="sigmoid").train()(model(images, None, targets), targets)["loss"].backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
            torch.testing.assert_close(first[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
