"""The documents of a file as runs of tokens in one array, and the mapped formats of token ids.

These are `.npy`, headerless `.bin`, and Megatron-LM's indexed files: `NAME.bin` holds the ids and
`NAME.idx` the positions of the documents, all little-endian: the magic, the version (u64, 1), the
dtype code (u8), the number of sequences (u64), the number of document indices (u64), the sizes of
the sequences in tokens (i32 each), their byte offsets in the `.bin` (i64 each), and the document
indices (i64 each): document d holds the sequences from index d up to index d + 1.

Damaged files and ids outside the vocabulary are a UserError with the path and the place.
"""

from __future__ import annotations

import itertools
import struct
import tempfile
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.data.tokenizer import IdsTokenizer, Tokenizer
from trainer.errors import UserError
from trainer.options import Options, TextSplit, part_options

if TYPE_CHECKING:  # they import this module
    from trainer.data.collate import Collator
    from trainer.data.groups import OpenStream

TokenArray = npt.NDArray[Any]  # any integer dtype: as stored on disk
Kind: TypeAlias = Literal["text", "ids"]  # of a file: text to be tokenized, or token ids
AGAIN = "write the file again"
FOR_SERIES = "for series of numbers write data.features, model.target and objective.target (docs/mixing.md)"
WHOLE = 1 << 22  # tokens: files up to this size are checked completely when they are opened
SAMPLE, NUM_SAMPLES = 1 << 14, 16  # larger files: tokens per stretch, and stretches
CHUNK = 1 << 16  # tokens checked together: checking each short document would take longer
SPOOLED = 256_000_000  # bytes of tokens that a file of text may take in memory
SCANNED = 1 << 22  # tokens scanned at a time
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# The format has codes of floats too.
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def damaged(where: Path | str, problem: str, fix: str = AGAIN) -> UserError:
    """The error for a file, or a place in it, that does not hold what its format promises."""
    return UserError(str(where), " ".join(problem.split()), fix)


@dataclass(frozen=True)
class IdBounds:
    """Ids of a file must be 0 to num_ids - 1: those of the tokenizer, with `ids` but for the last,
    which begins documents."""

    where: str  # the file or the place in it
    num_ids: int
    tokenizer: str  # its name

    @classmethod
    def of(cls, where: Path | str, tokenizer: Tokenizer) -> IdBounds:
        """The bounds that a tokenizer sets for a file."""
        num_ids = tokenizer.vocab_size
        if isinstance(tokenizer, IdsTokenizer):
            num_ids = tokenizer.bos_id
        return cls(str(where), num_ids, tokenizer.name)

    def refusal(self, token: int, position: str = "", read_as: str = "") -> UserError:
        """The error for an id that is out of range; `position` and `read_as` end its sentence."""
        outside = f"is outside the vocabulary of {self.num_ids} ids ({self.tokenizer})"
        setting = "data.vocab_size" if self.tokenizer == IdsTokenizer.name else "the tokenizer"
        fix = f"set {setting}, or the dtype of a .bin, to that of the tool that made the file"
        return damaged(self.where, f"token id {token}{position} {outside}{read_as}", fix)

    def check_eod(self, eod: int, key: str) -> None:
        """Refuse an end-of-document id that no file can hold."""
        if not 0 <= eod < self.num_ids:
            problem = f"{eod} is outside the vocabulary of {self.num_ids} ids ({self.tokenizer})"
            raise UserError(key, problem, "set it to the id that ends documents")

    def check(self, tokens: npt.NDArray[Any], begin: int) -> None:
        """Refuse the first id that is out of range; `begin`: the place of `tokens` in the file."""
        # As unsigned, a negative id is above all others of its type: one maximum checks both ends.
        unsigned = tokens.view(f"u{tokens.dtype.itemsize}")
        if tokens.size and int(unsigned.max()) >= min(self.num_ids, np.iinfo(tokens.dtype).max + 1):
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self.num_ids))[0])
            position, read_as = f" at token {begin + at}", f", read as {tokens.dtype}"
            raise self.refusal(int(tokens[at]), position, read_as)

    def check_sample(self, tokens: npt.NDArray[Any]) -> None:
        """Check a small file completely, or a few stretches of a large one, as `check` does."""
        if len(tokens) <= WHOLE:
            self.check(tokens, 0)
            return
        for start in np.linspace(0, len(tokens) - SAMPLE, NUM_SAMPLES).astype(np.int64).tolist():
            self.check(tokens[start : start + SAMPLE], start)


