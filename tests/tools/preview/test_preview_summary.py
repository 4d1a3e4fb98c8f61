"""The numbers of a preview that are computed, not counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs import make_corpus, write_tiny_config
from trainer.config.load import load_config
from trainer.data.documents import TokenTable
from trainer.data.groups import CutOptions, OpenStream, build_groups
from trainer.data.layout import Stream
from trainer.data.pool import ActivePool
from trainer.data.weights import ConstantWeight, ScheduledWeight
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.options import ONE
from trainer.tools.limits import wait_bound
from trainer.tools.preview.summary import expected_batches, make_preview
from trainer.training.setup.plan import Plan, make_plan
from trainer.training.setup.sources import make_blend


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
def test_without_full_rows_the_corpus_is_measured_and_no_wait_is_longer_than_said(
    tmp_path: Path, mode: str, world_size: int
) -> None:
    sets = ("train.steps=60", f"data.mixing.batching_mode={mode}", "data.max_group_cells=3", "ledger.capacity=200")
    plan = plan_of(tmp_path, *sets, world_size=world_size)
    preview = make_preview(plan)
    assert (preview.has_full_rows, preview.fill, preview.is_counted) == (False, None, False)
    for source, modality in zip(preview.sources, "ab", strict=True):
        paths = (tmp_path / "corpus" / modality).iterdir()
        sizes = [len(json.loads(line)["text"].encode()) for path in paths for line in path.read_text().splitlines()]
        (view,) = source.modalities
        assert (view.name, view.streams, view.corpus_tokens, view.tokens) == (modality, 5, sum(sizes), None)
    longest, num_micro = 0, plan.config.train.micro_batches
    for rank in range(world_size):
        blend = make_blend(plan, RankInfo(rank=rank, local_rank=rank, world_size=world_size))
        last: dict[int, int] = {}
        for index in range(plan.num_batches):
            batch = next(blend)
            for group, cell in zip(batch["group_ids"].tolist(), batch["cell_index"].tolist(), strict=True):
                longest = max(longest, index // num_micro - last[group] if cell > 0 else 0)
                last[group] = index // num_micro
    assert preview.ledger is not None
    assert 0 < longest <= preview.ledger.wait_bound_steps


def waits(num_mixed: int, picks: int, seed: int) -> Iterator[int]:
    """Waits of a pool of K readers with n picks per slice, refilled from 4 K streams, over 10 K n picks."""
    pool, draw, unread = ActivePool(["m"], "weighted"), np.random.Generator(np.random.Philox(seed)), 0

    def new() -> SimpleNamespace:
        stream = SimpleNamespace(modality="m")
        return SimpleNamespace(stream=stream, remaining_picks=picks, remaining_fraction=1.0, last=None)

    for at in range(10 * num_mixed * picks):
        if not pool.readers:
            unread = 3 * num_mixed
            for _ in range(num_mixed):
                pool.add(new())
        slot = pool.pick(draw.random())
        reader = pool.readers[slot]
        if reader.last is not None:
            yield at - reader.last
        reader.last, reader.remaining_picks = at, reader.remaining_picks - 1
        if reader.remaining_picks:
            pool.note(slot)
        else:
            pool.replace(slot, new() if unread else None)
            unread -= unread > 0


@pytest.mark.parametrize("num_mixed", [4, 8])
@pytest.mark.parametrize("picks", [20, 50, 100])
def test_no_wait_is_longer_than_2_k_n(num_mixed: int, picks: int) -> None:
    longest = max(max(waits(num_mixed, picks, seed)) for seed in range(3))
    assert longest <= 2 * num_mixed * picks
    assert longest > 0.4 * num_mixed * picks  # the bound is tight: a threshold far below is not safe


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
