"""For a training loop of your own: status.json, and a reduction over ranks.

with run_status(directory, rank=rank):
    train()
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.files import parse_count
from trainer.metrics.aggregate import Scalar, SumCount, Value, reduce_over_ranks
from trainer.metrics.catalog_rows import RankReduction
from trainer.metrics.run_status import STATUS_NAME, last_step, take_lock, write_status
from trainer.wording import error_text

logger = logging.getLogger(__name__)


@contextmanager
def run_status(directory: Path | str, *, rank: int = 0) -> Iterator[None]:
    """Keep status.json for your own loop: `running`, then `done`, `stopped` or `failed`, and why.

    An exception is `failed` with its type and message, Ctrl-C is `stopped`, `SystemExit` with a
    code other than 0 is `failed`. A killed process leaves `running`, which readers take for `died`,
    since it shows itself no more. The run's `directory` is made; ranks other than 0 do nothing.
    Raises UserError: another process writes its run there.
    """
    if rank != 0:
        yield
        return
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    # That of torchrun, which the diagnosis needs.
    world_size = parse_count(os.environ.get("WORLD_SIZE", ""))
    with take_lock(path) as lock:
        step = last_step(path)
        if step is not None:
            text = "%s has rows through step %d already, and those of this run follow them: "
            logger.warning(text + "another run needs another directory", path, step)
        write_status(path / STATUS_NAME, "running", reason="", step=step, world_size=world_size)
        state, reason = "done", ""
        try:
            yield
        except BaseException as error:
            state, reason = _end_of(error)
            raise
        finally:
            # Before the lock is free: without a process, `running` would mean that it died.
            lock.check()
            step = last_step(path)
            write_status(path / STATUS_NAME, state, reason=reason, step=step, world_size=world_size)


def _end_of(error: BaseException) -> tuple[str, str]:
    """(state, reason) of a run that ended with an exception."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__  # Lightning catches Ctrl-C and exits with 1
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "stopped by SIGINT"
    if not isinstance(error, SystemExit):
        return "failed", error_text(error)
    if error.code in (None, 0):
        return "done", ""
    return "failed", f"exit: {error.code}"


def reduce_loss_metrics(
    values: Mapping[str, Scalar],
    counts: Mapping[str, Scalar] | None = None,
    sum_keys: Iterable[str] | None = None,
    *,
    device: torch.device | str,
    world_size: int,
) -> dict[str, float]:
    """Means and totals over ranks in one collective. Every rank must call it, with the same names.

    Args:
        values: this rank's numbers; one that it lacks is named by `counts` or `sum_keys` alone.
        counts: weight of this rank's mean, by name, on all ranks or on none (alike).
        sum_keys: names of totals; `<name>_max` is the largest rank's.

    Returns the same on every rank; a mean over nothing is absent, a total over nothing is 0.
    """
    counts, totals = counts or {}, frozenset(sum_keys or ())
    names = values.keys() | counts.keys() | totals
    operations: dict[str, RankReduction] = dict.fromkeys(sorted(names), "mean")
    operations |= dict.fromkeys(totals, "sum_and_worst")
    local: dict[str, Value] = {**dict.fromkeys(totals, 0.0), **values}
    for name in (values.keys() & counts.keys()) - totals:
        # A mean over nothing may be NaN: its count 0 leaves it out.
        local[name] = SumCount(values[name] * counts[name], counts[name])
    return reduce_over_ranks(local, operations, device=device, world_size=world_size)
