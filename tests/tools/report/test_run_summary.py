"""The results of a run, and how two runs differ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.records import record_of
from trainer.metrics.payload_contract import Restart
from trainer.tools.report.run_summary import config_differences, end_of, key_means, ran, reservations, summarize


def results(run, **options):
    return {row.label: row.value for row in summarize(run, **options)}


def test_results_come_from_the_rows_and_are_none_if_unknown(make_run):
    train = {"loss": [4.0, 3.0, 1.0, 2.0], "tokens_per_sec": [5.0, 100.0, 110.0, 120.0]}
    train |= {"ledger/cold_starts": [1.0, 0.0, 2.0, 0.0], "data/fill": [1.0, 1.0, 1.0, 0.6]}
    found = results(make_run("a", train, {2: {"eval_loss": 2.0}, 4: {"eval_loss": 2.5}}), window=2)
    expected = {"Steps": 4, "Final loss": 1.5, "Held-out loss": 2.5, "Best held-out loss": 2.0}
    expected |= {"Speed": 105.0, "Fill": 0.9, "Cold starts": 3.0, "Noise scale": None, "Tokens seen": None}
    unknown = ("Parameters", "Tokens per parameter", "Batch", "MFU", "Peak memory", "Time of all steps")
    expected |= dict.fromkeys(unknown)
    assert found == found | expected


def test_the_size_of_a_run_comes_from_its_environment_and_rows(make_run):
    config = {"model": {"dim": 16, "num_layers": 1}, "data": {"source": [{"name": "books"}]}}
    sizes = {"world_size": 2, "parameters": 50, "tokens_per_step": 60, "devices": ["H100", "H100"]}
    rows = {"gpu/peak_gb": [2.0, 3.0], "tokens_seen": [50.0, 100.0], "mfu": [0.4, 0.4]}
    rows |= {"data/epochs/web": [0.2, 0.41], "data/epochs/code": [1.1, 2.3]}
    rows["data/epochs/lost"] = [5.0, float("nan")]  # not known any more: no total
    evals = {2: {"eval_loss": 2.0, "eval_bits_per_byte": 1.5}}
    run = make_run("a", rows, evals, {**config, "train": {"device": "auto"}}, sizes)
    expected = {"Tokens per parameter": 2.0, "Batch": 50.0, "MFU": 0.4, "Peak memory": 3.0}
    assert results(run) == results(run) | expected
    notes = {row.label: row.note for row in summarize(run)}
    assert (results(run)["Data read"], notes["Data read"]) == (2.3, "source code; web 0.41")
    assert notes["Batch"] == "of at most 60, mean of all steps"
    fewer = summarize(replace(run, environment={**sizes, "tokens_per_step": 20}))  # ranks, since a resume
    assert {row.label: row.note for row in fewer}["Batch"] == "mean of all steps"
    assert notes["Held-out loss"] == "1.5 bits/byte, last of 1 evaluation, step 2"
    shown = [("Model", "rglru", "dim 16, 1 layer"), ("Device", "H100", "2 ranks"), ("Data", "books", "")]
    assert [(row.label, row.value, row.note) for row in ran(run)] == shown
    assert ran(replace(run, config={})) == []
    resumed = replace(record_of({step: {"step_time_sec": step / 10} for step in (110, 120)}), restarts=[Restart(100)])
    assert results(resumed)["Time of all steps"] == 10 * 11 + 10 * 12


def test_differing_settings_are_dotted_keys_and_sources_go_by_name(make_run):
    source = {"name": "books", "weight": 1.0}
    shared = {"lr": 1e-3}
    config = {"run": {"name": "a"}, "optimizer": shared, "data": {"source": [source]}}
    a = make_run("a", {"loss": [1.0]}, config=config)
    other = {"optimizer": {**shared, "eps": 1e-8}, "data": {"source": [{**source, "weight": 2.0}]}}
    machine = {"world_size": 2, "command": ["x"]}
    b = make_run("b", {"loss": [1.0]}, config={"run": {"name": "b"}, **other}, environment=machine)
    assert config_differences([a, b]) == [
        ("data.source.books.weight", [1.0, 2.0]),
        ("optimizer.eps", [None, 1e-8]),
        ("env.world_size", [None, 2]),
    ]
    assert config_differences([a, a]) == []


def test_means_cover_the_steps_of_the_last_rows(make_run):
    a = make_run("a", {"loss": [9.0, 9.0, 1.0, 3.0], "rare": [7.0]}, {1: {"eval_loss": 5.0}, 4: {"eval_loss": 3.0}})
    b = make_run("b", {"loss": [9.0, 9.0, 4.0, 4.0]}, {2: {"eval_loss": 4.0}})
    rows = {row.key: row for row in key_means(a, b, window=2)}
    loss = rows["loss"]
    assert (loss.means, loss.difference) == ((2.0, 4.0), 2.0)
    assert loss.standard_deviations == (pytest.approx(math.sqrt(2)), 0.0)
    assert rows["eval_loss"].means == (3.0, 4.0)
    assert (rows["rare"].means, rows["rare"].difference) == ((7.0, None), None)


def test_the_end_is_the_last_tenth_of_the_rows_and_the_final_loss_names_its_steps(make_run):
    falling = [float(100 - step) for step in range(100)]
    short = make_run("short", {"loss": falling[:11]})
    assert (end_of(short).rows, end_of(short).first, end_of(short).last) == (1, 11, 11)
    long = make_run("long", {"loss": falling})
    rough = make_run("rough", {"loss": [3.0, 2.0, math.nan]})
    for run, value, note in (
        (short, falling[10], "mean of step 11"),
        (long, sum(falling[90:]) / 10, "mean of 10 rows, steps 91 to 100"),
        (rough, 2.0, "last finite value, step 2"),
    ):
        (final,) = [row for row in summarize(run) if row.label == "Final loss"]
        assert (final.value, final.note) == (value, note)
    assert end_of(make_run("longer", {"loss": falling * 5})).rows == 20
    assert end_of(short, 400).rows == 11


def test_counters_schedules_and_running_averages_are_not_averaged(make_run):
    columns = {"loss": [3.0, 1.0], "tokens_seen": [10.0, 20.0], "lr": [0.1, 0.3], "smoothed/loss": [3.0, 2.5]}
    rows = {row.key: row for row in key_means(make_run("a", columns), make_run("b", columns), window=2)}
    assert {key: row.means[0] for key, row in rows.items()} == {
        "loss": 2.0, "tokens_seen": 20.0, "lr": 0.3, "smoothed/loss": 2.5
    }  # fmt: skip
    assert [row.is_last for row in rows.values()] == [False, True, True, True]


def test_runs_that_do_not_compare_are_named(make_run):
    def made(name, steps=4, state="done", **evaluation):
        record = make_run(name, {"loss": [2.0] * steps}, {}, {"eval": {"batches": 8, **evaluation}})
        return replace(record, status={"state": state})

    assert list(reservations([made("a"), made("b")])) == []
    changed = Restart(1, {"changed": {"data.tokenizer": {"before": "ids", "after": "bytes"}}})
    runs = [made("a"), made("b", 2, "running", batches=4), replace(made("c"), restarts=[changed])]
    runs[0].config["objective"] = {"target": "mine:Focal", "token_types": True}
    assert list(reservations(runs)) == [
        "not done: b (running)",
        "not equally long: the longest ended at step 4, earlier b (2)",
        "held-out losses may be of different data: eval.batches, data.tokenizer differ",
        "losses are of different objectives: objective.target differ",
    ]
