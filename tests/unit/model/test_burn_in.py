"""Burn-in: what is stored, what is read again, and the gradient, against a loop that is written down token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.model import build
from trainer.model.protocol import ModelOutput
from trainer.model.wrappers import Cellwise

VOCAB, CELL, CELLS, BURN_IN = 11, 6, 5, 4
LENGTHS = (30, 27, 13)
"""Of three documents: whole cells, a partial last cell, and one that ends earlier; then its row belongs to no group."""


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return build(VOCAB, dim=8, num_layers=2).to(dtype)


def drift(model: nn.Module, seed: int, size: float) -> None:
    """An optimizer step, as far as a state is concerned: other weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def documents() -> tuple[Tensor, Tensor]:
    """Tokens and resets [3, 30]; what is beyond a document's end is never looked at by the oracle."""
    generator = torch.Generator().manual_seed(2)
    shape = (len(LENGTHS), CELL * CELLS)
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    return tokens, torch.rand(shape, generator=generator) < 0.1


def batch_of(cell: int, tokens: Tensor, resets: Tensor, width: int) -> dict[str, Tensor]:
    """One cell of each document, with `width` tokens before it; zeros and masks where a document has ended."""
    start, stop = cell * CELL, (cell + 1) * CELL
    batch = {"tokens": tokens[:, start:stop].clone(), "resets": resets[:, start:stop].clone()}
    before = slice(max(start - width, 0), start)
    pad = (width - (before.stop - before.start), 0)
    batch["tokens_before"] = F.pad(tokens[:, before], pad)
    batch["resets_before"] = F.pad(resets[:, before], pad)
    batch["continues"] = torch.tensor([cell > 0 and start < length for length in LENGTHS])
    for row, length in enumerate(LENGTHS):
        batch["tokens"][row, max(length - start, 0) :] = 0
    return batch


def targets_of(cell: int, tokens: Tensor) -> Tensor:
    targets = tokens[:, cell * CELL : (cell + 1) * CELL].roll(-1, 1)
    for row, length in enumerate(LENGTHS):
        targets[row, max(length - cell * CELL, 0) :] = -100
    return targets


def by_token(model: nn.Module, tokens: Tensor, resets: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [1, n, V] and the state after one row's tokens, one token at a time."""
    logits = []
    for at in range(tokens.shape[1]):
        output = model(tokens[:, at : at + 1], state, resets[:, at : at + 1])
        logits.append(output.logits)
        state = output.state
    return torch.cat(logits, 1), state


def oracle(size: float, burn_in: int) -> tuple[list[float], list[list[Tensor]], dict[tuple[int, int], Tensor]]:
    """Loss and gradient of each cell, and the stored states by (row, cell); plainly, row by row."""
    model, (tokens, resets) = make_model(), documents()
    losses, gradients = [], []
    stored: dict[tuple[int, int], Tensor] = {}
    for cell in range(CELLS):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row, length in enumerate(LENGTHS):
            start, stop = cell * CELL, min((cell + 1) * CELL, length)
            if start >= length:
                continue
            state = torch.zeros(1, model.state_width, dtype=torch.float64)
            if cell > 0:
                again = slice(start - burn_in, start)
                with torch.no_grad():
                    state = by_token(
                        model, tokens[row : row + 1, again], resets[row : row + 1, again], stored[row, cell - 1]
                    )[1]
            own = slice(start, stop)
            logits, _ = by_token(model, tokens[row : row + 1, own], resets[row : row + 1, own], state)
            targets = targets_of(cell, tokens)[row, : stop - start]
            total = total + F.cross_entropy(logits[0], targets, reduction="sum")
            count += stop - start
            if stop - start == CELL:
                kept = slice(start, stop - burn_in)
                with torch.no_grad():
                    stored[row, cell] = by_token(
                        model, tokens[row : row + 1, kept], resets[row : row + 1, kept], state
                    )[1]
        model.zero_grad()
        total.backward()
        losses.append(float(total.detach()) / count)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        drift(model, cell, size)
    return losses, gradients, stored


def trained(size: float, burn_in: int, *, width: int | None = None, **options: object) -> tuple[list, list, dict]:
    """The same through `Cellwise` and a dict as the ledger, three rows at once."""
    model, (tokens, resets) = make_model(), documents()
    cellwise = Cellwise(model, cell=CELL, burn_in=burn_in, **options)
    losses, gradients = [], []
    stored: dict[tuple[int, int], Tensor] = {}
    state = torch.zeros(len(LENGTHS), model.state_width, dtype=torch.float64)
    for cell in range(CELLS):
        batch, targets = batch_of(cell, tokens, resets, width or max(burn_in, 1)), targets_of(cell, tokens)
        output = cellwise(**batch, state=state)
        total = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        model.zero_grad()
        total.backward()
        losses.append(float(total.detach()) / int((targets != -100).sum()))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        state = output.state.detach()
        stored.update({(row, cell): state[row : row + 1] for row in range(len(LENGTHS))})
        drift(model, cell, size)
    return losses, gradients, stored


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
@pytest.mark.parametrize(("burn_in", "width"), [(1, 1), (4, 4), (5, 5), (4, 17)])
def test_losses_gradients_and_stored_states_are_those_of_the_oracle(burn_in, width, options):
    losses, gradients, stored = trained(0.05, burn_in, width=width, **options)
    expected_losses, expected_gradients, expected_stored = oracle(0.05, burn_in)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-9, atol=1e-12)
    assert len(expected_stored) > 8
    for key, state in expected_stored.items():
        torch.testing.assert_close(stored[key], state, rtol=1e-10, atol=1e-12)


