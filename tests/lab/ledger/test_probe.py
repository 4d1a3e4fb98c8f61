"""The probe of carry against a slow loop that reads whole documents again, and where its numbers could be wrong."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.arrays import IGNORED
from trainer.lab.carry_probe import SAMPLED_KEYS, SHARE_KEY, CarryProbe
from trainer.ledger import Ledger, LedgerOptions
from trainer.metrics.aggregate import reduce_over_ranks
from trainer.metrics.best_effort import SkipBatch
from trainer.model import build
from trainer.model.protocol import ModelOutput

AGE, DRIFT, GAIN, GAP = SAMPLED_KEYS
T, VOCAB = 6, 11


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """[B, T], 0 where masked."""
    losses: Tensor = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(targets.shape)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = build(vocab_size=VOCAB, dim=8, num_layers=2)
    for parameter in model.parameters():  # far from the small initial weights, so that states matter
        nn.init.normal_(parameter, std=0.4)
    return model


def changed(model: nn.Module, seed: int = 1, scale: float = 0.05) -> nn.Module:
    """Another model, some steps of training away."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return other


@dataclass(frozen=True)
class Batch:
    """Rows that continue groups, with the inputs of their earlier cells."""

    tokens: Tensor
    targets: Tensor
    tokens_before: Tensor
    resets: Tensor
    resets_before: Tensor
    group_ids: np.ndarray
    cell_index: np.ndarray

    def rows(self, part: slice) -> Batch:
        return Batch(*(getattr(self, name)[part] for name in self.__dataclass_fields__))


def make_batch(cells: list[int], *, history: int, seed: int = 0) -> Batch:
    """One row per entry of `cells`, its number of earlier cells; every second row ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(cells)
    documents = [torch.randint(1, VOCAB, ((c + 1) * T + 1,), generator=generator) for c in cells]
    before = torch.zeros(rows, history * T, dtype=torch.int64)
    tokens, targets = torch.zeros(rows, T, dtype=torch.int64), torch.full((rows, T), IGNORED)
    for row, (document, count) in enumerate(zip(documents, cells, strict=True)):
        size = T if row % 2 == 0 else T - 1 - row % 3
        tokens[row, :size] = document[count * T : count * T + size]
        targets[row, :size] = document[count * T + 1 : count * T + size + 1]
        known = document[: count * T][-history * T :]
        before[row, before.shape[1] - len(known) :] = known
    resets, resets_before = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(before, dtype=torch.bool)
    return Batch(tokens, targets, before, resets, resets_before, np.arange(rows) + 100, np.array(cells))


def stored_states(model: nn.Module, batch: Batch, *, uses_resets: bool = False) -> Tensor:
    """What carrying through the row's earlier cells gives, each row alone, from the group's first token."""
    ends = []
    for row, count in enumerate(batch.cell_index.tolist()):
        state = torch.zeros(1, model.state_width)
        if count:
            seen = slice(batch.tokens_before.shape[1] - count * T, None)
            extra = {"resets": batch.resets_before[row : row + 1, seen]} if uses_resets else {}
            with torch.no_grad():
                state = model(batch.tokens_before[row : row + 1, seen], state=state, **extra).state
        ends.append(state)
    return torch.cat(ends)


def measure(
    model: nn.Module,
    batch: Batch,
    state: Tensor,
    *,
    cells: int = 4,
    age: Tensor | None = None,
    autocast: Any = contextlib.nullcontext,
    **kwargs: Any,
) -> CarryProbe:
    probe = CarryProbe(model, token_loss=token_loss, cells=cells, cell_tokens=T, autocast=autocast)
    given = {
        "group_ids": batch.group_ids,
        "cell_index": batch.cell_index,
        "tokens_before": batch.tokens_before,
        "state": state,
        "age": torch.arange(len(batch.tokens)) + 3 if age is None else age,
        **kwargs,
    }
    probe.measure(given.pop("inputs", {"tokens": batch.tokens}), batch.targets, **given)
    return probe


def numbers(probe: CarryProbe) -> dict[str, float]:
    """As one rank logs them."""
    return reduce_over_ranks(probe.drain_metrics(), probe.metric_keys, device="cpu", world_size=1)


def ratio(totals: list[float], weights: list[float]) -> tuple[float, float]:
    """A weighted mean and its standard error, from the definition."""
    mean = sum(totals) / sum(weights)
    n = len(totals)
    squares = sum((y - mean * w) ** 2 for y, w in zip(totals, weights, strict=True))
    return mean, math.sqrt(n / (n - 1) * squares) / sum(weights)


def oracle(model: nn.Module, batch: Batch, state: Tensor, rows: list[int]) -> dict[str, float]:
    """Read each row's document again from its start, alone, and evaluate its cell three ways."""
    fresh = stored_states(model, batch)
    drift, gain, gap, tokens, ages = [], [], [], [], []
    for row in rows:
        loss = {}
        for name, start in (("zero", torch.zeros_like(state)), ("stored", state), ("fresh", fresh)):
            with torch.no_grad():
                logits = model(batch.tokens[row : row + 1], state=start[row : row + 1]).logits
            loss[name] = float(token_loss(logits, batch.targets[row : row + 1]).double().sum())
        drift.append(float((state[row] - fresh[row]).norm() / fresh[row].norm()))
        gain.append(loss["zero"] - loss["stored"])
        gap.append(loss["stored"] - loss["fresh"])
        tokens.append(float((batch.targets[row] != IGNORED).sum()))
        ages.append(float(row + 3))
    ones = [1.0] * len(rows)
    found = {}
    for key, totals, weights in ((AGE, ages, ones), (DRIFT, drift, ones), (GAIN, gain, tokens), (GAP, gap, tokens)):
        found[key], found[f"{key}_se"] = ratio(totals, weights)
    return found


