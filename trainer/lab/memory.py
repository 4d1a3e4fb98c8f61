"""What takes the memory of a run that has no more; `train.memory_snapshot` records allocations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainer.distributed.shards import own_part
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.training.setup.plan import ledger_bytes, width_of

if TYPE_CHECKING:
    from trainer.training.run import Run

every_rank_logger = get_logger(__name__, rank_zero_only=False)
SNAPSHOT_ENTRIES = 100_000  # the last allocations


class MemorySnapshot(Extension):
    """`train.memory_snapshot`: records CUDA's allocations, and writes them at the end."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        if run.device.type != "cuda":
            problem = f"records CUDA's memory, not that of {run.device.type}"
            raise UserError("train.memory_snapshot", problem, "remove it")
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        for left in run.run_dir.path.glob("memory_rank_*.pickle"):
            left.unlink(missing_ok=True)

    def closed(self) -> None:
        write_snapshot(self.run)
        torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(run: Run) -> None:
    """Write this rank's snapshot, unless it is there: it shows most where the memory ran out."""
    file = run.run_dir.path / f"memory_rank_{run.info.rank}.pickle"
    if not file.exists():
        torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]


def explain(run: Run) -> None:
    """Log what this rank's memory holds, by part."""
    if run.config.train.memory_snapshot:
        write_snapshot(run)
    parameters = list(run.model.parameters())
    states = ledger_bytes(run.config.ledger, width_of(run.model))
    parts = {
        "weights": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(parameter.grad) for parameter in parameters),
        "optimizer": sum(map(_bytes, tree_leaves([*run.state.optimizer.state.values()]))),
        "ledger": len(run.state.ledgers) * states,
    }
    if run.device.type == "cuda":
        parts["all tensors at their peak"] = torch.cuda.max_memory_allocated(run.device)
    found = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in parts.items())
    text = "out of memory at step %d, rank %d: %s; docs/memory.md lists what takes less"
    every_rank_logger.error(text, run.position.step + 1, run.info.rank, found)


def _bytes(value: Any) -> int:
    """What this rank holds of a tensor; 0 of anything else."""
    return own_part(value).nbytes if isinstance(value, Tensor) else 0
