"""Runs grouped by their settings, and what differences of their means say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trainer.metrics.payload_contract import Restart
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.report.run_summary import Spread, excess, reservations, seed_groups, with_distinct_names


@pytest.fixture
def make(make_run):
    """`make(name, seed, held_out, lr=0.1)`: a run of two rows that is done."""

    def run(name, seed, held_out, *, steps=2, tokens=None, state="done", environment=None, **settings):
        config = {"run": {"name": name, "seed": seed}, "optimizer": {"lr": 0.1}}
        for key, value in settings.items():
            table, _, name_of_key = key.partition("__")
            config.setdefault(table, {})[name_of_key] = value
        columns = {"loss": [2.0] * steps, "tokens_seen": [tokens or 10.0 * step for step in range(1, steps + 1)]}
        evals = {} if held_out is None else {2: {"eval_loss": held_out}}
        record = make_run(name, columns, evals, config, environment)
        return replace(record, status={"state": state})

    return run


def grouped(*runs, **options):
    label, groups = seed_groups([diagnose(run) for run in with_distinct_names(runs)], **options)
    return label, groups, list(reservations(groups, label))


def test_runs_that_differ_in_seed_and_names_alone_are_one_row_ranked_by_its_mean(make):
    runs = [make(f"high{seed}", seed, loss) for seed, loss in ((1, 3.0), (2, 3.2), (3, 3.4))]
    runs += [make(f"low{seed}", seed, loss, optimizer__lr=0.2) for seed, loss in ((1, 2.0), (2, 2.5))]
    label, (low, high), remarks = grouped(*runs)
    assert label == "Held-out loss"
    assert (low.settings, high.settings) == ({"optimizer.lr": 0.2}, {"optimizer.lr": 0.1})
    assert high.seeds == [1, 2, 3]
    assert high.outcome["Held-out loss"] == Spread(pytest.approx(3.2), pytest.approx(0.2), 3)
    assert low.outcome["Held-out loss"] == Spread(2.25, pytest.approx(math.sqrt(0.125)), 2)
    assert remarks == []


def test_a_seed_that_was_run_twice_counts_once(make):
    runs = [make("a", 1, 2.0), make("b", 1, 3.0), make("c", 2, 4.5)]
    _, (group,), remarks = grouped(*runs)
    assert group.outcome["Held-out loss"] == Spread(3.5, pytest.approx(math.sqrt(2.0)), 2)
    assert remarks == ["row 1 has 3 runs of 2 seeds; runs of one seed count as one"]


def test_a_difference_is_resolved_beyond_two_standard_errors_of_both():
    error = math.sqrt(0.1**2 + 0.1**2)
    for times, is_resolved in ((1.99, False), (2.01, True)):
        found = excess(Spread(1.0, 0.3, 9), Spread(1.0 + times * error, 0.2, 4))
        assert (found.error, found.is_resolved) == (pytest.approx(error), is_resolved)


def test_losses_of_documents_that_a_resume_changed_are_named(make):
    changed = Restart(1, {"changed": {"data files": {"before": "as saved", "after": "source a: 1 changed"}}})
    runs = [make("a", 1, 2.0), replace(make("b", 1, 1.0), restarts=[changed])]
    assert "held-out losses may be of different data: data files differ" in grouped(*runs)[2]


def test_rows_that_do_not_compare_are_named(make):
    runs = [
        make("a", 1, 2.0, steps=4, eval__batches=8),
        make("b", 2, 2.5, steps=2, eval__batches=8, state="running"),
        make("c", 1, None, steps=4, eval__batches=4, environment={"packages": {"torch": "1"}}),
        make("d", 2, 2.6, steps=4, eval__batches=4, environment={"packages": {"torch": "2"}}),
    ]
    remarks = grouped(*runs)[2]
    assert remarks == [
        "not done: b (running)",
        "not equally long: the longest ended at step 4, earlier b (2)",
        "held-out losses may be of different data: eval.batches differ",
        "not equally many tokens: up to 40 on average of a row, fewer in row 1 (30)",
        "row 2 has a held-out loss for 1 of 2 seeds",
        "recorded versions or machines differ within row 2: env.packages.torch",
    ]


def test_runs_without_recorded_settings_are_not_pooled(make_run):
    runs = [make_run(name, {"loss": [loss]}) for name, loss in (("a", 3.0), ("b", 2.0))]
    label, groups, remarks = grouped(*(replace(run, status={"state": "done"}) for run in runs))
    assert label == "Final loss"
    assert [group.runs[0].name for group in groups] == ["b", "a"]
    assert remarks[0] == "no config.resolved.toml, hence a row of its own: b, a"