def test_numbers_equal_a_loop_that_reads_documents_again() -> None:
    model = make_model()
    batch = make_batch([0, 1, 2, 4, 3, 7, 1, 2], history=4)
    state = stored_states(changed(model), batch)
    state[0] = 0.0
    found = numbers(measure(model, batch, state))
    assert found.pop(SHARE_KEY) == pytest.approx(6 / 7)  # row 5 began 7 cells ago
    expected = oracle(model, batch, state, [1, 2, 3, 4, 6, 7])
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert found[DRIFT] > 0.05
    assert abs(found[GAP]) > 1e-4


def test_without_learning_drift_and_gap_are_exactly_0() -> None:
    """Groups carried through a ledger by the model itself; the batch keeps its shape, as in a run."""
    model = make_model()
    ledger = Ledger(LedgerOptions(capacity=8, wipe_mode="none"), state_width=model.state_width)
    whole = make_batch([3] * 5, history=3)
    groups = whole.group_ids
    for cell in range(3):
        ledger.begin_step(cell + 1)
        tokens = whole.tokens_before[:, cell * T : (cell + 1) * T]
        output = model(tokens, state=ledger.lookup(groups, np.full(5, cell)))
        output.logits.sum().backward()
        ledger.store(groups, np.full(5, cell), np.zeros(5, bool), output.state)
    ledger.begin_step(7)
    state = ledger.lookup(groups, whole.cell_index)
    found = numbers(measure(model, whole, state, age=ledger.lookup_age()))
    zeros = {key: 0.0 for base in (DRIFT, GAP) for key in (base, f"{base}_se")}
    assert {key: found[key] for key in zeros} == zeros
    assert found[AGE] == 4.0
    assert found[f"{AGE}_se"] == 0.0
    assert found[GAIN] != 0.0
    assert found[SHARE_KEY] == 1.0


def test_one_row_has_no_standard_error_and_none_no_number() -> None:
    model = make_model()
    batch = make_batch([1, 9], history=4)
    found = numbers(measure(model, batch, stored_states(changed(model), batch)))
    assert found.keys() == {*SAMPLED_KEYS, SHARE_KEY}
    long = make_batch([8, 9], history=4)
    assert numbers(measure(model, long, stored_states(model, long))) == {SHARE_KEY: 0.0}
    first = make_batch([0, 0], history=4)
    assert numbers(measure(model, first, torch.zeros(2, model.state_width))) == {}
    cold = make_batch([1, 1], history=4)
    assert numbers(measure(model, cold, torch.zeros(2, model.state_width), age=torch.full((2,), -1))) == {
        SHARE_KEY: 0.0
    }


def test_cells_further_back_than_the_tokens_reach_are_left_out() -> None:
    """Also where the columns are no whole number of cells."""
    model = make_model()
    batch = make_batch([1, 2, 3], history=4)
    state = stored_states(changed(model), batch)
    short = replace(batch, tokens_before=batch.tokens_before[:, -(2 * T + 2) :])
    found = numbers(measure(model, short, state))
    assert found.pop(SHARE_KEY) == pytest.approx(2 / 3)
    assert found == pytest.approx(oracle(model, batch, state, [0, 1]), rel=1e-4, abs=1e-7)
    assert numbers(measure(model, batch, state, cells=1))[SHARE_KEY] == pytest.approx(1 / 3)


