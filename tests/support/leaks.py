"""Faults that projects have had with states and packed documents, each a small model with an honest twin, and more of the kind.

Own code in plain torch: what a fault does, not how its project wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.honest_models import DIM, HONEST, VOCAB, Language
from tests.support.mutant_models import MUTANTS
from trainer.lab.contracts import check_model, soak
from trainer.model.protocol import ModelOutput

Change = Callable[[Any], Any]
Make = Callable[[], nn.Module]


class Mixer(nn.Module):
    """A causal convolution and a gated recurrence, which keep documents of a packed row apart, and positions.

    State: [the last inputs | the recurrence | tokens of the document so far]. `changes` replace intermediates of the
    forward, by name, computed from all before it; `width` is that of the convolution.
    """

    def __init__(self, width: int = 4, **changes: Change) -> None:
        super().__init__()
        self.width, self.changes = width, changes
        self.state_width = width * DIM + 1
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.taps = nn.Parameter(torch.randn(width, DIM) / 2)
        self.gate = nn.Linear(DIM, 1)
        self.head = nn.Linear(DIM, VOCAB)
        self.register_buffer("frequencies", torch.linspace(0.02, 1.0, DIM))
        self.slot: Tensor | None = None

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        c = SimpleNamespace(model=self, tokens=tokens, given=state, rows=tokens.shape[0], length=tokens.shape[1])

        def put(name: str, value: Any) -> None:
            setattr(c, name, value)
            if name in self.changes:
                setattr(c, name, self.changes[name](c))

        put("x", self.embedding(tokens))
        put("state", c.x.new_zeros(c.rows, self.state_width) if state is None else state.to(c.x.dtype))
        put("resets", torch.zeros_like(tokens, dtype=torch.bool) if resets is None else resets)
        c.segment = c.resets.cumsum(1)  # 0: the document that goes on
        c.at = torch.arange(c.length, device=tokens.device).expand_as(tokens)
        put("count", c.state[:, -1:])
        put("place", torch.where(c.segment > 0, c.at - (c.at * c.resets).cummax(1).values, c.count + c.at))
        put("x", c.x + torch.sin(c.place[..., None] * self.frequencies))
        put("pads", torch.zeros_like(c.resets))
        c.x = c.x * ~c.pads[..., None]
        put("window", c.segment)  # the convolution's documents
        put("taps", self.taps)
        c.context = c.state[:, : (self.width - 1) * DIM].view(c.rows, -1, DIM)
        owner = F.pad(c.window, (self.width - 1, 0))
        ends = [(self.width - 1 - lag, self.width - 1 - lag + c.length) for lag in range(self.width)]
        # Of each lag, where the token that far back is of the same document, [B, T].
        put("reach", [owner[:, begin:end] == c.window for begin, end in ends])
        joined = torch.cat([c.context, c.x], 1)
        lags = [joined[:, begin:end] for begin, end in ends]  # [B, T, D] each
        put("mixed", torch.tanh(sum(tap * at[..., None] * x for tap, at, x in zip(c.taps, c.reach, lags, strict=True))))
        kept = owner[:, c.length :] == owner[:, -1:]
        put("context", joined[:, c.length :] * kept[..., None])
        put("memory", c.segment)  # the recurrence's documents
        put("h", c.state[:, (self.width - 1) * DIM : -1])
        put("decay", F.logsigmoid(self.gate(c.mixed).to(c.x.dtype) + 2)[..., 0] * ~c.pads)
        put("inside", c.memory[:, :, None] == c.memory[:, None])
        put("sees", torch.ones(c.length, c.length, dtype=torch.bool, device=tokens.device).tril())
        total = c.decay.cumsum(1)
        far = -(total[:, :, None] - total[:, None]).abs()
        weights = far.masked_fill(~(c.inside & c.sees), -math.inf).exp()
        new = c.mixed * (1 - c.decay.exp())[..., None]
        old = (total.exp() * (c.memory == 0))[..., None] * c.h[:, None]
        put("out", (weights.to(new.dtype) @ new + old).to(c.x.dtype))
        put("last", c.out[:, -1])
        put("end", torch.cat([c.context.flatten(1), c.last, c.place[:, -1:].to(c.x.dtype) + 1], 1))
        return ModelOutput(self.head(c.out + c.mixed), c.end)


class WithoutResets(Mixer):
    """The same, for rows of one document."""

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        return super().forward(tokens, state)


class Regraded(torch.autograd.Function):
    """The same numbers; `change` is applied to their gradient: a kernel whose backward is wrong where its forward is exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.change(grads[0]), None


