"""Learning-rate schedules; optimizers: their first step in closed form, skipped steps, groups, and what a resume restores."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ranks import differences
from tests.support.runs import write_tiny_config
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.config.schema import OptimizerTable, SchedulerTable
from trainer.errors import UserError
from trainer.model import build
from trainer.model.protocol import parameter_roles
from trainer.on_device import step_unless, supports_found_inf
from trainer.training.optimizer import (
    Length,
    build_optimizer,
    group_counters,
    load_named_state,
    lr_at,
    make_schedule,
    named_state,
    parameter_groups,
    set_lr,
)

NAMES = ["adamw", "muon", "sgd"]
SCHEDULES = ["constant", "linear", "cosine", "wsd"]


def test_a_frozen_parameter_is_left_out_and_a_complex_one_refused():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert len(build_optimizer(model, OptimizerTable()).param_groups) == 1
    with pytest.raises(UserError, match="adamw cannot train weight: TypeError: it is complex"):
        build_optimizer(torch.nn.Linear(2, 2, dtype=torch.complex64), OptimizerTable())


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
    lr, decay, momentum = 0.01, 0.2, 0.95
    model = build(11, dim=8, num_layers=2)
    table = OptimizerTable(name=name, lr=lr, weight_decay=decay)
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


@pytest.mark.cuda
@pytest.mark.parametrize("num_steps_before", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_changes_nothing_and_the_next_is_as_if_it_had_not_been(device, name, num_steps_before):
    results = []
    for has_bad_step in (False, True):
        torch.manual_seed(1)
        model = build(11, dim=8, num_layers=1).to(device)
        optimizer = build_optimizer(model, OptimizerTable(name=name), PARTS)
        assert supports_found_inf(optimizer)
        for step in range(num_steps_before):
            set_gradients(model, step)
            step_unless(torch.tensor(False, device=device), optimizer)
        if has_bad_step:
            before = everything(model, optimizer)
            set_gradients(model)
            for parameter in model.parameters():
                parameter.grad.fill_(float("nan"))
            step_unless(torch.tensor(True, device=device), optimizer)
            after = everything(model, optimizer)
            if num_steps_before:
                assert differences(before, after) == []
            else:  # the state is made, as zeros
                assert differences(before[0], after[0]) == []
        set_gradients(model, 7)
        step_unless(torch.tensor(False, device=device), optimizer)
        results.append(everything(model, optimizer))
    assert differences(*results) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_restores_the_state_and_takes_the_settings_of_the_config(name):
    model = build(11, dim=8, num_layers=1)
    optimizer = build_optimizer(model, OptimizerTable(name=name), PARTS)
    set_gradients(model)
    optimizer.step()
    for part in getattr(optimizer, "parts", {"": optimizer}).values():
        for state in part.state.values():  # as a custom optimizer may keep it
            state["mask"], state["lost"] = torch.tensor([True, False]), torch.tensor(2.0**60 + 2**20).double()
    saved, whole = copy.deepcopy(named_state(optimizer, model)), copy.deepcopy(optimizer.state_dict())
    same = build_optimizer(model, OptimizerTable(name=name), PARTS)
    for part in (saved, {}):  # what is not saved stays
        load_named_state(same, model, part)
        assert differences(same.state_dict(), whole) == []
    other = build_optimizer(model, OptimizerTable(name=name, weight_decay=0.7), PARTS)
    load_named_state(other, model, saved)
    assert {group["weight_decay"] for group in other.param_groups} == {0.0, 0.7}
    set_lr(other, 0.5)
    parts = getattr(other, "parts", {"": other}).values()
    assert {group["lr"] for part in parts for group in part.param_groups} == {0.5}


class Various(torch.nn.Module):
    """Parameters whose shapes mislead: as many positions as features, a gate stack of as many rows as ids, a padded
    output, decay rates of four dimensions, a table that no layer holds."""

    def __init__(self):
        super().__init__()
        vocab_size, dim = 201, 67
        self.wpe = torch.nn.Embedding(dim, dim)
        self.table = torch.nn.Parameter(torch.randn(vocab_size, dim))
        self.wte = torch.nn.Parameter(torch.randn(vocab_size, dim))
        self.pos_embedding = torch.nn.Parameter(torch.zeros(1, 16, dim))
        self.block = torch.nn.Module()
        self.block.gru = torch.nn.GRU(dim, dim)  # 3 * 67 = 201 rows
        self.block.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.block.layers[0].output = torch.nn.Linear(dim, dim)
        self.block.conv = torch.nn.Conv1d(dim, dim, 4, groups=dim)
        self.block.A_log = torch.nn.Parameter(torch.zeros(1, 1, 4, 1))
        self.block.gains = torch.nn.Parameter(torch.ones(4, dim))
        self.block.speakers = torch.nn.Embedding(4, dim)
        self.block.gains._no_weight_decay = self.block.speakers.weight._no_weight_decay = True
        self.block.embed_gains = torch.nn.Parameter(torch.ones(1, dim))
        self.lm_head = torch.nn.Linear(dim, 256)
        self.block.one = torch.nn.Linear(dim, 1)


class Saying(Various):
    """Says itself which layers embed and which give the logits."""

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.block.layers[0].output


VECTORS = {
    "block.gru.bias_ih_l0",
    "block.gru.bias_hh_l0",
    "block.layers.0.output.bias",
    "block.conv.bias",
    "block.one.bias",
}
VECTORS |= {"block.A_log", "block.gains", "block.speakers.weight", "block.embed_gains", "lm_head.bias"}
TABLES = {"wpe.weight", "wte", "pos_embedding"}
MATRICES = {"block.gru.weight_ih_l0", "block.gru.weight_hh_l0", "block.one.weight"}


@pytest.mark.parametrize(
    ("model", "tables", "outputs", "matrices"),
    [
        (Various, TABLES, {"lm_head.weight"}, {*MATRICES, "table", "block.layers.0.output.weight"}),
        (Saying, {*TABLES, "table"}, {"lm_head.weight", "block.layers.0.output.weight"}, MATRICES),
    ],
)
def test_muon_and_decay_go_by_what_a_model_says_and_not_by_sizes(model, tables, outputs, matrices):
    model = model()
    names = {id(p): name for name, p in model.named_parameters()}
    parts = build_optimizer(model, OptimizerTable(name="muon"), PARTS).parts
    of = {key: {names[id(p)] for g in part.param_groups for p in g["params"]} for key, part in parts.items()}
    assert of["muon"] == matrices
    assert of["adamw"] == set(names.values()) - matrices
    roles = parameter_roles(model)
    for role, expected in (
        ("embedding", tables),
        ("output", outputs),
        ("vector", VECTORS),
        ("kernel", {"block.conv.weight"}),
    ):
        assert {name for name, found in roles.items() if found == role} == expected
    decayed = {
        names[id(p)] for g in parameter_groups(model, OptimizerTable()) if g["weight_decay"] for p in g["params"]
    }
    assert decayed == set(names.values()) - VECTORS


def test_a_tied_table_is_an_embedding():
    model = build(11, dim=8, num_layers=1)
    model.head.weight = model.embedding.weight
    assert parameter_roles(model)["embedding.weight"] == "embedding"


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
    with pytest.raises(UserError, match=r"group: 'blokcs.*' is the first match of no .*; names are such as embedding"):
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
    optimizer.param_groups[0] |= {"count": 3, "sum": torch.ones(1), "lr": 0.5}  # as a step may do
    assert group_counters(optimizer)[0] == {"count": 3, "sum": torch.ones(1)}
    for args, message in (({"beta": 1}, "optimizer.args: cannot call"), ({"alpha": -1}, "optimizer.target: ")):
        with pytest.raises(UserError, match=message):
            build_optimizer(model, OptimizerTable(target=here, args=args), PARTS)
    for target, args, message in (
        (f"{__name__}:no_optimizer", {}, "gave a dict, not an optimizer"),
        ("torch.optim:SGD", {"fused": True, "momentum": 0.9, "dampening": 0.5}, "cannot have a dampening here"),
    ):
        with pytest.raises(UserError, match=message):
            build_optimizer(model, OptimizerTable(target=target, args=args), PARTS)


def first_group_alone(groups, lr):
    return torch.optim.AdamW(groups[:1], lr=lr)


def test_one_of_ones_own_that_would_not_train_all_parameters_is_refused_with_their_names():
    model = build(11, dim=8, num_layers=1)
    with pytest.raises(UserError, match=r"leaves \d+ parameters out, which would never be trained: .*norm"):
        build_optimizer(model, OptimizerTable(target=f"{__name__}:first_group_alone"), PARTS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "embedding.weight")
    build_optimizer(model, OptimizerTable(target=f"{__name__}:first_group_alone"), PARTS)  # the others are frozen


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", {1: 0.25, 4: 1.0, 5: 1.0, 24: 1.0}),
        ("linear", {1: 0.25, 4: 1.0, 14: 0.55, 24: 0.1}),
        ("cosine", {1: 0.25, 4: 1.0, 14: 0.55, 24: 0.1, 9: 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2}),
        ("wsd", {1: 0.25, 4: 1.0, 19: 1.0, 24: 0.1, 22: 1.0 - 0.9 * 3 / 5}),
    ],
)
def test_known_points(name, expected):
    table = SchedulerTable(name=name, warmup_steps=4, min_lr_ratio=0.1, decay_fraction=0.2)
    for step, height in expected.items():
        assert lr_at(step, steps=24, peak=3.0, table=table) == pytest.approx(3.0 * height)
    table = SchedulerTable(name="wsd", warmup_steps=0, decay_fraction=0.07)
    assert [lr_at(step, steps=100, peak=1.0, table=table) for step in (93, 100)] == [1.0, table.min_lr_ratio]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 60), st.integers(0, 60), st.floats(0, 1), st.floats(0.01, 1))
def test_it_rises_to_the_peak_then_never_rises_again_and_stays_above_its_floor(name, steps, warmup, floor, decay):
    warmup = min(warmup, steps)
    table = SchedulerTable.model_construct(name=name, warmup_steps=warmup, min_lr_ratio=floor, decay_fraction=decay)
    rates = [lr_at(step, steps=steps, peak=2.0, table=table) for step in range(1, steps + 1)]
    assert all(0 < rate <= 2.0 + 1e-12 for rate in rates) or floor == 0
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= 2.0 * floor - 1e-12 for rate in rates[warmup:])
    if steps > warmup and name != "constant":
        assert rates[-1] == pytest.approx(2.0 * floor, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_that_is_shorter_than_its_warmup_ends_on_the_ramp(tmp_path, name):
    table = SchedulerTable(name=name, warmup_steps=100, min_lr_ratio=0.1, decay_fraction=0.2)
    rates = [lr_at(step, steps=10, peak=2.0, table=table) for step in range(1, 11)]
    assert rates == pytest.approx([2.0 * step / 100 for step in range(1, 11)])
    sets = ["train.steps=0", "train.tokens=500", "scheduler.warmup_steps=0", "scheduler.warmup_tokens=2000"]
    config = load_config(write_tiny_config(tmp_path), [*sets, f"scheduler.name={name}", "optimizer.lr=2.0"])
    schedule = make_schedule(config, Length.of(config, 64))
    assert [schedule(reached) for reached in (64, 128, 500)] == pytest.approx([0.064, 0.128, 0.5])


def of_target(tmp_path, monkeypatch, body, *sets):
    (tmp_path / "own_rates.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_rates", raising=False)
    config = write_tiny_config(tmp_path)
    lines = [line for line in config.read_text().splitlines() if not line.startswith("warmup_steps")]
    config.write_text("\n".join(lines))
    loaded = load_config(config, ["scheduler.target=own_rates:rate", "train.steps=12", *sets])
    return make_schedule(loaded, Length.of(loaded, 0))


def test_a_schedule_of_ones_own_is_called_with_its_settings(tmp_path, monkeypatch):
    body = "def rate(step, *, steps, peak, power):\n    return peak * (1 - (step - 1) / steps) ** power\n"
    schedule = of_target(tmp_path, monkeypatch, body, "scheduler.args={power=2}", "optimizer.lr=0.5")
    assert [schedule(step) for step in (1, 7, 12)] == pytest.approx([0.5, 0.125, 0.5 / 144])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("def rate(step):\n    return 1.0\n", r"scheduler.args: cannot call own_rates:rate with a step"),
        ("def rate(step, steps, peak):\n    return 1 / (steps - step)\n", r"fails for 12: ZeroDivisionError"),
        (
            "def rate(step, steps, peak):\n    return float('nan')\n",
            r"scheduler.target: own_rates:rate gave nan for 1, ",
        ),
        ("def rate(step, steps, peak):\n    return '0.1'\n", r"gave '0.1' for 1, which is no"),
        ("def rate(step, steps, peak):\n    return -1.0 if step == 7 else 1.0\n", r"gave -1.0 for 7"),
        ("", r"scheduler.target: own_rates .*has no function rate"),
    ],
)
def test_one_that_cannot_be_used_is_refused_before_the_run(tmp_path, monkeypatch, body, text):
    with pytest.raises(UserError, match=text):
        of_target(tmp_path, monkeypatch, body)
