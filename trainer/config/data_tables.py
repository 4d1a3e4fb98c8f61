"""The tables below `[data]`: sources, mixing, evaluation's share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config.base import SOURCE_NAME, Table, Weight

PickMode = Literal["weighted", "uniform", "round_robin"]
BatchingMode = Literal["per_stream", "device_per_stream"]
Count = Annotated[int, Field(ge=1)]


class MixingTable(Table):
    """`[data.mixing]`: how streams are mixed; the defaults of every source."""

    num_streams_mixed: Count = 4
    """K: readers that are active at once."""
    pick_mode: PickMode = "weighted"
    """weighted: by remaining picks, so that the active readers drain together; uniform; round_robin."""
    batching_mode: BatchingMode = "per_stream"
    """per_stream: all ranks pick the same stream; device_per_stream: every rank has a pool of its own."""
    batch_size: Count = 8
    """Cells per micro-batch and rank."""
    batch_size_by_modality: dict[str, Count] = {}
    """Another batch size for the streams of a modality."""
    repeat: bool = True
    """Start the next epoch when all streams are read; false: the run ends with the data."""


class MixingOverride(Table):
    """`[data.source.mixing]`: what one source does differently; absent keys are those of `[data.mixing]`."""

    num_streams_mixed: Count | None = None
    """As in `[data.mixing]`."""
    pick_mode: PickMode | None = None
    """As in `[data.mixing]`."""
    batching_mode: BatchingMode | None = None
    """As in `[data.mixing]`."""
    batch_size: Count | None = None
    """As in `[data.mixing]`."""
    batch_size_by_modality: dict[str, Count] | None = None
    """As in `[data.mixing]`."""
    repeat: bool | None = None
    """As in `[data.mixing]`."""

    def applied_to(self, defaults: MixingTable) -> MixingTable:
        """`defaults` with this table's keys in their place."""
        return defaults.model_copy(update=self.model_dump(exclude_none=True))


class SourceTable(Table):
    """`[[data.source]]`: one source of the blend."""

    name: Annotated[str, Field(min_length=1, pattern=SOURCE_NAME)]
    """Names the source in messages and in `blend/share/<name>`."""
    layout: Literal["nested", "direct"] | None = None
    """nested: `root/<modality>/.../<stream file>`; direct: the files of `paths`, modality = parent directory."""
    root: str | None = None
    """nested: the directory, relative to the working directory."""
    paths: list[str] | None = None
    """direct: files or globs, relative to the working directory."""
    modalities: list[str] | None = None
    """nested: which of the root's modalities; all, if absent."""
    include: str | None = None
    """A dataset file with `[[source]]` entries of its own, relative to this file; weights multiply."""
    target: str | None = None
    """Import path `package.module:function` of a function that builds your own iterable of micro-batches."""
    args: dict[str, Any] = {}
    """target: passed on to the function."""
    weight: Weight = 1.0
    """Share of the micro-batches, relative to the other sources: a number or a schedule."""
    mixing: MixingOverride = MixingOverride()
    """What this source mixes differently from `[data.mixing]`."""
    format: Annotated[str, Field(min_length=1)] = "auto"
    """auto: by file extension; a format's name, for files with another extension; or the import path
    `package.module:function` of a format of your own: `(path, options) -> TokenTable`."""
    dtype: str | None = None
    """Headerless `.bin`: the numpy type of a token (`uint16`)."""
    eod: int | None = None
    """`.npy` and `.bin`: the token id that ends a document; absent: the file is one document."""

    @model_validator(mode="after")
    def _one_origin(self) -> SourceTable:
        origins = [key for key in ("root", "paths", "include", "target") if getattr(self, key) is not None]
        if len(origins) != 1:
            raise ValueError(f"needs exactly one of root, paths, include, target; got {', '.join(origins) or 'none'}")
        if self.layout == "nested" and self.root is None:
            raise ValueError("layout nested needs root")
        if self.layout == "direct" and self.paths is None:
            raise ValueError("layout direct needs paths")
        if self.modalities is not None and self.root is None:
            raise ValueError("modalities goes with root")
        if self.args and self.target is None:
            raise ValueError("args goes with target")
        return self


class DatasetFile(Table):
    """A dataset file that a source includes."""

    source: Annotated[list[SourceTable], Field(min_length=1)]
    """The file's sources."""


class DataTable(Table):
    """`[data]`: what is read, and how it is cut."""

    seq_len: Count = 256
    """T: target tokens in a cell."""
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    """`bytes`; the path of a Hugging Face tokenizer.json; or `ids` for files that hold token ids."""
    vocab_size: Annotated[int, Field(ge=0)] = 0
    """tokenizer `ids`: how many token ids there are; ids beyond are refused. Otherwise 0: the tokenizer knows."""
    max_group_cells: Count = 64
    """Longer documents are cut into groups of at most this many cells."""
    pack: bool = False
    """Put several documents shorter than a cell into one row; they carry no state across rows."""
    prefetch: Annotated[int, Field(ge=0)] = 2
    """Micro-batches made ahead in a thread; 0: made in the step."""
    mixing: MixingTable = MixingTable()
    """Defaults of every source."""
    source: Annotated[list[SourceTable], Field(min_length=1)]
    """The sources of the blend."""


class EvalTable(Table):
    """`[eval]`: evaluation on documents that are never trained on."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: none."""
    batches: Count = 8
    """Held-out micro-batches per rank and evaluation."""
    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each stream's documents that is held out, chosen by a hash of the document's id."""
