"""Data: streams on disk, tokenizers, mixing, blending and loading."""

from __future__ import annotations

from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.documents import ReadOptions, TokenTable, table_from_pieces
from trainer.data.formats import load_documents
from trainer.data.groups import CutOptions
from trainer.data.lanes import LaneBlend
from trainer.data.layout import discover_nested
from trainer.data.shard_source import MixOptions, ShardSource
from trainer.data.tokenizer import BytesTokenizer
from trainer.data.weights import ConstantWeight, ScheduledWeight

__all__ = [
    "BlendDataset",
    "BlendSource",
    "BytesTokenizer",
    "ConstantWeight",
    "CutOptions",
    "LaneBlend",
    "MixOptions",
    "ReadOptions",
    "ScheduledWeight",
    "ShardSource",
    "TokenTable",
    "discover_nested",
    "load_documents",
    "table_from_pieces",
]
