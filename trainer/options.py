"""The options of the parts: a frozen dataclass for each, which its table in the config inherits.

In a loop of your own, options check themselves: `Ledger(LedgerOptions(capacity=8192), ...)`. They
stand here, not in the parts' modules, so that a config is read without torch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from operator import attrgetter, itemgetter
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, dataclass_transform, get_type_hints

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError

from trainer.errors import UserError

NO_NUL = r"^[^\x00]*$"

# Every number has an upper bound: beyond it is a typing mistake, which would overflow.
Count = Annotated[int, Field(ge=1, le=10**9)]  # over a whole run: steps, groups
WholeNumber = Annotated[int, Field(ge=0, le=10**9)]
Size = Annotated[int, Field(ge=1, le=10**6)]  # what exists at once in a step: rows, cells, widths
# Also a position in a run, in any unit. float64 counts exactly so far.
Tokens = Annotated[int, Field(ge=0, le=10**15)]
Factor = Annotated[float, Field(ge=0, le=1000)]  # multiplies something of the order of 1
PositiveFactor = Annotated[float, Field(gt=0, le=1000)]
Amount = Annotated[float, Field(ge=0, le=1e9)]  # in the key's unit: a norm, minutes, TFLOPS
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=NO_NUL)]


@dataclass_transform(field_specifiers=(field,))
def part_options(cls: Any) -> Any:
    """A frozen dataclass."""
    # Type checkers are not told: they would reject frozen bases of pydantic's models.
    return dataclass(frozen=True)(cls)


@part_options
class Options:
    """Base class. Raises a ValueError if a value is of another type, out of range or in conflict."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    __pydantic_config__: ClassVar = {"use_attribute_docstrings": True}

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self), include_extras=True)
        for name, value in vars(self).items():
            try:
                _adapter(kinds[name]).validate_python(value)
            except ValidationError as error:
                found = error.errors()[0]
                problem = f"{found['msg']}, got {found['input']!r}"
                raise UserError(f"{type(self).__name__}.{name}", problem, "see its type") from None
        self.check()

    def check(self) -> None:
        """Refuse conflicting values with a ValueError. A table of the config calls it, too."""

    @classmethod
    def of(cls, table: object, **others: Any) -> Self:
        """These options with the values of the fields that `table` has; `others` win."""
        names = [each.name for each in fields(cls) if hasattr(table, each.name)]
        return cls(**{name: getattr(table, name) for name in names} | others)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Checks values of a type as a table of the config does."""
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))


TextSplit = Literal["file", "blank_line"]
WipeMode = Literal["none", "full", "lru", "periodic_stale"]
DEFAULT_CAPACITY: Final = 4096


@part_options
class LedgerOptions(Options):
    """Options of `trainer.ledger.Ledger`."""

    wipe_mode: WipeMode = "lru"
    """Evict none, all (full), the least recently stored (lru), or the stale ones."""
    capacity: WholeNumber = 0
    """Number of groups a data shard can hold; 0: full rows: one for each lane, otherwise 4,096."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the kept states."""
    stale_threshold: WholeNumber = 0
    """periodic_stale: evict groups not stored for more than this many steps."""
    sweep_every: Count = 1
    """periodic_stale: steps between sweeps."""
    wipe_every: WholeNumber = 0
    """full: steps between wipes."""

    @property
    def slots(self) -> int:
        """`capacity`, or its default where rows are not full."""
        return self.capacity or DEFAULT_CAPACITY

    def check(self) -> None:
        """Refuse a mode without its interval."""
        if self.wipe_mode == "full" and self.wipe_every == 0:
            raise ValueError('wipe_mode "full" needs wipe_every >= 1')
        if self.wipe_mode == "periodic_stale" and self.stale_threshold == 0:
            raise ValueError('wipe_mode "periodic_stale" needs stale_threshold >= 1')


DEFAULT_STREAMS: Final = 4
PickMode = Literal["weighted", "uniform", "round_robin"]
BatchingMode = Literal["per_row", "per_stream", "device_per_stream"]


@part_options
class MixingOptions(Options):
    """Options of `ShardSource` and `StreamMixingDataset`: how a source's streams are mixed."""

    num_streams_mixed: WholeNumber = 0
    """K: number of streams that a source keeps open at once; 0: full rows: as many as there are
    lanes, up to 256, otherwise 4."""
    pick_mode: PickMode = "weighted"
    """How to pick the next document's or batch's stream. weighted: by what is left; uniform: equally."""
    batching_mode: BatchingMode = "per_row"
    """per_row: full rows of one document after the other; per_stream: a micro-batch is of one
    stream, which all ranks pick; device_per_stream: each rank picks its own."""
    batch_size: Size = 8
    """Rows per micro-batch and rank."""
    batch_size_by_modality: dict[Text, Size] = field(default_factory=dict)
    """Modality -> batch size, where it differs from batch_size."""
    repeat: bool = True
    """Start another epoch when the data is exhausted; false: end the run."""

    @property
    def streams_open(self) -> int:
        """`num_streams_mixed`, or its default where rows are not full."""
        return self.num_streams_mixed or DEFAULT_STREAMS


