"""Small streams for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.layout import Stream, discover_nested
from trainer.data.mixing import StreamMixingDataset
from trainer.data.tokenizer import BytesTokenizer


def write_streams(root: Path, layout: Mapping[str, Sequence[Sequence[int]]]) -> list[Stream]:
    """Modality -> streams -> document lengths, as JSON lines."""
    for modality, streams in layout.items():
        for number, lengths in enumerate(streams):
            path = root / modality / f"s{number}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in lengths))
    return discover_nested(root)


def mixing(streams: Sequence[Stream], **kwargs: Any) -> StreamMixingDataset:
    """A dataset with short cells."""
    defaults = {"name": "source", "tokenizer": BytesTokenizer(), "seq_len": 4, "num_streams_mixed": 2, "batch_size": 2}
    return StreamMixingDataset(streams, **{**defaults, **kwargs})
