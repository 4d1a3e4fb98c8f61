"""Which branches there are, their learning rates and configs."""

from __future__ import annotations

from fractions import Fraction

import pytest

from trainer.errors import UserError
from trainer.tools.branching.run_branches import evaluation_config, training_config
from trainer.tools.branching.study import parse_numbers


def rates(study):
    return {branch.batch.factor: branch.lr for branch in study.branches if branch.lr_scale == 1}


@pytest.mark.parametrize(
    ("optimizer", "rule", "expected"),
    [
        ({}, None, (0.5e-3, 1e-3, 2e-3)),
        ({"name": "muon"}, None, (0.5e-3, 1e-3, 2e-3)),
        ({"name": "sgd"}, None, (0.25e-3, 1e-3, 4e-3)),
        ({"name": "sgd"}, "sqrt", (0.5e-3, 1e-3, 2e-3)),
        ({}, "none", (1e-3, 1e-3, 1e-3)),
        ({"target": "my:optimizer"}, "linear", (0.25e-3, 1e-3, 4e-3)),
    ],
)
def test_the_learning_rate_follows_the_batch_by_the_rule_of_the_optimizer(make_study, optimizer, rule, expected):
    study = make_study({"optimizer": optimizer}, lr_rule=rule)
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
