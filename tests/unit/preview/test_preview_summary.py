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
from trainer.data.groups import CutOptions, build_groups
from trainer.data.weights import ConstantWeight, ScheduledWeight
from trainer.errors import UserError
from trainer.micro_batches import ONE
from trainer.tools.limits import wait_bound
from trainer.tools.preview.forecast import count_run, expected_batches, source_shape
from trainer.tools.preview.summary import _source_view, make_preview
from trainer.training.setup.plan import Plan, make_plan


def plan_of(tmp_path: Path, *overrides: str, world_size: int = 2) -> Plan:
    if not (tmp_path / "corpus").exists():
        make_corpus(tmp_path / "corpus", streams=5, documents=9)
    config_path = write_tiny_config(tmp_path)
    return make_plan(load_config(config_path, overrides), config_path, world_size)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    max_cells=st.integers(1, 4),
    every=st.integers(1, 2),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_token_of_the_documents_belongs_to_one_group(lengths: list[int], max_cells: int, every: int) -> None:
    sizes, kept = np.array(lengths), np.arange(0, len(lengths), every)
    groups = build_groups(sizes, kept, "s", CutOptions("", 6, max_cells))
    tokens = groups.num_tokens(sizes, 6)
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
def test_averages_of_a_long_run_agree_with_its_counts(tmp_path: Path, mode: str) -> None:
    plan = plan_of(tmp_path, "train.steps=400", f"data.mixing.batching_mode={mode}")
    shapes = [source_shape(plan, source, 2) for source in plan.sources]
    counted = make_preview(plan)
    assert counted.is_counted
    short = count_run(plan, shapes, 2, most=40)
    assert not short.is_whole
    for source, shape in zip(counted.sources, shapes, strict=True):
        view = _source_view(plan, shape, source.batches, short)
        for own, other in zip(view.modalities, source.modalities, strict=True):
            assert own.picks == pytest.approx(other.picks, rel=0.1)
            # Counts leave out the readers that the run has not finished, about 4 of 35.
            assert own.exhausts == pytest.approx(other.exhausts, rel=0.2)
            assert own.tokens == pytest.approx(other.tokens, rel=0.1)


def test_the_step_at_which_data_is_exhausted_is_found(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.steps=500", "data.mixing.repeat=false")
    preview = make_preview(plan)
    assert preview.ends_at_step is not None
    assert preview.ends_at_step < 500
    # Everything is read once.
    assert [source.epochs for source in preview.sources] == [pytest.approx(1.0)] * 2


def test_wait_bound_is_two_k_n_in_steps() -> None:
    for picks, num_mixed, share, ranks, steps in (
        ([50] * 10, 4, 1.0, 1, 2 * 4 * 50),
        ([50] * 10, 4, 0.25, 2, 2 * 2 * 4 * 50),
        ([10, 10, 90, 50], 2, 1.0, 1, 2 * (90 + 50)),
        ([50] * 10, 1, 1.0, 2, 1),  # a single reader waits for its source alone
        ([50] * 10, 1, 0.5, 2, 15),
        ([], 4, 0.0, 1, 0),
    ):
        assert wait_bound(picks, num_mixed, share, ranks) == steps
    assert 0.5 ** wait_bound([50] * 10, 1, 0.5, 1) <= 1e-9 < 0.5 ** (wait_bound([50] * 10, 1, 0.5, 1) - 1)


def test_the_share_of_tokens_behind_cuts_is_that_of_the_documents(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "data.max_group_cells=2")
    lines = [line for path in (tmp_path / "corpus" / "a").iterdir() for line in path.read_text().splitlines()]
    sizes = [len(json.loads(line)["text"].encode()) for line in lines]
    share = sum(max(size - 2 * plan.config.data.seq_len, 0) for size in sizes) / sum(sizes)
    assert make_preview(plan).sources[0].behind_cuts_share == pytest.approx(share)
    assert 0 < share < 1
    assert make_preview(plan_of(tmp_path, "data.max_group_cells=0", world_size=1)).sources[0].behind_cuts_share == 0


def test_a_source_without_documents_is_refused(tmp_path: Path) -> None:
    for modality in "ab":
        (tmp_path / "corpus" / modality).mkdir(parents=True)
        (tmp_path / "corpus" / modality / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="source first: has no document to train on"):
        make_preview(plan_of(tmp_path))
