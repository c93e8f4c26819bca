"""Parameter groups, and optimizers against PyTorch's own."""

import copy
import re

import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.errors import UserError
from vision_attn.training.muon import MuonWithAdamW, orthogonalize
from vision_attn.training.optimizers import (
    OptimizerConfig,
    PeakRate,
    adapt_state,
    build_optimizer,
    changes,
    parameter_groups,
    parameter_names,
)


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


ZOO = [(name, {}) for name in va.list_models()]
ZOO += [
    (f"{kind}detr_tiny", {"backbone": body})
    for body in ("vit_tiny_patch16_224", "vit_wee_patch16_reg1_gap_256", "swin_cifar_tiny", "swinv2_cifar_tiny")
    for kind in ("", "dn_")
]
ZOO += [("vit_tiny_patch16_224", {"attention": {"position": word}}) for word in ("relative_bias", "cpb", "t5")]
TABLES = re.compile(
    r"(.*\.)?(pos_embed|\w+_token|start|query|queries|query_embed(\.weight)?|label_embed\.weight|logit_scale|gamma"
    r"|queries\.\w+|position\.(table|prefix)|pool\.query)"
)
MAPS = re.compile(r".*\.score\.query")  # a matrix from queries to hidden units, not a table


@pytest.mark.parametrize(("name", "args"), ZOO, ids=lambda value: value if isinstance(value, str) else str(value))
def test_no_table_of_the_zoo_is_decayed(name, args):
    """What is looked up and added is no map between layers, wherever in the model it lies."""
    with torch.device("meta"):
        model = va.create_model(name, **args)
    decayed = names_by(parameter_groups(model, OptimizerConfig(weight_decay=0.3)), model, "weight_decay")[0.3]
    assert decayed
    assert not {key for key in decayed if TABLES.fullmatch(key) and not MAPS.fullmatch(key)}


def test_the_tables_that_nested_models_have_are_seen():
    """The pattern above, and so the test, would miss a table under another name."""
    for name, args, expected in [
        ("pointer_transformer", {}, {"image_encoder.pos_embed", "start"}),
        ("detr_tiny", {"backbone": "vit_tiny_patch16_224"}, {"backbone.body.pos_embed", "backbone.body.cls_token"}),
        ("detr_tiny", {"backbone": "vit_wee_patch16_reg1_gap_256"}, {"backbone.body.reg_token", "queries.position"}),
        ("dn_detr_tiny", {}, {"label_embed.weight", "queries.content", "queries.anchors"}),
        ("detr_tiny", {"backbone": "swin_cifar_tiny"}, {"backbone.body.layers.0.blocks.0.attn.position.table"}),
    ]:
        with torch.device("meta"):
            model = va.create_model(name, **args)
        assert {key for key, _ in model.named_parameters() if TABLES.fullmatch(key)} >= expected


@pytest.mark.parametrize("adamw_lr", [0.0, 0.25])
def test_a_rate_of_zero_is_a_rate(adamw_lr):
    model = Net()
    groups = parameter_groups(model, OptimizerConfig(name="muon", lr=1.0, adamw_lr=adamw_lr))
    assert {(group["algorithm"], group["peak_lr"]) for group in groups} == {("muon", 1.0), ("adamw", adamw_lr)}


def test_a_peak_rate_in_place_of_a_factor():
    model = Net()
    config = OptimizerConfig(name="muon", lr=1.0, adamw_lr=0.0, lr_mult={"block.0.*": 0.5, "block.*": PeakRate(0.25)})
    rates = names_by(parameter_groups(model, config), model, "peak_lr")
    assert rates[0.25] == {"block.1.weight", "block.1.bias", "block.2.weight", "block.2.bias"}
    assert rates[0.5] == {"block.0.weight"}
    assert "block.0.bias" in rates[0.0]  # half of the rate of what AdamW takes


def test_muon_takes_hidden_matrices():
    model = Net()
    groups = parameter_groups(model, OptimizerConfig(name="muon", adamw_lr=0.5))
    algorithms = names_by(groups, model, "algorithm")
    assert algorithms["muon"] == {"block.0.weight", "block.1.weight", "block.2.weight", "conv.weight"}
    rates = names_by(groups, model, "peak_lr")
    assert rates[0.5] == algorithms["adamw"]


@pytest.mark.parametrize(
    ("name", "args", "heads"),
    [
        ("dn_detr_tiny", {"query_selection": True, "dn_groups": 2}, r"(selection\.)?(class_embed|bbox_embed)\."),
        ("detr_resnet50", {"backbone": "light_cnn"}, r"(class_embed|bbox_embed)\."),
        ("vit_tiny_patch16_224", {"depth": 1}, r"head\."),
    ],
)
def test_muon_leaves_every_head_to_adamw(name, args, heads):
    """Logits and boxes are no hidden layers: under Muon, units of a box head die and boxes are refined no more."""
    with torch.device("meta"):
        model = va.create_model(name, num_classes=5, img_size=32, **args)
    algorithms = names_by(parameter_groups(model, OptimizerConfig(name="muon")), model, "algorithm")
    found = {n for n, _ in model.named_parameters() if re.match(heads, n)}
    assert found
    assert found <= algorithms["adamw"]
    assert algorithms["muon"]


