"""A checkpoint as the beginning of another run: the same state, optionally with another order of the data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.files import remove_tree
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.tensor_files import Rows, TensorFiles, pack, unpack, write_tensors
from trainer.training.run_dir import RunDir

# Farther than any run gets: every order has epochs and batches of its own.
EPOCHS, BATCHES = 2**20, 2**32


def fork(source: Path, run_dir: Path, *, order: int = 0, evaluates: bool = False) -> Path:
    """Put a checkpoint into the run directory of another run, which continues from it with `--resume auto`.

    Files that stay the same are linked (copied, where the file system has no links).

    Args:
        order: 0: the data continue where they were; see `reordered`.
        evaluates: the other run begins with an evaluation.

    Raises:
        OSError: the disk is full or read-only.
    """
    state = checkpoint.read_state(source)
    step = state["step"]
    checkpoints = RunDir(run_dir).checkpoints
    staging = checkpoint.staging_dir(checkpoints, step)
    if staging.exists():
        remove_tree(staging)
    staging.mkdir(parents=True)
    ranks = {checkpoint.rank_file(rank) for rank in range(state["world_size"])}
    for path in source.iterdir():
        if path.name in ranks and order:
            _reorder(path, staging / path.name, order)
        elif path.name not in (checkpoint.MARKER, checkpoint.STATE_FILE):
            _link(path, staging / path.name)
    return checkpoint.finish(checkpoints, step, {**state, "evaluation_is_due": evaluates})


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _reorder(source: Path, target: Path, order: int) -> None:
    files = TensorFiles([source])
    part = unpack(files.values, files.read)
    values, tensors = pack({**part, "data": reordered(part["data"], order)})
    write_tensors(target, {name: Rows.all_of(tensor) for name, tensor in tensors.items()}, values)


def reordered(state: Mapping[str, Any], order: int) -> dict[str, Any]:
    """The state of a rank's blend at the beginning of another epoch, with other choices.

    Every choice of blend and mixing is a function of run.seed, the epoch and the batch's index, so epochs and indices that the
    run itself never reaches are an order of their own. run.seed stays: the held-out documents and their order follow from it.
    All ranks must begin the same epoch.
    """
    return {
        **state,
        "batch_index": state["batch_index"] + order * BATCHES,
        "ended": [False] * len(state["ended"]),
        "sources": [_beginning(source, order) for source in state["sources"]],
    }


def _beginning(state: Mapping[str, Any], order: int) -> dict[str, Any]:
    return {
        **state,
        "epoch": order * EPOCHS,
        "batch_index": state["batch_index"] + order * BATCHES,
        "queue_index": 0,
        "turn": 0,
        "is_barren": False,
        "pool": [],
        "observed": {**state["observed"], "waits": []},
        "chapters": [],
    }
