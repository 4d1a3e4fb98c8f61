"""The tables `[data]`, `[[data.source]]`, `[data.mixing]` and `[eval]`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.config.base import SOURCE_NAME, Amount, Args, ImportPath, Size, Table, Text, Weight, WholeNumber

PickMode = Literal["weighted", "uniform", "round_robin"]
BatchingMode = Literal["per_row", "per_stream", "device_per_stream"]


class MixingTable(Table):
    """`[data.mixing]`: how streams are mixed; defaults for every source."""

    num_streams_mixed: Size = 4
    """K: number of streams that a source keeps open at once."""
    pick_mode: PickMode = "weighted"
    """How a micro-batch's stream is picked. weighted: in proportion to the batches left; uniform: equally."""
    batching_mode: BatchingMode = "per_row"
    """per_row: full rows, each of which reads documents one behind the other; per_stream: a micro-batch is of one stream, which
    all ranks pick; device_per_stream: each rank picks its own."""
    batch_size: Size = 8
    """Rows per micro-batch and rank."""
    batch_size_by_modality: dict[Text, Size] = {}
    """Modality -> batch size, where it differs from batch_size."""
    repeat: bool = True
    """Start another epoch when the data is exhausted; false: end the run."""


class MixingOverride(Table):
    """`[data.source.mixing]`: the keys of `[data.mixing]`, for one source; absent keys keep the value they have there."""

    num_streams_mixed: Size | None = None
    pick_mode: PickMode | None = None
    batching_mode: BatchingMode | None = None
    batch_size: Size | None = None
    batch_size_by_modality: dict[Text, Size] | None = None
    repeat: bool | None = None


class FilesTable(Table):
    """Files of documents, for training or evaluation."""

    name: Annotated[str, Field(pattern=SOURCE_NAME, max_length=100)]
    """The source's name in messages, `--set` and metric keys."""
    layout: Literal["nested", "direct"] | None = None
    """nested: `root/<modality>/.../<stream file>`; direct: `paths`, with a directory's name as modality. Absent: follows."""
    root: Text | None = None
    """Directory of a nested layout, or its URL, `s3://bucket/corpus`."""
    paths: list[Text] | None = None
    """Files or globs of a direct layout, or their URLs."""
    modalities: list[Text] | None = None
    """Modalities to read below root; absent: all."""
    format: Text = "auto"
    """auto: by file extension; or a name; or the import path of your own, `(path, options) -> TokenTable`."""
    dtype: Text | None = None
    """numpy dtype of the tokens in `.bin` files without an index (`uint16`)."""
    eod: WholeNumber | None = None
    """Token id that ends a document in `.npy` and `.bin` files; absent: one document per file."""
    text_split: Literal["file", "blank_line"] = "file"
    """Documents of text files. file: each file; blank_line: each block between blank lines."""
    column: Text | None = None
    """Field of JSON lines or Parquet with the documents, strings or lists of ids; absent: text or tokens."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        keys = [key for key in ("root", "paths", "include", "target") if key in type(self).model_fields]
        origins = [key for key in keys if getattr(self, key) is not None]
        if len(origins) != 1:
            raise ValueError(f"needs exactly one of {', '.join(keys)}; got {', '.join(origins) or 'none'}")
        if self.layout == "nested" and self.root is None:
            raise ValueError("layout nested needs root")
        if self.layout == "direct" and self.paths is None:
            raise ValueError("layout direct needs paths")
        if self.modalities is not None and self.root is None:
            raise ValueError("modalities needs root")
        return self


class SourceTable(FilesTable):
    """`[[data.source]]`: one source of the blend. Needs exactly one of root, paths, include and target."""

    include: Text | None = None
    """A dataset file with `[[source]]` tables, relative to this file; weights are multiplied."""
    target: ImportPath | None = None
    """Import path `package.module:function`: returns your own iterable of micro-batches."""
    args: Args = {}
    """Keyword arguments of the target."""
    weight: Weight = 1.0
    """Relative share of the tokens (of the micro-batches, where rows are not full): a number, or a schedule."""
    mixing: MixingOverride = MixingOverride()
    """Keys of `[data.mixing]` that this source sets differently."""

    @model_validator(mode="after")
    def _args_are_of_a_target(self) -> SourceTable:
        if self.args and self.target is None:
            raise ValueError("args needs target")
        return self


class DatasetFile(Table):
    """A dataset file that a source includes."""

    source: Annotated[list[SourceTable], Field(min_length=1)]
    """The file's sources."""


class DataTable(Table):
    """`[data]`: what is read, and how it is cut into cells."""

    seq_len: Annotated[int, Field(ge=1, le=10**8)] = 256
    """T: target tokens per cell."""
    tokenizer: Text = "bytes"
    """`bytes`; the path of a Hugging Face tokenizer.json; or `ids`, for files of token ids."""
    vocab_size: WholeNumber = 0
    """Number of token ids, with tokenizer `ids`; 0 with any other."""
    max_group_cells: WholeNumber = 0
    """Most cells per group; longer documents become several groups. 0: no document is cut."""
    align: Literal["auto", "stream", "document"] = "auto"
    """Of full rows (batching_mode per_row). stream: no gaps, documents begin within rows; document: each begins a row and its
    last one is padded; auto: stream where the model runs resets in one pass."""
    prefetch: Annotated[int, Field(ge=0, le=1000)] = 2
    """Micro-batches prepared ahead by a background thread; 0: no thread."""
    cache_dir: Text | None = None
    """Where each node copies sources that are URLs; absent: `trainer/data` in the user's cache directory."""
    cache_gb: Amount = 100.0
    """Limit on all copies, in GB; 0: none."""
    mixing: MixingTable = MixingTable()
    source: Annotated[list[SourceTable], Field(min_length=1)]


class EvalSourceTable(FilesTable):
    """`[[eval.source]]`: a validation set of your own, with the keys of `[[data.source]]` from name to column."""

    batches: WholeNumber = 0
    """Micro-batches per rank and evaluation, about: so many are filled by documents drawn at random; 0: the whole set."""

    def as_source(self) -> SourceTable:
        """As a source that is read once."""
        return SourceTable.model_validate(self.model_dump(exclude={"batches"}))


class EvalTable(Table):
    """`[eval]`: evaluation on documents that are never trained on: held-out ones, sets of your own, tasks of your own."""

    every: WholeNumber = 0
    """Steps between evaluations, and one after the last step; 0: none."""
    batches: WholeNumber = 0
    """Held-out micro-batches per rank and evaluation, about: so many are filled by documents drawn at random. 0: all held-out
    documents, or as many as cost about 5 % of the time (docs/evaluation.md)."""
    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each stream's documents to hold out, by a hash of their id."""
    depth: bool = False
    """Report the loss by the number of tokens read before, carried and from a zero state, where documents are longer than a
    cell: up to twice the time of an evaluation (docs/evaluation.md)."""
    target: ImportPath | None = None
    """Import path `package.module:function` of your own task (docs/evaluation.md)."""
    args: Args = {}
    """Further keyword arguments of the target."""
    source: list[EvalSourceTable] = []

    @property
    def has_data(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.holdout_fraction > 0 or bool(self.source) or self.target is not None

    @model_validator(mode="after")
    def _fits_together(self) -> EvalTable:
        names = [source.name for source in self.source]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are named {twice[0]}: give each a name of its own")
        if self.args and self.target is None:
            raise ValueError("args are those of a target: name it")
        return self
