"""Fingerprints of data files: enough to notice on a resume that a file has changed.

A mark is the file's size and a hash of blocks spread over it, or of the whole of a small file. Times
of modification are not used: copying a corpus changes them, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainer.data.formats import files_of
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.wording import few

FINGERPRINT_KEY = "data"  # in a checkpoint's state.json
# Before the name of a validation set in a fingerprint; names of sources have no slash.
EVAL: Final = "eval/"
BLOCK_BYTES = 4096
# Blocks of a file: as many as keep all files within the total, which 50,000 files with two blocks
# each use up (400 MB).
FEWEST_BLOCKS, MOST_BLOCKS, TOTAL_BLOCKS = 2, 16, 100_000
# A cold or remote disk answers several requests at once; handing a single file to a thread takes
# longer than reading its blocks.
THREADS, CHUNK = 8, 64


@dataclass(frozen=True)
class Fingerprint:
    """The data files of a run."""

    blocks: int  # sampled per file
    tokenizer: str  # mark of the tokenizer.json; empty without one
    # Source -> stream (relative path, in the order of the stream ids) -> mark.
    sources: Mapping[str, Mapping[str, str]]

    def to_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> Fingerprint:
        """The inverse of `to_state`. Raises ValueError if the state is damaged."""
        try:
            blocks, tokenizer, sources = state["blocks"], state["tokenizer"], state["sources"]
            marks = [mark for files in sources.values() for mark in files.values()]
            is_whole = type(blocks) is int and {type(tokenizer), *map(type, marks)} == {str}
        except (AttributeError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            raise ValueError("the fingerprint of the data is damaged")
        if not FEWEST_BLOCKS <= blocks <= MOST_BLOCKS:
            raise ValueError(f"the fingerprint of the data has {blocks} blocks per file")
        return cls(blocks, tokenizer, sources)


def blocks_per_file(num_files: int) -> int:
    """Blocks to sample of each of so many files."""
    return min(max(TOTAL_BLOCKS // max(num_files, 1), FEWEST_BLOCKS), MOST_BLOCKS)


def mark_files(paths: Sequence[Sequence[Path]], *, blocks: int, whole: bool) -> list[str]:
    """The marks of streams: `SIZE:SAMPLES`, with `whole` also `:CONTENT`, of each file, joined by `+`."""
    mark = partial(_mark, blocks=blocks, whole=whole)
    chunks = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]
    with ThreadPoolExecutor(THREADS) as pool:
        done = pool.map(lambda chunk: ["+".join(map(mark, files)) for files in chunk], chunks)
        return [each for chunk in done for each in chunk]


def stream_files(streams: Iterable[Stream], format: str) -> list[list[Path]]:
    """The files of each stream: its own, and its index."""
    return [files_of(Path(stream.path), format) for stream in streams]


def _mark(path: Path, *, blocks: int, whole: bool) -> str:
    samples = hashlib.blake2b(digest_size=8)
    try:
        descriptor = os.open(path, os.O_RDONLY)
        with open(descriptor, "rb", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            if size <= blocks * BLOCK_BYTES:
                samples.update(os.pread(descriptor, size, 0))
            else:  # the beginning, the end, and evenly spaced blocks in between
                for block in range(blocks):
                    place = (size - BLOCK_BYTES) * block // (blocks - 1)
                    samples.update(os.pread(descriptor, BLOCK_BYTES, place))
            mark = f"{size}:{samples.hexdigest()}"
            if whole:
                content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
                mark += ":" + content.hexdigest()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise UserError(str(path), problem, "check the path and its mode") from None
    return mark


@dataclass(frozen=True)
class SourceChange:
    """Streams of a source (relative paths) that differ from those of the checkpoint."""

    changed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = asdict(self).items()
        return ", ".join(f"{len(paths):,} {kind} ({few(paths)})" for kind, paths in kinds if paths)


@dataclass(frozen=True)
class DataChange:
    """How the data differ from a checkpoint's. A new source is no change: blends may grow."""

    tokenizer: bool = False
    sources: Mapping[str, SourceChange] = field(default_factory=dict)
    removed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self.tokenizer or bool(self.sources or self.removed)

    def __str__(self) -> str:
        parts = []
        if self.tokenizer:
            parts.append("the tokenizer.json changed")
        parts += [f"source {name}: {change}" for name, change in self.sources.items()]
        return "; ".join([*parts, *(f"source {name}: not in the config" for name in self.removed)])


def compare(saved: Fingerprint, now: Fingerprint) -> DataChange:
    """The differences. Contents are compared where both sides have hashed them."""
    sources = {}
    for name in sorted(saved.sources.keys() & now.sources.keys()):
        before, after = saved.sources[name], now.sources[name]
        if not before or not after:  # not files, or never read
            continue
        common = [path for path in after if path in before]
        change = SourceChange(
            changed=[path for path in common if not _agree(before[path], after[path])],
            missing=[path for path in before if path not in after],
            new=[path for path in after if path not in before],
        )
        if change != SourceChange():
            sources[name] = change
    gone = saved.sources.keys() - now.sources.keys()
    removed = sorted(name for name in gone if not name.startswith(EVAL))
    return DataChange(not _agree(saved.tokenizer, now.tokenizer), sources, removed)


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """New name -> former name of each file whose name changed and whose mark did not."""
    missing, found = defaultdict[str, list[str]](list), {}
    for path in sorted(before.keys() - after.keys(), reverse=True):
        missing[_samples(before[path])].append(path)
    for path in sorted(after.keys() - before.keys()):
        former = missing[_samples(after[path])]
        if former and _agree(before[former[-1]], after[path]):
            found[path] = former.pop()
    return found


def _samples(mark: str) -> str:
    """A mark without the hashes of whole contents."""
    return "+".join(":".join(one.split(":")[:2]) for one in mark.split("+"))


def keep_contents(saved: Fingerprint, now: Fingerprint) -> Fingerprint:
    """`now`, with the hashes of contents that only `saved` has, for later verifications."""

    def kept(before: str, after: str) -> str:
        return before if len(before) > len(after) and _agree(before, after) else after

    sources = {}
    for name, files in now.sources.items():
        before = saved.sources.get(name, {})
        sources[name] = {path: kept(before.get(path, ""), mark) for path, mark in files.items()}
    return Fingerprint(now.blocks, kept(saved.tokenizer, now.tokenizer), sources)


def has_contents(fingerprint: Fingerprint) -> bool:
    marks = [mark for files in fingerprint.sources.values() for mark in files.values()]
    files = "+".join(filter(None, [*marks, fingerprint.tokenizer])).split("+")
    return all(file.count(":") == 2 for file in files if file)


def _agree(one: str, other: str) -> bool:
    """Whether two marks may be of the same content: as far as both go, they are equal."""
    first, second = one.split("+"), other.split("+")
    if len(first) != len(second):
        return False
    pairs = [(a.split(":"), b.split(":")) for a, b in zip(first, second, strict=True)]
    return all(a[: len(b)] == b[: len(a)] for a, b in pairs)