def test_a_parameter_that_changed_its_algorithm_begins_anew():
    model = Net()
    before = build_optimizer(model, OptimizerConfig(name="muon"))
    sum(p.sum() for p in model.parameters()).backward()
    before.step()
    saved, names = before.state_dict(), parameter_names(model, before)
    model.output_names = ("block.1",)
    after = build_optimizer(model, OptimizerConfig(name="muon"))
    after.load_state_dict(adapt_state(saved, names, after, parameter_names(model, after)))
    assert model.block[1].weight not in after.state
    assert model.block[0].weight in after.state
    after.step()


def test_lr_mult():
    model = Net()
    groups = parameter_groups(model, OptimizerConfig(lr=1.0, lr_mult={"head.*": 0.1, "*.bias": 0.5}))
    rates = names_by(groups, model, "peak_lr")
    assert rates[0.1] == {"head.weight", "head.bias"}
    assert rates[0.5] == {"stem.bias", "norm.bias", "block.0.bias", "block.1.bias", "block.2.bias", "depthwise.bias"}
    with pytest.raises(UserError, match=r"lr_mult.*back\*"):
        parameter_groups(model, OptimizerConfig(lr_mult={"back*": 0.1}))


@pytest.mark.parametrize("key", ["lr", "weight_decay", "warmup", "min_lr", "adamw_lr"])
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


def stepped(config):
    """A net after one step, and the optimizer that took it."""
    model = Net()
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return model, optimizer


def states(model, optimizer):
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_state_finds_its_parameters_in_other_groups(name):
    """``lr_mult`` makes groups, so another one reorders the parameters, by whose places PyTorch would go."""
    model, old = stepped(OptimizerConfig(name=name, lr_mult={"head.*": 0.1}))
    new = build_optimizer(model, OptimizerConfig(name=name, lr=0.5, weight_decay=0.25, lr_mult={"stem.*": 0.1}))
    names = parameter_names(model, new)
    new.load_state_dict(adapt_state(old.state_dict(), parameter_names(model, old), new, names))
    torch.testing.assert_close(states(model, new), states(model, old), rtol=0, atol=0)
    assert {group["peak_lr"] for group in new.param_groups} == {0.5, 0.05}
    assert {group["weight_decay"] for group in new.param_groups} == {0.25, 0.0}


def test_a_state_goes_on_where_parameters_were_frozen_or_freed():
    model, old = stepped(OptimizerConfig())
    saved, names = old.state_dict(), parameter_names(model, old)
    model.frozen.requires_grad_(True)
    model.head.requires_grad_(False)
    new = build_optimizer(model, OptimizerConfig())
    new.load_state_dict(adapt_state(saved, names, new, parameter_names(model, new)))
    expected = {key: value for key, value in states(model, old).items() if not key.startswith("head.")}
    torch.testing.assert_close(states(model, new), expected, rtol=0, atol=0)
    model.frozen.weight.grad = torch.ones_like(model.frozen.weight)
    new.step()
    assert new.state[model.frozen.weight]["step"] == 1


def test_a_state_without_names_goes_by_places():
    """Of checkpoints from before they were kept."""
    model, old = stepped(OptimizerConfig())
    new = build_optimizer(model, OptimizerConfig(lr=0.5))
    new.load_state_dict(adapt_state(old.state_dict(), None, new, parameter_names(model, new)))
    torch.testing.assert_close(states(model, new), states(model, old), rtol=0, atol=0)
    assert {group["peak_lr"] for group in new.param_groups} == {0.5}
    other = build_optimizer(model, OptimizerConfig(lr_mult={"stem.*": 0.1}))
    with pytest.raises(UserError, match="other groups of parameters"):
        adapt_state(old.state_dict(), None, other, parameter_names(model, other))


@pytest.mark.parametrize("now", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("was", ["adamw", "sgd", "muon"])
def test_a_state_of_another_optimizer_is_refused(was, now):
    model = Net()
    saved, new = (build_optimizer(model, OptimizerConfig(name=name)) for name in (was, now))
    names = parameter_names(model, new)
    if was == now:
        adapt_state(saved.state_dict(), None, new, names)
        return
    with pytest.raises(UserError, match=f"the state of {was}, from which {now}.*--model.optimizer.name {was}"):
        adapt_state(saved.state_dict(), parameter_names(model, saved), new, names)


def test_changes_are_told():
    model = Net()
    before = parameter_groups(model, OptimizerConfig(lr=0.5))
    assert changes(before, before) == ""
    after = parameter_groups(model, OptimizerConfig(lr=0.25, weight_decay=0.125))
    assert changes(before, after) == "peak_lr 0.5 -> 0.25, weight_decay 0.05 -> 0.125"
    after = parameter_groups(model, OptimizerConfig(lr=0.5, lr_mult={"head.*": 0.5}))
    assert changes(before, after) == "peak_lr 0.5 -> 0.25 and 0.5"


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
