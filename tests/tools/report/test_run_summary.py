"""The results of a run, and how runs differ."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.records import record_of, write_record
from trainer.metrics.noise_scale import t_quantile
from trainer.metrics.payload_contract import Restart
from trainer.tools.report.run_summary import config_differences, over_seeds, summaries, summarize
from trainer.tools.runs.load import RowTable, load_run
from trainer.tools.runs.readings import NoiseScale, noise_scale_of


def results(run):
    return {row.label: row.value for row in summarize(run)}


def notes(run):
    return {row.label: row.note for row in summarize(run)}


def test_results_come_from_the_rows_and_are_none_if_unknown():
    train = {"loss": [4.0, 3.0, 1.0, 2.0], "tokens_per_sec": [5.0, 100.0, 110.0, 120.0]}
    train |= {"tokens_in_step": [4096.0] * 4, "tokens_seen": [0.0, 0.0, 4096.0, 8192.0]}  # two steps were rejected
    train |= {"ledger/cold_starts": [1.0, 0.0, 2.0, 0.0], "data/fill": [1.0, 1.0, 1.0, 0.6]}
    run = record_of(train, {2: {"eval_loss": 2.0, "eval_bits_per_byte": 1.5}, 4: {"eval_loss": 2.5}})
    expected = {"Steps": 4, "Final loss": 2.0, "Held-out loss": 2.5, "Held out": 1.5}
    expected |= {"Speed": 105.0, "Fill": 0.9, "Cold starts": 3.0, "Noise scale": None, "Batch": 4096.0}
    unknown = ("Parameters", "MFU", "Peak memory", "Time of all steps")
    expected |= dict.fromkeys(unknown)
    assert results(run) == results(run) | expected
    assert notes(run)["Held-out loss"] == "step 4, best 2 at step 2"
    lost = record_of({}, {2: {"eval_loss": 2.0}, 4: {"eval_loss": math.nan}})
    assert (str(results(lost)["Held-out loss"]), notes(lost)["Held-out loss"]) == ("nan", "step 4, best 2 at step 2")
    rows = {"gpu/peak_gb": [2.0, 3.0], "tokens_seen": [50.0, 100.0], "mfu": [0.4, 0.4]}
    rows |= {"data/epochs_most": [1.0, 2.0]}
    run = record_of(rows, environment={"parameters": 50})
    expected = {"Tokens seen": 100.0, "MFU": 0.4, "Peak memory": 3.0, "Data read": 2.0}
    assert results(run) == results(run) | expected
    units = {row.label: row.unit for row in summarize(record_of(rows, config={"objective": {"target": "my:loss"}}))}
    assert (units["Final loss"], units["Held-out loss"]) == ("per token", "per token")
    resumed = record_of({"step_time_sec": {110: 11.0, 120: 12.0}}, restarts=[Restart(100)])
    assert results(resumed)["Time of all steps"] == 10 * 11 + 10 * 12


TOKENS = [10, 7, 20, 25, 6, 3, 9]


def evaluated(directory, nats, tokens=TOKENS, logged=None, part="token_ce"):
    """A run with these losses of documents."""
    row = {"eval_loss": logged or sum(nats) / sum(tokens[: len(nats)]), f"eval_objective/{part}": 0.1}
    path = write_record(directory, {"loss": [2.0]}, {4: row}) / "evaluations" / "step_00000004.jsonl"
    path.parent.mkdir()
    of = {"key": "eval_loss", "source": "s", "stream": "f"}
    pairs = enumerate(zip(tokens, nats, strict=False))
    path.write_text("".join(json.dumps({**of, "document": at, "tokens": n, "nats": y}) + "\n" for at, (n, y) in pairs))
    return load_run(directory)


def test_the_difference_of_two_runs_is_a_ratio_over_the_documents_that_both_have(tmp_path):
    first, second = [21.0, 17.5, 39.0, 61.0, 13.0, 8.0, 20.0], [20.0, 15.0, 38.5, 55.0, 12.5, 8.5, 99.0]
    before, after = evaluated(tmp_path / "a", first), evaluated(tmp_path / "b", second, [*TOKENS[:6], 80])
    few, wrong = evaluated(tmp_path / "few", second[:4]), evaluated(tmp_path / "wrong", second, logged=2.5)
    cut, parts = evaluated(tmp_path / "cut", second), evaluated(tmp_path / "parts", second, logged=2.5, part="mine")
    assert parts.document_losses == load_run(tmp_path / "cut" / "metrics.jsonl").document_losses
    kept = tmp_path / "cut" / "evaluations" / "step_00000004.jsonl"
    whole = kept.read_text()
    for content in ("3", whole.replace("7, ", "-7, "), whole.replace("20.0", "1e200"), '{"key": 1'):
        kept.write_text(content)
        assert load_run(tmp_path / "cut").document_losses[1].startswith("evaluations/step_00000004.jsonl is damaged: ")
    _, row, *others = summaries([before, after, few, wrong, cut])[-1]
    d, w = np.subtract(second, first)[:6], np.array(TOKENS)[:6]  # the last one was read further
    effective = w.sum() ** 2 / np.square(w).sum()
    error = math.sqrt(np.square(d - d.sum() / w.sum() * w).sum() * effective / (effective - 1)) / w.sum()
    assert row.value == pytest.approx(d.sum() / w.sum()) == pytest.approx(-10 / 71)
    assert row.error == pytest.approx(error * t_quantile(1.96, effective - 1) / 1.96)
    assert [each.value for each in others] == [None] * 3
    assert notes(before)["Held-out loss"].endswith(", 7 documents, 80 tokens")
    edited = replace(after, environment={"data": "1f"})
    assert summaries([before, edited])[-1][1].note.endswith("; the runs' data files differ")
    assert "train eval reads all" in summaries([before, evaluated(tmp_path / "alone", second, [99] * 7)])[-1][1].note
    for key, value in (("tokenizer", "ids"), ("targets", [2])):
        other = summaries([before, replace(after, config={"data": {key: value}})])[-1][1]
        assert (other.value, other.note) == (None, "of other tokens or targets")
    words = ("4 documents in common: too few", "not give the logged eval_loss", "is damaged")
    for each, word in zip(others, words, strict=True):
        assert word in each.note
    kept.rename(kept.with_name("step_00000000.jsonl"))
    assert replace(before, path=cut.path, evals=RowTable()).document_losses == ({}, ""), "no evaluation"


def test_runs_are_averaged_that_differ_in_the_seed_alone(tmp_path):
    def run(loss, seed, lr=0.1, step=4, ranks=1, state="done"):
        config, world = {"run": {"seed": seed}, "optimizer": {"lr": lr}}, {"world_size": ranks}
        how = {"config": config, "environment": world, "label": f"r{loss}", "status": {"state": state}}
        return record_of({}, {step: {"eval_loss": loss}}, **how)

    others = [run(9.0, 4, lr=0.2), run(8.0, 5, step=2), run(7.0, 6, ranks=2), run(2.1, 1)]
    found = over_seeds([run(2.0, 1), run(2.2, 2), run(2.6, 3), *others, record_of({}, {4: {"eval_loss": 6.0}})])
    mean, *singles = found
    # Their standard deviation is 0.3055, and Student's t with 2 degrees of freedom 4.303.
    assert (mean["mean"], 2 * mean["error"]) == pytest.approx((6.8 / 3, 4.303 * 0.30551 / math.sqrt(3)), rel=1e-4)
    assert mean["text"] == "r2.0, r2.2, r2.6: held-out loss 2.2667, +- 0.759 (95 %), mean of 3 seeds"
    assert [(each["mean"], each["error"]) for each in singles] == [(9.0, None), (8.0, None), (7.0, None)]
    assert "one seed: its scatter over seeds is not known" in singles[0]["text"]
    others = [run(1.7, 3, lr=0.2), run(1.5, 1, lr=0.2), run(1.2, 9, lr=0.2), run(4.0, 8, step=2, state="failed")]
    *_, pair, failed = over_seeds([run(2.0, 1), run(2.2, 2), run(2.6, 3), *others])
    # Of -0.9 and -0.5: the mean -0.7, and Student's t with 1 degree of freedom, 12.706, times 0.2.
    assert (pair["runs"], pair["minus"]) == (["r1.7", "r1.5"], ["r2.6", "r2.0"])
    assert (pair["mean"], 2 * pair["error"]) == pytest.approx((-0.7, 2.5412))
    assert failed["text"] == "r4.0: left out, failed or without a held-out loss"


def test_seeds_are_compared_over_the_same_documents_alone(tmp_path):
    def run(number, sizes, tokenizer="bytes"):
        directory = tmp_path / f"{number} {sizes[-1]} {tokenizer}"
        found = evaluated(directory, [21.0, 17.5, 39.0, 61.0, 13.0, 8.0, 20.0], sizes)
        config = {"run": {"seed": number % 2}, "optimizer": {"lr": number // 2}, "data": {"tokenizer": tokenizer}}
        return replace(found, config=config)

    runs = [run(number, TOKENS) for number in range(4)]
    assert "seed by seed: 0, " in over_seeds(runs)[-1]["text"]
    other = run(3, TOKENS, "ids")
    for fourth in (run(3, [*TOKENS[:6], 80]), other, replace(other, path=tmp_path)):
        *_, group = over_seeds([*runs[:2], replace(runs[2], config={**fourth.config, "run": {"seed": 0}}), fourth])
        assert group["text"].endswith("not compared: it has read other documents, parts or targets")


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
    more = {"name": "web", "weight": 1.0, "root": "web", "format": "auto"}
    both = record_of({}, config={"optimizer": {"lr": 1e-3}, "data": {"source": [source, more]}})
    differing = [("data.source[].name", [["books"], ["books", "web"]]), ("data.source.web.root", [None, "web"])]
    assert config_differences([a, both]) == differing
    assert config_differences([a, a]) == config_differences([a, record_of({}), a]) == []


def test_the_noise_scale_is_that_of_the_last_row_with_a_batch():
    ends = {"": 1, "_low": 0.5, "_high": 2, "_steps": 3}
    rows = {f"gns/b_now{end}": {5: 5.0 * n, 10: 10.0 * n} for end, n in ends.items()}
    run = record_of({"gns/b_big": {5: 16.0, 10: 16.0}, **rows})
    assert noise_scale_of(run) == NoiseScale(10, 16.0, 5.0, 10.0, 20.0, 30)
    assert noise_scale_of(record_of({"gns/b_big": {5: 16.0, 11: 16.0}, **rows})) is None


@pytest.mark.parametrize(
    ("row", "number", "is_known"),
    [
        ({"b_now_low": 0.0}, "at least 0", False),
        ({"b_now_low": 0.5}, "at least 0.5", True),
        ({"b_now_low": 0.0, "b_now": 3.0, "b_now_high": 9.0}, "3 (0 to 9)", True),
    ],
)
def test_a_lower_bound_of_0_alone_is_no_number_and_with_an_upper_one_it_is(row, number, is_known):
    columns = {"b_big": 16.0, "b_now_steps": 30.0, **row}
    found = noise_scale_of(record_of({f"gns/{key}": [value] for key, value in columns.items()}))
    assert found is not None
    assert (found.number, found.is_known) == (number, is_known)
