"""Time and memory of a run: `--profile N`, `train.memory_snapshot`, and what is told when memory runs out.

torch's profiler records N steady steps of rank 0, as a trace in `RUN_DIR/profile`. It could go if a
run were profiled by a program around it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._pytree import tree_leaves

from trainer.config.schema import FIRST_PROFILED
from trainer.distributed.shards import own_part
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.training.setup.plan import ledger_bytes, width_of
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.training.run import Run

logger = get_logger(__name__)
every_rank_logger = get_logger(f"{__name__}.memory", rank_zero_only=False)

FOLDER: Final = "profile"  # of the run directory
TRACE: Final = "trace.json.gz"
WARM_UP = 2  # steps with the profiler on that are not recorded
SETTLING = FIRST_PROFILED - 1 - WARM_UP  # steps before: models are compiled, caches are filled


class StepProfile(Extension):
    """Records steps on rank 0, in the place of an earlier profile of the run; then it is off."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._folder, self._first_step = run.run_dir.path / FOLDER, run.position.step + FIRST_PROFILED
        self._num_steps = run.config.metrics.profile
        self._is_done = False
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier process of the run
        self._folder.mkdir(parents=True)
        activities = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=SETTLING, warmup=WARM_UP, active=self._num_steps, repeat=1)
        self._profiler: profile | None = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def step_launched(self, step: int) -> None:
        if self._profiler is not None:
            self._profiler.step()
            if self._is_done:
                self.closed()

    def closed(self) -> None:
        """Stop recording. Without effect once it has stopped."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        if not self._is_done:
            text = "--profile: the run ended before steps %d to %d were recorded: there is no profile"
            logger.warning(text, self._first_step, self._first_step + self._num_steps - 1)

    def _write(self, recorded: profile) -> None:
        if self._profiler is None:  # stopped before the last step
            return
        path = self._folder / TRACE
        with self.run.tracker.outside():
            recorded.export_chrome_trace(str(path))
        self._is_done = True
        steps = counted(self._num_steps, "step")
        logger.info("profile of %s from step %d on: %s, for https://ui.perfetto.dev", steps, self._first_step, path)


class MemorySnapshot(Extension):
    """`train.memory_snapshot`: records CUDA's last allocations, and writes them at the end."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if run.device.type != "cuda":
            problem = f"records CUDA's memory, not that of {run.device.type}"
            raise UserError("train.memory_snapshot", problem, "remove it")
        torch.cuda.memory._record_memory_history(max_entries=100_000)

    def closed(self) -> None:
        path = self.run.run_dir.path / f"memory_rank_{self.run.info.rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)


def explain(run: Run) -> None:
    """Log what this rank's memory holds, by part."""
    parameters = list(run.model.parameters())
    sizes = {
        "weights": _bytes(parameters),
        "gradients": _bytes([parameter.grad for parameter in parameters]),
        "optimizer": _bytes(tree_leaves([*run.state.optimizer.state.values()])),
        "ledger": len(run.state.ledgers) * ledger_bytes(run.config.ledger, width_of(run.model)),
    }
    if run.device.type == "cuda":
        sizes["all tensors at their peak"] = torch.cuda.max_memory_allocated(run.device)
    found = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in sizes.items())
    text = "out of memory at step %d, rank %d: %s; docs/memory.md lists what takes less"
    every_rank_logger.error(text, run.position.step + 1, run.info.rank, found)


def _bytes(held: Iterable[object]) -> int:
    """What this rank holds of the tensors among them."""
    return sum(own_part(each).nbytes for each in held if isinstance(each, Tensor))
