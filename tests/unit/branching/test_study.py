"""Which branches there are, their batches, learning rates, steps and configs."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.tools.branching.run_branches import evaluation_config, slots, training_config
from trainer.tools.branching.study import STEPS_UNIT, BranchBatch, base_steps_for, fit_batch, parse_numbers


def rates(study):
    return {branch.batch.factor: branch.lr for branch in study.branches if branch.lr_scale == 1}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({}, (0.5e-3, 1e-3, 2e-3)),
        ({"name": "muon"}, (0.5e-3, 1e-3, 2e-3)),
        ({"name": "sgd"}, (0.25e-3, 1e-3, 4e-3)),
    ],
)
def test_the_learning_rate_follows_the_batch_by_the_rule_of_the_optimizer(make_study, optimizer, expected):
    study = make_study({"optimizer": optimizer})
    assert list(rates(study).values()) == pytest.approx(expected)
    assert {branch.lr for branch in study.branches if branch.batch.factor == 1} == {0.5e-3, 1e-3, 2e-3}


def test_the_tokens_are_a_share_of_the_run_so_far_or_enough_steps_of_the_largest_batch(make_study):
    short = make_study()
    assert short.tokens == 64_000  # 16 steps of the largest batch
    long = make_study(fields={"tokens_seen": 1_000_000})
    assert long.tokens == 208_000
    assert {branch.steps for branch in long.branches} == {832, 208, 52}
    asked = make_study(tokens=1)
    assert (asked.tokens, {branch.steps for branch in asked.branches}) == (16_000, {64, 16, 4})


def test_tokens_of_branches_that_are_done_stay_unless_a_new_factor_does_not_divide_them(make_study):
    def before(steps):
        return {**make_study().common, "base_steps": steps, "tokens": 1000 * steps}

    assert make_study(before=before(32)).base_steps == 32
    with pytest.raises(UserError, match=r"base_steps 20 \(now 64\); their losses do not compare"):
        make_study(before=before(20))


def test_data_of_ones_own_have_one_order_and_batches_of_their_size(make_study):
    data = {"data": {"source": [{"name": "mine", "target": "my:data"}]}}
    with pytest.raises(UserError, match="--seeds: source mine is a target of your own"):
        make_study(data)
    study = make_study(data, num_seeds=1)
    assert [line.split()[0] for line in study.impossible] == ["1/4"]


def test_the_config_of_a_branch_differs_in_batch_rate_and_length_alone(make_study):
    study = make_study(
        {"ledger": {"wipe_mode": "periodic_stale", "stale_threshold": 10}, "train": {"on_non_finite": "skip"}}
    )
    before = study.origin.config
    for branch in study.branches:
        after = training_config(study, branch)
        factor = branch.batch.factor
        rows = after.train.micro_batches * after.data.mixing.batch_size
        assert rows == factor * 16
        assert (after.train.steps, after.optimizer.lr, after.scheduler.name) == (
            100 + branch.steps,
            branch.lr,
            "constant",
        )
        assert after.ledger.stale_threshold == {Fraction(1, 4): 40, 1: 10, 4: 3}[factor]
        assert after.train.on_non_finite == "stop"
        assert (after.eval.every > 0) == (branch.batch.row_share == 1)
        kept = {"run", "model", "objective", "distributed"}
        assert all(getattr(after, table) == getattr(before, table) for table in kept)


def test_fewer_rows_are_fewer_of_every_source_and_modality_and_evaluated_with_all(make_study):
    mixing = {"batch_size": 8, "batch_size_by_modality": {"a": 4}}
    source = {"name": "one", "root": "nowhere", "mixing": {"batch_size": 2, "batch_size_by_modality": {"b": 6}}}
    study = make_study({"data": {"mixing": mixing, "source": [source]}}, factors=[Fraction(1, 4), Fraction(1)])
    branch = study.branches[0]
    assert branch.batch.row_share == Fraction(1, 2)
    after = training_config(study, branch).data
    assert (after.mixing.batch_size, after.mixing.batch_size_by_modality) == (4, {"a": 2})
    assert (after.source[0].mixing.batch_size, after.source[0].mixing.batch_size_by_modality) == (1, {"b": 3})
    evaluated = evaluation_config(study, branch)
    assert evaluated.data == study.origin.config.data
    assert evaluated.eval.every > 0
    assert evaluated.train.steps == 100 + branch.steps


def test_groups_that_are_never_read_on_may_be_evicted(make_study):
    study = make_study({"ledger": {"wipe_mode": "none"}})
    modes = {branch.seed: training_config(study, branch).ledger.wipe_mode for branch in study.branches}
    assert modes == {0: "none", 1: "lru"}


def test_without_held_out_documents_every_training_loss_is_logged(make_study):
    study = make_study({"eval": {"every": 0, "holdout_fraction": 0.0}})
    assert not study.is_held_out
    configs = [training_config(study, branch) for branch in study.branches]
    assert {(config.metrics.log_interval, config.eval.every) for config in configs} == {(1, 0)}
    assert make_study({"eval": {"every": 0, "holdout_fraction": 0.1}}).is_held_out


def test_numbers_are_read_exactly():
    assert parse_numbers("--factors", "1/4, 0.5,1e-1") == [Fraction(1, 4), Fraction(1, 2), Fraction(1, 10)]
    for text in ("", "1,,2", "-1", "1/0", "inf", "nan"):
        with pytest.raises(UserError, match=r"--factors: .* is no positive number"):
            parse_numbers("--factors", text)


def test_branches_at_once_get_devices_of_their_own():
    assert slots(2, 2, ["0", "1", "5", "7", "8"]) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "5,7"}]
    assert slots(2, 1, []) == [{}]
    with pytest.raises(UserError, match="--parallel: 3 branches of 2 ranks need 6 CUDA devices, there are 5"):
        slots(2, 3, ["0", "1", "5", "7", "8"])


QUARTER, HALF = Fraction(1, 4), Fraction(1, 2)


@pytest.mark.parametrize(
    ("factor", "today", "sizes", "expected"),
    [
        (Fraction(2), 2, [8], (4, 1)),
        (HALF, 2, [8], (1, 1)),
        (QUARTER, 2, [8, 4], (1, HALF)),
        (QUARTER, 1, [8], (1, QUARTER)),
        (HALF, 3, [8], (2, Fraction(3, 4))),
        (HALF, 3, [6], (3, HALF)),  # 3/4 of 6 rows are no rows, 1/2 of them are
        (Fraction(3, 2), 1, [8], (2, Fraction(3, 4))),
        (HALF, 1, [1], None),
        (QUARTER, 1, [2], None),
        (QUARTER, 1, [8, 6], None),  # a modality whose rows cannot be divided
        (QUARTER, 2, [], None),  # batches of a source's own
        (HALF, 2, [], (1, 1)),
    ],
)
def test_a_factor_is_made_of_micro_batches_or_else_of_fewer_rows(factor, today, sizes, expected):
    found = fit_batch(factor, today, sizes)
    assert found == (None if expected is None else BranchBatch(factor, *expected))


@given(
    factor=st.fractions(Fraction(1, 16), 16, max_denominator=16),
    today=st.integers(1, 16),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=3),
)
def test_a_batch_has_exactly_the_rows_that_were_asked_for(factor, today, sizes):
    found = fit_batch(factor, today, sizes)
    if found is None:
        return
    assert found.micro_batches * found.row_share == factor * today
    assert found.row_share <= 1
    assert all((size * found.row_share).denominator == 1 and size * found.row_share >= 1 for size in sizes)


@given(
    factors=st.lists(st.fractions(QUARTER, 8, max_denominator=6), min_size=1, max_size=5),
    tokens=st.integers(1, 10**7),
    per_step=st.floats(1, 1e4),
)
def test_every_factor_trains_the_same_tokens_in_whole_steps(factors, tokens, per_step):
    base = base_steps_for(tokens, per_step, factors)
    assert base * per_step >= tokens * (1 - 1e-9)
    for factor in factors:
        steps = BranchBatch(factor, 1).steps(base)
        assert steps * factor == base
        assert steps % STEPS_UNIT == 0
