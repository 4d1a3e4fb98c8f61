"""Learning-rate schedules; optimizers: their first step in closed form, skipped steps, groups, and what a resume restores."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.support.ranks import differences
from trainer.cli.parts import PARTS
from trainer.config.schema import OptimizerTable
from trainer.errors import UserError
from trainer.model import build
from trainer.on_device import step_unless, supports_found_inf
from trainer.training.step.optimizer import build_optimizer, load_named_state, named_state, parameter_groups
from trainer.training.step.schedule import set_lr

NAMES = ["adamw", "muon", "sgd"]


def test_a_frozen_parameter_is_left_out():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert len(build_optimizer(model, OptimizerTable()).param_groups) == 1


def set_gradients(model, seed=0):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def everything(model, optimizer):
    """Weights and the state of the optimizer, copied."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def newton_schulz(gradient):
    """Jordan et al. (2024): five quintic iterations towards the nearest orthogonal matrix, in float64."""
    x = gradient.double() / gradient.double().norm()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x.T if is_tall else x


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_that_of_its_formula(name):
    lr, decay, momentum = 0.01, 0.2, 0.9
    model = build(11, dim=8, num_layers=2)
    table = OptimizerTable(name=name, lr=lr, weight_decay=decay, momentum=momentum)
    optimizer = build_optimizer(model, table, PARTS)
    set_gradients(model)
    before = copy.deepcopy(dict(model.named_parameters()))
    set_lr(optimizer, lr)
    optimizer.step()
    for key, parameter in model.named_parameters():
        old, gradient = before[key].double(), before[key].grad
        gradient = parameter.grad.double() if gradient is None else gradient.double()
        own_decay = decay if parameter.ndim >= 2 else 0.0
        tolerance = 1e-4  # of what changes, in float32
        if name == "sgd":
            gradient = gradient + own_decay * old
            expected = old - lr * (1 + momentum) * gradient
        elif name == "muon" and parameter.ndim == 2 and parameter.shape[0] != 11:
            scale = 0.2 * math.sqrt(max(parameter.shape))
            expected = old * (1 - lr * own_decay) - lr * scale * newton_schulz(gradient)
            tolerance = 0.05  # torch iterates in bfloat16
        else:
            expected = old * (1 - lr * own_decay) - lr * gradient / (gradient.abs() + 1e-8)
        change = (parameter.detach().double() - old).norm()
        assert (parameter.detach().double() - expected).norm() < tolerance * change, key


