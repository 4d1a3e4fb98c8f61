"""Rules across tables, the forms of `train.micro_batches`, and the facts that follow from a config."""

from __future__ import annotations

import pytest

from tests.support.in_process import plan_of
from tests.support.runs import TINY, write_tiny_config
from trainer.config.load import load_config
from trainer.config.rules import check_rules
from trainer.errors import UserError


def facts(tmp_path, *overrides: str, world_size: int = 1):
    path = tmp_path / "x.toml"
    path.write_text(TINY.format(runs="runs", corpus="corpus"), encoding="utf-8")
    config = load_config(path, overrides)
    return check_rules(config, world_size)


def test_facts_count_the_largest_batch_on_all_ranks(tmp_path):
    found = facts(tmp_path, "data.mixing.batch_size_by_modality={b=6}", world_size=3)
    assert found.tokens_per_step == 6 * 2 * 3 * 16
    assert found.groups_in_flight == 2 * 2 * 6
    own, foreign = "data.source.first.mixing.num_streams_mixed=3", "data.source.second={name='own', target='my:build'}"
    off = "data.source.second={name='off', root='x', weight=0, mixing={batch_size=100}}"
    assert [facts(tmp_path, own, *each).groups_in_flight for each in ((), (off,))] == [3 * 4 + 2 * 4, 3 * 4]
    assert facts(tmp_path, foreign, world_size=2).groups_in_flight == 2 * 4


OFF = "data.source.second={name='own', target='my:build', weight={schedule='step', points={0=0}}}"
LARGE = ('data.mixing={batching_mode="per_row", batch_size=5000}', "ledger.capacity=0", OFF)


def test_the_capacity_must_hold_the_groups_in_flight(tmp_path):
    own = "data.source=[{name='own', target='my:build'}]"
    assert [facts(tmp_path, *each).groups_in_flight for each in (LARGE, (*LARGE, own))] == [5000, 0]
    assert facts(tmp_path, "ledger.capacity=16").ledger_capacity == 16
    with pytest.raises(UserError, match=r"ledger\.capacity: .* documents in flight: 16 .* set it to 16 or more"):
        facts(tmp_path, "ledger.capacity=15")


FULL_ROWS = ('data.mixing={batching_mode="per_row", batch_size=4}',)
STALE = (*FULL_ROWS, "ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=99")
BY_BATCH = "data.source.first.weight=1"
BY_STREAM = ["data.mixing={}", *(f"data.source.{at}.mixing.batching_mode=per_stream" for at in (0, 1))]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["eval.every=5"], "eval.holdout_fraction: is 0"),
        (["data.source.second.name=first"], "data.source: two sources are named first"),
        (["eval.source=[{name='a', root='x'}, {name='a', root='y'}]"], "eval.source: two sources are named a"),
        (['data.mixing.batch_size_by_modality={"../x"=2}'], "no stream has the modality '../x'; there are 'a', 'b'"),
        (['train.micro_batches="auto"'], 'train.micro_batches: must be a valid integer, got "auto"'),
        (['train.micro_batches={schedule="auto",points={0=2}}'], 'must be one of step; got "auto"'),
        (["distributed.shards=1000000"], "makes 2,000,000 micro-batches of a step on a rank; most: 10,000; start"),
        ([*FULL_ROWS, "ledger.capacity=1"], "of each source), got 1; remove it: then there is a slot for each lane"),
        (["data.mixing.spread=4"], 'data.mixing.spread: needs batching_mode "per_row"; remove it'),
        ([*STALE, 'train.micro_batches={schedule="step",points={0=1,9=2}}'], "where train.micro_batches changes m"),
        ([*STALE, "data.source.second={name='own', target='my:build'}"], "a source with a target gives whole batches"),
        (BY_STREAM, 'is "per_row" for some sources'),
        (["train.micro_batches=0"], "train.micro_batches: must be greater than or equal to 1, got 0"),
        (['train.micro_batches={schedule="step",points={0=0}}'], "train.micro_batches.points.0: must be greater"),
        (['train.micro_batches={schedule="step",points={0=1},a=2}'], "train.micro_batches.a: unknown key; known keys"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_that_says_how_to_fix_it(tmp_path, sets, message):
    with pytest.raises(UserError) as refused:
        plan_of(write_tiny_config(tmp_path), *sets)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_gap_in_the_weights_that_only_a_grown_batch_reaches_is_refused(tmp_path):
    config = write_tiny_config(tmp_path)
    gap = [
        'data.source.first.weight={schedule="step",points={0=1,40=0}}',
        'data.source.second.weight={schedule="step",points={0=1,40=0}}',
    ]
    plan_of(config, *gap, "train.micro_batches=2")
    with pytest.raises(UserError, match="all weights are zero at batch 40, of"):
        plan_of(config, *gap, 'train.micro_batches={schedule="step",points={0=2,3=10}}')


def test_facts_are_those_of_the_largest_step_and_of_the_planned_run(tmp_path):
    micro = 4 * 16 * 2
    found = facts(tmp_path, BY_BATCH, 'train.micro_batches={schedule="step",points={0=9,1=1,3=5,5=2}}', world_size=2)
    assert (found.tokens_per_micro, found.tokens_per_step) == (micro, 5 * micro)
    in_tokens = ("train.steps=0", f"train.tokens={10 * micro}", "scheduler.warmup_steps=0")
    by_steps = 'train.micro_batches={schedule="step",points={0=1,3=3}}'
    assert facts(tmp_path, BY_BATCH, by_steps, *in_tokens, world_size=2).steps == 2 + 3  # 1 + 1 + 3 + 3 + 2 of 3
    assert facts(tmp_path, BY_BATCH, "train.micro_batches=3", *in_tokens, world_size=2).steps == 4
