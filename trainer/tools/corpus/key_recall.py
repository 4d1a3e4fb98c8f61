"""Key recall: a corpus that can only be learned with state carried from cell to cell.

A group is a document of `cells` cells of `seq_len` bytes, each ending in a newline. Its first cell reveals two of eight
symbols, drawn independently; every later cell asks for both. With 6 bytes per cell:

    <CF>.        the symbols are 2 (C) and 5 (F)
    a2b5.        asked for the first symbol: 2; for the second: 5
    a2b5.        ...

The reveal uses letters and the answers use digits, which occur nowhere else: the loss of the token type `digit` is the
loss of the answers. The last bytes of a cell are constant, since its last byte is the first input of the next cell. So
nothing within a cell tells its answers: without carried state their loss cannot fall below ln 8 = 2.079 nats, with it
they are certain. Of the other bytes only the two revealed ones are unpredictable: over all bytes a perfect model with
state reaches 2 ln 8 / (cells * seq_len).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from trainer.errors import UserError
from trainer.hashing import keyed_generator
from trainer.metrics.progress_bar import Report
from trainer.tools.corpus.documents import Document
from trainer.tools.corpus.manifest import Manifest
from trainer.tools.corpus.writer import write_corpus

NUM_SYMBOLS = 8
REVEALED = "ABCDEFGH"
ANSWERS = "01234567"
MODALITY = "recall"
MIN_SEQ_LEN = 5


def group_text(first: int, second: int, *, cells: int, seq_len: int) -> str:
    """The text of the group that reveals the symbols `first` and `second` (0 to 7): `cells * seq_len` characters."""
    end = "." * (seq_len - MIN_SEQ_LEN) + "\n"
    reveal = f"<{REVEALED[first]}{REVEALED[second]}>{end}"
    return reveal + f"a{ANSWERS[first]}b{ANSWERS[second]}{end}" * (cells - 1)


def build_key_recall(
    out: Path,
    *,
    groups: int = 1024,
    cells: int = 16,
    seq_len: int = 6,
    streams: int = 8,
    seed: int = 0,
    force: bool = False,
    progress: Report | None = None,
) -> Manifest:
    """Write the corpus as `out/recall/stream<k>.jsonl`, one document per group. Equal arguments give equal bytes.

    Args:
        out: the corpus directory; see `write_corpus` for what may be there already.
        groups: documents over all streams.
        cells: cells per group; train with `max_group_cells` of at least this.
        seq_len: bytes per cell; train with this `data.seq_len` and the tokenizer `bytes`.
        streams: files.
        seed: of the symbols.
        force: replace another corpus in `out`.
        progress: gets (done, total, what).

    Raises:
        UserError: a number is out of range, or `out` cannot be used.
    """
    for option, value, least in (
        ("--streams", streams, 1),
        ("--groups", groups, streams),
        ("--cells", cells, 2),
        ("--seq-len", seq_len, MIN_SEQ_LEN),
        ("--seed", seed, 0),
    ):
        if value < least:
            why = " (the streams)" if option == "--groups" else ""
            raise UserError(option, f"must be >= {least}{why}, got {value}")
    digits = len(str(streams - 1))
    documents: dict[str, list[Document]] = {}
    for stream in range(streams):
        name = f"stream{stream:0{digits}}"
        count = len(range(stream, groups, streams))
        symbols = keyed_generator("key-recall", seed, stream).integers(NUM_SYMBOLS, size=(count, 2)).tolist()
        texts = [group_text(first, second, cells=cells, seq_len=seq_len) for first, second in symbols]
        documents[name] = [
            Document(f"{name}/{index}", text, len(text), hashlib.sha256(text.encode()).hexdigest())
            for index, text in enumerate(texts)
        ]
    floor = 2 * np.log(NUM_SYMBOLS)
    rules = {
        "groups": f"{groups} documents of {cells} cells of {seq_len} bytes, seed {seed}",
        "answers": f"the digits; {np.log(NUM_SYMBOLS):.4f} nats each without carried state, 0 with it",
        "floor": f"{floor / (cells * seq_len):.4f} nats a byte with carried state: the two revealed symbols",
    }
    return write_corpus(
        out, {MODALITY: documents}, builder="key-recall", rules=rules, skipped=[], force=force, progress=progress
    )