@pytest.mark.parametrize("num_steps_before", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_changes_nothing_and_the_next_is_as_if_it_had_not_been(name, num_steps_before):
    results = []
    for has_bad_step in (False, True):
        torch.manual_seed(1)
        model = build(11, dim=8, num_layers=1)
        optimizer = build_optimizer(model, OptimizerTable(name=name), PARTS)
        assert supports_found_inf(optimizer)
        for step in range(num_steps_before):
            set_gradients(model, step)
            step_unless(torch.tensor(False), optimizer)
        if has_bad_step:
            before = everything(model, optimizer)
            set_gradients(model)
            for parameter in model.parameters():
                parameter.grad.fill_(float("nan"))
            step_unless(torch.tensor(True), optimizer)
            after = everything(model, optimizer)
            if num_steps_before:
                assert differences(before, after) == []
            else:  # the state is made, as zeros
                assert differences(before[0], after[0]) == []
        set_gradients(model, 7)
        step_unless(torch.tensor(False), optimizer)
        results.append(everything(model, optimizer))
    assert differences(*results) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_restores_the_state_and_takes_the_settings_of_the_config(name):
    model = build(11, dim=8, num_layers=1)
    optimizer = build_optimizer(model, OptimizerTable(name=name), PARTS)
    set_gradients(model)
    optimizer.step()
    saved, whole = copy.deepcopy(named_state(optimizer, model)), copy.deepcopy(optimizer.state_dict())
    same = build_optimizer(model, OptimizerTable(name=name), PARTS)
    load_named_state(same, model, saved)
    assert differences(same.state_dict(), whole) == []
    other = build_optimizer(model, OptimizerTable(name=name, weight_decay=0.7), PARTS)
    load_named_state(other, model, saved)
    assert {group["weight_decay"] for group in other.param_groups} == {0.0, 0.7}
    set_lr(other, 0.5)
    parts = getattr(other, "parts", {"": other}).values()
    assert {group["lr"] for part in parts for group in part.param_groups} == {0.5}


def test_muon_takes_the_matrices_between_embedding_and_output():
    model = build(11, dim=8, num_layers=2)
    parts = build_optimizer(model, OptimizerTable(name="muon"), PARTS).parts
    names = {id(p): name for name, p in model.named_parameters()}
    of = {key: {names[id(p)] for g in part.param_groups for p in g["params"]} for key, part in parts.items()}
    assert of["muon"] | of["adamw"] == set(names.values())
    assert not of["muon"] & of["adamw"]
    assert {"embedding.weight", "head.weight"} <= of["adamw"]
    assert all(dict(model.named_parameters())[name].ndim == 2 for name in of["muon"])
    assert any("mlp" in name for name in of["muon"])


def test_groups_have_settings_of_their_own():
    model = build(11, dim=8, num_layers=2)
    groups = [{"match": "embedding.*", "lr_scale": 0.1, "weight_decay": 0.0}, {"match": "*norm*", "weight_decay": 0.5}]
    optimizer = build_optimizer(model, OptimizerTable(weight_decay=0.3, group=groups))
    set_lr(optimizer, 2.0)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        group = found[id(parameter)]
        assert group["lr"] == (0.2 if name.startswith("embedding.") else 2.0)
        decay = 0.0 if name.startswith("embedding.") else 0.5 if "norm" in name else 0.3 if parameter.ndim >= 2 else 0.0
        assert group["weight_decay"] == decay, name
    with pytest.raises(
        UserError, match=r"optimizer.group: 'blokcs.*' matches no parameter; names are such as embedding"
    ):
        parameter_groups(model, OptimizerTable(group=[{"match": "blokcs.*"}]))


def rmsprop(groups, lr, alpha=0.9):
    return torch.optim.RMSprop(groups, lr=lr, alpha=alpha)


def no_optimizer(groups, lr):
    return {"groups": groups, "lr": lr}


def test_one_of_ones_own_is_called_with_groups_and_rate():
    model = build(11, dim=8, num_layers=1)
    here = f"{__name__}:rmsprop"
    optimizer = build_optimizer(model, OptimizerTable(target=here, args={"alpha": 0.5}, lr=0.25), PARTS)
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert {(group["lr"], group["alpha"]) for group in optimizer.param_groups} == {(0.25, 0.5)}
    for args, message in (({"beta": 1}, "optimizer.args: cannot call"), ({"alpha": -1}, "optimizer.target: ")):
        with pytest.raises(UserError, match=message):
            build_optimizer(model, OptimizerTable(target=here, args=args), PARTS)
    with pytest.raises(UserError, match="gave a dict, not an optimizer"):
        build_optimizer(model, OptimizerTable(target=f"{__name__}:no_optimizer"), PARTS)


def first_group_alone(groups, lr):
    return torch.optim.AdamW(groups[:1], lr=lr)


def with_a_closure(groups, lr):
    return torch.optim.LBFGS([parameter for group in groups for parameter in group["params"]], lr=lr)


def test_one_of_ones_own_that_would_not_train_all_parameters_is_refused_with_their_names():
    model = build(11, dim=8, num_layers=1)
    with pytest.raises(UserError, match=r"leaves \d+ parameters out, which would never be trained: .*bias"):
        build_optimizer(model, OptimizerTable(target=f"{__name__}:first_group_alone"), PARTS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.ndim >= 2 and "head" not in name)
    build_optimizer(model, OptimizerTable(target=f"{__name__}:first_group_alone"), PARTS)  # the others are frozen


def test_one_of_ones_own_whose_step_needs_a_closure_is_refused():
    model = build(11, dim=8, num_layers=1)
    with pytest.raises(UserError, match=r"LBFGS takes arguments.*'closure'"):
        build_optimizer(model, OptimizerTable(target=f"{__name__}:with_a_closure"), PARTS)


def test_keys_that_would_have_no_effect_beside_a_target_are_refused():
    with pytest.raises(ValueError, match="betas, name would have no effect beside target"):
        OptimizerTable(target="a:b", name="muon", betas=[0.9, 0.99])
    OptimizerTable(target="a:b", name="adamw", lr=0.1, weight_decay=0.3)
