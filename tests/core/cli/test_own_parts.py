"""A user's own model and own data, by import path, without a line of ours changed."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from tests.support.in_process import program
from tests.support.ranks import status
from tests.support.runs import command, fresh, read_rows, train, write_tiny_config

MODULE = """
import itertools
import numpy as np
import torch
from torch import nn
from trainer.model.protocol import ModelOutput

class Bigram(nn.Module):
    state_width = np.int64(0)
    def __init__(self, vocab_size, dim=0, num_layers=0):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
    def forward(self, tokens, state=None):
        assert state is None
        return ModelOutput(self.table(tokens), None)

def counting(rank, world_size, seed, seq_len, *, length=10**9, extra=None):
    for index in range(length):
        start = index + rank * 1000
        tokens = (start + np.arange(seq_len))[None] % 50
        batch = {"tokens": tokens, "targets": (tokens + 1) % 50}
        if extra:
            batch[extra] = np.zeros(1)
        yield batch

def mostly_masked(rank, world_size, seed, seq_len, *, masked, length=20):
    for index, batch in enumerate(counting(rank, world_size, seed, seq_len, length=length)):
        if index in masked:
            batch["targets"] = np.full_like(batch["targets"], -100)
        yield batch

def moving(rank, world_size, seed, seq_len):
    for index, batch in enumerate(counting(rank, world_size, seed, seq_len)):
        group = np.array([(index + rank) % 2])
        yield {**batch, "group_ids": group, "cell_index": np.array([index]), "is_last": np.array([False])}

def failing(rank, world_size, seed, seq_len, *, at):
    yield from itertools.islice(counting(rank, world_size, seed, seq_len), at)
    raise ValueError("bad shard")

class Measured:
    # Metrics of its own, of which one has no row in the catalog, and labels that do not fit.
    metric_keys = ("my/thing", "ledger/cold_starts")
    def __init__(self, rank, world_size, seed, seq_len):
        self.batches, self.count = counting(rank, world_size, seed, seq_len), 0
    def __iter__(self):
        for batch in self.batches:
            batch = {name: np.concatenate([array, array]) for name, array in batch.items()}
            self.count += 1
            yield {**batch, "dataset_labels": ["first"] * 3}
    def drain_step_metrics(self):
        return {"my/thing": float(self.count), "ledger/cold_starts": 1.0}

class Sometimes(Bigram):
    # A second table, which some of the batches alone use.
    def __init__(self, vocab_size, dim, num_layers):
        super().__init__(vocab_size)
        self.second = nn.Embedding(vocab_size, vocab_size)
    def forward(self, tokens, state=None):
        logits = super().forward(tokens, state).logits
        return ModelOutput(logits if tokens[0, 0] % 3 else logits + self.second(tokens), None)

frozen = lambda vocab_size, dim, num_layers: Bigram(vocab_size).requires_grad_(False)
not_a_model, lazy = lambda vocab_size, dim, num_layers: object(), lambda dim, **_: nn.LazyLinear(dim)
widthless = lambda vocab_size, dim, num_layers: type("Odd", (), {"state_width": property(lambda self: 1 / 0)})()
"""


BROKEN = """
def broken(vocab_size, dim, num_layers):
    model = Bigram(vocab_size)
    del model.table
    model.unused = nn.Linear(1, 1)
    return model
