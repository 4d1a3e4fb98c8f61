"""What a step logs does not depend on how its rows are laid over ranks and micro-batches."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.core.properties.test_full_rows import blend, corpus
from tests.support.gloo import make_step, run_on_ranks
from trainer.data.loader import MicroBatch
from trainer.data.weights import ConstantWeight
from trainer.distributed.strategy import Replicated, Strategy
from trainer.metrics.aggregate import Recorder, rank_operations, reduce_over_ranks
from trainer.metrics.best_effort import Diagnostics
from trainer.model import build
from trainer.objective import Objective
from trainer.options import CoordOptions, ObjectiveOptions
from trainer.training.core_extensions import StepDetails
from trainer.training.extension import Extensions

ROWS, LENGTH, VOCABULARY = 16, 9, 13
LENGTHS = [9, 1, 7, 3, 9, 0, 5, 2, 9, 9, 0, 0, 4, 1, 6, 8]
TYPES = ("even", "odd", "never")
LABELS = [("left", "right", "left", "left")[row % 4] for row in range(ROWS)]
COORD = CoordOptions(first_token=4, num_bins=5, sigma=1.5, weight=0.3)
Z_LOSS = 1e-2
LAYOUTS = (1, 2, 4)


def rows() -> dict[str, torch.Tensor]:
    """Rows of ragged length, three of them with nothing to predict; row 8 repeats tokens, so that some guesses are right."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    targets[8] = tokens[8] = 6
    types = (targets % 2).to(torch.int8)
    for row, length in enumerate(LENGTHS):
        targets[row, length:] = -100
        types[row, length:] = -1
    return {"tokens": tokens, "targets": targets, "types": types}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build(VOCABULARY, dim=8, num_layers=1).double()


def logged_by(rank: int, world: int, micros: int) -> dict[str, float]:
    """What rank `rank` of `world` logs of one step over its share of the rows."""
    inner = make_model()
    details = StepDetails(("token_ce", "z_loss", "coord"), token_types=TYPES, sources=("left", "right"))
    strategy = Replicated(world_size=world, device=torch.device("cpu")) if world > 1 else Strategy()
    extensions = Extensions(Diagnostics(), device=torch.device("cpu"), world_size=world)
    extensions.add({"details": details})
    objective = Objective(ObjectiveOptions(z_loss=Z_LOSS, coord=COORD))
    step = make_step(inner, strategy, objective=objective, clip_grad_norm=1.0, world_size=world, extensions=extensions)
    data, share, window = rows(), ROWS // (world * micros), []
    for index in range(micros):
        first = (rank * micros + index) * share
        part = slice(first, first + share)
        extras = {"token_types": data["types"][part], "dataset_labels": LABELS[part]}
        window.append(MicroBatch({"tokens": data["tokens"][part]}, data["targets"][part], None, extras))
    step.accumulate(1, window, is_logged=True)
    outcome = step.finish(step.launch(lr=1.0))
    reduced = reduce_over_ranks(details.drain_metrics(), details.metric_keys, device="cpu", world_size=world)
    assert reduced["loss"] == pytest.approx(outcome.loss, rel=1e-12), "both ways to the loss agree"
    return {**reduced, "loss": outcome.loss, "grad_norm": outcome.grad_norm, "tokens_in_step": float(outcome.tokens)}


def logged_by_all_layouts(rank: int, world: int) -> list[dict[str, float]]:
    return [logged_by(rank, world, micros) for micros in LAYOUTS]


