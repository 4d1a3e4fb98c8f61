"""Sequences of numbers in place of tokens: their loss, series in files, and the batch by which a
model of them is judged.

It could go if all data were text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.arrays import Ints, is_known
from trainer.data.collate import Batch, Collator, Pieces
from trainer.data.documents import TokenTable, damaged, table_from_pieces
from trainer.data.loader import MicroBatch, accepted_inputs, take_apart
from trainer.data.records import BATCH_ROWS, pyarrow_for
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.import_path import with_own
from trainer.lab.loss_mask import CountingCollator, refuse_missing
from trainer.lab.nested_state import some_rows
from trainer.model.protocol import ModelOutput, extras_of

if TYPE_CHECKING:
    from trainer.config.data_tables import DataTable
    from trainer.config.schema import RunConfig

POSITIONS = 256  # of the first batch that are tried: copies of the model have them


class SquaredError:
    """`[objective] target`: the squared error of each known value of float targets [B, T, ...]."""

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """The losses, in the shape of the targets; what stands at an unknown one is no matter."""
        if output.shape == (*targets.shape, 1):
            output = output.squeeze(-1)
        if output.shape != targets.shape or not targets.is_floating_point():
            found = f"{targets.dtype} {list(targets.shape)}"
            raise ValueError(f"the output is {list(output.shape)}, and the targets are {found}")
        return (output.to(targets.dtype) - targets.masked_fill(~is_known(targets), 0.0)).square()


class Series(Tokenizer):
    """Reads series, in the place of a tokenizer: the rows of documents are F numbers.

    Row t is predicted from row t - 1, the first one from zeros; or its columns `targets` from the
    others, unshifted. Raises UserError: a key of `[data]` does not fit.
    """

    def __init__(self, data: DataTable) -> None:
        self.vocab_size = self.bos_id = self.width = data.features
        self.columns, self.targets = tuple(data.columns), data.targets
        self.name = f"series of {self.width} numbers, columns {data.columns}, targets {data.targets}"
        of_text = data.tokenizer != "bytes" or data.vocab_size or data.eod is not None or data.parse_special
        fits = {
            "data.columns": len(data.columns) in (0, self.width),
            "data.targets": {*data.targets} < {*range(self.width)} and len({*data.targets}) == len(data.targets),
            "data.tokenizer, vocab_size, eod and parse_special": not of_text,
        }
        for key, is_fit in fits.items():
            if not is_fit:
                problem = f"does not fit data.features = {self.width}"
                fix = "name as many columns, as targets some of them from 0, and nothing of text"
                raise UserError(key, problem, fix)

    def refuse_unfit(self, path: str, document: int, start: int, rows: npt.NDArray[Any]) -> None:
        """Refuse rows [n, F] of a document, from `start` on, with numbers that no model takes."""
        with np.errstate(over="ignore"):
            given = rows.astype(np.float32, copy=False)  # as the collator gives them
        is_bad = ~np.isfinite(given)
        is_bad[:, self.targets] = np.isinf(given[:, self.targets])
        for row, column in np.argwhere(is_bad)[:1].tolist():
            where = f"{path}: document {document}, row {start + row}, column {column}"
            fix = "fill it in; NaN may stand in data.targets alone"
            raise damaged(where, f"is {rows[row, column]}, and a model takes finite float32", fix)

    @property
    def collator(self) -> type[Collator]:
        """Makes the batches."""
        return SeriesCollator

    def encode(self, text: str) -> Ints:
        """Refused."""
        fix = "set sample.every = 0; nothing can be sampled"
        raise UserError("data.features", "are numbers, and a prompt is text", fix)

    def decode(self, ids: Any) -> str:
        """Rows for people."""
        return "; ".join(" ".join(f"{number:.4g}" for number in row) for row in ids)

    def load(self, path: Path, format: str, _: object) -> TokenTable:
        """The series of a file."""
        if format == "parquet" and self.columns:
            return self.table(self._parquet(path), where=str(path))
        if format != "npy":
            problem = f"is read as {format}, and series are .npy, or Parquet with data.columns"
            raise damaged(path, problem, "leave it out, or convert it")
        try:
            rows = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except Exception as error:  # numpy evaluates the header, so a damaged one raises anything
            raise damaged(path, f"is not a readable .npy array ({error})") from error
        if rows.ndim and not len(rows):
            raise damaged(path, "has no rows", "remove the file")
        is_plain = rows.ndim == 2 and rows.dtype.kind == "f" and rows.dtype.isnative and rows.flags.c_contiguous
        if not is_plain or rows.shape[1] != self.width:
            found = f"{rows.dtype.str} {list(rows.shape)}" + " in Fortran order" * (not rows.flags.c_contiguous)
            problem = f"must be floats [T, {self.width}], little-endian and in C order, got {found}"
            raise damaged(path, problem, "write it so, or set data.features to its numbers per row")
        return TokenTable(rows, np.zeros(1, np.int64), np.array([len(rows)]))

    def _parquet(self, path: Path) -> Iterator[Any]:
        """The rows of each document, float32 [T, F]."""
        with pyarrow_for(path, "Parquet") as pyarrow, pyarrow.parquet.ParquetFile(path) as file:
            kinds = file.schema_arrow
            refuse_missing(path, self.columns, kinds.names)
            odd = [name for name in self.columns if not hasattr(kinds.field(name).type, "value_field")]
            if odd:
                raise damaged(path, f"{odd[0]} holds no lists", "write a series as one row of lists")
            for batch in file.iter_batches(BATCH_ROWS, columns=list(self.columns)):
                lists = [batch.column(name).cast(pyarrow.large_list(pyarrow.float64())) for name in self.columns]
                lengths = [each.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False) for each in lists]
                if any((own != lengths[0]).any() or (own < 0).any() for own in lengths):
                    problem = f"has a row whose {', '.join(self.columns)} are of unequal length, or null"
                    raise damaged(path, problem, "write lists of one length in each row")
                columns = [each.flatten().to_numpy(zero_copy_only=False) for each in lists]
                with np.errstate(over="ignore"):  # refused when it is read
                    rows = np.stack(columns, 1).astype(np.float32)
                yield from np.split(rows, lengths[0].cumsum()[:-1])

    def table(self, pieces: Iterable[Any], *, where: str) -> TokenTable:
        """Series, [T, F] each, in one array."""
        bits = (np.ascontiguousarray(piece, np.float32).ravel().view(np.uint32) for piece in pieces)
        flat = table_from_pieces(bits, 1 << 32, where=where)
        return TokenTable(
            flat.tokens.view(np.float32).reshape(-1, self.width), flat.starts // self.width, flat.lengths // self.width
        )


def _parts(rows: Any, targets: Sequence[int]) -> tuple[Any, Any]:
    """Inputs and targets, by columns; all are both if no targets are named."""
    if not targets:
        return rows, rows
    return np.delete(rows, targets, axis=-1), rows[..., list(targets)]


class SeriesCollator(CountingCollator):
    """Gives `features` [B, T, ...] in the place of tokens, and float targets, NaN in gaps."""

    _unknown = np.nan

    def __init__(self, tokenizer: Tokenizer, **how: Any) -> None:
        super().__init__(tokenizer, **how)
        assert isinstance(tokenizer, Series)
        self._series, self._targets = tokenizer, tokenizer.targets
        self._nothing: Any = np.zeros((self._row_tokens, tokenizer.width), np.float32)

    def _content(self, found: Pieces, begins: Ints) -> Batch:
        with np.errstate(over="ignore"):  # refused below
            rows = np.concatenate(found.tokens, dtype=np.float32, casting="same_kind")
        features, targets = _parts(rows, self._targets)
        if not self._targets:  # from the row before, which of a segment's first one is in another piece
            features = np.zeros_like(rows)
            features[1:] = rows[:-1]
            features[begins] = 0.0
            for at, read in zip(begins, found.reads, strict=True):
                if read is not None and (read[0].first or read[1]):
                    of, offset, _ = read
                    features[at] = of.source.documents.tokens[of.begin + offset - 1]
        is_fit = np.isfinite(rows).all() if not self._targets else not np.isinf(targets).any()
        if not (is_fit and np.isfinite(features).all()):
            self._refuse(found)
        return {"features": features, "targets": targets}

    def _refuse(self, found: Pieces) -> None:
        for of, offset, size in filter(None, found.reads):
            start = max(of.first + offset - 1, 0)
            rows = of.source.documents.read(of.document, start, of.first + offset + size)
            self._series.refuse_unfit(of.source.stream.path, of.document, start, rows)


def first_batch(model: nn.Module, config: RunConfig, vocab_size: int) -> MicroBatch | None:
    """That of the first data set of the user's own, or drawn features, on the model's device; None
    if there are neither, or the model takes tokens alone. Raises UserError: it is no batch, or not
    for this model."""
    accepted, where = accepted_inputs(model), ""
    if config.data.features:
        shape = 8, config.data.seq_len, config.data.features
        drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        features, targets = map(torch.from_numpy, _parts(drawn, config.data.targets))
        batch: dict[str, Any] = {"features": features, "targets": targets}
    else:
        evaluated = config.eval.source * bool(config.eval.every)
        read = (*(each for each in config.data.source if not each.is_off), *evaluated)
        own = next((each for each in read if each.target), None)
        if own is None or (accepted is not None and accepted <= {"tokens", "resets"}):
            return None
        where = f"{'eval ' * (own in evaluated)}source {own.name}: "
        of_rank = with_own({"rank": 0, "world_size": 1}, own.args, f"{where}args")
        given = {"seed": config.run.seed, "seq_len": config.data.seq_len, **of_rank}
        batch = _read(str(own.target), json.dumps(given), f"{where}target", vocab_size)
    return take_apart(batch, accepted, where).to(next(model.parameters(), torch.empty(0)).device)


@lru_cache(1)  # it is asked for several times, and a data set may take long to make
def _read(path: str, given: str, key: str, vocab_size: int) -> dict[str, Any]:
    from trainer.lab.own_batches import OwnBatches, make_own

    with torch.device("cpu"):  # also where a model is built without memory
        return OwnBatches(make_own(path, json.loads(given), key), vocab_size=vocab_size, key=key).first()


class OnPositions(nn.Module):
    """A model as one of tokens: token i stands for the i-th position of a batch.

    So the checks, which draw, change and cut rows of tokens, do so with inputs of the real data.
    What a batch has by row is that of its first one.
    """

    def __init__(self, model: nn.Module, micro: MicroBatch) -> None:
        super().__init__()
        self.model, self.fixed = model, some_rows(micro, 1)
        for name in {"state_width", "state_layout", "loss_keys"} & {*dir(model)}:
            setattr(self, name, getattr(model, name))
        shape = micro.targets.shape[:2]
        self.num = min(POSITIONS, shape.numel())
        for key, value in micro.inputs.items():
            if isinstance(value, Tensor) and value.shape[:2] == shape:
                self.register_buffer(f"of_{key}", value.flatten(0, 1)[: self.num].clone(), persistent=False)

    def forward(self, tokens: Tensor, state: Tensor | None = None, **more: Tensor) -> ModelOutput:
        """Run the model on the positions `tokens` [B, T]."""
        given = dict(self.fixed)
        for key, value in self.fixed.items():
            if f"of_{key}" in self._buffers:
                given[key] = self.get_buffer(f"of_{key}")[tokens]
            elif isinstance(value, Tensor) and len(value.shape) > 0:
                given[key] = value.expand(len(tokens), *value.shape[1:])
        output = self.model(**{**given, **more}, state=state)
        found = output.logits.reshape(*output.logits.shape[:2], -1)
        # As wide as a vocabulary: the checks leave out columns that are constant.
        found = F.pad(found, (0, max(self.num - found.shape[2], 0)))
        return ModelOutput(found, output.state, *extras_of(output))
