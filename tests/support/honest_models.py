"""Models of different make that keep the contract: `trainer.lab.contracts` must not convict any of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.protocol import ModelOutput

VOCAB, DIM = 37, 16


class Language(nn.Module):
    """Embedding, `mix` and head; a subclass mixes over time and carries the state."""

    def __init__(self, state_width: int, vocab_size: int = VOCAB, dim: int = DIM, sparse: bool = False) -> None:
        super().__init__()
        self.state_width = state_width
        self.embedding = nn.Embedding(vocab_size, dim, sparse=sparse)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        x = self.embedding(tokens)
        if state is None and self.state_width:
            state = x.new_zeros(x.shape[0], self.state_width)
        x, end = self.mix(x, state)
        return ModelOutput(self.head(x), end)

    def mix(self, x: Tensor, state: Any) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


class Gru(Language):
    """Stacked GRU, state [layer 0 | layer 1 ...]."""

    def __init__(self, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__(layers * DIM)
        self.layers = layers
        self.rnn = nn.GRU(DIM, DIM, layers, batch_first=True, dropout=dropout)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = state.to(x.dtype).view(-1, self.layers, DIM).transpose(0, 1).contiguous()
        x, h = self.rnn(x, h)
        return x, h.transpose(0, 1).flatten(1)


def answering(change: Callable[[ModelOutput], ModelOutput]) -> type[Gru]:
    """A GRU whose answer is another one."""

    class Answering(Gru):
        def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
            return change(super().forward(tokens, state))

    return Answering


class Lstm(nn.LSTM):
    """Without oneDNN, which has no LSTM in bf16 for processors without AVX-512."""

    def forward(self, *args: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return super().forward(*args)


class NestedLstm(nn.Module):
    """Without `state_width`: a state in a nest of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.rnn = Lstm(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, state: Any = None) -> Any:
        given = None if state is None else tuple(state[name][None].contiguous() for name in ("h", "c"))
        x, (h, c) = self.rnn(self.embedding(tokens), given)
        return SimpleNamespace(logits=self.head(x), state={"h": h[0], "c": c[0]})


class Counted(NamedTuple):
    """A state that counts."""

    hidden: Tensor
    count: Tensor


class Counting(nn.Module):
    """A GRU that adds an embedding of the position, which it counts in its state."""

    def __init__(self, dtype: torch.dtype = torch.int64, *, forgets: bool = False) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(4096, DIM)
        self.rnn, self.head = nn.GRU(DIM, DIM, batch_first=True), nn.Linear(DIM, VOCAB)
        self.dtype, self.forgets = dtype, forgets

    def forward(self, tokens: Tensor, state: Counted | None = None) -> Any:
        x = self.embedding(tokens)
        hidden = x.new_zeros(len(x), DIM) if state is None else state.hidden
        count = torch.zeros(len(x), dtype=self.dtype) if state is None else state.count
        x, end = self.rnn(x + self.places(count.long()[:, None] + torch.arange(x.shape[1])), hidden[None].contiguous())
        count = count if self.forgets else (count + x.shape[1]).to(self.dtype)
        return SimpleNamespace(logits=self.head(x), state=Counted(end[0], count))


class Rotating(nn.Module):
    """A diagonal recurrence of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(2 * DIM, VOCAB)
        self.angles = nn.Parameter(torch.randn(DIM))

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> Any:
        x, turn = self.embedding(tokens), torch.polar(torch.full_like(self.angles, 0.9), self.angles)
        held, found = turn.new_zeros(len(x), DIM) if state is None else state, []
        for step in x.unbind(1):
            held = turn * held + step
            found.append(torch.view_as_real(held).flatten(1))
        return SimpleNamespace(logits=self.head(torch.stack(found, 1)), state=held)


class LinearAttention(Language):
    """Unnormalized linear attention in parallel form, with the matrix-valued state added."""

    chunk = 16

    def __init__(self) -> None:
        super().__init__(DIM * DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.norm = nn.LayerNorm(DIM)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] % self.chunk:
            raise ValueError(f"the length {x.shape[1]} is no multiple of {self.chunk}")
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = state.view(-1, DIM, DIM).to(v.dtype)
        out = []
        for qs, ks, vs in zip(*(each.split(self.chunk, 1) for each in (q, k, v)), strict=True):
            inner = torch.tril(qs @ ks.transpose(1, 2)) @ vs
            out.append(inner + qs @ memory)
            memory = memory + ks.transpose(1, 2) @ vs
        return x + torch.cat(out, 1) / DIM, memory.flatten(1)


class Ema(Language):
    """An exponential moving average with a learned rate."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.rate = nn.Parameter(torch.linspace(-2, 2, DIM))

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rate, h, out = self.rate.sigmoid(), state, []
        for t in range(x.shape[1]):
            h = rate * h + (1 - rate) * x[:, t]
            out.append(h)
        return torch.stack(out, 1), h


