"""The results of a run, and how runs differ."""

from __future__ import annotations

import math

from tests.support.records import record_of
from trainer.metrics.payload_contract import Restart
from trainer.tools.report.run_summary import config_differences, summarize


def results(run):
    return {row.label: row.value for row in summarize(run)}


def notes(run):
    return {row.label: row.note for row in summarize(run)}


def test_results_come_from_the_rows_and_are_none_if_unknown():
    train = {"loss": [4.0, 3.0, 1.0, 2.0], "tokens_per_sec": [5.0, 100.0, 110.0, 120.0]}
    train |= {"ledger/cold_starts": [1.0, 0.0, 2.0, 0.0], "data/fill": [1.0, 1.0, 1.0, 0.6]}
    run = record_of(train, {2: {"eval_loss": 2.0, "eval_bits_per_byte": 1.5}, 4: {"eval_loss": 2.5}})
    expected = {"Steps": 4, "Final loss": 2.0, "Held-out loss": 2.5, "Held out": 1.5}
    expected |= {"Speed": 105.0, "Fill": 0.9, "Cold starts": 3.0, "Noise scale": None, "Tokens seen": None}
    unknown = ("Parameters", "MFU", "Peak memory", "Time of all steps")
    expected |= dict.fromkeys(unknown)
    assert results(run) == results(run) | expected
    assert notes(run)["Held-out loss"] == "step 4, best 2 at step 2"
    rows = {"gpu/peak_gb": [2.0, 3.0], "tokens_seen": [50.0, 100.0], "mfu": [0.4, 0.4]}
    rows |= {"data/epochs/web": [0.2, 0.41], "data/epochs_most": [1.1, 2.3]}
    run = record_of(rows, environment={"parameters": 50})
    expected = {"Tokens seen": 100.0, "MFU": 0.4, "Peak memory": 3.0, "Data read": 2.3}
    assert results(run) == results(run) | expected
    resumed = record_of({"step_time_sec": {110: 11.0, 120: 12.0}}, restarts=[Restart(100)])
    assert results(resumed)["Time of all steps"] == 10 * 11 + 10 * 12


def test_the_end_is_the_last_tenth_of_the_rows_and_the_final_loss_names_its_steps():
    falling = [float(100 - step) for step in range(100)]
    short, rough = record_of({"loss": falling[:11]}), record_of({"loss": [3.0, 2.0, math.nan]})
    for run, value, note in (
        (short, falling[10], "mean of step 11"),
        (record_of({"loss": falling}), sum(falling[90:]) / 10, "mean of 10 rows, steps 91 to 100"),
        (record_of({"loss": falling * 5}), 10.5, "mean of 20 rows, steps 481 to 500"),
        (rough, 2.0, "mean of step 2"),
    ):
        assert (results(run)["Final loss"], notes(run)["Final loss"]) == (value, note)


def test_differing_settings_are_dotted_keys_and_sources_go_by_name():
    source = {"name": "books", "weight": 1.0}
    a = record_of({}, config={"run": {"name": "a"}, "optimizer": {"lr": 1e-3}, "data": {"source": [source]}})
    other = {"optimizer": {"lr": 1e-3, "eps": 1e-8}, "data": {"source": [{**source, "weight": 2.0}]}}
    b = record_of({}, config={"run": {"name": "b"}, **other}, environment={"world_size": 2, "command": ["x"]})
    assert config_differences([a, b]) == [
        ("data.source.books.weight", [1.0, 2.0]),
        ("optimizer.eps", [None, 1e-8]),
        ("env.world_size", [None, 2]),
    ]
    assert config_differences([a, a]) == []
