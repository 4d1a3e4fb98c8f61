"""Models with one breach of the contract each."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.honest_models import (
    DIM,
    Counting,
    Ema,
    Experts,
    Gru,
    Language,
    LearnedStart,
    LinearAttention,
    NestedLstm,
)
from trainer.model.encoder import RecurrentEncoder
from trainer.model.protocol import ModelOutput

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def given(change: Change, base: type[Language] = Gru) -> Callable[[], nn.Module]:
    """A model that mixes other inputs, or continues from another state."""

    class Given(base):
        def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return super().mix(*change(x, state))

    return Given


def returned(
    change: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], base: type[Language] = Gru
) -> Callable[[], nn.Module]:
    """A model that returns something else; `change` takes inputs, state, outputs and the next state."""

    class Returned(base):
        def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return change(x, state, *super().mix(x, state))

    return Returned


def kept(where: Callable[[Tensor], bool]) -> Callable[[], nn.Module]:
    """Takes a state of inputs [B, T, D] of this kind alone."""
    return given(lambda x, state: (x, state if where(x) else torch.zeros_like(state)))


def write_into_state(x: Tensor, state: Tensor, out: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        state.copy_(end)
    return out, end


DropState = kept(lambda x: False)


class LearnedStartOfNone(LearnedStart):
    """The learned state for `None` alone, zeros meaning zeros."""

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        if state is None:
            state = self.initial.expand(tokens.shape[0], -1)
        x, h = self.rnn(self.embedding(tokens), state[None].to(self.embedding.weight.dtype).contiguous())
        return ModelOutput(self.head(x), h[0])


class ReturnNone(NestedLstm):
    """Takes a state, and returns none; `mode` is the one in which it does return one."""

    def __init__(self, mode: bool | None = None) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, tokens: Tensor, state: Any = None) -> Any:
        output = super().forward(tokens, state)
        return SimpleNamespace(logits=output.logits, state=output.state if self.training is self.mode else None)


class DropPartOfNest(NestedLstm):
    def forward(self, tokens: Tensor, state: Any = None) -> Any:
        return super().forward(tokens, state and {**state, "c": torch.zeros_like(state["c"])})


class RaisesLater(Gru):
    """Takes a few calls, and no more."""

    calls = 0

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        self.calls += 1
        if self.calls > 4:
            raise RuntimeError("boom in my model")
        return super().forward(tokens, state)


class Encoder(RecurrentEncoder):
    """The reference encoder."""

    def __init__(self) -> None:
        super().__init__(vocab_size=37, dim=DIM, num_layers=2, hidden=2 * DIM, tie_embeddings=False)


class RaisesOnResets(Encoder):
    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        if resets is not None and resets.any():
            raise RuntimeError("boom on a reset")
        return super().forward(tokens, state, resets)


class ClearsResets(Encoder):
    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        if resets is not None:
            resets.zero_()
        return super().forward(tokens, state, resets)


class BatchNorm(Gru):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().mix(self.norm(x.transpose(1, 2)).transpose(1, 2), state)


class CapacityExperts(Experts):
    """A GRU, and one expert for each token, which takes no more than its capacity: rows are coupled by who comes first."""

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, end = Gru.mix(self, x, state)
        flat = x.flatten(0, 1)
        capacity = math.ceil(flat.shape[0] / 8)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        chosen = F.one_hot(choice, 4)
        fits = (chosen.cumsum(0) * chosen).sum(-1) <= capacity
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            taken = (fits & (choice == index)).unsqueeze(-1)
            out = out + torch.where(taken, expert(flat) * weight[:, None], 0.0)
        return x + out.view_as(x), end


class InPlaceBackward(LinearAttention):
    """An in-place update of the cache, which autograd needs: backward raises."""

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        memory, out = state.view(-1, DIM, DIM).to(v.dtype).clone(), []
        for t in range(x.shape[1]):
            out.append((memory @ q[:, t, :, None])[..., 0])
            memory.mul_(0.9).add_(v[:, t, :, None] * k[:, t, None])
        return x + torch.stack(out, 1), memory.flatten(1)


class HiddenInANest(Gru):
    """Keeps its state with the graph in a dict of one of its modules, and adds it to the one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn.cache = {}

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        (held,) = self.rnn.cache.get(state.shape, (0.0,))
        x, end = super().mix(x, state + held)
        self.rnn.cache[state.shape] = (end,)
        return x, end


class ZeroGate(Language):
    """The breach is behind a gate that is zero at the start: random weights alone would not show it."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.gate = nn.Parameter(torch.zeros(DIM))

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, end = self.rnn(x, torch.zeros_like(state)[None].to(x.dtype))
        return x + self.gate * h, end[0]


class Unsaved(Gru):
    """Draws a buffer at random that its state_dict does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix_in", torch.randn(DIM), persistent=False)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().mix(x * self.mix_in, state)


MUTANTS: dict[str, Callable[[], nn.Module]] = {
    "drops the state": DropState,
    "drops a count in its state": lambda: Counting(forgets=True),
    "learned start of None alone": LearnedStartOfNone,
    "returns none": ReturnNone,
    "returns a state in training alone": lambda: ReturnNone(True),
    "returns a state in eval alone": lambda: ReturnNone(False),
    "drops a part of a nest": DropPartOfNest,
    "returns a state of nan": returned(lambda x, state, out, end: (out, end * math.nan)),
    "raises later": RaisesLater,
    "raises on a reset": RaisesOnResets,
    "clears its resets": ClearsResets,
    "off by one": returned(lambda x, state, out, end: (out, out[:, -2] if x.shape[1] > 1 else state), Ema),
    "single rows only": kept(lambda x: x.shape[0] == 1),
    "behind a gate of zeros": ZeroGate,
    "returns the states in another order": returned(lambda x, state, out, end: (out, end.roll(1, 0))),
    "swaps rows of tokens": given(lambda x, state: (x.flip(0), state)),
    "batch norm": BatchNorm,
    "experts with a low capacity": CapacityExperts,
    "peeks one ahead": returned(lambda x, state, out, end: (out + 0.1 * F.pad(x[:, 1:], (0, 0, 0, 1)), end)),
    "writes into the incoming state": returned(write_into_state, Ema),
    "state hidden with its graph": HiddenInANest,
    "a random buffer that is not saved": Unsaved,
    "dropout in eval": returned(lambda x, state, out, end: (F.dropout(out, 0.3), end)),
    "noise in eval": given(lambda x, state: (x + 0.1 * torch.randn_like(x), state)),
    "noise of numpy in eval": given(
        lambda x, state: (x + torch.as_tensor(np.random.standard_normal(DIM), dtype=x.dtype), state)
    ),
    "in-place update breaks backward": InPlaceBackward,
    "state detached": returned(lambda x, state, out, end: (out, end.detach())),
    "drops the state in bf16": kept(lambda x: not torch.is_autocast_enabled(x.device.type)),
}
