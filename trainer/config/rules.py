"""Rules across tables or that need the world size, and the numbers that follow from a config.

Rules that need the data itself are in `trainer.training.plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.data_tables import MixingTable, SourceTable
from trainer.config.schema import RunConfig, TrainTable
from trainer.errors import UserError, raise_found
from trainer.options import MOST_MICRO_BATCHES
from trainer.wording import counted

Mistake = tuple[str, str, str]  # key, problem, fix


@dataclass(frozen=True)
class Facts:
    """The numbers that follow from a config at a world size.

    Tokens are upper bounds: of full batches, and of the steps with the most micro-batches.
    """

    world_size: int
    data_shards: int  # the ranks, or `distributed.shards`
    steps: int  # of the run; with `train.tokens` the fewest: if all batches are full
    tokens_per_step: int
    tokens_per_micro: int  # over all data shards; 0 if only data sets of the user's own are read
    groups_in_flight: int  # whose state a data shard has to hold at once, at least; lanes hold more
    # After a resume on other data shards, each keeps what was in flight in all of them.
    capacity_to_change_ranks: int
    ledger_capacity: int

    @property
    def shards_per_rank(self) -> int:
        """Data shards that one rank runs."""
        return self.data_shards // self.world_size


def mixing_of(config: RunConfig, source: SourceTable) -> MixingTable:
    """How `source` is mixed: `[data.mixing]` with the keys replaced that the source sets."""
    return config.data.mixing.model_copy(update=source.mixing.model_dump(exclude_none=True))


def _mixings(config: RunConfig) -> list[MixingTable]:
    """How the sources of files that are read, not off, are mixed."""
    read = (source for source in config.data.source if source.target is None and not source.is_off)
    return [mixing_of(config, source) for source in read]


def reads_lanes(config: RunConfig) -> bool:
    """Whether rows of files are full, and hold documents of all sources."""
    return config.data.mixing.batching_mode == "per_row"


def data_shards(config: RunConfig, world_size: int) -> int:
    """Number of parts that the data is read in: the ranks, or `distributed.shards`."""
    return config.distributed.shards or world_size


def largest_batch(mixing: MixingTable) -> int:
    """Most cells in a micro-batch of one data shard."""
    return max([mixing.batch_size, *mixing.batch_size_by_modality.values()])


def check_rules(config: RunConfig, world_size: int) -> Facts:
    """The numbers that follow from a config. Raises UserError or `UserErrors` if it cannot work."""
    # One group in each lane: a reader has one per cell of its batch, full rows are lanes.
    in_flight = sum(mixing.streams_open * largest_batch(mixing) for mixing in _mixings(config))
    if reads_lanes(config) and _mixings(config):
        in_flight = config.data.mixing.batch_size  # a document in each row
    num_shards = data_shards(config, world_size)
    micro_tokens = tokens_per_micro(config, num_shards)
    facts = Facts(
        world_size=world_size,
        data_shards=num_shards,
        steps=least_steps(config, micro_tokens),
        tokens_per_step=micro_tokens * config.micro_batches.most,
        tokens_per_micro=micro_tokens,
        groups_in_flight=in_flight,
        capacity_to_change_ranks=in_flight * (num_shards + 1),
        ledger_capacity=config.ledger.slots,
    )
    raise_found([UserError(*each) for each in _broken_rules(config, facts)])
    return facts


def tokens_per_micro(config: RunConfig, num_shards: int) -> int:
    """Most tokens of a micro-batch over all data shards; 0: see `Facts`."""
    cells = max(map(largest_batch, _mixings(config)), default=0) * num_shards
    return cells * config.data.seq_len * config.data.values


def least_steps(config: RunConfig, tokens_per_micro: int) -> int:
    """Steps of the run; with `train.tokens` the fewest, if all batches are full."""
    if not config.train.tokens:
        return config.train.steps
    batches = -(-config.train.tokens // max(tokens_per_micro, 1))  # rounded up
    return config.micro_batches.step_of(batches - 1)


def _broken_rules(config: RunConfig, facts: Facts) -> Iterator[Mistake]:
    yield from _broken_run(config, facts)
    yield from _broken_lanes(config)
    yield from _broken_sharding(config, facts.world_size)
    yield from _broken_ledger(config, facts.groups_in_flight)
    for table, sources in (("data", config.data.source), ("eval", config.eval.source)):
        names = [source.name for source in sources]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{table}.source", f"two sources are named {name}", "give each a unique name"


def _broken_run(config: RunConfig, facts: Facts) -> Iterator[Mistake]:
    """Settings of the run's length, evaluation and loss that conflict."""
    train = config.train
    if train.tokens and train.steps:
        problem = f"{train.steps} and train.tokens = {train.tokens:,} are both the run's length"
        yield "train.steps", problem, "set one of them to 0"
    if train.tokens and not facts.tokens_per_step:
        problem = "needs the size of a batch, which data sets of your own do not tell"
        yield "train.tokens", problem, "set train.steps instead"
    if config.scheduler.warmup_tokens and not train.tokens:
        problem = "needs a run whose length is in tokens"
        yield "scheduler.warmup_tokens", problem, "set train.tokens, or warmup_steps instead"
    if config.eval.every and not config.eval.has_data:
        problem = "is 0, which leaves no documents for eval.every to evaluate on"
        fix = "set it above 0 (0.02), add an [[eval.source]], or set eval.every to 0"
        yield "eval.holdout_fraction", problem, fix
    if config.objective.chunk_tokens and config.distributed.find_unused_parameters:
        problem = "makes the output layer seem unused to distributed.find_unused_parameters"
        yield "objective.chunk_tokens", problem, "set one of them off"


