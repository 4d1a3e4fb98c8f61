"""Unknown keys: the fix names the key to write; what is refused is refused in our own words."""

from __future__ import annotations

import copy
import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import ValidationError

from tests.support.config_fuzz import Path as KeyPath
from tests.support.config_fuzz import schema_keys
from tests.support.in_process import program
from tests.support.runs import write_tiny_config
from trainer.config.load import REMOVED, hint, keys_of, load_config, load_dataset_file, user_errors
from trainer.config.schema import RunConfig
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("train.log_interval", "did you mean metrics.log_interval?"),  # of another table
        ("data.mixing.num_stream_mixed", "did you mean num_streams_mixed?"),  # misspelt
        ("train.batch_size", "did you mean data.mixing.batch_size or data.source.mixing.batch_size?"),
        ("checkpoint.zzz", "known keys: every, every_minutes, keep_every, keep_last, remote, resume"),
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


PYDANTIC = re.compile(
    r"Input|should|valid|dictionary|instance|unable|parse|Extra|Field|constraint|pydantic|Value error|datetime", re.I
)
VALUES = [
    *("", "x", "a b:c", 0, 1, -3, 10**30, 2.5, -2.5, float("inf"), float("nan"), True),
    *([], [1], ["x"], [2.5, "x", []], [1, 2, 3], [{}], [{"x": 1}]),
    *({}, {"x": 1}, {"x": "y"}, {"-1": 1.0}, {"schedule": 3}),
    *(datetime.date(2020, 1, 1), datetime.time(1, 2), datetime.datetime(2020, 1, 1)),
]
PATHS = sorted({path for path, _ in schema_keys(RunConfig.model_json_schema())}, key=str)


def config_with(path: KeyPath, value: Any) -> dict[str, Any]:
    """A small config in which the table of `path` holds nothing but `value`."""
    for part in reversed(path):
        value = [value] if part == 0 else {part: value}
    return {"train": {"steps": 3}, "data": {"source": [{"name": "one", "root": "corpus"}]}} | value


@pytest.mark.parametrize("table", sorted({path[0] for path in PATHS}))
def test_no_message_has_the_words_of_the_validator(table):
    messages = []
    for path in (path for path in PATHS if path[0] == table):
        for value in VALUES:
            try:
                RunConfig.model_validate(config_with(path, value))
            except ValidationError as error:
                messages += [each.message for each in user_errors(error, RunConfig, lambda _: "x.toml:1")]
    assert len(messages) > 20
    assert {("data", "source", 0, "weight", "points", "some"), ("optimizer", "betas", 0)} < set(PATHS)
    assert [text for text in messages if PYDANTIC.search(text)] == []
