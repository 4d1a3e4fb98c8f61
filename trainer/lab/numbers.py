"""Sequences of numbers in place of tokens: their loss, and the batch by which a model of them is judged.

It could go if all data were text.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.arrays import is_known
from trainer.data.loader import MicroBatch, accepted_inputs, take_apart
from trainer.model.protocol import ModelOutput, extras_of

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

POSITIONS = 256  # of the first batch that are tried: copies of the model have them


class SquaredError:
    """`[objective] target`: the squared error of each known value of float targets [B, T, ...]."""

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """The losses, in the shape of the targets; what stands at an unknown one is no matter."""
        if output.shape == (*targets.shape, 1):
            output = output.squeeze(-1)
        if output.shape != targets.shape:
            raise ValueError(f"the output is {list(output.shape)}, and the targets are {list(targets.shape)}")
        return (output.to(targets.dtype) - targets.masked_fill(~is_known(targets), 0.0)).square()


def first_batch(model: nn.Module, config: RunConfig, vocab_size: int) -> MicroBatch | None:
    """That of the first data set of the user's own, on the model's device; None if the model takes
    tokens alone, or no such data are read. Raises UserError: it is none, or not for this model."""
    accepted = accepted_inputs(model)
    own = next((each for each in (*config.data.source, *config.eval.source) if each.target), None)
    if own is None or (accepted is not None and accepted <= {"tokens", "resets"}):
        return None
    given = {"rank": 0, "world_size": 1, "seed": config.run.seed, "seq_len": config.data.seq_len, **own.args}
    batch = _read(str(own.target), json.dumps(given), f"source {own.name}: target", vocab_size)
    return take_apart(batch, accepted).to(next(model.parameters(), torch.empty(0)).device)


@lru_cache(1)  # it is asked for several times, and a data set may take long to make
def _read(path: str, given: str, key: str, vocab_size: int) -> dict[str, Any]:
    from trainer.lab.own_batches import OwnBatches, make_own

    with torch.device("cpu"):  # also where a model is built without memory
        return OwnBatches(make_own(path, json.loads(given), key), vocab_size=vocab_size, key=key).first()


def some_rows(micro: MicroBatch, rows: int) -> dict[str, Any]:
    """The inputs of so many rows; those of a batch of fewer rows are repeated."""
    count, found = len(micro.targets), dict(micro.inputs)
    for key, value in micro.inputs.items():
        if isinstance(value, Tensor) and value.shape[:1] == (count,):
            found[key] = value[torch.arange(rows, device=value.device) % count]
    return found


class OnPositions(nn.Module):
    """A model as one of tokens: token i stands for the i-th position of a batch.

    So the checks, which draw, change and cut rows of tokens, do so with inputs of the real data. What
    a batch has by row is that of its first one.
    """

    def __init__(self, model: nn.Module, micro: MicroBatch) -> None:
        super().__init__()
        self.model, self.fixed, self.takes_resets = (
            model,
            some_rows(micro, 1),
            "resets" in (accepted_inputs(model) or ()),
        )
        for name in {"state_width", "state_layout", "loss_keys"} & {*dir(model)}:
            setattr(self, name, getattr(model, name))
        shape = micro.targets.shape[:2]
        self.num = min(POSITIONS, shape.numel())
        for key, value in micro.inputs.items():
            if isinstance(value, Tensor) and value.shape[:2] == shape:
                self.register_buffer(f"of_{key}", value.flatten(0, 1)[: self.num].clone(), persistent=False)

    def forward(self, tokens: Tensor, state: Tensor | None = None, **more: Tensor) -> ModelOutput:
        """Run the model on the positions `tokens` [B, T]."""
        given = dict(self.fixed)
        for key, value in self.fixed.items():
            if f"of_{key}" in self._buffers:
                given[key] = self.get_buffer(f"of_{key}")[tokens]
            elif isinstance(value, Tensor) and len(value.shape) > 0:
                given[key] = value.expand(len(tokens), *value.shape[1:])
        output = self.model(**{**given, **more}, state=state)
        found = output.logits.reshape(*output.logits.shape[:2], -1)
        # As wide as a vocabulary: the checks leave out columns that are constant.
        found = F.pad(found, (0, max(self.num - found.shape[2], 0)))
        return ModelOutput(found, output.state, *extras_of(output))
