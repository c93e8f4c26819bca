"""Parameter groups, and optimizers against PyTorch's own."""

import copy

import pytest
import torch
from torch import nn

from vision_attn.errors import UserError
from vision_attn.training.muon import MuonWithAdamW, orthogonalize
from vision_attn.training.optimizers import OptimizerConfig, build_optimizer, parameter_groups


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 7))
        self.stem = nn.Conv2d(3, 7, 3)
        self.norm = nn.LayerNorm(7)
        self.block = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 7), nn.Linear(7, 11))
        self.conv = nn.Conv2d(11, 13, 3, bias=False)
        self.depthwise = nn.Conv2d(13, 13, 3, groups=13)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(13, 5)

    def no_weight_decay(self):
        return {"pos_embed"}


def names_by(groups, model, key):
    names = {id(p): n for n, p in model.named_parameters()}
    result = {}
    for group in groups:
        result.setdefault(group.get(key), set()).update(names[id(p)] for p in group["params"])
    return result


def test_no_decay_on_norms_biases_and_positions():
    model = Net()
    decayed = names_by(parameter_groups(model, OptimizerConfig(weight_decay=0.3)), model, "weight_decay")
    matrices = {"stem.weight", "block.0.weight", "block.1.weight", "block.2.weight"}
    assert decayed[0.3] == matrices | {"conv.weight", "depthwise.weight", "head.weight"}
    everything = {n for n, p in model.named_parameters() if p.requires_grad}
    assert decayed[0.0] == everything - decayed[0.3]


def test_muon_takes_hidden_matrices():
    model = Net()
    groups = parameter_groups(model, OptimizerConfig(name="muon", adamw_lr=0.5))
    algorithms = names_by(groups, model, "algorithm")
    assert algorithms["muon"] == {"block.0.weight", "block.1.weight", "block.2.weight", "conv.weight"}
    rates = names_by(groups, model, "peak_lr")
    assert rates[0.5] == algorithms["adamw"]


def test_lr_mult():
    model = Net()
    groups = parameter_groups(model, OptimizerConfig(lr=1.0, lr_mult={"head.*": 0.1, "*.bias": 0.5}))
    rates = names_by(groups, model, "peak_lr")
    assert rates[0.1] == {"head.weight", "head.bias"}
    assert rates[0.5] == {"stem.bias", "norm.bias", "block.0.bias", "block.1.bias", "block.2.bias", "depthwise.bias"}
    with pytest.raises(UserError, match=r"lr_mult.*back\*"):
        parameter_groups(model, OptimizerConfig(lr_mult={"back*": 0.1}))


@pytest.mark.parametrize("key", ["lr", "weight_decay", "warmup", "min_lr"])
def test_negative_numbers_are_refused(key):
    with pytest.raises(UserError, match=key):
        OptimizerConfig(**{key: -1.0})


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_state_survives_saving(name, tmp_path):
    """Three steps in one go equal one step, a saved and loaded state, and two more."""
    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    config = OptimizerConfig(name=name, lr=0.01, weight_decay=0.1)

    def step(net, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None
        optimizer.step()

    whole, first = build_optimizer(model, config), build_optimizer(other, config)
    for seed in range(3):
        step(model, whole, seed)
    step(other, first, 0)
    torch.save(first.state_dict(), tmp_path / "state")
    second = build_optimizer(other, config)
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for seed in (1, 2):
        step(other, second, seed)
    torch.testing.assert_close(dict(other.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


def test_muon_equals_torch_muon(monkeypatch):
    """On plain matrices, with the scaling of Liu et al."""
    torch.manual_seed(0)
    monkeypatch.setattr("vision_attn.training.muon._fast_dtype", lambda device: torch.bfloat16)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((11, 7), (7, 13), (11, 7))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a = MuonWithAdamW(ours, lr=0.02, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2e-3)  # bfloat16 inside, in another order


@pytest.mark.parametrize("shape", [(3, 7, 13), (2, 13, 7), (1, 5, 5)])
def test_orthogonalize(shape):
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalize(torch.randn(shape) * 10))
    assert singular.min() > 0.3
    assert singular.max() < 1.3


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="vectors"):
        MuonWithAdamW([nn.Parameter(torch.zeros(3))])


def test_closure_runs_with_gradients():
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = MuonWithAdamW([weight], lr=0.1)

    def closure():
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 6.0
    assert (weight < 1).all()