regraded = Regraded.apply


def model(width: int = 4, **changes: Change) -> Make:
    return lambda: Mixer(width, **changes)


def lost(where: Change) -> Make:
    """The incoming state is zeros in the calls, or rows [B, 1], where this holds."""
    return model(state=lambda c: c.state.masked_fill(torch.as_tensor(where(c)), 0.0))


def in_float32(c: Any) -> Tensor:
    """The embeddings of a model that takes no other precision."""
    assert c.x.dtype == torch.float32
    return c.x


def honours(which: Callable[[Tensor], Tensor]) -> Make:
    """Only some of the resets of each row."""
    return model(resets=lambda c: which(c.resets))


def number(resets: Tensor) -> Tensor:
    """1 at a row's first reset, 2 at its second ..., 0 elsewhere."""
    return resets.cumsum(1) * resets


def row(c: Any) -> Tensor:
    return torch.arange(c.rows, device=c.tokens.device)[:, None]


def with_count(c: Any, change: Change) -> Tensor:
    """The returned state with another count."""
    return torch.cat([c.end[:, :-1], change(c.end[:, -1:])], 1)


def padding(c: Any) -> Tensor:
    """Some tokens stand for padding."""
    return c.tokens < VOCAB // 4


def padded_end(c: Any, *, is_right: bool) -> Tensor:
    """The state of a row that was padded to a multiple of 8 tokens: after the padding, or where the row ended."""
    spare = -c.length % 8
    if is_right or not spare:
        return c.end
    context = F.pad(c.context, (0, 0, 0, spare))[:, spare:]
    return torch.cat([context.flatten(1), c.last * 0.8**spare, c.end[:, -1:]], 1)


def unit(x: Tensor, floor: float) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + floor).sqrt().clamp(min=1e-9)


def attention(c: Any) -> Tensor:
    """Over the tokens that the convolution sees, documents kept apart."""
    width, joined = c.model.width, torch.cat([c.context, c.x], 1)
    keys = torch.stack([joined[:, width - 1 - lag :][:, : c.length] for lag in range(width)], 2)  # [B, T, W, D]
    near = torch.stack(c.reach, -1) & (c.place[..., None] >= torch.arange(width, device=c.tokens.device))
    scores = torch.einsum("btd,btwd->btw", c.x, keys).masked_fill(~near, -math.inf)
    return torch.einsum("btw,btwd->btd", scores.softmax(-1), keys * c.taps[:, None].mean())


def short_end(c: Any, *, is_right: bool) -> Tensor:
    """The last inputs, whose gradient is shifted in a row shorter than the convolution."""
    if is_right or c.length >= c.model.width - 1:
        return c.context
    return regraded(c.context, lambda grad: grad.roll(-c.length, 1))


def of_slot(c: Any) -> Tensor:
    """A row that begins starts from what the slot's last user left."""
    held = c.model.slot
    return c.state if held is None or held.shape != c.state.shape or c.state.any() else held


def hidden(c: Any) -> Tensor:
    """What the module has kept, whatever it is given."""
    held = c.model.slot
    return torch.zeros_like(c.state) if held is None or held.shape != c.state.shape else held


def to_slot(c: Any) -> Tensor:
    c.model.slot = c.end.detach()
    return c.end


def advance_in_place(c: Any) -> Tensor:
    """The offset of the positions is bound before the cache is updated, and updated with it."""
    count = c.state[:, -1:]
    if c.given is not None:
        with torch.no_grad():
            c.given[:, -1:] += c.length
    return count


def marked(c: Any) -> Tensor:
    c.resets[:, 1:2] = True
    return c.resets


