"""Small streams for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.streams import mixing_dataset
from trainer.data.layout import Stream, discover_nested
from trainer.lab.stream_mixing import StreamMixingDataset


@pytest.fixture
def write_streams(tmp_path: Path) -> Callable[[Mapping[str, Sequence[Sequence[int]]]], list[Stream]]:
    """Modality -> streams -> document lengths; written as JSON lines."""

    def write(layout: Mapping[str, Sequence[Sequence[int]]]) -> list[Stream]:
        for modality, streams in layout.items():
            for number, lengths in enumerate(streams):
                path = tmp_path / modality / f"s{number}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in lengths))
        return discover_nested(tmp_path)

    return write


@pytest.fixture
def mixing() -> Callable[..., StreamMixingDataset]:
    """Makes a dataset with small batches of short cells."""
    return partial(mixing_dataset, num_streams_mixed=2, batch_size=2)
