"""Which branches there are, their batches, rates and steps; and from their losses to a verdict, rows and a sentence."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.records import record_of
from trainer.errors import UserError
from trainer.files import write_json
from trainer.tools.branching.answer import decide, error_bar_of, make_answer
from trainer.tools.branching.study import (
    STEPS_UNIT,
    STUDY_FILE,
    base_steps_for,
    last_training_loss,
    parse_numbers,
    training_config,
)


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


def test_data_of_ones_own_have_one_order(make_study):
    data = {"data": {"source": [{"name": "mine", "target": "my:data"}]}}
    with pytest.raises(UserError, match="--seeds: source mine is a target of your own"):
        make_study(data)
    assert make_study(data, num_seeds=1).num_seeds == 1


def test_a_batch_is_a_whole_number_of_micro_batches(make_study):
    study = make_study(fields={"micro_batches": 2}, factors=None)
    assert {branch.micro_batches for branch in study.branches} == {1, 2, 4, 8}
    for factors, said in (("1/4,1", "1/4 of 2"), ("2", "2 of 2")):
        with pytest.raises(UserError, match=f"--factors: {said} micro-batches; name two or more"):
            make_study(fields={"micro_batches": 2}, factors=parse_numbers("--factors", factors))


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


def test_numbers_are_read_exactly():
    assert parse_numbers("--factors", "1/4, 0.5,1e-1") == [Fraction(1, 4), Fraction(1, 2), Fraction(1, 10)]
    for text in ("", "1,,2", "-1", "1/0", "inf", "nan"):
        with pytest.raises(UserError, match=r"--factors: .* is no positive number"):
            parse_numbers("--factors", text)


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


def answered(study, loss_of):
    results = {branch: loss_of(branch.factor, branch.lr_scale, branch.seed) for branch in study.branches}
    return make_answer(study, results, tolerance=0.01)


def test_the_rate_with_the_best_mean_over_seeds_counts(make_study):
    losses = {0.5: [1.0, 3.0], 1.0: [1.8, 1.8], 2.0: [2.0, 2.0]}
    answer = answered(make_study(), lambda factor, scale, seed: losses[scale][seed])
    for row in answer["batches"]:
        assert (row["is_edge"], row["loss"]) == (False, 1.8)


def test_a_rate_that_diverged_with_one_seed_does_not_count(make_study):
    answer = answered(make_study(), lambda factor, scale, seed: None if scale == 0.5 and seed else 1.0 + scale)
    assert [row["lr"] for row in answer["batches"]] == [0.5e-3, 1e-3, 2e-3]
    nothing = answered(make_study(), lambda factor, scale, seed: None)
    assert nothing["critical"] is None
    assert "no branch ended with a finite loss" in nothing["sentence"]


def test_the_sentence_names_the_batch_in_sequences_and_tokens(make_study):
    study = make_study()
    found = answered(study, lambda factor, scale, seed: 2.0 + (factor == 4) + abs(scale - 1))["sentence"]
    assert found.startswith("At step 100 the critical batch is 10 sequences (1,000 tokens, 1 x today's): ")
    assert "edge" not in found
    edge = answered(study, lambda factor, scale, seed: 2.0 + float(factor))["sentence"]
    assert "The best learning rate of 1/4 x, 1 x, 4 x is at the edge of the grid" in edge
    above = answered(study, lambda factor, scale, seed: 2.0)["sentence"]
    assert "at least 40 sequences (4,000 tokens, 4 x today's), the largest measured" in above


def test_the_noise_scale_stands_beside_it_in_the_same_units(make_study):
    rows = record_of(
        {90: {"gns/b_simple": 20.0, "gns/b_simple_low": 15.0, "gns/b_simple_high": 30.0, "gns/b_big": 16.0}}
    )
    found = answered(make_study(fields={"run": rows}), lambda factor, scale, seed: 2.0)["sentence"]
    assert found.endswith("The noise scale (gns/b_simple at step 90) is 20 (15 to 30) sequences.")


def test_the_training_loss_is_a_mean_per_token_over_the_last_quarter():
    rows = {step: {"loss": float(step), "tokens_in_step": 10.0 * step} for step in range(1, 9)}
    assert last_training_loss(record_of(rows), last=8, num_steps=8) == pytest.approx((7 * 70 + 8 * 80) / 150)
    del rows[7]
    assert last_training_loss(record_of(rows), last=8, num_steps=8) is None


def test_results_of_other_settings_are_refused(make_study, tmp_path):
    write_json(tmp_path / STUDY_FILE, make_study(tokens=1).common)
    make_study(tokens=1, num_seeds=5)
    with pytest.raises(UserError, match="their losses do not compare"):
        make_study(tokens=1, fields={"tokens_per_step": 999.0})
    with pytest.raises(UserError, match="their losses do not compare"):
        make_study(tokens=1, fields={"marker": "1"})


FACTORS = [Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4)]


def measured(*losses):
    """One batch per entry: a list of losses by seed, or one loss."""
    by_seed = [each if isinstance(each, list) else [each] for each in losses]
    return {factor: dict(enumerate(each)) for factor, each in zip(FACTORS, by_seed, strict=False)}


def test_the_largest_batch_within_the_tolerance_of_the_best_is_critical():
    verdict = decide(measured(2.0, 2.0, 2.01, 2.1, 2.4), tolerance=0.01)
    assert (verdict.reference, verdict.largest, verdict.next_larger) == (Fraction(1, 4), 1, 2)
    assert (verdict.lowest, verdict.highest, verdict.excess[1]) == (1, 1, pytest.approx(0.01))
    # A batch without a loss is outside.
    verdict = decide(measured(2.0, 2.0, [], 2.0), tolerance=0.01)
    assert (verdict.largest, verdict.next_larger, len(verdict.excess)) == (Fraction(1, 2), 1, 3)


def test_batches_that_the_error_bars_leave_open_are_named(make_study):
    noisy = measured([1.98, 2.02], [2.02, 1.98], [2.02, 2.06], [2.48, 2.52])
    verdict = decide(noisy, tolerance=0.01)
    assert (verdict.largest, verdict.lowest, verdict.highest) == (Fraction(1, 2), Fraction(1, 4), 1)
    sure = decide(noisy, tolerance=0.1)
    assert (sure.largest, sure.lowest, sure.highest) == (1, 1, 1)
    losses = {Fraction(1, 4): [1.98, 2.02], Fraction(1): [2.03, 2.05], Fraction(4): [2.5, 2.5]}
    found = answered(make_study(), lambda factor, scale, seed: losses[factor][seed] + abs(scale - 1))
    assert "; the error bars leave 1/4 x to 1 x open: add seeds or tokens" in found["sentence"]
    assert [row["is_within"] for row in found["batches"]] == [True, False, False]
    single = answered(make_study(num_seeds=1), lambda factor, scale, seed: 2.0 + (factor == 4) + abs(scale - 1))
    assert "; a single seed has no error bars" in single["sentence"]


def test_the_variance_is_pooled_over_batches_without_what_seeds_share():
    """The residual mean square of the two-way layout, by a least-squares fit."""
    losses = np.random.default_rng(0).normal(2.0, 0.1, (4, 3))
    seeds, batches = np.eye(3)[np.tile(range(3), 4)], np.eye(4)[np.repeat(range(4), 3)]
    design = np.hstack([seeds, batches])
    residuals = losses.ravel() - design @ np.linalg.lstsq(design, losses.ravel(), rcond=None)[0]
    error = (2 * residuals @ residuals / 6 / 3) ** 0.5
    bar = error_bar_of(measured(*losses.tolist()))
    assert bar / error == pytest.approx(2.699, rel=0.005)  # Student's t at 6 degrees, 98.2 %


def test_what_seeds_have_in_common_is_no_error():
    """Branches of one seed read the same data: the spread between seeds cancels in their difference."""
    verdict = decide(measured([2.0, 2.5, 3.0], [2.1, 2.6, 3.1]), tolerance=0.01)
    assert verdict.excess[FACTORS[1]] == pytest.approx(0.1)
    assert verdict.error_bar == pytest.approx(0.0, abs=1e-12)
    assert verdict.largest == Fraction(1, 4)


@given(
    losses=st.lists(st.lists(st.floats(0.5, 5.0), min_size=2, max_size=2), min_size=5, max_size=5),
    tolerance=st.floats(0, 0.5),
)
def test_a_wider_tolerance_never_gives_a_smaller_batch(losses, tolerance):
    strict, wide = (decide(measured(*losses), tolerance=each) for each in (tolerance, 2 * tolerance))
    assert strict.reference <= strict.largest <= wide.largest
    assert strict.next_larger is None or strict.next_larger > strict.largest
    assert strict.lowest <= strict.largest <= strict.highest <= wide.highest