@dataclass(frozen=True)
class TokenTable:
    """All tokens of a file in one array (in memory or mapped), and where each document lies."""

    tokens: TokenArray  # any integer dtype, [N]; of series their rows, floats [N, F]
    starts: Ints  # where each document begins, int64 [D]
    lengths: Ints  # tokens per document, int64 [D]

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document, as a view."""
        assert 0 <= start <= stop <= self.lengths[document], (document, start, stop)
        begin = int(self.starts[document]) + start
        return self.tokens[begin : begin + stop - start]


@runtime_checkable
class Reader(Protocol):
    """Reads documents that are not plain ids, and makes their batches. A tokenizer may be one."""

    @property
    def collator(self) -> type[Collator]: ...
    def load(self, path: Path, format: str, options: ReadOptions) -> TokenTable: ...
    def table(self, pieces: Iterable[TokenArray], where: str) -> TokenTable: ...


class Mask(Reader, Protocol):
    """Knows from a `field` of records which tokens are trained."""

    @property
    def field(self) -> str: ...
    def refuse_absent(self, where: Path | str, fields: Collection[str]) -> None: ...
    def pieces(self, path: Path, options: ReadOptions) -> Iterator[TokenArray]: ...
    def coded(self, where: str, content: str | TokenArray, mask: Any, options: ReadOptions) -> TokenArray: ...
    def refuse_untrained(self, opened: Iterable[OpenStream], source: str) -> Iterator[OpenStream]: ...


def reader_of(tokenizer: Tokenizer, mask: Mask | None) -> Reader | None:
    """What reads the documents of a source; None: they are plain ids."""
    if mask is None and isinstance(tokenizer, Reader):
        return tokenizer
    return mask


@part_options
class ReadOptions(Options):
    tokenizer: Tokenizer
    """Tokenizes text, and bounds the ids in token files."""
    dtype: str | None = None
    """The type of a headerless token file (`uint16`, ...)."""
    eod: int | None = None
    """The id that ends a document in a token file; None: the file is one document."""
    text_split: TextSplit = "file"
    """A raw text file is one document (`file`), or one per block between blank lines."""
    format: str = "auto"
    """`auto` (by file extension), a key of `FORMATS`, or an import path."""
    column: str | None = None
    """The documents' field in JSON lines, Parquet or Arrow; None: `text` or `tokens`."""
    text_eod: int | None = None
    """The id to end each document of text with; None: none."""
    loss_mask: Mask | None = None
    """None: all tokens are trained."""

    @cached_property
    def reader(self) -> Reader | None:
        """`reader_of` these."""
        return reader_of(self.tokenizer, self.loss_mask)


def table_from_pieces(pieces: Iterable[TokenArray], vocab_size: int, *, where: str = "tokens") -> TokenTable:
    """Concatenate documents that are tokenized one by one, in the smallest dtype for the ids; many
    are in a mapped temporary file (`TMPDIR`). Raises UserError, naming the file `where`, at an id
    outside the vocabulary. `pieces`: the ids of each document, all signed or all unsigned.
    """
    dtype, lengths = np.dtype(np.min_scalar_type(max(vocab_size - 1, 0))), array("q")
    bounds, num_tokens = IdBounds(where, vocab_size, "the tokenizer"), 0
    with tempfile.SpooledTemporaryFile(SPOOLED, prefix="trainer-tokens-") as store:
        waiting: list[TokenArray] = []
        size = 0
        for piece in itertools.chain(pieces, [None]):
            if piece is not None:
                if len(piece):  # an empty one may be of floats
                    waiting.append(piece)
                lengths.append(len(piece))
                size += len(piece)
            if waiting and (piece is None or size >= CHUNK):
                chunk = np.concatenate(waiting)
                bounds.check(chunk, num_tokens)
                num_tokens += store.write(chunk.astype(dtype).tobytes()) // dtype.itemsize
                waiting, size = [], 0
        num_bytes = store.tell()
        store.flush()
        store.seek(0)
        if num_bytes > SPOOLED:
            tokens = np.asarray(np.memmap(store, dtype, "r"))  # the file is gone with the mapping
        else:
            tokens = np.frombuffer(store.read(), dtype)
    sizes = np.array(lengths, dtype=np.int64)
    return TokenTable(tokens, np.cumsum(sizes) - sizes, sizes)


def _document_ends(tokens: TokenArray, eod: int, bounds: IdBounds) -> Ints:
    """Where each document ends, just past its end-of-document id, int64 [D]; checks every id."""
    found = []
    for start in range(0, len(tokens), SCANNED):
        chunk = tokens[start : start + SCANNED]
        bounds.check(chunk, start)
        found.append(np.flatnonzero(chunk == eod) + (start + 1))
    ends = np.concatenate(found).astype(np.int64)
    if len(ends) and ends[-1] == len(tokens):
        return ends
    return np.append(ends, len(tokens))  # the last document lacks the id


def _table(path: Path, mapped: TokenArray, options: ReadOptions) -> TokenTable:
    """Without an end-of-document id the file is one document, of which a sample is checked."""
    if not len(mapped):
        raise damaged(path, "has no tokens", "remove the file")
    # A plain ndarray: slicing the memmap subclass costs several times as much.
    tokens, bounds = np.asarray(mapped), IdBounds.of(path, options.tokenizer)
    start = np.zeros(1, np.int64)
    if options.eod is None:
        bounds.check_sample(tokens)
        return TokenTable(tokens, start, start + len(tokens))
    ends = _document_ends(tokens, options.eod, bounds)
    starts = np.concatenate([start, ends[:-1]])
    return TokenTable(tokens, starts, ends - starts)


