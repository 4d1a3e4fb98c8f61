"""What must match for a saved state of data to fit: the files, and how a source reads them.

A mark of a file is its size and a hash of blocks spread over it, or of the whole of a small file.
Times of modification are not used: copying a corpus changes them, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from trainer.arrays import stable_hash
from trainer.data.documents import ReadOptions, damaged
from trainer.data.groups import CutOptions
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
THREADS = 8  # a cold or remote disk answers several requests at once


@dataclass(frozen=True)
class Fingerprint:
    """The data files of a run."""

    blocks: int  # sampled per file
    tokenizer: str  # mark of the tokenizer.json; empty without one
    # Source -> stream (relative path, in the order of the stream ids) -> mark.
    sources: Mapping[str, Mapping[str, str]]

    @property
    def content(self) -> str:
        """The same for equal files, wherever they are."""
        marks = [mark for files in self.sources.values() for mark in files.values()]
        return f"{stable_hash(*sorted(marks)):016x}"

    def __post_init__(self) -> None:
        """Raises an error of any kind for what a damaged checkpoint may say."""
        marks = [mark for files in self.sources.values() for mark in files.values()]
        types = {type(self.blocks)}, {type(self.tokenizer), *map(type, marks)}
        if types != ({int}, {str}) or not FEWEST_BLOCKS <= self.blocks <= MOST_BLOCKS:
            raise ValueError("not a fingerprint")


def blocks_per_file(num_files: int) -> int:
    """Blocks to hash of each of so many files."""
    return min(max(TOTAL_BLOCKS // max(num_files, 1), FEWEST_BLOCKS), MOST_BLOCKS)


def mark_files(paths: Sequence[Sequence[Path]], *, blocks: int) -> list[str]:
    """The marks of streams: `SIZE:SAMPLES` of each file, joined by `+`."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [*pool.map(lambda files: "+".join(_mark(path, blocks) for path in files), paths)]


def _mark(path: Path, blocks: int) -> str:
    samples = hashlib.blake2b(digest_size=8)
    try:
        with open(path, "rb", buffering=0) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            if size <= blocks * BLOCK_BYTES:
                samples.update(os.pread(descriptor, size, 0))
            else:  # the beginning, the end, and evenly spaced blocks in between
                for block in range(blocks):
                    place = (size - BLOCK_BYTES) * block // (blocks - 1)
                    samples.update(os.pread(descriptor, BLOCK_BYTES, place))
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}", "check its path and mode") from None
    return f"{size}:{samples.hexdigest()}"


def compare(saved: Fingerprint, now: Fingerprint) -> list[str]:
    """How the data differ, in words. A source that is new, gone, or off is no difference."""
    found = []
    if saved.tokenizer != now.tokenizer:
        found.append("the tokenizer.json changed")
    for name in sorted(saved.sources.keys() & now.sources.keys()):
        before, after = saved.sources[name], now.sources[name]
        if not before or not after:  # not files, or never read
            continue
        kinds = {
            "changed": [path for path in after if before.get(path, after[path]) != after[path]],
            "missing": [path for path in before if path not in after],
            "new": [path for path in after if path not in before],
        }
        listed = [f"{len(paths):,} {kind} ({few(paths)})" for kind, paths in kinds.items() if paths]
        if listed:
            found.append(f"source {name}: {', '.join(listed)}")
    return found


def fingerprint(streams: Sequence[Stream], options: ReadOptions, cut: CutOptions, **settings: object) -> dict[str, Any]:
    """Everything that must match for a state to fit: how files are read and cut, and which."""
    paths = [part for stream in streams for part in (stream.relative_path, stream.modality)]
    tokenizer = options.tokenizer
    return {
        **asdict(cut),
        **settings,
        **{each.name: getattr(options, each.name) for each in fields(options)},
        "loss_mask": options.loss_mask and options.loss_mask.field,
        "tokenizer": f"{tokenizer.name} ({tokenizer.vocab_size} ids){tokenizer.settings}",
        "streams": f"{len(streams)} streams, hash {stable_hash(*paths):016x}",
    }


def check_states(states: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> None:
    """Raise UserError unless a dataset like the `own` saved the states, in rank order."""
    wanted, num_states = own["fingerprint"], len(states)
    name = f"source {wanted['namespace']}"
    ranks = [(state["rank"], state["world_size"]) for state in states if "fingerprint" in state]
    # One state alone may be that of any rank.
    if not ranks or (num_states > 1 and ranks != [(rank, num_states) for rank in range(num_states)]):
        problem = "these are not the states that all ranks of a dataset saved, in rank order"
        raise UserError(name, problem, "load those of one checkpoint")
    for saved in (state["fingerprint"] for state in states):
        found = [f"{key} was {saved.get(key)!r} and is {now!r}" for key, now in wanted.items() if saved.get(key) != now]
        if found:
            problem = f"the saved state does not fit: {', '.join(found)}"
            raise UserError(name, problem, "restore the old value, or start without this state")
