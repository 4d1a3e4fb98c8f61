"""Data: streams on disk, tokenizers, mixing, blending and loading."""

from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.documents import ReadOptions, TokenTable, table_from_pieces
from trainer.data.formats import open_documents
from trainer.data.layout import Stream, discover_direct, discover_nested
from trainer.data.loader import LoadedBatch, Loader
from trainer.data.mixing import StreamMixingDataset
from trainer.data.schedule import (
    ConstantWeight,
    ScheduledWeight,
    WeightSpec,
    compose_weights,
    first_all_zero,
)
from trainer.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "BlendDataset",
    "BlendSource",
    "BytesTokenizer",
    "ConstantWeight",
    "HuggingFaceTokenizer",
    "LoadedBatch",
    "Loader",
    "ReadOptions",
    "ScheduledWeight",
    "Stream",
    "StreamMixingDataset",
    "TokenTable",
    "Tokenizer",
    "WeightSpec",
    "compose_weights",
    "discover_direct",
    "discover_nested",
    "first_all_zero",
    "load_tokenizer",
    "open_documents",
    "table_from_pieces",
]