@part_options
class CoordOptions(Options):
    """Options of `trainer.objective.Objective` for coordinate tokens, which are ordered bins."""

    first_token: WholeNumber
    """Token id of the first bin."""
    num_bins: Annotated[int, Field(ge=2, le=10**6)]
    """Number of bins; their token ids are consecutive."""
    sigma: Annotated[float, Field(gt=0, le=1e6)]
    """Standard deviation of the soft target around the true bin, in bins."""
    weight: PositiveFactor = 1.0
    """Factor of this component in the loss."""


@part_options
class ObjectiveOptions(Options):
    """Options of `trainer.objective.Objective`: the built-in components of the loss."""

    token_ce: Factor = 1.0
    """Factor of the cross-entropy; 0: off, for a model with its own loss."""
    z_loss: Factor = 0.0
    """Coefficient of the z-loss, the squared log-partition; 0: off."""
    coord: InstanceOf[CoordOptions] | None = None


@part_options
class TrackerOptions(Options):
    """Options of `trainer.metrics.tracker.MetricsTracker`."""

    log_interval: Count = 10
    """Steps between logged steps; step 1 and the last step are always logged."""
    peak_tflops: Amount = 0.0
    """Peak TFLOPS of one device, for MFU; 0: by the device's name."""
    per_source: bool = False
    """Also report metrics per source and modality."""


@part_options
class StrategyOptions(Options):
    """Options of `trainer.training.build.make_strategy`: how the ranks share the model."""

    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """ddp: every rank holds the whole model; fsdp: shards over all ranks (FSDP2); hsdp: over
    the ranks of each replica."""
    replicas: WholeNumber = 0
    """hsdp: number of replicas, each of neighbouring ranks; 0: one per node."""
    reshard_after_forward: bool = True
    """fsdp and hsdp: free a block's parameters between forward and backward."""
    find_unused_parameters: bool = False
    """ddp: allow parameters that a micro-batch does not use; DDP searches in every step."""


MOST_MICRO_BATCHES: Final = 10_000  # of a step on one rank, which runs them in turn
MicroBatchCount = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]


class Stretch(NamedTuple):
    """Steps with the same m. Steps count from 1, batches (a rank's micro-batches) from 0."""

    first_step: int
    first_batch: int
    m: int


@dataclass(frozen=True)
class MicroBatches:
    """m, the micro-batches of a step on each data shard: a constant, or a plan by steps. `points`:
    step -> m from there on, ascending, the first at 0."""

    points: tuple[tuple[int, int], ...]
    begin: int = 0  # the first batch, by these points; not 0 if steps before had another m

    @classmethod
    def constant(cls, m: int) -> Self:
        """The same m in every step."""
        return cls(((0, m),))

    @property
    def least(self) -> int:
        """The smallest m that a step can have."""
        return min(self.stretches, key=attrgetter("m")).m

    @property
    def most(self) -> int:
        """The largest m that a step can have."""
        return max(self.stretches, key=attrgetter("m")).m

    def at(self, step: int) -> int:
        """The m of `step`."""
        return self.points[bisect_right(self.points, step, key=itemgetter(0)) - 1][1]

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """In order, the first from step 1 on."""
        found = [Stretch(1, self.begin, self.at(1))]
        for at, m in self.points:
            if at > 1:
                step, batch, former = found[-1]
                found.append(Stretch(at, batch + (at - step) * former, m))
        return tuple(found)

    def batches_before(self, step: int) -> int:
        """Micro-batches of a data shard before `step`, which is 1 or later."""
        at = bisect_right(self.stretches, step, key=attrgetter("first_step")) - 1
        first_step, first_batch, m = self.stretches[at]
        return first_batch + (step - first_step) * m

    def step_of(self, batch: int) -> int:
        """The step that a data shard's micro-batch belongs to."""
        at = bisect_right(self.stretches, batch, key=attrgetter("first_batch")) - 1
        first_step, first_batch, m = self.stretches[at]
        return first_step + (batch - first_batch) // m


ONE = MicroBatches.constant(1)
