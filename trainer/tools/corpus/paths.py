"""The streams at paths that a user names, for verbs that take them without a config."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from trainer.data.layout import (
    Discovery,
    Stream,
    discover_direct,
    discover_nested,
    loose_files,
    refuse_empty_files,
    sort_of,
)
from trainer.errors import UserError


def discover(paths: Sequence[str], *, format: str = "auto") -> Discovery:
    """A single directory with one directory per modality is NESTED; anything else is DIRECT."""
    directory = Path(paths[0])
    if len(paths) > 1 or not directory.is_dir():
        return Discovery("direct", discover_direct(paths, format=format), paths=tuple(paths))
    try:
        streams = discover_nested(directory, format=format)
        loose = tuple(loose_files(directory, format))
        return Discovery("nested", streams, root=paths[0], left_out=loose)
    except UserError:
        files = [Path(path.name) for path in directory.iterdir() if path.is_file()]
        if not any(sort_of(name, format) == "data" for name in files):
            raise
        pattern = os.path.join(glob.escape(paths[0]), "*")
        return Discovery("direct", discover_direct([pattern], format=format), paths=(pattern,))


def refuse_empty(streams: Sequence[Stream]) -> None:
    """Refuse streams of empty files, all of them at once."""
    paths = [stream.path for stream in streams if os.path.isfile(stream.path)]
    refuse_empty_files([path for path in paths if not os.path.getsize(path)], len(streams))