class Spy(nn.Module):
    """Keeps the incoming states and lengths."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.states, self.lengths, self.caches = inner, [], [], []

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        self.states.append(state)
        self.lengths.append(tokens.shape[1])
        self.caches.append(torch.is_autocast_cache_enabled())
        return self.inner(tokens, state, resets)


def test_with_several_cells_per_row_burn_in_precedes_the_row():
    """The pieces are burn-in, whole cells, and the last cell in two, of which the first ends in what is stored."""
    spy, (tokens, _) = Spy(make_model()), documents()
    cellwise = Cellwise(spy, cell=CELL, cells=2, burn_in=BURN_IN)
    row, before = tokens[:, 2 * CELL : 4 * CELL], tokens[:, 2 * CELL - BURN_IN : 2 * CELL]
    state = spy.inner(tokens[:, : 2 * CELL - BURN_IN]).state.detach()
    output = cellwise(row, state, tokens_before=before, continues=torch.ones(3, dtype=torch.bool))
    assert spy.lengths == [BURN_IN, CELL, CELL - BURN_IN, BURN_IN]
    whole = spy.inner(tokens[:, : 4 * CELL])
    torch.testing.assert_close(output.logits, whole.logits[:, 2 * CELL :], rtol=1e-10, atol=1e-12)
    kept = spy.inner(tokens[:, : 4 * CELL - BURN_IN]).state
    torch.testing.assert_close(output.state, kept, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_first", [True, False])
def test_autocast_keeps_the_gradient_of_weights_that_burn_in_has_converted(is_first):
    """Autocast keeps converted weights; until torch 2.10 one that was converted without gradient had none in the cell."""
    model, (tokens, resets) = make_model(torch.float32), documents()
    batch = batch_of(0 if is_first else 1, tokens, resets, BURN_IN)
    state = torch.zeros(3, model.state_width)

    def gradient(module: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            module(**inputs, state=state).logits.float().square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    spy = Spy(model)
    found = gradient(Cellwise(spy, cell=CELL, burn_in=BURN_IN), batch)
    assert spy.caches == [False, True, True]
    assert all(each is not None for each in found)
    if is_first:  # then burn-in changes nothing but pieces
        plain = gradient(model, {name: batch[name] for name in ("tokens", "resets")})
        for each, expected in zip(found, plain, strict=True):
            assert float((each - expected).norm() / expected.norm()) < 0.02


def test_what_burn_in_lacks_is_named_in_one_line():
    cellwise, tokens = Cellwise(make_model(), cell=CELL, burn_in=BURN_IN), torch.zeros(1, CELL).long()
    state, yes = torch.zeros(1, 16).double(), torch.ones(1, dtype=torch.bool)
    with pytest.raises(UserError, match="has no tokens_before and no group_ids"):
        cellwise(tokens, state)
    with pytest.raises(UserError, match="tokens_before has 3"):
        cellwise(tokens, state, tokens_before=torch.zeros(1, 3).long(), continues=yes)
    with pytest.raises(UserError, match="the input styles, which is not known for the tokens before"):
        cellwise(tokens, state, tokens_before=torch.zeros(1, 4).long(), continues=yes, styles=torch.zeros(1))


def test_a_row_that_nothing_precedes_begins_from_the_state_it_is_given() -> None:
    model, (tokens, resets) = make_model(), documents()
    batch = batch_of(1, tokens, resets, CELL)
    batch["continues"][:2] = False
    state = torch.randn(len(LENGTHS), model.state_width, dtype=torch.float64)
    found = Cellwise(model, cell=CELL, burn_in=BURN_IN)(**batch, state=state)
    expected = model(batch["tokens"], state, batch["resets"])
    assert torch.allclose(found.logits[:2], expected.logits[:2], rtol=0, atol=1e-10)
