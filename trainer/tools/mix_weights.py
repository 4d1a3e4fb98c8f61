"""The weights that `train mix` sets in a run, and its events about them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.distributed.env import RankInfo, from_main_rank
from trainer.files import read_lines
from trainer.metrics.aggregate import Reported
from trainer.training.extension import Extension
from trainer.training.run_dir import REQUESTS, RunDir

if TYPE_CHECKING:
    from trainer.training.checkpointing.train_state import TrainState
    from trainer.training.run import Run
    from trainer.training.setup.plan import Plan
    from trainer.training.setup.record import Found


def mix_events(events: Path) -> list[bytes]:
    """The lines of a run's events about changes of weights by `train mix`, refused ones included."""
    if not events.is_file():
        return []
    return [line for line in read_lines(events) if b'"mix"' in line]


class MixWeights(Extension):
    """Applies the weights that `train mix` sets, and reports them with `metrics.per_source`.

    The part that answers requests is loaded on rank 0 by the first one.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._dataset = run.state.dataset
        self._requests: Any = None
        # Skips requests to an earlier process: nobody waits for their answers any more.
        self._look(skip=True)
        if run.config.metrics.per_source:
            self.metric_keys = [f"blend/weight/{source.name}" for source in self._dataset.sources]

    def _look(self, *, skip: bool = False) -> None:
        path = self.run.run_dir.path / REQUESTS
        if self._requests is None and self.run.info.is_main and os.path.lexists(path):
            make = self.run.plan.part("mix requests")
            self._requests = make and make(self.run, skip=skip)

    def drain_metrics(self) -> Mapping[str, Reported]:
        """Answer requests (rank 0). Returns the weights, as shares."""
        read = max(state["batch_index"] for state in self.run.position.data_states)
        # At the end of its data rank 0 cannot say where the others are.
        if not all(micro.is_filler for micro in self.run.reading.last):
            self._look()
            if self._requests is not None:
                self._requests.answer(read)
        shares = self._dataset.shares_at(self.run.position.step, read - 1)
        return dict(zip(self.metric_keys, shares, strict=False))

    def to_exchange(self) -> Mapping[int, Mapping[str, float]]:
        """All changes so far; rank 0's are used."""
        return self._dataset.changes

    def exchanged(self, by_rank: Sequence[Any]) -> None:
        """Change the weights on this rank."""
        if by_rank[0]:
            for shard in self.run.state.shards:
                shard.dataset.changes = by_rank[0]

    def state_dict(self) -> dict[str, Any]:
        """All changes so far, those to come included."""
        return {str(batch): weights for batch, weights in self._dataset.changes.items()}


def restore_mix(plan: Plan, info: RankInfo, state: TrainState, run_dir: RunDir, found: Found | None) -> None:
    """Continue with the weights that `train mix` has set, before anything is read."""
    if len(plan.sources) == 1:
        return
    lines = mix_events(run_dir.events) if info.is_main else []
    saved = found is not None and found[1].get("extensions", {}).get("mix")
    # The events are rank 0's, but all ranks must change their weights.
    if from_main_rank(bool(saved or lines), world_size=info.world_size):
        plan.parts.need("mix changes", "checkpoint.resume")(plan, info, state, found, lines)