def test_resets_among_the_earlier_tokens_are_honoured() -> None:
    model = make_model()
    batch = make_batch([2, 1, 3], history=3)
    batch.resets_before[0, -4] = batch.resets_before[2, -9] = True
    state = stored_states(model, batch, uses_resets=True)
    inputs = {"tokens": batch.tokens, "resets": batch.resets}
    kept = numbers(measure(model, batch, state, inputs=inputs, resets_before=batch.resets_before))
    assert kept[DRIFT] < 1e-5
    assert numbers(measure(model, batch, state, inputs=inputs))[DRIFT] > 1e-4  # None: resets nowhere


class Ignores(nn.Module):
    """Returns a state and never reads it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.state_width = inner, inner.state_width

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        return self.inner(tokens, state=None)  # type: ignore[no-any-return]


def test_carrying_is_worth_nothing_to_a_model_that_ignores_its_state() -> None:
    model = Ignores(make_model())
    batch = make_batch([1, 2, 3], history=4)
    found = numbers(measure(model, batch, torch.randn(3, model.state_width)))
    assert (found[GAIN], found[f"{GAIN}_se"], found[GAP]) == (0.0, 0.0, 0.0)


class Noisy(nn.Module):
    """Dropout, a part that is kept in evaluation mode, and a count of calls in training."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout, self.state_width = inner, nn.Dropout(0.5), inner.state_width
        self.frozen = nn.Dropout(0.5).eval()
        self.norm = nn.BatchNorm1d(VOCAB)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        output = self.inner(tokens, state=state)
        logits = self.norm(self.frozen(self.dropout(output.logits)).transpose(1, 2)).transpose(1, 2)
        return ModelOutput(logits, output.state)


def test_modes_generators_buffers_gradients_and_states_are_as_before() -> None:
    model = Noisy(make_model()).train()
    model.frozen.eval()
    batch = make_batch([1, 2, 3], history=4)
    state = stored_states(model.inner, batch)
    model(batch.tokens, state=state).logits.sum().backward()
    kept = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    held, generator = state.clone(), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    probe = measure(model, batch, state)
    assert [module.training for module in model.modules()] == modes
    assert modes.count(False) == 1
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(state, held)
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, gradients, strict=True))
    # Evaluation mode: dropout would make two probes differ.
    assert numbers(probe) == numbers(measure(model, batch, state))


def test_gradients_are_those_without_a_probe_under_autocast() -> None:
    """Weights that the probe's autocast converted without a gradient must not serve the training step."""

    def gradients(*, probes: bool) -> list[Tensor]:
        model = make_model()
        batch = make_batch([1, 2, 3], history=4)
        state = stored_states(model, batch)
        if probes:
            probe = measure(model, batch, state, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
            assert DRIFT in probe.drain_metrics()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch.tokens, state=state)
            token_loss(output.logits, batch.targets).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    pairs = zip(gradients(probes=True), gradients(probes=False), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tokens_before": None}, "tokens_before"),
        ({"tokens_before": torch.zeros(2, T - 1, dtype=torch.int64)}, "less than a cell"),
        ({"inputs": {"tokens": torch.zeros(2, T), "image": torch.zeros(2, 4)}}, "image"),
    ],
)
def test_what_cannot_be_read_again_is_skipped_with_words(changes: dict[str, Any], word: str) -> None:
    batch = make_batch([1, 2], history=4)
    with pytest.raises(SkipBatch, match=word):
        measure(make_model(), batch, torch.zeros(2, 16), **changes)


def ages(ledger: Ledger) -> Iterator[list[int]]:
    """Of two groups that are read in turn, and one that is new each time."""
    for step, groups in enumerate(([1, 2, 30], [1, -1, 31], [2, 1, 32]), start=5):
        ids, cells = np.array(groups), np.array([1, 1, 0])
        ledger.begin_step(step)
        ledger.lookup(ids, cells)
        yield ledger.lookup_age().tolist()
        ledger.store(ids, cells, np.array([False, False, True]), torch.full((3, 2), float(step)))


def test_the_age_of_a_state_is_that_of_its_last_store() -> None:
    ledger = Ledger(LedgerOptions(capacity=4, wipe_mode="none"), state_width=2)
    ledger.begin_step(2)
    ledger.store(np.array([1, 2]), np.array([0, 0]), np.array([False, False]), torch.tensor([[1.0, 1], [math.nan, 1]]))
    # Group 2 was refused: it holds a slot, but no state.
    assert list(ages(ledger)) == [[3, -1, -1], [1, -1, -1], [2, 1, -1]]
