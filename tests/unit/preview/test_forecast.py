"""The counts of the preview, against the real data pipeline and its batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import make_corpus, write_tiny_config
from trainer.config.load import load_config
from trainer.data.mixing import EXHAUST_EVENTS
from trainer.distributed.env import RankInfo
from trainer.tools.preview.forecast import CountedMixing, SliceShape, SourceShape, StreamShape, count_run, source_shape
from trainer.training.setup.parts import make_blend
from trainer.training.setup.plan import Plan, make_plan

MODES = [
    (),
    ("data.mixing.pick_mode=uniform", "data.mixing.num_streams_mixed=3"),
    ("data.mixing.pick_mode=round_robin", "data.mixing.num_streams_mixed=7", "train.micro_batches=3"),
    ("data.mixing.batching_mode=device_per_stream", "run.seed=3"),
    ("eval.holdout_fraction=0.2",),
    ("data.mixing.repeat=false", "data.mixing.batch_size=3"),
    ("data.max_group_cells=0", "data.mixing.batch_size=9"),
    ("data.mixing.repeat=false", "data.mixing.batching_mode=device_per_stream", "data.mixing.batch_size=1"),
]


@dataclass
class Real:
    """Counts of the real pipeline over all ranks (picks: per rank)."""

    picks: list[Counter[str]] = field(default_factory=list)
    cells: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    cells_per_step: Counter[int] = field(default_factory=Counter)
    exhausts: Counter[str] = field(default_factory=Counter)
    longest_wait: int = 0


def real_run(plan: Plan, world_size: int) -> Real:
    real = Real()
    num_micro = plan.config.train.micro_batches
    for rank in range(world_size):
        blend = make_blend(plan, RankInfo(rank=rank, local_rank=rank, world_size=world_size))
        picks: Counter[str] = Counter()
        last_step: dict[int, int] = {}
        for index in range(plan.config.train.steps * num_micro):
            batch = next(blend, None)
            if batch is None:
                break
            step = index // num_micro + 1
            source = batch["dataset_labels"][0]
            picks[source] += 1
            drained = next(each.dataset for each in blend.sources if each.name == source).drain_step_metrics()
            real.exhausts[source] += int(drained[EXHAUST_EVENTS])
            rows = int((batch["targets"] >= 0).any(axis=1).sum())  # a rank without data gives a masked row
            real.cells[source] += rows
            real.cells_per_step[step] += rows
            real.tokens[source] += int((batch["targets"] >= 0).sum())
            for group, cell, is_last in zip(batch["group_ids"], batch["cell_index"], batch["is_last"], strict=True):
                if group >= 0:
                    if cell > 0:
                        real.longest_wait = max(real.longest_wait, step - last_step[group])
                    last_step[group] = step
                    if is_last:
                        del last_step[group]
        real.picks.append(picks)
    return real


def plan_of(tmp_path: Path, *overrides: str, world_size: int = 2) -> tuple[Plan, list[SourceShape]]:
    if not (tmp_path / "corpus").exists():
        make_corpus(tmp_path / "corpus", streams=5, documents=9)
    config_path = write_tiny_config(tmp_path)
    config = load_config(config_path, ["data.max_group_cells=3", "train.steps=60", "ledger.capacity=200", *overrides])
    plan = make_plan(config, config_path, world_size)
    return plan, [source_shape(plan, source, world_size) for source in plan.sources]


@pytest.mark.parametrize("overrides", MODES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_counts_match_the_real_pipeline(tmp_path: Path, overrides: tuple[str, ...], world_size: int) -> None:
    plan, shapes = plan_of(tmp_path, *overrides, world_size=world_size)
    forecast = count_run(plan, shapes, world_size)
    real = real_run(plan, world_size)
    for shape in shapes:
        tallies = forecast.tallies[shape.name]
        ranks = 1 if shape.shared else world_size
        assert [tally.picks.total() for tally in tallies] == [real.picks[rank][shape.name] for rank in range(ranks)]
        assert sum(tally.cells.total() for tally in tallies) == real.cells[shape.name]
        exhausts = sum(tally.exhausts.total() for tally in tallies)
        assert exhausts * (world_size if shape.shared else 1) == real.exhausts[shape.name]
        # The tokens of a slice in progress are estimated in proportion to its cells.
        tokens = sum(sum(tally.tokens.values()) for tally in tallies)
        assert tokens == pytest.approx(real.tokens[shape.name], rel=0.05)
        is_cut = "data.max_group_cells=0" not in overrides
        assert any(stream.behind_cuts for stream in shape.streams) == is_cut
    assert forecast.cells_per_step.tolist() == [
        real.cells_per_step[step + 1] for step in range(len(forecast.cells_per_step))
    ]
    tallies = [tally for shape in shapes for tally in forecast.tallies[shape.name]]
    assert real.longest_wait <= max(max(waits) for tally in tallies for waits in tally.waits.values())


def waits(num_mixed: int, picks: int, seed: int) -> list[int]:
    """Waits of a pool of K readers with n picks per slice, refilled from 4 K streams, over 10 K n picks."""
    part = SliceShape(np.full(4, picks), 4 * picks)
    streams = tuple(StreamShape("m", 4, (part,)) for _ in range(4 * num_mixed))
    shape = SourceShape("pool", streams, num_mixed, shared=True)
    mixing = CountedMixing(shape, "weighted", seed, 0)
    for step in range(1, 10 * num_mixed * picks + 1):
        mixing.step = step
        next(mixing)
    return list(mixing.tally.waits["m"].elements())


@pytest.mark.parametrize("num_mixed", [4, 8])
@pytest.mark.parametrize("picks", [20, 50, 100])
def test_no_wait_is_longer_than_2_k_n(num_mixed: int, picks: int) -> None:
    longest = max(max(waits(num_mixed, picks, seed)) for seed in range(3))
    assert longest <= 2 * num_mixed * picks
    assert longest > 0.4 * num_mixed * picks  # the bound is tight: a threshold far below is not safe
