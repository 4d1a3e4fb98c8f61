"""Data: streams on disk, tokenizers, mixing, blending and loading."""

from __future__ import annotations

from trainer.data.blend import BlendDataset as BlendDataset
from trainer.data.blend import BlendSource as BlendSource
from trainer.data.documents import ReadOptions as ReadOptions
from trainer.data.documents import TokenTable as TokenTable
from trainer.data.documents import table_from_pieces as table_from_pieces
from trainer.data.formats import load_documents as load_documents
from trainer.data.groups import CutOptions as CutOptions
from trainer.data.lanes import LaneBlend as LaneBlend
from trainer.data.layout import discover_nested as discover_nested
from trainer.data.shard_source import MixOptions as MixOptions
from trainer.data.shard_source import ShardSource as ShardSource
from trainer.data.tokenizer import BytesTokenizer as BytesTokenizer
from trainer.data.weights import ConstantWeight as ConstantWeight
from trainer.data.weights import ScheduledWeight as ScheduledWeight
