"""Rules across tables, and the facts that follow from a config."""

from __future__ import annotations

import pytest

from tests.support.runs import TINY
from trainer.config.load import load_config
from trainer.config.rules import check_rules
from trainer.errors import UserError


def facts(tmp_path, *overrides: str, world_size: int = 1):
    path = tmp_path / "x.toml"
    path.write_text(TINY.format(runs="runs", corpus="corpus"), encoding="utf-8")
    config = load_config(path, overrides)
    return check_rules(config, config.data.source, world_size)


def test_facts_count_the_largest_batch_on_all_ranks(tmp_path):
    found = facts(tmp_path, "data.mixing.batch_size_by_modality={b=6}", world_size=3)
    assert found.cells_per_step == 6 * 2 * 3
    assert found.tokens_per_step == 6 * 2 * 3 * 16
    assert found.tokens_in_run == 6 * found.tokens_per_step
    assert found.groups_in_flight == 2 * 2 * 6


def test_a_source_s_own_mixing_counts_in_flight(tmp_path):
    assert facts(tmp_path, "data.source.first.mixing.num_streams_mixed=3").groups_in_flight == 3 * 4 + 2 * 4


@pytest.mark.parametrize("mode", ["none", "lru", "full", "periodic_stale"])
def test_capacity_below_the_groups_in_flight_is_refused_in_every_mode(tmp_path, mode):
    knobs = ["ledger.wipe_every=5", "ledger.stale_threshold=5", f"ledger.wipe_mode={mode}"]
    assert facts(tmp_path, "ledger.capacity=16", *knobs).ledger_capacity == 16
    with pytest.raises(
        UserError, match=r"ledger\.capacity: must hold the groups in flight: 16 .* set it to 16 or more"
    ):
        facts(tmp_path, "ledger.capacity=15", *knobs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.every=5"], r"eval\.holdout_fraction: is 0"),
        (["train.precision=fp16"], r"train\.precision: \"fp16\" needs a CUDA device"),
        (["distributed.backend=nccl"], r"distributed\.backend: \"nccl\" needs CUDA"),
        (["data.source.second.name=first"], "two sources are named first"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        facts(tmp_path, *overrides)


def test_ownership_follows_from_who_reads(tmp_path):
    assert facts(tmp_path, world_size=2).ownership == "reader"
    assert facts(tmp_path, "ledger.ownership=exchange", world_size=2).ownership == "exchange"
    foreign = ["data.source.second={name='own', target='my:build'}"]
    assert facts(tmp_path, *foreign, world_size=2).groups_in_flight == 2 * 4  # a target has no readers
    assert facts(tmp_path, *foreign, world_size=2).ownership == "exchange"
    assert facts(tmp_path, *foreign, world_size=1).ownership == "reader"
    with pytest.raises(UserError, match="which source own"):
        facts(tmp_path, *foreign, "ledger.ownership=reader", world_size=2)
