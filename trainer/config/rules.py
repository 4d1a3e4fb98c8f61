"""Rules that involve more than one table, or the world size; and what follows from a config, in numbers.

Checked before the process group starts. Rules that need the data itself are in `trainer.training.setup.sources`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.data_tables import MixingTable, SourceTable
from trainer.config.schema import RunConfig
from trainer.errors import UserError, UserErrors


@dataclass(frozen=True)
class Facts:
    """What follows from a config at a world size. Counts are upper bounds: a stream's last batches are smaller."""

    world_size: int
    cells_per_step: int
    tokens_per_step: int
    tokens_in_run: int
    groups_in_flight: int
    """Groups whose state a rank may have to hold at once."""
    ledger_capacity: int
    ledger_mode: str
    ownership: str
    ownership_reason: str


def mixing_of(config: RunConfig, source: SourceTable) -> MixingTable:
    """How `source` is mixed: `[data.mixing]` with the source's own keys in their place."""
    return source.mixing.applied_to(config.data.mixing)


def largest_batch(mixing: MixingTable) -> int:
    """The most cells that a micro-batch of one rank can have."""
    return max([mixing.batch_size, *mixing.batch_size_by_modality.values()])


def groups_in_flight(config: RunConfig, sources: list[SourceTable]) -> int:
    """K readers a source, each with a lane for every cell of its batch, and one group on every lane."""
    own_streams = [mixing_of(config, source) for source in sources if source.target is None]
    return sum(mixing.num_streams_mixed * largest_batch(mixing) for mixing in own_streams)


def resolve_ownership(config: RunConfig, sources: list[SourceTable], world_size: int) -> tuple[str, str]:
    """(`reader` or `exchange`, why).

    A stream's slices are cut at group boundaries in both batching modes, so one rank reads a whole group and can own it
    without communication. A data set of the user's own promises no such thing.
    """
    foreign = [source.name for source in sources if source.target is not None]
    wanted = config.ledger.ownership
    if wanted == "exchange":
        return "exchange", "as configured"
    if foreign and world_size > 1:
        if wanted == "reader":
            raise UserError(
                "ledger.ownership",
                f'"reader" needs every group to stay on one rank, which source {foreign[0]} (a target) does not promise',
                "use exchange or auto",
            )
        return "exchange", f"source {foreign[0]} is a target, which may move groups between ranks"
    return "reader", "slices are cut at group boundaries: the rank that reads a group owns it"


def check_rules(config: RunConfig, sources: list[SourceTable], world_size: int) -> Facts:
    """Refuse what cannot work, and say what follows from the rest.

    Args:
        config: a validated config.
        sources: its sources with included files resolved.
        world_size: ranks of the run.

    Raises:
        UserError: one or several (`UserErrors`) rules are broken.
    """
    found = [*_table_rules(config), *_source_rules(sources)]
    in_flight = groups_in_flight(config, sources)
    if config.ledger.capacity < in_flight:
        found.append(
            UserError(
                "ledger.capacity",
                f"must hold the groups in flight: {in_flight} (K x batch size over the sources), got "
                f"{config.ledger.capacity}; states that are still needed would be evicted",
                f"set it to {in_flight} or more",
            )
        )
    if found:
        raise found[0] if len(found) == 1 else UserErrors(found)
    ownership, reason = resolve_ownership(config, sources, world_size)
    largest = max([largest_batch(mixing_of(config, s)) for s in sources if s.target is None], default=0)
    cells = largest * config.train.micro_batches * world_size
    return Facts(
        world_size=world_size,
        cells_per_step=cells,
        tokens_per_step=cells * config.data.seq_len,
        tokens_in_run=cells * config.data.seq_len * config.train.steps,
        groups_in_flight=in_flight,
        ledger_capacity=config.ledger.capacity,
        ledger_mode=config.ledger.wipe_mode,
        ownership=ownership,
        ownership_reason=reason,
    )


def _table_rules(config: RunConfig) -> list[UserError]:
    found = []
    train, scheduler = config.train, config.scheduler
    if scheduler.warmup_steps > train.steps:
        problem = f"{scheduler.warmup_steps} is longer than the run (train.steps = {train.steps})"
        found.append(UserError("scheduler.warmup_steps", problem, f"set it to at most {train.steps}"))
    if config.eval.every and not config.eval.holdout_fraction:
        problem = "is 0, so that eval.every has no documents to evaluate on"
        found.append(UserError("eval.holdout_fraction", problem, "set it above 0 (0.02), or eval.every to 0"))
    if train.precision == "fp16" and train.device == "cpu":
        found.append(UserError("train.precision", '"fp16" needs a CUDA device', 'use "bf16" or "fp32" on the CPU'))
    if config.distributed.backend == "nccl" and train.device == "cpu":
        found.append(UserError("distributed.backend", '"nccl" needs CUDA devices', 'use "gloo" or "auto"'))
    return found


def _source_rules(sources: list[SourceTable]) -> list[UserError]:
    names = [source.name for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [UserError("data.source", f"two sources are named {name}", "give each a name of its own") for name in twice]