def reference() -> dict[str, float]:
    """All rows as one batch on one rank, from the definitions."""
    data, model = rows(), make_model()
    mask = data["targets"] != -100
    scores, targets = model(data["tokens"]).logits[mask], data["targets"][mask]
    ce, squares = F.cross_entropy(scores, targets, reduction="none"), scores.logsumexp(-1).square()
    correct = (scores.argmax(-1) == targets).double()
    true_bins = targets - COORD.first_token
    is_bin = (true_bins >= 0) & (true_bins < COORD.num_bins)
    offsets = torch.arange(COORD.num_bins) - true_bins[is_bin, None].double()
    log_p = scores[is_bin, COORD.first_token : COORD.first_token + COORD.num_bins].log_softmax(-1)
    soft = torch.softmax(-offsets.square() / (2 * COORD.sigma**2), -1)
    coord = (log_p.exp() * offsets.abs()).sum(-1) / COORD.num_bins - (soft * log_p).sum(-1)
    assert 0 < correct.sum() < len(ce)
    loss = (ce.sum() + Z_LOSS * squares.sum() + COORD.weight * coord.sum()) / len(ce)
    loss.backward()
    of_row = torch.arange(ROWS)[:, None].expand_as(mask)[mask]
    is_right = torch.tensor([label == "right" for label in LABELS])[of_row]
    expected = {
        "loss": loss,
        "objective/token_ce": ce.mean(),
        "objective/z_loss": Z_LOSS * squares.mean(),
        "objective/coord": COORD.weight * coord.mean(),
        "accuracy": correct.mean(),
        "tokens_in_step": mask.sum(),
        "grad_norm": sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None) ** 0.5,
        "source/left/loss": ce[~is_right].mean(),
        "source/right/loss": ce[is_right].mean(),
    }
    for kind, name in enumerate(TYPES[:2]):
        own = targets % 2 == kind
        expected |= {f"token_type/{name}/loss": ce[own].mean(), f"token_type/{name}/accuracy": correct[own].mean()}
    return {key: float(value) for key, value in expected.items()}


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_loss_parts_accuracy_tokens_and_gradient_equal_one_big_batch(world):
    expected = reference()
    results = run_on_ranks(logged_by_all_layouts, world) if world > 1 else [logged_by_all_layouts(0, 1)]
    assert len(results) == world
    for logged in results:
        for micros, values in zip(LAYOUTS, logged, strict=True):
            assert values == pytest.approx(expected, rel=1e-6), micros


BATCHES = (40, 2, 9)  # of each rank: the shares of a rank that has read little are far off
WEIGHTS = {"few": 0.1, "many": 0.9}


def blended_by(rank: int, world: int) -> tuple[dict[str, float], Any]:
    """What is logged of a blend, a `Recorder` and the reduction in between; and what this rank has read."""
    with corpus({"few": [[90] * 5] * 4, "many": [[7] * 60] * 4}) as streams:
        weights = {name: ConstantWeight(weight) for name, weight in WEIGHTS.items()}
        reader = blend(streams, shard=rank, num_shards=world, weights=weights, repeat=True, per_source=True)
        recorder, read, longest = Recorder(), Counter[str](), 0
        for _ in range(BATCHES[rank]):
            for segment in chain.from_iterable(next(reader)["instability_meta_json"].rows):
                read[segment["source"]] += segment["stop"] - segment["start"]
                longest = max(longest, 90 if segment["source"] == "few" else 7)
            recorder.add(reader.drain_step_metrics())
        recorder.add({"data/fill": (rank, 10 * rank)})  # with nothing on rank 0
        operations = rank_operations([*reader.metric_keys, "data/fill"])
        return reduce_over_ranks(recorder.drain_metrics(), operations, device="cpu", world_size=world), (read, longest)


def test_ratios_over_ranks_are_ratios_of_sums():
    results = run_on_ranks(blended_by, len(BATCHES))
    read = sum((own for _, (own, _) in results), Counter[str]())
    shares = {name: read[name] / read.total() for name in WEIGHTS}
    by_rank = [own["few"] / own.total() for _, (own, _) in results]
    assert abs(sum(by_rank) / len(BATCHES) - shares["few"]) > 0.03, "unlike enough to tell the means apart"
    for reduced, _ in results:
        for name, weight in WEIGHTS.items():
            assert reduced[f"blend/share/{name}"] == pytest.approx(shares[name])
            assert reduced[f"blend/share_error/{name}"] == pytest.approx(shares[name] - weight)
        assert reduced["blend/longest_share"] == pytest.approx(max(own for _, (_, own) in results) / read.total())
        assert reduced["data/fill"] == pytest.approx(0.1)
