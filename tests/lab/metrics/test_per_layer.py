"""Norms, updates and noise scale by layer, on one process."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from tests.support.gns_windows import make_model, window
from tests.support.layered import TRUTH, Layered, measure, wrong_averages
from trainer.lab.per_layer import MOST_IN_ALL, MOST_PER_TENSOR, PerLayer, WeightSample, layer_of, sample_limit
from trainer.metrics.catalog.lookup import is_known, lookup
from trainer.metrics.noise_scale.hooks import GradientNoiseScale


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.0.mixer.weight", "blocks.0"),
        ("model.layers.13.self_attn.q_proj.weight", "model.layers.13"),
        ("layers.2.experts.7.weight", "layers.2"),
        ("embedding.weight", "embedding"),
        ("model.norm.weight", "model.norm"),
        ("scale", "scale"),
        ("_orig_mod.blocks.1.weight", "blocks.1"),
        ("a/b.weight", "a_b"),
    ],
)
def test_a_parameter_belongs_to_the_layer_of_its_first_number_or_to_its_module(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_the_noise_of_each_layer_is_that_of_the_closed_form_and_adds_up_to_the_whole() -> None:
    layers, gns, rows = measure(0, 1)
    wrong = wrong_averages(layers, gns)
    assert not wrong, "\n".join(wrong)
    for name, truth in TRUTH.items():
        ratio = layers._noise[f"layer/{name}"].ratio()
        assert ratio is not None
        assert ratio.low < truth.tr_sigma / truth.grad_sq < ratio.high
        assert rows[-1][f"layer/{name}/b_simple"] == ratio.value


def test_the_squares_of_the_norms_add_up_to_that_of_the_gradient() -> None:
    _, _, rows = measure(0, 1, steps=3)
    for row in rows:
        for prefix in ("layer/", "param_group/"):
            parts = [v for key, v in row.items() if key.startswith(prefix) and key.endswith("/grad_norm")]
            assert math.fsum(part**2 for part in parts) == pytest.approx(row["grad_sq"], rel=1e-6)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, gns: GradientNoiseScale | None = None
) -> dict[str, float]:
    """One measured step with one micro-batch."""
    layers = PerLayer(model, optimizer, gns)
    optimizer.zero_grad()
    loss.backward()
    layers.before_update()
    optimizer.step()
    return layers.step()


def test_the_update_ratio_is_that_of_a_copy_of_the_weights() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    before = [p.detach().double().clone() for p in model.parameters()]
    found = step_of(model, optimizer, model(torch.ones(4, 5)).square().sum())
    after = [p.detach().double() for p in model.parameters()]
    for name, members in (("0", (0, 1)), ("2", (2, 3))):
        moved = sum(float((after[i] - before[i]).square().sum()) for i in members)
        weights = sum(float(before[i].square().sum()) for i in members)
        assert found[f"layer/{name}/update_ratio"] == pytest.approx(math.sqrt(moved / weights), rel=1e-5)
    assert "layer/0/b_simple" not in found
    assert found.keys() == {
        f"{k}/{w}" for k in ("layer/0", "layer/2", "param_group/0") for w in ("grad_norm", "update_ratio")
    }


@pytest.mark.parametrize("limit", [256, 4096])
def test_a_sample_of_a_large_tensor_stands_for_all_of_it_within_its_error(limit: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = nn.Parameter(torch.randn(300, 200, generator=generator).t())  # transposed: not contiguous
    sample = WeightSample([weight], limit=limit)
    sample.take()
    change = 0.01 * torch.randn(200, 300, generator=generator)
    with torch.no_grad():
        weight += change
    moved, weights = sample.compare()
    error = 2.0 / math.sqrt(2.0 * limit)  # of a square, twice that of the norm
    assert float(moved) == pytest.approx(float(change.double().square().sum()), rel=5 * error)
    assert float(weights) == pytest.approx(float((weight.detach() - change).double().square().sum()), rel=5 * error)
    assert float(moved) != pytest.approx(float(change.double().square().sum()), rel=1e-6)


def test_what_is_kept_of_the_weights_does_not_grow_with_the_model() -> None:
    weights = [nn.Parameter(torch.zeros(1000, 1000)) for _ in range(3)]
    sample = WeightSample(weights, limit=sample_limit(3))
    assert len(sample._before) == len(sample._now) == 3 * MOST_PER_TENSOR
    places = {id(place): place for place in sample._places}
    assert [len(place) for place in places.values()] == [MOST_PER_TENSOR]  # one for all tensors of a size
    assert all(count * sample_limit(count) <= MOST_IN_ALL for count in (1, 60, 700, 16_000))


def test_a_layer_without_a_gradient_stands_still_and_a_frozen_one_is_left_out() -> None:
    model = Layered()
    model.blocks[1].theta.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = step_of(model, optimizer, model.head(torch.ones(20)))
    assert (found["layer/blocks.0/grad_norm"], found["layer/blocks.0/update_ratio"]) == (0.0, 0.0)
    assert found["layer/head/update_ratio"] > 0.0
    assert not any(key.startswith("layer/blocks.1") for key in found)


def test_a_tied_parameter_is_counted_once_in_the_layer_that_is_named_first() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7)})
    model["head"].weight = model["embedding"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model["head"](model["embedding"](torch.arange(7))).square().sum()
    found = step_of(model, optimizer, loss)
    squares = {name: float(p.grad.square().sum()) for name, p in model.named_parameters() if p.grad is not None}
    assert found["layer/embedding/grad_norm"] ** 2 == pytest.approx(squares["embedding.weight"], rel=1e-5)
    assert found["layer/head/grad_norm"] ** 2 == pytest.approx(squares["head.bias"], rel=1e-5)


def test_a_skipped_step_has_neither_norm_nor_update_and_is_no_window() -> None:
    model = make_model()
    gns = GradientNoiseScale(model)
    layers = PerLayer(model, torch.optim.SGD(model.parameters(), lr=0.1), gns)
    for is_taken in (True, False):
        window(gns, model, 2, by_parameter=True)
        layers.before_update()
        layers.finish(layers.after_update().tolist(), is_taken=is_taken)
        assert bool(layers.drain_metrics()) == is_taken
        assert layers.state_dict()["layer/0"]["count"] == 1.0
    model.zero_grad()
    (model(torch.ones(1, 5)).sum() * math.nan).backward()
    layers.before_update()
    assert layers.step() == {}
    assert layers.drain_metrics() == {}


def test_the_state_goes_through_json_bit_for_bit() -> None:
    layers, gns, _ = measure(0, 1, steps=7)
    model = Layered()
    other = PerLayer(model, torch.optim.SGD(model.parameters(), lr=0.0), gns, ema=0.9999)
    state = layers.state_dict()
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.state_dict() == state
    assert state["layer/head"]["count"] == 7.0
    other.load_state_dict({"layer/gone": {}})  # of a layer that the model no longer has
    assert other.state_dict() == state


def test_every_key_is_in_the_catalog() -> None:
    model = Layered()
    layers = PerLayer(model, torch.optim.SGD(model.parameters(), lr=0.0), group_names=["0.blocks/*.matrices"])
    assert "param_group/0.blocks_*.matrices/update_ratio" in layers.metric_keys
    assert all(is_known(key) and lookup(key).group == "Layers" for key in layers.metric_keys)
