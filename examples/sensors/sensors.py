"""A model of sensor data, and its data set: train --config sensors.toml.

Each series is a walk of four numbers. From the features of one moment the model predicts those of the next,
where they are known. What a batch may hold, and how a data set is called, is in docs/mixing.md, "Data of your own".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.model.protocol import ModelOutput

State = tuple[Tensor, Tensor]
SERIES, CELLS = 4, 3  # of a micro-batch; of a series


class Model(nn.Module):
    """An LSTM on features instead of tokens. Its state is a pair of tensors, which the trainer carries from cell to
    cell; any nest of tensors will do, batch first."""

    def __init__(self, *, dim: int, **_: Any) -> None:  # also given: vocab_size, num_layers and [model] args
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, dim, batch_first=True), nn.Linear(dim, 4)

    def forward(self, features: Tensor, state: State | None = None) -> ModelOutput:
        """Predict [B, T, 4] from features [B, T, 4], float32; the state is (h, c), each [B, 1, dim]."""
        before = None if state is None else tuple(each.transpose(0, 1).contiguous() for each in state)
        out, after = self.lstm(features, before)
        carried: Any = tuple(each.transpose(0, 1) for each in after)
        return ModelOutput(self.head(out), carried)


class Sensors:
    """Gives micro-batches of one cell of each of four series.

    Two sets of series take turns: the next cell of a series is never in the next micro-batch, whose gradient would
    depend on this one's, so that the noise scale would leave it out.
    """

    def __init__(self, *, rank: int, world_size: int, seed: int, seq_len: int, batches: int = 1200) -> None:
        self.rank, self.seed, self.seq_len, self.batches = rank, seed, seq_len, batches
        self.at = 0  # the next batch; a checkpoint keeps it

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < self.batches:
            self.at += 1
            yield self.batch(self.at - 1)

    def batch(self, at: int) -> dict[str, Any]:
        """The batch of this number: any of them can be made anew."""
        pair, turn = divmod(at, 2 * CELLS)
        cell, which = divmod(turn, 2)
        random = np.random.default_rng((self.seed, self.rank, pair, which))
        series = random.normal(size=(SERIES, CELLS * self.seq_len + 1, 4)).cumsum(1) / 10
        known = np.where(random.random(series.shape) < 0.9, series, np.nan)
        first, end = cell * self.seq_len, (cell + 1) * self.seq_len
        return {
            "features": series[:, first:end],
            "targets": known[:, first + 1 : end + 1],  # NaN where unknown
            "group_ids": ((self.rank * 10**6 + pair) * 2 + which) * SERIES + np.arange(SERIES),
            "cell_index": [cell] * SERIES,
            "is_last": [cell == CELLS - 1] * SERIES,
        }

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the last batch that was trained on."""
        self.at = state["at"]
