"""The numbers of a preview that are computed, not counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs import make_corpus, write_tiny_config
from trainer.config.load import load_config
from trainer.data.documents import TokenTable
from trainer.data.groups import CutOptions, OpenStream, build_groups
from trainer.data.layout import Stream
from trainer.data.weights import ConstantWeight, ScheduledWeight
from trainer.errors import UserError
from trainer.micro_batches import ONE
from trainer.tools.preview.summary import expected_batches, make_preview
from trainer.training.setup.plan import Plan, make_plan


def plan_of(tmp_path: Path, *overrides: str, world_size: int = 2) -> Plan:
    if not (tmp_path / "corpus").exists():
        make_corpus(tmp_path / "corpus", streams=5, documents=9)
    config_path = write_tiny_config(tmp_path)
    return make_plan(load_config(config_path, overrides), config_path, world_size)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), max_cells=st.integers(1, 4), every=st.integers(1, 2)
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_token_of_the_documents_belongs_to_one_group(lengths: list[int], max_cells: int, every: int) -> None:
    sizes, kept = np.array(lengths), np.arange(0, len(lengths), every)
    groups = build_groups(sizes, kept, "s", CutOptions("", 6, max_cells))
    tokens = OpenStream(Stream(0, "s", "m", "s"), TokenTable(sizes, sizes, sizes), groups, 6, 0).num_tokens()
    assert tokens.sum() == sizes[kept].sum()
    assert (tokens > 0).all()
    assert (tokens <= groups.num_cells * 6).all()


def test_expected_batches_sum_the_probabilities_over_chunks() -> None:
    fading = ScheduledWeight("linear", {0: 3.0, 100_000: 0.0})
    found = expected_batches([fading, ConstantWeight(1.0)], 150_000, ONE)
    weights = np.clip(3.0 * (1 - np.arange(150_000) / 100_000), 0, None)
    assert found[0] == pytest.approx((weights / (weights + 1)).sum())
    assert sum(found) == pytest.approx(150_000)


@pytest.mark.parametrize("mode", ["per_stream", "device_per_stream"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_without_full_rows_the_corpus_is_measured(tmp_path: Path, mode: str, world_size: int) -> None:
    sets = ("train.steps=60", f"data.mixing.batching_mode={mode}", "data.max_group_cells=3", "ledger.capacity=200")
    plan = plan_of(tmp_path, *sets, world_size=world_size)
    preview = make_preview(plan)
    assert (preview.has_full_rows, preview.fill, preview.is_counted) == (False, None, False)
    for source, modality in zip(preview.sources, "ab", strict=True):
        paths = (tmp_path / "corpus" / modality).iterdir()
        sizes = [len(json.loads(line)["text"].encode()) for path in paths for line in path.read_text().splitlines()]
        (view,) = source.modalities
        assert (view.name, view.streams, view.corpus_tokens, view.tokens) == (modality, 5, sum(sizes), None)


def test_a_source_without_documents_is_refused(tmp_path: Path) -> None:
    for modality in "ab":
        (tmp_path / "corpus" / modality).mkdir(parents=True)
        (tmp_path / "corpus" / modality / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="source first: has no document to train on"):
        make_preview(plan_of(tmp_path))
