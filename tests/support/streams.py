"""Streams and data sets of streams for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.layout import Stream
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.tokenizer import BytesTokenizer


def mixing_dataset(
    streams: Sequence[Stream], *, rank: int = 0, world_size: int = 1, **settings: Any
) -> StreamMixingDataset:
    """A data set, its settings by name; cells of 4 bytes unless they say otherwise."""
    settings = {"namespace": settings.pop("name", "source"), "seq_len": 4, "tokenizer": BytesTokenizer(), **settings}
    parts = []
    for kind in (CutOptions, ReadOptions, MixOptions):
        names = {each.name for each in fields(kind)}
        parts.append(kind(**{name: settings.pop(name) for name in names & settings.keys()}))
    assert not settings, settings
    return StreamMixingDataset(streams, *parts, rank=rank, world_size=world_size)  # type: ignore[arg-type]
