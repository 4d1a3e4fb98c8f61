"""Rows run cell by cell give the outputs and gradients of rows run whole, also where activations are recomputed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data.batch import MicroBatch
from trainer.errors import UserError
from trainer.lab.auxiliary import AuxiliaryLoss, AuxiliaryLosses
from trainer.lab.pieces import Cellwise
from trainer.model import build
from trainer.model.protocol import ModelOutput
from trainer.objective.loss import Objective

VOCAB, CELL, ROWS = 13, 8, 3


class Spied(nn.Module):
    """Keeps the lengths that a model is called with."""

    def __init__(self, inner: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.state_width = inner, inner.state_width
        self.dropout = nn.Dropout(dropout)
        self.calls: list[int] = []

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        self.calls.append(tokens.shape[1])
        output = self.inner(tokens, state, resets)
        return ModelOutput(self.dropout(output.logits), self.dropout(output.state))


def make_model(dtype: torch.dtype = torch.float64, **spied: object) -> Spied:
    torch.manual_seed(0)
    return Spied(build(VOCAB, dim=8, num_layers=2).to(dtype), **spied)


def make_rows(length: int, document: int, *, has_resets: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Rows of which `document` tokens are there; the rest is padding, without targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, length), generator=generator)
    targets = torch.randint(0, VOCAB, (ROWS, length), generator=generator)
    tokens[:, document:], targets[:, document:] = 0, -100
    resets = torch.rand(ROWS, length, generator=generator) < 0.1
    return tokens, targets, {"resets": resets} if has_resets else {}


def gradient(model: nn.Module, rows: tuple[Tensor, Tensor, dict[str, Tensor]], state: Tensor | None) -> list[Tensor]:
    tokens, targets, inputs = rows
    logits = model(tokens=tokens, state=state, **inputs).logits
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize(("cells", "document"), [(2, 16), (3, 19), (5, 8)])
@pytest.mark.parametrize("has_state", [False, True])
def test_all_cells_of_a_document_give_the_uncut_gradient(cells, document, has_resets, recompute, has_state):
    """Also if the last row is padded, because k does not divide the number of cells."""
    model = make_model()
    state = torch.randn(ROWS, model.state_width, dtype=torch.float64) if has_state else None
    rows = make_rows(cells * CELL, document, has_resets=has_resets)
    cellwise = Cellwise(model, cell=CELL, cells=cells, recompute=recompute)
    torch.testing.assert_close(
        cellwise(rows[0], state, **rows[2])[:2], model(rows[0], state, **rows[2])[:2], rtol=1e-12, atol=1e-12
    )
    found, uncut = gradient(cellwise, rows, state), gradient(model, rows, state)
    torch.testing.assert_close(found, uncut, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_gradient():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, rows = build(VOCAB, dim=8, num_layers=2).double(), make_rows(16, 16, has_resets=True)
    plain = gradient(model, rows, None)
    model.compile(backend="aot_eager", dynamic=False)
    found = gradient(Cellwise(model, cell=CELL, cells=2, recompute=True), rows, None)
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)


def test_the_model_sees_one_cell_per_call_and_recomputes_all_but_the_last():
    model, rows = make_model(), make_rows(32, 32, has_resets=True)
    gradient(Cellwise(model, cell=CELL, cells=4), rows, None)
    assert model.calls == [CELL] * 4
    model.calls.clear()
    gradient(Cellwise(model, cell=CELL, cells=4, recompute=True), rows, None)
    assert model.calls == [CELL] * 7


def test_recomputing_repeats_the_dropout_and_leaves_the_generator_alone():
    rows, model, found = make_rows(32, 32, has_resets=False), make_model(dropout=0.3), []
    for recompute in (False, True):
        torch.manual_seed(5)
        found.append((gradient(Cellwise(model, cell=CELL, cells=4, recompute=recompute), rows, None), torch.rand(1)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-15)


def saved_bytes(model: nn.Module, tokens: Tensor) -> int:
    """What the forward keeps for the backward, beside the parameters."""
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            kept.add(storage.data_ptr())
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens=tokens, state=None)
    return total


def test_recomputing_keeps_the_activations_of_one_cell():
    model, (rows, *_) = make_model(), make_rows(64, 64, has_resets=False)
    of_a_cell = saved_bytes(model, rows[:, :CELL])
    assert saved_bytes(Cellwise(model, cell=CELL, cells=8), rows) > 6 * of_a_cell
    assert saved_bytes(Cellwise(model, cell=CELL, cells=8, recompute=True), rows) < 2 * of_a_cell


class Penalized(nn.Module):
    """Has a loss of each shape, of the state too, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(VOCAB, dim=8, num_layers=2).double()
        self.state_width = self.inner.state_width

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        output = self.inner(tokens, state)
        squares = output.logits.square().mean(-1)  # [B, T]
        losses = {"tokens": squares, "rows": squares.mean(1), "all": self.inner.norm.weight.square().mean()}
        return output._replace(losses=losses, metrics={"my/tokens": tokens.shape[1]})


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_of_a_row_are_those_of_its_cells_together(recompute):
    """Where the row is padded, a loss by rows is that of its cells, by their targets: one of padding alone is none of them."""
    torch.manual_seed(0)
    model, (tokens, targets, _) = Penalized(), make_rows(3 * CELL, 3 * CELL, has_resets=False)
    cut = Cellwise(model, cell=CELL, cells=3, recompute=recompute)
    outputs = [model(tokens, torch.zeros(ROWS, model.state_width).double()), cut(tokens)]
    assert [set(output.losses) for output in outputs] == [{"tokens", "rows", "all"}] * 2
    assert outputs[1].metrics == {"my/tokens": CELL}  # a gauge: the mean over the cells
    weights = torch.rand(ROWS, 3 * CELL).double()
    targets[1, CELL:], targets[2, CELL + 2 :] = -100, -100
    objective = AuxiliaryLosses(
        {"tokens": AuxiliaryLoss(), "rows": AuxiliaryLoss("rows"), "all": AuxiliaryLoss()}, ["my/tokens"]
    )
    with torch.no_grad():  # as an evaluation: no window has counted the rows
        micro = MicroBatch({}, targets, None, {})
        part = objective(Objective()(outputs[1].logits, targets), outputs[1], micro).parts
    cells = outputs[0].losses["tokens"].reshape(ROWS, 3, CELL).mean(2)
    expected = cells[0].mean() + cells[1, 0] + (CELL * cells[2, 0] + 2 * cells[2, 1]) / (CELL + 2)
    torch.testing.assert_close(part["rows"].sum, expected.detach(), rtol=1e-10, atol=0)
    found = []
    for output in outputs:
        shaped = output.losses | {"all": output.losses["all"].expand(weights.shape)}
        shaped["rows"] = shaped["rows"].reshape(ROWS, -1).mean(1)
        loss = torch.stack([(each * (weights if each.ndim == 2 else weights[:, 0])).sum() for each in shaped.values()])
        found.append([loss.detach(), *torch.autograd.grad(loss.sum(), list(model.parameters()), allow_unused=True)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_losses_that_only_some_cells_have_are_refused():
    class Own(nn.Module):
        def forward(self, tokens, state):
            losses = {"first": torch.ones(())} if not tokens[0, 0] else None
            return ModelOutput(tokens[..., None].float(), torch.zeros(len(tokens), 1), losses)

    with pytest.raises(UserError, match="not the same in all cells of a row"):
        Cellwise(Own(), cell=2, cells=2)(torch.arange(4)[None])


def test_inputs_over_time_are_cut_and_others_are_not():
    seen = []

    class Own(nn.Module):
        state_width = 1

        def forward(self, tokens, state, positions, styles):
            seen.append((positions[0].tolist(), styles.tolist()))
            return ModelOutput(tokens[..., None].float(), torch.zeros(len(tokens), 1))

    cellwise = Cellwise(Own(), cell=2, cells=2)
    cellwise(torch.zeros(3, 4).long(), positions=torch.arange(4).expand(3, 4), styles=torch.tensor([7, 8, 9]))
    assert seen == [([0, 1], [7, 8, 9]), ([2, 3], [7, 8, 9])]


def test_the_state_returns_in_the_type_in_which_the_ledger_keeps_it():
    class Half(nn.Module):
        def forward(self, tokens, state):
            assert state.dtype == torch.float32
            return ModelOutput(tokens[..., None].bfloat16(), state.bfloat16())

    assert Cellwise(Half(), cell=2, cells=2)(torch.zeros(1, 4).long(), torch.zeros(1, 3)).state.dtype == torch.float32
