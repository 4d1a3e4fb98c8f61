"""Which branches there are, their batches, learning rates, steps and configs."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.tools.branching.run_branches import slots, training_config
from trainer.tools.branching.study import STEPS_UNIT, base_steps_for, parse_numbers


@pytest.mark.parametrize(("optimizer", "power"), [({}, 0.5), ({"name": "muon"}, 0.5), ({"name": "sgd"}, 1)])
def test_the_learning_rate_follows_the_batch_by_the_rule_of_the_optimizer(make_study, optimizer, power):
    study = make_study({"optimizer": optimizer})
    rates = {branch.factor: branch.lr for branch in study.branches if branch.lr_scale == 1}
    assert rates == pytest.approx({factor: 1e-3 * float(factor) ** power for factor in rates})
    assert {branch.lr for branch in study.branches if branch.factor == 1} == {0.5e-3, 1e-3, 2e-3}


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


def test_data_of_ones_own_have_one_order(make_study):
    data = {"data": {"source": [{"name": "mine", "target": "my:data"}]}}
    with pytest.raises(UserError, match="--seeds: source mine is a target of your own"):
        make_study(data)
    assert make_study(data, num_seeds=1).num_seeds == 1


def test_a_batch_is_a_whole_number_of_micro_batches(make_study):
    study = make_study(fields={"micro_batches": 2})
    assert [line.split()[0] for line in study.impossible] == ["1/4"]
    assert {branch.micro_batches for branch in study.branches} == {2, 8}


def test_the_config_of_a_branch_differs_in_batch_rate_and_length_alone(make_study):
    ledger = {"wipe_mode": "periodic_stale", "stale_threshold": 10}
    study = make_study({"ledger": ledger, "train": {"on_non_finite": "skip"}})
    before = study.origin.config
    for branch in study.branches:
        after = training_config(study, branch)
        assert after.train.micro_batches == branch.factor * 4
        assert (after.train.steps, after.optimizer.lr) == (100 + branch.steps, branch.lr)
        assert after.scheduler.name == "constant"
        assert after.ledger.stale_threshold == {Fraction(1, 4): 40, 1: 10, 4: 3}[branch.factor]
        assert after.train.on_non_finite == "stop"
        for table in ("run", "model", "objective", "distributed", "data"):
            assert getattr(after, table) == getattr(before, table)


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


QUARTER = Fraction(1, 4)


@given(
    factors=st.lists(st.fractions(QUARTER, 8, max_denominator=6), min_size=1, max_size=5),
    tokens=st.integers(1, 10**7),
    per_step=st.floats(1, 1e4),
)
def test_every_factor_trains_the_same_tokens_in_whole_steps(factors, tokens, per_step):
    base = base_steps_for(tokens, per_step, factors)
    assert base * per_step >= tokens * (1 - 1e-9)
    for factor in factors:
        steps = base / factor
        assert steps.denominator == 1
        assert steps % STEPS_UNIT == 0