def load_npy(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a 1-D integer `.npy`; each keeps the id that ends it as its last token."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy evaluates the header, so a damaged one raises anything
        if "pickled" in str(error):  # numpy's guess at what has no header
            fix = 'if it holds ids alone, set format = "bin" and their dtype'
            raise damaged(path, "has no header of a .npy file", fix) from error
        raise damaged(path, f"is not a readable .npy array ({error})") from error
    found = "an archive (.npz)"
    if isinstance(tokens, np.ndarray):
        if tokens.ndim == 1 and tokens.dtype.kind in "iu" and tokens.dtype.isnative:
            return _table(path, tokens, options)
        found = f"{tokens.dtype.str} of shape {tokens.shape}"
    problem = f"must be a 1-D integer array, little-endian, got {found}"
    raise damaged(path, problem, f"save the ids of all documents concatenated; {FOR_SERIES}")


def load_bin(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a headerless array of `options.dtype`."""
    try:
        dtype = np.dtype(options.dtype or "void")
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype("void")
    if dtype.kind not in "iu" or not dtype.isnative:
        problem = f"a file without a header needs an integer dtype, little-endian; got {options.dtype!r}"
        raise UserError(f"{path}: dtype", problem, 'set dtype = "uint16", or the dtype that wrote the file')
    size = path.stat().st_size
    rest = size % dtype.itemsize
    if rest:
        problem = f"ends in the middle of a token ({dtype}): the last complete one ends at byte offset {size - rest} of {size}"
        raise damaged(path, problem, "write the file again, or set the dtype that wrote it")
    return _table(path, np.memmap(path, dtype=dtype, mode="r"), options)


def read_index(path: Path, bin_size: int) -> tuple[np.dtype[Any], Ints, Ints]:
    """(dtype, first token of each document, tokens of each) of a `.bin` of so many bytes."""
    data = np.zeros(0, np.uint8)
    if path.stat().st_size:  # mmap takes no empty file
        data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    head = data[: HEADER.size].tobytes()
    magic, version, code, num_sequences, num_indices = HEADER.unpack(head.ljust(HEADER.size, b"\0"))
    if (magic, version) != (MAGIC, 1) or code not in DTYPES or len(head) < HEADER.size:
        raise damaged(path, f"is not a Megatron-LM index of version 1 and of integers: it begins with {head[:18]!r}")
    # As Python's integers: a damaged count may exceed 64 bits.
    widths = [HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_indices]
    header, sizes_end, pointers_end, end = itertools.accumulate(widths)
    if len(data) != end:
        raise damaged(path, f"its tables take {end} bytes, it has {len(data)}")
    dtype = np.dtype(DTYPES[code])
    sizes = data[header:sizes_end].view("<i4").astype(np.int64)
    pointers, indices = data[sizes_end:pointers_end].view("<i8"), data[pointers_end:].view("<i8")
    if not len(sizes) or len(indices) < 2:
        raise damaged(path, "has no documents")
    if indices[0] != 0 or indices[-1] != len(sizes) or (indices[1:] < indices[:-1]).any():
        raise damaged(path, f"its document indices do not increase from 0 to {len(sizes)}")
    room = bin_size - sizes * dtype.itemsize
    is_outside = (sizes < 0) | (pointers < 0) | (pointers > room) | (pointers % dtype.itemsize != 0)
    if is_outside.any() or (room - pointers).min() != 0:  # the last one ends the file
        raise damaged(path, f"its sequences do not fit a .bin of {bin_size} bytes of {dtype}")
    starts = pointers // dtype.itemsize
    if len(indices) == len(sizes) + 1 and int(np.diff(indices).min()) == 1:  # one sequence each
        return dtype, starts, sizes
    is_inner = np.ones(len(starts), dtype=np.bool_)  # sequences that continue a document
    is_inner[indices[:-1][indices[:-1] < len(starts)]] = False
    if (is_inner[1:] & (starts[1:] != (starts + sizes)[:-1])).any():
        raise damaged(path, "the sequences of a document do not follow each other")
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return dtype, starts[np.minimum(indices[:-1], len(starts) - 1)], np.diff(totals[indices])


def load_megatron(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of an indexed `.bin`, of which a sample of ids is read (`check_sample`)."""
    index = path.with_suffix(".idx")
    if not index.is_file():
        raise damaged(index, f"is missing next to {path.name}", 'put it there, or set format = "bin"')
    dtype, starts, lengths = read_index(index, path.stat().st_size)
    tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    IdBounds.of(path, options.tokenizer).check_sample(tokens)
    return TokenTable(tokens, starts, lengths)
