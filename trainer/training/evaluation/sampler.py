"""A sample of what the model writes, every some steps: on rank 0, without a trace in training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer.config.schema import SampleTable
from trainer.data.tokenizer import TextStream, Tokenizer, prompt_ids
from trainer.metrics.sinks.events import SAMPLE
from trainer.model.generate import Draw, generate


class Sampler:
    """Writes samples. Training is the same with and without it.

    It has a generator of its own, puts torch's generators and the model's mode back, keeps no gradient, and does not run
    the compiled model, whose shapes it would change.

    Args:
        model: the model itself, without DDP: no other rank takes part. Of a model in shards every rank generates the same.
        cell: tokens that a model without state sees, and in which a long prompt is read.
        send: what gets each sample, as an event; on ranks other than 0 nothing.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        tokenizer: Tokenizer,
        table: SampleTable,
        seed: int,
        cell: int,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[None]],
        send: Sequence[Callable[[dict[str, Any]], None]],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._table = table
        self._cell = cell
        self._device = device
        self._autocast = autocast
        self._send = send
        self._draw = Draw(table.temperature, table.top_k, seed)
        self._prompt = prompt_ids(tokenizer, table.prompt, "sample.prompt")

    def run(self, step: int) -> None:
        """Generate, and send the text."""
        text = self._text()
        event: Mapping[str, Any] = {"event": SAMPLE, "global_step": step, "prompt": self._table.prompt, "text": text}
        for send in self._send:
            send(dict(event))

    def _text(self) -> str:
        was_training = self._model.training
        devices = [self._device] if self._device.type == "cuda" else []
        stream = TextStream(self._tokenizer)
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), self._autocast():
            self._model.eval()
            try:
                tokens = generate(
                    self._model,
                    self._prompt,
                    draw=self._draw,
                    cell=self._cell,
                    forbidden=[self._tokenizer.bos_id],
                    device=self._device,
                )
                pieces = [stream.push(token) for token in itertools.islice(tokens, self._table.tokens)]
            finally:
                self._model.train(was_training)
        return "".join([*pieces, stream.flush()])
