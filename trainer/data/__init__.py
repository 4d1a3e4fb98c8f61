"""Data: streams on disk, tokenizers, mixing, blending and loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.documents import ReadOptions, TokenTable, table_from_pieces
from trainer.data.formats import open_documents
from trainer.data.groups import CutOptions
from trainer.data.lanes import LaneBlend
from trainer.data.layout import discover_nested
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.shard_source import ShardSource
from trainer.data.tokenizer import BytesTokenizer
from trainer.data.weights import ConstantWeight, ScheduledWeight

if TYPE_CHECKING:
    from trainer.data.loader import Loader, MicroBatch

__all__ = [
    "BlendDataset",
    "BlendSource",
    "BytesTokenizer",
    "ConstantWeight",
    "CutOptions",
    "LaneBlend",
    "Loader",
    "MicroBatch",
    "MixOptions",
    "ReadOptions",
    "ScheduledWeight",
    "ShardSource",
    "StreamMixingDataset",
    "TokenTable",
    "discover_nested",
    "open_documents",
    "table_from_pieces",
]


def __getattr__(name: str) -> Any:
    # They need torch, without which looking at files starts in a quarter of the time.
    if name not in ("Loader", "MicroBatch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer.data import loader

    return getattr(loader, name)
