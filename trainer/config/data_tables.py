"""The base class of all tables, the types that they share, and the tables `[data]` and `[eval]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    TypeAdapter,
    model_validator,
)
from pydantic_core import CoreSchema

from trainer.options import (
    NO_NUL,
    BatchingMode,
    MicroBatchCount,
    MixingOptions,
    Options,
    PickMode,
    Size,
    Text,
    TextSplit,
    Tokens,
    WholeNumber,
)

# Tags of the unions of numbers and tables, in angle brackets to keep them distinct from keys.
NUMBER_TAG = "<number>"
SCHEDULE_TAG = "<schedule>"
TAGS = (NUMBER_TAG, SCHEDULE_TAG, "[key]")  # in pydantic's error paths; `load` removes them
# String patterns, and how error messages describe them.
PLAIN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
SOURCE_NAME = r"^[A-Za-z0-9_.-]+$"
IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
FORMS = {
    PLAIN_NAME: 'letters, digits, "_", "." and "-", starting with a letter, digit or "_"',
    SOURCE_NAME: 'letters, digits, "_", "." and "-"',
    IMPORT_PATH: "an import path package.module:function",
    NO_NUL: "text without NUL characters",
}

Share = Annotated[float, Field(ge=0, le=1e15)]  # relative to the others: may be a size in bytes
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # three years; torch counts milliseconds
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
ImportPath = Annotated[str, Field(pattern=IMPORT_PATH, max_length=4096)]


def _storable(args: dict[str, Any]) -> dict[str, Any]:
    """Refuse values that a checkpoint's config, which is JSON, could not hold."""
    try:
        json.dumps(args, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("holds a date, NaN or infinity: write it as a string, for JSON") from None
    return args


Args = Annotated[dict[str, Any], AfterValidator(_storable)]


def _no_number(value: Any) -> Any:
    """Refuse 1 and 0, which Python takes for true and false."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'must be "auto", true or false, got {value}')
    return value


AutoSwitch = Annotated[Literal["auto", True, False], BeforeValidator(_no_number)]


class Table(BaseModel):
    """One TOML table: frozen and strictly typed; refuses unknown keys, NaN and infinity.

    A table of `Options` has their fields, before its own.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,  # "2" and 2.0 are no integers
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,  # a default of options has passed no check of pydantic's
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        """Refuse conflicting values: `check`, of a table or of its `Options`, raises a ValueError."""
        if hasattr(self, "check"):
            self.check()
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Add the descriptions of inherited options, which pydantic leaves out."""
        for base in cls.__mro__:
            if Options in base.__bases__:
                for name, node in TypeAdapter(base).json_schema()["properties"].items():
                    cls.__pydantic_fields__[name].description = node.get("description")
        return handler(source)


def _whole(key: Any) -> int:
    """A point's key as a number: of one spelling, so that no two strings are the same number."""
    if not re.fullmatch("0|[1-9][0-9]*", str(key)):
        raise ValueError("is no whole number such as 1000: a position in the run")
    return int(key)


Position = Annotated[Tokens, BeforeValidator(_whole)]
Points = Annotated[dict[Position, Share], Field(min_length=1)]
BatchPoints = Annotated[dict[Position, MicroBatchCount], Field(min_length=1)]


class ScheduleTable(Table):
    """A weight that changes: `{ schedule = "linear", points = { 0 = 3.0, 150 = 1.0 } }`."""

    schedule: Literal["linear", "step"]
    """linear: interpolate between points; step: take the last point reached. Constant outside
    the points."""
    unit: Literal["batch", "step"] = "batch"
    """Unit of the points: a rank's micro-batches, from 0, or optimizer steps, from 1."""
    points: Points
    """Position in the run -> weight."""
    scale: Share = 1.0
    """Factor on the weight of every point."""


class BatchScheduleTable(Table):
    """A planned m: `{ schedule = "step", points = { 0 = 1, 1000 = 2 } }`."""

    schedule: Literal["step"]
    """step: take the last point reached, or the first one."""
    points: BatchPoints
    """Optimizer step, from 1 -> micro-batches."""


def _kind(value: Any) -> str:
    return SCHEDULE_TAG if isinstance(value, Mapping | Table) else NUMBER_TAG


Weight = Annotated[
    Annotated[Share, Tag(NUMBER_TAG)] | Annotated[ScheduleTable, Tag(SCHEDULE_TAG)],
    Discriminator(_kind),
]
BatchSize = Annotated[
    Annotated[MicroBatchCount, Tag(NUMBER_TAG)] | Annotated[BatchScheduleTable, Tag(SCHEDULE_TAG)],
    Discriminator(_kind),
]


class MixingTable(Table, MixingOptions):
    """`[data.mixing]`: how streams are mixed; defaults for every source."""

    spread: Size = 16
    """c: full rows: steps from one row of a document to its next, at most; few documents make it
    smaller (docs/mixing.md)."""

    # pydantic overlooks the default_factory of a dataclass.
    batch_size_by_modality: dict[Text, Size] = {}


class MixingOverride(Table):
    """`[data.source.mixing]`: keys of `[data.mixing]` for one source; absent: as there."""

    num_streams_mixed: WholeNumber | None = None
    pick_mode: PickMode | None = None
    batching_mode: BatchingMode | None = None
    batch_size: Size | None = None
    batch_size_by_modality: dict[Text, Size] | None = None
    repeat: bool | None = None


def refuse_lone_args(table: Any) -> None:
    """Refuse `args` without a `target`."""
    if table.args and table.target is None:
        raise ValueError("args are those of a target of your own: name it, or use this table's keys")


class FilesTable(Table):
    """Files of documents, or a data set of the user's own, for training or evaluation."""

    name: Annotated[str, Field(pattern=SOURCE_NAME, max_length=100)]
    """The source's name in messages, `--set` and metric keys."""
    root: Text | None = None
    """Nested layout: directory that holds `<modality>/.../<stream file>`."""
    paths: list[Text] | None = None
    """Files or globs of a direct layout, with a directory's name as modality."""
    modalities: Annotated[list[Text], Field(min_length=1)] | None = None
    """Modalities to read below root; absent: all."""
    format: Text = "auto"
    """auto: by file extension; or a name; or the import path of your own (docs/mixing.md)."""
    dtype: Text | None = None
    """numpy dtype of the tokens in `.bin` files without an index (`uint16`)."""
    eod: WholeNumber | None = None
    """Token id that ends a document in `.npy` and `.bin` files; absent: one document per file."""
    text_split: TextSplit = "file"
    """Documents of text files. file: each file; blank_line: each block between blank lines."""
    column: Text | None = None
    """Field of JSON lines, Parquet or Arrow with texts or lists of ids; absent: text or tokens."""
    loss_mask: Text | None = None
    """Field of the tokens that are trained, as spans of the text or 0 and 1 for ids; absent: all."""
    target: ImportPath | None = None
    """Import path `package.module:function`: returns your own iterable of micro-batches."""
    args: Args = {}
    """Keyword arguments of the target."""

    def check(self) -> None:
        """Refuse files of no origin or of several, and keys without effect."""
        refuse_lone_args(self)
        keys = [key for key in ("root", "paths", "include", "target") if key in type(self).model_fields]
        origins = [key for key in keys if getattr(self, key) is not None]
        if len(origins) != 1:
            given = ", ".join(origins) or "none"
            raise ValueError(f"needs exactly one of {', '.join(keys)}; got {given}")
        if self.modalities is not None and self.root is None:
            raise ValueError("modalities needs root")
        of_files = {*FilesTable.model_fields, "mixing"} - {"name", "root", "paths", "target", "args"}
        fields = {key: field for key, field in type(self).model_fields.items() if key in of_files}
        others = [key for key, field in fields.items() if getattr(self, key) != field.default]
        if others and origins[0] in ("include", "target"):
            raise ValueError(f"{others[0]} is for files that are named here, not for {origins[0]}")


class SourceTable(FilesTable):
    """`[[data.source]]`: a source. Needs exactly one of root, paths, include and target."""

    include: Text | None = None
    """A dataset file, relative to this file: its `[[source]]` tables replace this one,
    weights multiplied; `--set` cannot change them."""
    weight: Weight = 1.0
    """Share of the tokens (micro-batches, if rows are not full): a number, or a schedule."""
    mixing: MixingOverride = MixingOverride()
    """Keys of `[data.mixing]` that this source sets differently."""

    @property
    def is_off(self) -> bool:
        """Whether its weight is always 0, so that nothing of it is read."""
        if isinstance(self.weight, ScheduleTable):
            return not any(value * self.weight.scale for value in self.weight.points.values())
        return self.weight == 0


class DatasetFile(Table):
    """A dataset file that a source includes."""

    source: Annotated[list[SourceTable], Field(min_length=1)]


class DataTable(Table):
    """`[data]`: what is read, and how it is cut into cells."""

    seq_len: Annotated[int, Field(ge=1, le=10**8)] = 256
    """T: target tokens per cell."""
    features: WholeNumber = 0
    """F: numbers in a row of a series, of `.npy` [T, F] or Parquet of series; 0: tokens."""
    columns: list[Text] = []
    """Parquet of series: its F columns of lists, in this order."""
    targets: list[WholeNumber] = []
    """Columns of a series, from 0, to predict from the others; absent: all, from the row before."""
    tokenizer: Text = "bytes"
    """`bytes`; the path of a Hugging Face tokenizer.json; or `ids`, for files of token ids."""
    vocab_size: WholeNumber = 0
    """Number of token ids, with tokenizer `ids`; 0 with any other."""
    eod: WholeNumber | None = None
    """Token id that ends each document of text, and generation; files of ids have it already."""
    parse_special: bool = False
    """Whether `<|endoftext|>` in text is that special token of the tokenizer.json."""
    max_group_cells: WholeNumber = 0
    """Most cells per group; longer documents become several groups. 0: no document is cut."""
    align: Literal["auto", "stream", "document"] = "auto"
    """Alignment of full rows (batching_mode per_row). stream: no gaps, documents begin within
    rows; document: each begins a row and its last one is padded; auto: stream where the model
    runs resets in one pass."""
    prefetch: Annotated[int, Field(ge=0, le=1000)] = 2
    """Micro-batches prepared ahead by a background thread; 0: no thread."""
    cache_dir: Text | None = None
    """Where each node keeps tokens of text, until you delete them; absent: the user's cache."""
    mixing: MixingTable = MixingTable()
    source: Annotated[list[SourceTable], Field(min_length=1)]

    def check(self) -> None:
        """Refuse keys of series without `features`."""
        if not self.features and (self.targets or self.columns):
            raise ValueError("targets and columns are those of series: set features")

    @property
    def values(self) -> int:
        """Most known values of a position, which count as tokens."""
        return len(self.targets) or max(self.features, 1)


class EvalSourceTable(FilesTable):
    """`[[eval.source]]`: a validation set, with the keys `name` to `args` of a source."""

    batches: WholeNumber = 0
    """Number of random micro-batches per rank and evaluation, about; 0: the whole set."""

    def as_source(self) -> SourceTable:
        """The same files as a source; evaluations read it once."""
        return SourceTable.model_validate(self.model_dump(exclude={"batches"}))


class EvalTable(Table):
    """`[eval]`: evaluation on held-out documents, sets of your own and tasks of your own."""

    every: WholeNumber = 0
    """Steps between evaluations, and one after the last step; 0: none."""
    batches: WholeNumber = 0
    """Number of random held-out micro-batches per rank and evaluation, about; 0: all, or as many
    as cost about 5 % of the time (docs/evaluation.md)."""
    holdout_fraction: BelowOne = 0.0
    """Fraction of each stream's documents to hold out, by a hash of their id."""
    depth: bool = False
    """Report the loss by the number of tokens read before, carried and from a zero state: up to
    twice the time of an evaluation (docs/evaluation.md)."""
    target: ImportPath | None = None
    """Import path `package.module:function` of your own task (docs/evaluation.md)."""
    args: Args = {}
    """Further keyword arguments of the target."""
    source: list[EvalSourceTable] = []

    @property
    def has_data(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.holdout_fraction > 0 or bool(self.source) or self.target is not None

    def check(self) -> None:
        """Refuse `args` without a `target`."""
        refuse_lone_args(self)
