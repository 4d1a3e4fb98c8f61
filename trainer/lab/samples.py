"""Autoregressive generation with carried state; and samples at intervals during a run.

It could go if text were only generated after a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.tokenizer import Tokenizer, prompt_ids
from trainer.metrics.sinks import SAMPLE
from trainer.model.protocol import evaluating
from trainer.training.build import autocast_context
from trainer.training.extension import Extension, RunView

REPLACEMENT = "\ufffd"


class GenerationError(Exception):
    """No token can be sampled from the model's scores."""


@dataclass(frozen=True)
class Draw:
    """Sampling settings: the same ones, with the same weights and prompt, give the same tokens."""

    temperature: float = 1.0  # divides the scores; 0: the most likely token
    top_k: int = 0  # samples from so many tokens only; 0: from all
    seed: int = 0


def generate(
    model: nn.Module,  # implements `trainer.model.protocol`, in evaluation mode
    prompt: Sequence[int],  # at least one id, starting with the one that begins a document
    *,
    draw: Draw,
    cell: int,
    below: int | None = None,  # only ids below it are sampled, and `eod`: a model may have more
    eod: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Yield the token ids that follow `prompt`, up to the one that ends documents; without `eod`,
    without end. Raises GenerationError: see `draw_token`.

    A model with state reads the prompt in cells of `cell` tokens, then each new token alone with
    the state carried over, which equals one uncut forward pass. A model without state reads the
    last `cell` tokens, the length that it was trained on, for each new one.
    """
    generator = torch.Generator().manual_seed(draw.seed)  # not torch's own, which training uses
    has_state = bool(getattr(model, "state_width", 0))
    seen, state = list(prompt), None
    while True:
        if not has_state:  # it is shown the last tokens again
            seen = seen[-cell:]
        for start in range(0, len(seen), cell):
            tokens = torch.tensor([seen[start : start + cell]], device=device)
            with torch.no_grad():
                output: Any = model(tokens=tokens, state=state)
            state = output.state
        scores = output.logits[0, -1].to("cpu", torch.float64, copy=True)
        if below is not None:
            ids = torch.arange(len(scores))
            scores[(ids >= below) & (ids != (-1 if eod is None else eod))] = -torch.inf
        token = draw_token(scores, draw, generator)
        if token == eod:
            return
        yield token
        seen = [token] if has_state else [*seen, token]


def draw_token(scores: Tensor, draw: Draw, generator: torch.Generator) -> int:
    """Sample one id from scores float64 [V]; never one of minus infinity at a finite temperature.
    Raises GenerationError: one is NaN or inf, or all are -inf."""
    if not torch.isfinite(scores.max()):
        raise GenerationError(f"the model's scores are not finite: the largest is {scores.max()}")
    if draw.temperature == 0:
        return int(scores.argmax())
    if 0 < draw.top_k < len(scores):
        best = scores.topk(draw.top_k)
        scores = torch.full_like(scores, -torch.inf).scatter(0, best.indices, best.values)
    # Subtract the maximum first: a tiny temperature would overflow otherwise.
    probabilities = ((scores - scores.max()) / draw.temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Random numbers that are drawn within leave those behind it as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class Samples(Extension):
    """Generates a sample every `sample.every` steps and after the last: on rank 0, or, of a model
    in shards, the same on every rank. It does not change torch's generators or the model's mode,
    and does not run the compiled model, whose shapes it would change."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._table, tokenizer = run.config.sample, run.plan.tokenizer
        self.boundary_every = self._table.every
        self._is_off = not (run.info.is_main or run.strategy.is_sharded)  # no other rank is needed
        self._latest = -1  # step
        self._draw = Draw(seed=run.config.run.seed)
        self._prompt = prompt_ids(tokenizer, self._table.prompt, "sample.prompt")
        self._autocast = autocast_context(run.config, run.device)

    def at_boundary(self, step: int, *, is_last: bool) -> None:
        if self._is_off or step == self._latest or not (step % self._table.every == 0 or is_last):
            return
        self._latest = step
        event = {"event": SAMPLE, "global_step": step, "prompt": self._table.prompt, "text": self._text(step)}
        self.run.event(event)
        self.run.state.tracker.log_event(event)

    def _text(self, step: int) -> str:
        model, device, tokenizer = self.run.model, self.run.device, self.run.plan.tokenizer
        with forked_rng(device), self._autocast(), evaluating(model):
            tokens = generate(
                model,
                self._prompt,
                draw=self._draw,
                cell=self.run.config.data.seq_len,
                below=tokenizer.bos_id,
                eod=self.run.config.data.eod,
                device=device,
            )
            stream = TextStream(tokenizer, self._prompt)
            text = ""
            for token in itertools.islice(tokens, self._table.tokens):
                text += stream.push(token)
                self.run.watchdog.at("sample", step)  # other ranks may wait, but not in vain
            return text + stream.flush()


class TextStream:
    """Decodes token by token. A character whose bytes span several tokens is emitted with the last
    of them. `prompt`: ids of the text before, which decides whether a space comes first."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Already emitted; a tokenizer may join the next token to it.
        self._context = [*prompt]
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._waiting.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT):  # the rest of the character may follow
            return ""
        self._context, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """The text still held back, with U+FFFD for incomplete characters."""
        text, self._waiting = self._new_text(), []
        return text

    def _new_text(self) -> str:
        return self._decode([*self._context, *self._waiting])[len(self._decode(self._context)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(np.array(ids, dtype=np.int64))