"""


BIGRAM = "model.target=own_parts:Bigram"


def train_own(tmp_path, *sets: str, text: str = MODULE, **options: Any) -> str:
    """Train up to 20 steps into `tmp_path`/run with these parts; returns what was said."""
    (tmp_path / "own_parts.py").write_text(text)
    more, env = ("--steps", 20), {"PYTHONPATH": str(tmp_path)}
    return train(write_tiny_config(tmp_path), tmp_path / "run", *sets, more=more, extra=env, **options)


def rows_of(tmp_path) -> dict[int, dict[str, float]]:
    return {step: row for (_, step), row in read_rows(tmp_path / "run" / "metrics.jsonl").items()}


def own_source(function: str, args: str = "") -> str:
    return f"data.source=[{{name='own', target='own_parts:{function}', args={{{args}}}}}]"


FAST = ("optimizer.lr=0.3", "scheduler.warmup_steps=0")


@pytest.mark.distributed
def test_a_model_without_state_and_data_of_one_s_own_train_on_two_ranks(tmp_path):
    train_own(tmp_path, BIGRAM, own_source("counting"), *FAST, nproc=2)
    rows = rows_of(tmp_path)
    assert rows[20]["loss"] < 0.8 * rows[1]["loss"]
    found = [key for key in rows[20] if key.startswith(("stream_mixing/", "ledger/"))]
    assert found == ["stream_mixing/masked_share"]  # which the trainer measures itself, of any data
    assert rows[20]["stream_mixing/masked_share"] == 0
    assert rows[20]["tokens_in_step"] == 2 * 2 * 16


def test_a_parameter_that_is_not_used_is_named_on_several_ranks_and_searched_for_on_demand(tmp_path):
    own = ("model.target=own_parts:Sometimes", "model.contract=false", own_source("counting"), *FAST)
    refused = train_own(tmp_path, *own, nproc=2, code=2)
    assert "model.target: 1 parameter took no part in a step's last micro-batch" in refused
    assert "cannot be averaged: second.weight; " in refused
    assert "Expected to have finished reduction" not in refused
    train_own(tmp_path, *own, "distributed.find_unused_parameters=true", nproc=2)


@pytest.mark.distributed
def test_a_step_whose_batches_have_no_target_is_not_the_end_of_the_data(tmp_path):
    """A prompt that fills a window, for example. The step counts, has no loss, and changes nothing."""
    said = train_own(tmp_path, BIGRAM, own_source("mostly_masked", "masked=[0, 1, 6, 7, 9]"), nproc=2)
    assert "done at step 10 of 20: data exhausted" in said
    rows, whole = rows_of(tmp_path), 32 * 2
    tokens = [rows[step]["tokens_in_step"] for step in range(1, 11)]
    assert tokens == [0, whole, whole, 0, whole / 2, whole, whole, whole, whole, whole]
    assert [step for step, row in rows.items() if "loss" not in row] == [1, 4]
    assert all("smoothed/loss" in row for step, row in rows.items() if step > 1)
    assert rows[4]["stream_mixing/masked_share"] == 1.0
    assert rows[10].get("non_finite_steps") == 0.0


@pytest.mark.distributed
def test_groups_that_move_between_ranks_are_refused_by_name(tmp_path):
    own = (own_source("moving"), "train.micro_batches=1")
    said = train_own(tmp_path, *own, nproc=2, code=2)
    assert "source own: own_parts:moving: a batch continues group" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.target=own_parts:not_a_model", "gave a object, not a module"),
        ("eval={target='own_parts:Bigram'}", "eval.target: cannot call own_parts:Bigram with model, tokenizer, step, "),
        ("model.target=own_parts:frozen", "own_parts:frozen gave a model without a parameter to train"),
        ("model.target=own_parts:lazy", "own_parts:lazy gave a model with parameters that have no shape yet"),
        ("model.target=own_parts:widthless", "own_parts:widthless fails: ZeroDivisionError"),
        ("optimizer.group=[{match='*.embeding.*'}]", "optimizer.group: '*.embeding.*' is the first match of no "),
        ("optimizer.target=platform:machine", "cannot call platform:machine with parameter groups, and with lr: too"),
        ("optimizer.target=torch.optim:LBFGS", "optimizer.target: torch.optim:LBFGS fails: ValueError: LBFGS"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_by_check_in_one_line(tmp_path, monkeypatch, capsys, override, message):
    (tmp_path / "own_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    result = program(["check", "--config", write_tiny_config(tmp_path), "--set", override], capsys)
    sys.modules.pop("own_parts", None)
    assert message in result.mistake


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (own_source("counting", "extra='odd'"), r"cannot call the model with .*odd: got an unexpected"),
        (own_source("failing", "at=7"), r"own_parts:failing: fails after 7 batches of this start: ValueError: bad"),
    ],
)
def test_a_failure_of_data_of_one_s_own_names_the_source_and_what_was_read(tmp_path, source, message):
    said = train_own(tmp_path, BIGRAM, source, code=2)
    assert re.search(message, said), said
    assert "Traceback" not in said
    if "failing" in source:
        assert re.search(message, status(tmp_path / "run")["reason"])


def test_a_failure_is_told_once_with_its_place_and_recorded(tmp_path):
    """wandb hooks uncaught exceptions and would print them again; the command line's frames say nothing."""
    (tmp_path / "own_parts.py").write_text(MODULE + BROKEN)
    config = write_tiny_config(tmp_path, '\nwandb = { mode = "offline" }\n')
    arguments = ["--config", config, "--run-dir", tmp_path / "run", "--set", "model.target=own_parts:broken"]
    arguments += ["--set", "model.contract=false"]  # or the run would not begin
    result = fresh(command(arguments), PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert "cli/main.py" not in result.stderr
    assert "failed at step 0 of 6: AttributeError: 'Bigram' object has no attribute 'table'" in result.stderr
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank_000.log").read_text()
    assert '"state": "failed"' in (tmp_path / "run" / "status.json").read_text()


def test_metrics_of_one_s_own_are_logged_and_batches_that_a_diagnostic_skips_are_counted_at_the_end(tmp_path):
    target = 'data.source=[{name="first", target="own_parts:Measured"}]'
    said = train_own(tmp_path, target, "metrics.per_source=true", "data.mixing.batch_size_by_modality={}")
    rows = rows_of(tmp_path).values()
    assert all("my/thing" in row for row in rows)
    assert not any(row["ledger/cold_starts"] for row in rows), "the ledger's own, whatever the data set says"
    assert said.count("metric 'ledger/cold_starts' is left out: the trainer reports a metric of this name") == 1
    assert said.count("'my/thing' is not in the catalog: it counts as a gauge") == 1
    assert "per_source skipped 40 batches, the last one because: 3 labels for 2 rows" in said
