"""Restores a run's state from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.config.schema import RunConfig
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing import checkpoint as files
from trainer.training.checkpointing.checkpoint import CheckpointError, loading
from trainer.training.checkpointing.model_part import (
    OtherModel,
    load_optimizer,
    load_weights_of,
    open_model,
    scaler_state,
)
from trainer.training.checkpointing.resume_checks import DataCheck, check_config, restart_changed
from trainer.training.checkpointing.tensor_files import DamagedFile
from trainer.training.checkpointing.train_state import Position, TrainState, set_generator_states
from trainer.wording import counted

logger = get_logger(__name__)


def restore(
    path: Path,
    saved: Mapping[str, Any],
    state: TrainState,
    config: RunConfig,
    info: RankInfo,
    device: torch.device,
    data: DataCheck,
    *,
    groups_in_flight: int,
) -> Position:
    """Load a checkpoint into the parts of a run, and return where the run continues.

    Args:
        path: of the checkpoint.
        saved: its state.json.
        data: how the data differs from the checkpoint's.
        groups_in_flight: of this rank, which need room in the ledger beside those of a checkpoint of other ranks.

    Raises:
        UserError: a file is damaged, or the checkpoint does not fit the model, the data or the config.
    """
    with loading(path, "config"):
        check_config(saved["config"], config)
    saved_world_size = saved["world_size"]
    with loading(path, "files"):
        try:
            tensors = open_model(path, saved, rank=info.rank)
            parts = _read_parts(path, saved, state, info, needs_all=bool(data.change))
        except (CheckpointError, DamagedFile) as error:
            raise UserError("--resume", str(error), "use auto, which falls back to a complete one") from None
    with loading(path, "weights"):
        try:
            load_weights_of(state.model, tensors)
        except OtherModel as error:
            problem = f"{path} holds another model: {error}"
            raise UserError("--resume", problem, "resume with the [model] it was trained with") from None
    with loading(path, "optimizer"):
        load_optimizer(state.optimizer, state.model, tensors)
    if state.scaler.is_enabled():
        with loading(path, "loss scaling"):
            state.scaler.load_state_dict(scaler_state(tensors))
    if state.ledger is not None:
        if saved.get("state_layout") != state.state_layout:
            problem = f"{path} holds states of {saved.get('state_layout')}, the model's are {state.state_layout}"
            raise UserError("--resume", problem, "resume with the model that it was trained with")
        room = groups_in_flight if saved_world_size != info.world_size else 0
        with loading(path, "ledger"):
            state.ledger.load_state_dict([part["ledger"] for part in parts], room=room)
    with loading(path, "averages"):
        state.load_shared(saved)
    own = parts[info.rank] if saved_world_size == info.world_size else None
    if own is None:
        text = "saved on %s, resumed on %d: a step has another number of tokens (to continue as before: --nproc %d)"
        logger.warning(text, counted(saved_world_size, "rank"), info.world_size, saved_world_size)
    else:
        with loading(path, "generators"):
            set_generator_states(own["generators"], device)
    with loading(path, "data cursors"):
        blends = [part["data"] for part in parts]
        if data.change:
            blends = restart_changed(blends, state.dataset, data)
        state.dataset.load_state_dict(blends if own is None else blends[info.rank])
        position = Position.of(state, saved["step"])
    _place(position, saved, config)
    if own is not None:
        with loading(path, "counts"):
            position.load_counts(state, own["unlogged"])
    logger.info("resuming after step %d from %s", position.step, path)
    return position


def _place(position: Position, saved: Mapping[str, Any], config: RunConfig) -> None:
    """Put the position where the checkpoint was saved."""
    position.reached = saved["reached"]
    position.tokens_before, position.tokens = saved["tokens"]
    if config.micro_batches.auto is None or _was_auto(saved):
        position.micro_batches, position.micro_batches_since = saved["micro_batches"]
    else:  # `auto` begins here
        position.micro_batches_since = position.step + 1
    position.evaluation_is_due = saved["evaluation_is_due"]


def _was_auto(saved: Mapping[str, Any]) -> bool:
    """Whether the saved run let its batch grow by itself."""
    setting = saved["config"]["train"]["micro_batches"]
    return isinstance(setting, Mapping) and setting["schedule"] == "auto"


def _read_parts(
    path: Path, saved: Mapping[str, Any], state: TrainState, info: RankInfo, *, needs_all: bool
) -> list[dict[str, Any]]:
    """The parts of all saving ranks; where this rank needs its own alone, that one in every place."""
    world_size = saved["world_size"]
    if world_size == info.world_size and not needs_all:
        own = files.read_rank(path, info.rank)
        if state.ledger is None or own["ledger"]["ownership"] == state.ledger.ownership:
            return [own] * world_size
    return [files.read_rank(path, rank) for rank in range(world_size)]