class LearnedStart(Language):
    """A cell whose state is an offset from a learned initial state, so that zeros mean the learned one."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.initial = nn.Parameter(torch.randn(DIM))
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, h = self.rnn(x, (state + self.initial)[None].to(x.dtype).contiguous())
        return x, h[0] - self.initial


class Transformer(Language):
    """Without state; dropout, positions of a fixed length."""

    def __init__(self, dropout: float = 0.0, length: int = 64) -> None:
        super().__init__(0)
        self.positions = nn.Embedding(length, DIM)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=dropout, batch_first=True, norm_first=True)

    def mix(self, x: Tensor, state: None) -> tuple[Tensor, None]:
        length = x.shape[1]
        x = x + self.positions(torch.arange(length, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        return self.layer(x, src_mask=mask, is_causal=True), None


class DropoutGru(Gru):
    """Dropout as a module, as a function, and inside the GRU."""

    def __init__(self) -> None:
        super().__init__(2, dropout=0.3)
        self.dropout = nn.Dropout(0.2)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, end = super().mix(self.dropout(x), state)
        return F.dropout(x, 0.1, self.training), end


class Experts(Gru):
    """A GRU and two of four experts for each token, without a capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, end = super().mix(x, state)
        weight, choice = self.router(x).softmax(-1).topk(2, -1)
        for index, expert in enumerate(self.experts):
            x = x + expert(x) * (weight * (choice == index)).sum(-1, keepdim=True)
        return x, end


class RouterLoss(Experts):
    """Keeps what its router lost, and more of the graph of its last forward, at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.router.seen = {}

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, end = super().mix(x, state)
        probabilities = self.router(x).softmax(-1)
        self.aux_loss = probabilities.mean((0, 1)).square().sum()
        self.losses = [self.aux_loss, (probabilities.logsumexp(-1).square().mean(), x)]
        self.router.seen["last"] = {"probabilities": probabilities, "weight": self.router.weight.t()}
        return x, end


class Losses(Experts):
    """Returns losses and metrics, of which some mix all rows of the batch: that is no leak into logits or state."""

    loss_keys: ClassVar = {"balance": "tokens", "spread": "rows", "each": "tokens"}
    metric_keys = ("my/spread",)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        output = super().forward(tokens, state)
        p = self.router(self.embedding(tokens)).softmax(-1)  # [B, T, E]
        shares = p.mean((0, 1))
        losses = {"balance": shares.square().sum(), "spread": (p.mean(1) - shares).square().sum(1)}
        return output._replace(losses={**losses, "each": (shares * p).sum(-1)}, metrics={"my/spread": p.std()})


class LogSpaceScan(Language):
    """minGRU in log space: a global log-cumsum-exp, whose rounding is larger than that of a loop."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.gate, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        z, v = self.gate(x), self.value(x)
        log_keep, log_take = -F.softplus(z), -F.softplus(-z)
        log_value = torch.where(v >= 0, (F.relu(v) + 0.5).log(), -F.softplus(-v))
        a = F.pad(log_keep.cumsum(1), (0, 0, 1, 0))
        start = state.to(x.dtype).clamp(min=1e-9).log()[:, None]
        h = (a + torch.logcumsumexp(torch.cat([start, log_take + log_value], 1) - a, 1)).exp()
        return h[:, 1:], h[:, -1]


