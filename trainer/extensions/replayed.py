"""The rows of one step and their losses, for `train replay`, which repeats a run up to that step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.arrays import IGNORED
from trainer.files import write_file
from trainer.training.extension import Extension

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.data.batch import Carry, MicroBatch
    from trainer.objective.loss import ObjectiveOutput
    from trainer.training.run import Run, StepInFlight
    from trainer.training.step.step import StepOutcome


class Replayed(Extension):
    """Ends the run after `step`, whatever its length and its schedules are, and writes the rows that the step read.

    They are written however the run ends: a step that raises leaves those that it had come to, without losses.
    """

    def __init__(self, run: Run, *, step: int) -> None:
        super().__init__(run)
        self._step = step
        self._micros: list[dict[str, Any]] = []
        self._num_done = 0
        run.position.last_step = step
        run.position.evaluation_is_due = False

    def window_read(self, step: int, window: Sequence[MicroBatch]) -> None:
        """Note the rows of the step."""
        for micro in window if step == self._step else ():
            found = {"shard": self.run.state.shards[micro.shard].number, "meta": micro.meta}
            sources = micro.extras.get("dataset_labels")
            tokens = (micro.targets != IGNORED).sum(1).tolist()
            self._micros.append({**found, "is_filler": micro.is_filler, "sources": sources, "tokens": tokens})

    def state_found(self, micro: MicroBatch, carry: Carry, state: Tensor) -> None:
        """Note which rows continue from a state: the ledger gives zeros where it holds none."""
        if self._micros:
            has_state, continues = (state != 0).any(1).tolist(), (carry.group_ids >= 0) & (carry.cell_index > 0)
            names = [
                ("carried" if has else "cold") if c else "fresh" for has, c in zip(has_state, continues, strict=True)
            ]
            self._micros[self._num_done]["states"] = names

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Note the losses, in nats: each row's cross-entropy, and the sums that are trained on."""
        if self._micros:
            parts = {name: term.sum.item() for name, term in result.parts.items()}
            losses = result.token_loss.double().sum(1).tolist()
            self._micros[self._num_done] |= {"losses": losses, "parts": parts}
            self._num_done += 1

    def step_finished(self, taken: StepInFlight, outcome: StepOutcome) -> None:
        """No checkpoint is needed."""
        self.run.saver.last_saved = taken.step

    def closed(self) -> None:
        """Write what was noted."""
        text = json.dumps(self._micros)
        write_file(self.run.run_dir.path / f"replayed_{self.run.info.rank}.json", text, sync=False)
