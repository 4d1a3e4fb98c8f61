"""Samples of what the model generates, at intervals: written by rank 0, without a trace in training."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from trainer.data.tokenizer import TextStream, prompt_ids
from trainer.metrics.sinks import SAMPLE
from trainer.model.generate import Draw, generate
from trainer.training.extension import Extension
from trainer.training.setup.parts import autocast_context

if TYPE_CHECKING:
    from trainer.training.run import Run


class Samples(Extension):
    """Generates a sample every `sample.every` steps and after the last one. Training is the same with and without it.

    It has a generator of its own, puts torch's generators and the model's mode back, keeps no gradient, and does not run
    the compiled model, whose shapes it would change. It runs the model itself on rank 0; of a model in shards every rank
    generates the same.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._table, tokenizer = run.config.sample, run.plan.tokenizer
        self.boundary_every = self._table.every
        self._is_off = not run.strategy.runs_on(run.info.rank)
        self._draw = Draw(self._table.temperature, self._table.top_k, run.config.run.seed)
        self._prompt = prompt_ids(tokenizer, self._table.prompt, "sample.prompt")
        self._autocast = autocast_context(run.config, run.device)

    def at_boundary(self, step: int, *, is_last: bool) -> None:
        """Generate a sample if one is due, and send it to events.jsonl and the sinks."""
        if self._is_off or not (step % self._table.every == 0 or is_last):
            return
        with self.run.output():
            event = {"event": SAMPLE, "global_step": step, "prompt": self._table.prompt, "text": self._text()}
            self.run.event(event)
            self.run.tracker.log_event(event)

    def _text(self) -> str:
        model, device, tokenizer = self.run.model, self.run.device, self.run.plan.tokenizer
        was_training = model.training
        stream = TextStream(tokenizer)
        fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with fork, torch.compiler.set_stance("force_eager"), self._autocast():
            model.eval()
            try:
                cell, forbidden = self.run.config.data.seq_len, [tokenizer.bos_id]
                tokens = generate(model, self._prompt, draw=self._draw, cell=cell, forbidden=forbidden, device=device)
                pieces = [stream.push(token) for token in itertools.islice(tokens, self._table.tokens)]
            finally:
                model.train(was_training)
        return "".join([*pieces, stream.flush()])