def tail_detached(c: Any) -> Tensor:
    """The gate's gradient is missing in the tokens after the last full chunk of 4."""
    full = c.length - c.length % 4
    return torch.cat([c.decay[:, :full], c.decay[:, full:].detach()], 1)


class Case(NamedTuple):
    """A broken model."""

    make: Make
    source: str = ""  # repository and number of the issue or pull request that reported it; empty: a kind of our own
    twin: Make = Mixer  # the honest model that differs in the fault alone
    seq_len: int = 64  # of training


PUBLIC: dict[str, Case] = {
    "boundaries reach the convolution but not the recurrence": Case(
        model(memory=lambda c: c.segment * 0), "THUDM/slime#1686"
    ),
    "boundaries reach neither": Case(
        model(window=lambda c: c.segment * 0, memory=lambda c: c.segment * 0),
        "NVIDIA-NeMo/Automodel#2147 pytorch/torchtitan#3892 NovaSky-AI/SkyRL#2056",
    ),
    "boundaries reach the recurrence but not the convolution": Case(
        model(window=lambda c: c.segment * 0), "huggingface/transformers#46588"
    ),
    "boundaries reach attention but not the recurrence": Case(
        model(mixed=attention, memory=lambda c: c.segment * 0), "pytorch/torchtitan#3984", twin=model(mixed=attention)
    ),
    "sharded rows count as one document": Case(
        model(memory=lambda c: c.segment * (c.length < 16)), "PrimeIntellect-ai/prime-rl#3003"
    ),
    "the convolution begins anew in each shard": Case(
        model(window=lambda c: c.segment + c.at // 8), "PrimeIntellect-ai/prime-rl#3002"
    ),
    "another mode ignores boundaries": Case(
        model(memory=lambda c: c.segment * c.model.training), "fla-org/flash-linear-attention#1184"
    ),
    "left padding enters the convolution": Case(
        model(reach=lambda c: [same | F.pad(padding(c), (lag, 0))[:, : c.length] for lag, same in enumerate(c.reach)]),
        "AI-Hypercomputer/maxtext#5295",
    ),
    "padding of norm 0 has no gradient": Case(
        model(pads=padding, mixed=lambda c: unit(c.mixed * ~c.pads[..., None], 0.0)),
        "AI-Hypercomputer/maxtext#5295",
        twin=model(pads=padding, mixed=lambda c: unit(c.mixed * ~c.pads[..., None], 1e-3)),
    ),
    "padding is masked in the first cell alone": Case(
        model(pads=lambda c: padding(c) & ~c.state.any(1, keepdim=True)),
        "huggingface/transformers#47087",
        twin=model(pads=padding),
    ),
    "the state is taken after right padding": Case(
        model(end=partial(padded_end, is_right=False)),
        "huggingface/transformers#48256",
        twin=model(end=partial(padded_end, is_right=True)),
    ),
    "cells of many tokens drop the state": Case(lost(lambda c: c.length > 1), "huggingface/transformers#45513"),
    "kernels for many tokens get no initial state": Case(
        model(h=lambda c: c.h * (c.length == 1)), "huggingface/transformers#46741"
    ),
    "cells that go on step by their first token": Case(
        model(decay=lambda c: torch.where(c.state.any(1, keepdim=True), c.decay[:, :1], c.decay)),
        "huggingface/transformers#46032",
    ),
    "upper layers see the tokens counted too early": Case(
        model(place=lambda c: c.place + c.length * (c.count > 0)), "fla-org/flash-linear-attention#766"
    ),
    "heads are counted instead of tokens": Case(
        model(end=lambda c: with_count(c, lambda _: c.count + 4)), "fla-org/flash-linear-attention#126"
    ),
    "the offset moves in place": Case(model(count=advance_in_place), "ml-explore/mlx-lm#1699"),
    "a slot keeps its last user's state": Case(model(state=of_slot, end=to_slot), "ggml-org/llama.cpp#29092"),
    "the state is rounded to bf16 by each call": Case(
        model(h=lambda c: c.h.bfloat16().to(c.h.dtype)), "ml-explore/mlx-lm#988"
    ),
    "single tokens round their gate": Case(
        model(decay=lambda c: (c.decay * 256).round() / 256 if c.length == 1 else c.decay), "sgl-project/sglang#38975"
    ),
    "the state saturates late": Case(
        model(end=lambda c: with_count(c, lambda count: count.clamp(max=255))), "ddalcu/mlx-serve#415"
    ),
    "the last tokens of long rows are skipped": Case(
        model(mixed=lambda c: c.mixed * (c.at < 50)[..., None]), "fla-org/flash-linear-attention#906"
    ),
    "short rows shift the convolution's gradient": Case(
        model(9, context=partial(short_end, is_right=False)),
        "fla-org/flash-linear-attention#1140",
        twin=model(9, context=partial(short_end, is_right=True)),
    ),
    "several rows corrupt the gradient of the taps": Case(
        model(taps=lambda c: regraded(c.taps, lambda grad: grad * c.rows)),
        "fla-org/flash-linear-attention#955",
        twin=model(taps=lambda c: regraded(c.taps, lambda grad: grad)),
    ),
    "every gradient but the last cell's is off": Case(
        model(last=lambda c: regraded(c.last, lambda grad: grad * 0.9)),
        "fla-org/flash-linear-attention#1115",
        twin=model(last=lambda c: regraded(c.last, lambda grad: grad)),
    ),
    "a partial chunk drops the gate's gradient": Case(
        model(decay=tail_detached), "fla-org/flash-linear-attention#1142"
    ),
}
"""Reported faults."""


def in_cells(where: Callable[[int], Any], change: Change) -> Case:
    """Cells of these lengths change the incoming state of the recurrence."""
    return Case(model(h=lambda c: change(c.h) if where(c.length) else c.h), seq_len=80)


CHANGES: dict[str, Change] = {
    "drop": torch.zeros_like,
    "quantise": lambda h: (h * 64).round() / 64,
    "shift": lambda h: h.roll(1, 1),
}
LENGTHS: dict[str, Callable[[int], Any]] = {
    "20 tokens": lambda length: length >= 20,
    "64 tokens": lambda length: length >= 64,
    "lengths of no power of two": lambda length: length >= 20 and length & (length - 1),
}


LONGER = {  # What only a batch as in training shows: rows, phases, long and late cells, a graph, several resets.
    "positions of row 0": Case(model(count=lambda c: c.state[:1, -1:].expand(c.rows, 1))),
    "a start that any row decides": Case(
        lambda: WithoutResets(h=lambda c: c.h + c.model.frequencies * ~c.state.any()),
        twin=lambda: WithoutResets(h=lambda c: c.h + c.model.frequencies * ~c.state.any(1, keepdim=True)),
    ),
    "rows from the third on lose their state": Case(lost(lambda c: row(c) >= 2)),
    "rows from the fifth on lose their state": Case(lost(lambda c: row(c) >= 4)),
    "rows from the ninth on lose their state": Case(lost(lambda c: row(c) >= 8)),
    "a mean over more than four rows": Case(model(x=lambda c: c.x - c.x.mean(0) * (c.rows > 4))),
    **{
        f"{words} {change} the state": in_cells(where, CHANGES[change])
        for words, where in LENGTHS.items()
        for change in CHANGES
    },
    "no causal mask from 64 tokens on": Case(model(sees=lambda c: c.sees | (c.length >= 64))),
    "64 tokens drop a state that fades": Case(
        model(
            x=in_float32,
            state=lambda c: c.state * (c.length < 64),
            decay=lambda c: c.decay - 0.4,
            place=lambda c: c.place * 0,
            end=lambda c: c.end.detach(),
        )
    ),
    "a norm over time from 64 tokens on": Case(
        model(mixed=lambda c: c.mixed - c.mixed.mean(1, keepdim=True) * (c.length >= 64))
    ),
    "the state is lost after the third cell": Case(lost(lambda c: c.state[:, -1:] > 3 * 60)),
    "the position is kept to 128": Case(model(end=lambda c: with_count(c, lambda count: count.clamp(max=128)))),
    "fp16 overflows late": Case(
        model(end=lambda c: with_count(c, lambda count: (count * 256).half().to(count.dtype) / 256))
    ),
    "a graph drops the state": Case(lost(lambda c: torch.is_grad_enabled())),
    "eval() returns the state unchanged": Case(model(end=lambda c: c.end if c.model.training else c.state)),
    "only the first reset": Case(honours(lambda resets: number(resets) == 1)),
    "only the last reset": Case(honours(lambda resets: resets & (number(resets) == resets.sum(1, keepdim=True)))),
    "only resets side by side": Case(
        honours(lambda resets: resets & (F.pad(resets, (1, -1)) | F.pad(resets, (-1, 1))))
    ),
    "resets of the first four rows alone": Case(model(resets=lambda c: c.resets & (row(c) < 4))),
    "all but the last reset": Case(
        honours(lambda resets: resets & ((number(resets) < resets.sum(1, keepdim=True)) | (number(resets) == 1)))
    ),
}

OTHERS = {  # More of their kinds.
    "rows trade states in a batch of four or more": Case(
        model(state=lambda c: c.state.roll(1, 0) if c.rows >= 4 else c.state)
    ),
    "all rows get the first one's state": Case(model(state=lambda c: c.state[:1].expand_as(c.state))),
    "no reset at the last token": Case(honours(lambda resets: F.pad(resets[:, :-1], (0, 1)))),
    "resets in the first 20 tokens alone": Case(
        honours(lambda resets: F.pad(resets[:, :20], (0, max(resets.shape[1] - 20, 0))))
    ),
    "the state of a row with a reset is lost": Case(model(end=lambda c: c.end * ~c.resets.any(1, keepdim=True))),
    "the document before a reset stays in the state": Case(
        model(last=lambda c: c.last + 0.5 * c.h * (c.segment[:, -1:] > 0))
    ),
    "resets count only where a state came in": Case(model(resets=lambda c: c.resets & c.state.any(1, keepdim=True))),
    "eval() alone drops the state": Case(lost(lambda c: not c.model.training)),
    "eval() alone sees the next token": Case(
        model(mixed=lambda c: c.mixed if c.model.training else c.mixed + F.pad(c.x[:, 1:], (0, 0, 0, 1)))
    ),
    "the gradient stops every 8 tokens": Case(
        model(decay=lambda c: torch.where(c.at % 8 == 0, c.decay.detach(), c.decay))
    ),
    "the gradient of the state is clipped": Case(
        model(state=lambda c: regraded(c.state, lambda grad: grad.clamp(-1e-3, 1e-3)))
    ),
    "the forward writes into the resets": Case(model(resets=marked)),
    "the state fades by a millionth": Case(model(h=lambda c: c.h * (1 - 1e-6))),
    "20 tokens fade the state by a millionth in eval()": Case(
        model(h=lambda c: c.h if c.model.training or c.length < 20 else c.h * (1 - 1e-6))
    ),
    "rows from the fifth on have no gradient through a cut": Case(
        model(end=lambda c: torch.where(row(c) < 4, c.end, c.end.detach()))
    ),
    "64 tokens detach the state": Case(model(end=lambda c: c.end.detach() if c.length >= 64 else c.end)),
    "calls are counted": Case(model(x=lambda c: c.x + 0.1 * called(c.model))),
    "recomputation advances a state": Case(
        model(x=lambda c: c.x * (1 + called(c.model)) if c.model.training and torch.is_grad_enabled() else c.x)
    ),
    "positions restart": Case(model(place=lambda c: c.at)),
    "resets too late": Case(honours(lambda resets: resets.roll(1, 1))),
    "gradient partly detached": Case(model(end=lambda c: (c.end + c.end.detach()) / 2)),
    "state hidden in the module": Case(model(state=hidden, end=to_slot)),
}


def called(module: nn.Module) -> int:
    """How often, with this call."""
    module.calls = getattr(module, "calls", 0) + 1
    return int(module.calls)


class Cells(Language):
    """Token by token; `step` makes of four projections [B, D] of the input and the state an output and the next state."""

    def __init__(self, width: int, step: Callable[[Any, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(width)
        self.step, self.projections = step, nn.Linear(DIM, 4 * DIM)

    def mix(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for inputs in self.projections(x).to(state.dtype).unbind(1):
            y, state = self.step(inputs.chunk(4, -1), state)
            out.append(y)
        return torch.stack(out, 1).to(x.dtype), state


def wkv(u: Any, s: Tensor) -> tuple[Tensor, Tensor]:
    total, weight, top = s.chunk(3, -1)  # both in units of exp(top)
    after = torch.maximum(top - 0.1, u[0])
    old, new = (top - 0.1 - after).exp(), (u[0] - after).exp()
    total, weight = old * total + new * u[1], old * weight + new
    return u[2].sigmoid() * total / weight, torch.cat([total, weight, after], -1)


def clockwork(u: Any, s: Tensor) -> tuple[Tensor, Tensor]:
    h, count = s[:, :-1], s[:, -1:]
    h = torch.where(count % (1 + torch.arange(DIM, device=s.device) % 4) == 0, (u[0] + h.roll(1, -1)).tanh(), h)
    return h, torch.cat([h, count + 1], -1)


def centred(u: Any, s: Tensor) -> tuple[Tensor, Tensor]:
    total, count = s[:, :-1] + u[0], s[:, -1:] + 1
    return u[0] - total / count, torch.cat([total, count], -1)


def automaton(u: Any, s: Tensor) -> tuple[Tensor, Tensor]:
    s = (s + (u[0] > 0)) % 5
    return torch.sin(s) * u[1], s


TWINS: dict[str, Make] = {
    "convolution and recurrence with resets": Mixer,
    "window of attention with resets": PUBLIC["boundaries reach attention but not the recurrence"].twin,
    "start per row": LONGER["a start that any row decides"].twin,
    "padding masked in every cell": PUBLIC["padding is masked in the first cell alone"].twin,
    "a norm with a floor at padding": PUBLIC["padding of norm 0 has no gradient"].twin,
    "rows padded to a chunk": PUBLIC["the state is taken after right padding"].twin,
    "a convolution longer than a cell": PUBLIC["short rows shift the convolution's gradient"].twin,
    "a backward of its own": PUBLIC["every gradient but the last cell's is off"].twin,
    "a backward of its own for weights": PUBLIC["several rows corrupt the gradient of the taps"].twin,
    "documents that begin at a token": model(resets=lambda c: c.resets | (c.tokens == 0)),
    "positions that wrap": model(place=lambda c: c.place % 128),
    "positions that end at 128": model(place=lambda c: c.place.clamp(max=128)),
    "a convolution of one token": model(1),
    "rwkv": partial(Cells, 3 * DIM, wkv),
    "clockwork": partial(Cells, DIM + 1, clockwork),
    "mean of the document so far": partial(Cells, DIM + 1, centred),
    "an automaton": partial(Cells, DIM, automaton),
    "largest so far": partial(Cells, DIM, lambda u, s: (torch.maximum(s, u[0]) * u[1], torch.maximum(s, u[0]))),
}
"""Honest models like the broken ones, and more kinds of state."""

BROKEN: dict[str, Case] = {**PUBLIC, **LONGER, **OTHERS, **{name: Case(make) for name, make in MUTANTS.items()}}
HONEST_MODELS: dict[str, Make] = {**TWINS, **HONEST}
HEAD = "model,made,verdict,by,reported in\n"


def judge(name: str) -> str:
    """The line of the table for a model."""
    case = BROKEN.get(name) or Case(HONEST_MODELS[name], seq_len=64 if name in TWINS else 16)
    torch.manual_seed(0)
    with patch.object(soak, "SECONDS", 600.0):  # how busy the machine is decides nothing
        report = check_model(case.make(), vocab_size=VOCAB, build=case.make, seq_len=case.seq_len)
    found = report.breaches or (report.warnings if name in BROKEN else [])
    made, verdict = "broken" if name in BROKEN else "honest", found[0].status if found else "held"
    return f"{name},{made},{verdict},{' '.join(each.check for each in found)},{case.source}\n"


def render_table() -> str:
    """What `check_model` says of every model, as CSV."""
    return HEAD + "".join(judge(name) for name in (*BROKEN, *HONEST_MODELS))