class PaddedVocabulary(Gru):
    """More columns than ids; the spare ones are masked with -inf, or -1e9."""

    def __init__(self, fill: float = -math.inf) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB + 11)
        self.fill = fill

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        output = super().forward(tokens, state)
        spare = torch.arange(VOCAB + 11, device=tokens.device) >= VOCAB
        return output._replace(logits=output.logits.masked_fill(spare, self.fill))


class ZeroHead(Gru):
    """Head and output projection of zeros at the start, as many models begin."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class FusedRecurrentInEval(Ema):
    """One kernel in training, another in evaluation, equal up to rounding, as flash-linear-attention's layers do."""

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if not self.training:
            return super().mix(x, state)
        rate, length = self.rate.sigmoid(), x.shape[1]
        powers = rate ** torch.arange(length + 1, device=x.device)[:, None].to(x.dtype)  # [T + 1, D]
        lag = torch.arange(length, device=x.device)[:, None] - torch.arange(length, device=x.device)[None]
        kernel = powers[lag.clamp(min=0)] * (lag >= 0)[..., None] * (1 - rate)
        out = torch.einsum("tsd,bsd->btd", kernel, x) + powers[1:] * state[:, None]
        return out, out[:, -1]


class RotaryCounter(Language):
    """A window of three whose angles come from a counter in the state: only differences matter, so its gradient is 0."""

    def __init__(self) -> None:
        super().__init__(2 * DIM + 1)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        before = state[:, :-1].to(x.dtype).reshape(-1, 2, DIM)
        seen, start = torch.cat([before, x], dim=1), state[:, -1:].to(x.dtype)
        at = 0.3 * (start + torch.arange(-2, x.shape[1], device=x.device))  # [B, T + 2]
        phase = torch.polar(torch.ones_like(at), at)
        turned = seen[..., None, : DIM // 2] * torch.stack([phase.real, phase.imag], dim=-1)[..., None]
        query = turned[:, 2:]
        out = sum(
            (query * turned[:, lag : lag + x.shape[1]]).sum((-1, -2))[..., None] * seen[:, lag : lag + x.shape[1]]
            for lag in range(3)
        )
        return x + out, torch.cat([seen[:, -2:].flatten(1), start + x.shape[1]], dim=1)


class EmptyLeaf(NestedLstm):
    """A leaf of no numbers, as a layer without a state returns it."""

    def forward(self, tokens: Tensor, state: Any = None) -> Any:
        found = super().forward(tokens, state)
        found.state["none"] = found.logits.new_zeros(len(tokens), 0)
        return found


class LastTokens(Language):
    """A state of whole numbers, the last tokens: no gradient goes through it, and none is lost; a sparse embedding."""

    def __init__(self) -> None:
        super().__init__(3, sparse=True)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        start = tokens.new_zeros(len(tokens), 3) if state is None else state.long()
        seen = torch.cat([start, tokens], 1)
        near = sum(self.embedding(seen[:, lag : lag + tokens.shape[1]]) * (lag + 1) for lag in range(4))
        return ModelOutput(self.head(near), seen[:, -3:].to(near.dtype))


HONEST: dict[str, Callable[[], nn.Module]] = {
    "gru": Gru,
    "lstm with a nest": NestedLstm,
    "counts in int64": Counting,
    "counts in int16": lambda: Counting(torch.int16),
    "complex numbers": Rotating,
    "chunked linear attention": LinearAttention,
    "ema": Ema,
    "learned start": LearnedStart,
    "transformer with dropout": lambda: Transformer(dropout=0.2),
    "dropout everywhere": DropoutGru,
    "experts": Experts,
    "experts whose router keeps its loss": RouterLoss,
    "losses that mix rows": Losses,
    "logits in bf16": answering(lambda output: output._replace(logits=output.logits.bfloat16())),
    "state in bf16": answering(lambda output: output._replace(state=output.state.bfloat16())),
    "scan in log space": LogSpaceScan,
    "vocabulary padded with -inf": PaddedVocabulary,
    "vocabulary padded with -1e9": lambda: PaddedVocabulary(-1e9),
    "head of zeros": ZeroHead,
    "another kernel in eval": FusedRecurrentInEval,
    "a counter of relative positions": RotaryCounter,
    "an empty leaf": EmptyLeaf,
    "last tokens": LastTokens,
}