def _broken_ledger(config: RunConfig, in_flight: int) -> Iterator[Mistake]:
    """Settings of the ledger that would drop states of documents in flight."""
    ledger, is_full, spread = config.ledger, reads_lanes(config), config.data.mixing.spread
    if is_full and ledger.wipe_mode == "periodic_stale" and _mixings(config):
        if ledger.stale_threshold < spread:
            problem = f"is {ledger.stale_threshold}; a document continues up to {spread} steps later"
            yield "ledger.stale_threshold", problem, f"set it to data.mixing.spread = {spread} or more"
        if config.micro_batches.least < config.micro_batches.most:
            problem = "would drop states of documents that wait where train.micro_batches changes m"
            yield "ledger.wipe_mode", problem, 'use "lru"'
    # Lanes size a ledger without a capacity of its own.
    if ledger.slots < in_flight and (ledger.capacity or not is_full):
        problem = f"must hold the states of all documents in flight: {in_flight} (full rows: one each;"
        problem += f" others: open streams x batch size of each source), got {ledger.slots}"
        fix = f"set it to {in_flight} or more"
        if is_full:  # fewer slots than lanes would shrink the spread
            fix = "remove it: then there is a slot for each lane"
        yield "ledger.capacity", problem, fix


def _broken_lanes(config: RunConfig) -> Iterator[Mistake]:
    """Settings of full rows, which hold documents of all sources, that conflict."""
    mode = config.data.mixing.batching_mode
    tables = {"data.mixing.": config.data.mixing.model_dump()}
    for source in config.data.source:
        tables[f"source {source.name}: mixing."] = source.mixing.model_dump(exclude_none=True)
    modes = {keys.get("batching_mode", mode) for keys in tables.values()}
    if len(modes) > 1 and "per_row" in modes:
        problem = 'is "per_row" for some sources, and rows are full in all of them or in none'
        yield "data.mixing.batching_mode", problem, "set it for all sources alike"
    if not reads_lanes(config):
        if config.data.align != "auto":
            yield "data.align", 'needs data.mixing.batching_mode = "per_row"', 'set it to "auto"'
        if config.data.mixing.spread != MixingTable.model_fields["spread"].default:
            yield "data.mixing.spread", 'needs batching_mode "per_row"', "remove it"
        return
    if len({source.target is None for source in config.data.source if not source.is_off}) > 1:
        problem = '"per_row" reads documents, and a source with a target gives whole batches'
        yield "data.mixing.batching_mode", problem, 'set it to "per_stream", or keep one kind'
    # All rows of a micro-batch are alike: the table sets how many there are, and no source does.
    del tables["data.mixing."]["batch_size"]
    for table, keys in tables.items():
        for name in ("batch_size_by_modality", "batch_size"):
            if keys.get(name):
                problem = 'does not go with batching_mode "per_row", whose rows are of all sources'
                yield f"{table}{name}", problem, "remove it, or choose another batching_mode"


def needs_of_cuda(train: TrainTable) -> list[UserError]:
    """Settings that cannot be honoured without a CUDA device."""
    given = {"device": train.device == "cuda", "cuda_graph": train.cuda_graph is True}
    problem = "needs a CUDA device, and the run would have none here"
    fix = "use a machine with one, or another value"
    return [UserError(f"train.{key}", problem, fix) for key, is_set in given.items() if is_set]


def _broken_sharding(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    table, strategy = config.distributed, f'strategy "{config.distributed.strategy}"'
    micros = table.shards // world_size * config.micro_batches.most
    if table.shards % world_size:
        ranks = counted(world_size, "rank")
        problem = f"{counted(table.shards, 'data shard')} cannot be divided among {ranks}"
        yield "distributed.shards", problem, "start a divisor of them, or set a multiple of the ranks"
    elif micros > MOST_MICRO_BATCHES:
        problem = f"makes {micros:,} micro-batches of a step on a rank; most: {MOST_MICRO_BATCHES:,}"
        yield "distributed.shards", problem, "start more ranks, or lower it"
    if table.strategy != "hsdp" and table.replicas:
        problem = f'{table.replicas} replicas, but the strategy is "{table.strategy}"'
        yield "distributed.replicas", problem, 'set it to 0, or the strategy to "hsdp"'
    elif table.replicas and world_size % table.replicas:
        problem = f"{table.replicas} replicas do not divide {counted(world_size, 'rank')}"
        yield "distributed.replicas", problem, "choose a divisor"
    if table.strategy != "ddp" and table.find_unused_parameters:
        problem = f"does not go with {strategy}, whose ranks must use the same parameters"
        yield "distributed.find_unused_parameters", problem, "set it to false, and freeze the unused ones"
