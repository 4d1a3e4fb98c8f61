"""Unknown keys: the fix names the key to write; what is refused is refused in our own words."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.in_process import program
from tests.support.runs import write_tiny_config
from trainer.config.load import REMOVED, hint, keys_of, load_config, load_dataset_file
from trainer.config.schema import RunConfig
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("data.batch_size", "did you mean data.mixing.batch_size or data.source.mixing.batch_size?"),
        ("optimizer.learning_rate", "did you mean optimizer.lr?"),
        ("eval.interval", "did you mean every?"),
        ("train.log_interval", "did you mean metrics.log_interval?"),  # of another table
        ("data.mixing.num_stream_mixed", "did you mean num_streams_mixed?"),  # misspelt
        ("train.batch_size", "did you mean data.mixing.batch_size or data.source.mixing.batch_size?"),
        ("checkpoint.zzz", "known keys: every, every_minutes, keep_best, keep_every, keep_last, remote, resume"),
    ],
)
def test_the_key_or_the_keys_that_may_be_meant(written, fix):
    assert hint(tuple(written.split(".")), RunConfig) == fix


def test_dotted_options_set_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_tiny_config(tmp_path)
    said = program(["check", "--config", config, "--optimizer.lrr", "1e-3"], capsys)
    assert (said.returncode, "optimizer.lrr: unknown key; did you mean lr?" in said.stderr) == (2, True)
    said = program(["check", "--config", config, "--optimizer.lr=-1"], capsys)
    assert "optimizer.lr: must be > 0.0, got -1" in said.stderr
    said = program(["check", "--optimizer.lr", "--config", config], capsys)
    assert "--optimizer.lr: has no value" in said.stderr


def exists(key: str) -> bool:
    *table, name = key.split(".")
    return name in keys_of(RunConfig, tuple(table))


def test_the_keys_that_are_gone_do_not_exist():
    assert [key for key in REMOVED if exists(key)] == []


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_is_gone_is_read_where_it_says_nothing_and_explained_elsewhere(key, tmp_path):
    values, advice = REMOVED[key]
    plan = {"schedule": "step", "points": {"0": 1}}
    config = {
        "train": {"steps": 1, "micro_batches": plan},
        "data": {"seq_len": 8, "source": [{"name": "a", "root": "r"}]},
    }
    *tables, name = key.split(".")

    def load(value: Any) -> RunConfig:
        written = copy.deepcopy(config)
        table = written
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = value
        path = tmp_path / "x.toml"
        path.write_text(tomli_w.dumps(written))
        return load_config(path)

    for value in values:
        load(value)
    with pytest.raises(UserError, match=re.escape(f"{key}: this key is gone; {advice}")):
        load("something else")


def test_a_dataset_file_knows_its_own_keys(tmp_path):
    path = tmp_path / "d.toml"
    path.write_text('[[source]]\nname = "a"\nroot = "r"\n')
    assert load_dataset_file(path).source[0].root == "r"
    path.write_text('[[source]]\nname = "a"\nroot = "r"\nbatch_size = 4\n')
    with pytest.raises(UserError, match=r"d\.toml:4: source\.0\.batch_size: unknown key; did you mean source\.mixing"):
        load_dataset_file(path)
