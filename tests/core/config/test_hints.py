"""Unknown keys and those of other trainers: the fix names the key to write; what is refused is refused in our own words."""

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
from trainer.config.load import (
    EXPLAINED,
    OTHER_NAMES,
    REMOVED,
    SAME_KEYS,
    hint,
    keys_of,
    load_config,
    load_dataset_file,
    to_toml,
    user_errors,
)
from trainer.config.schema import RunConfig
from trainer.errors import UserError

MIXING = "data.mixing.batch_size or data.source.mixing.batch_size"


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("gpu_peak_tflops", "did you mean metrics.peak_tflops?"),  # a name of the requests
        ("train.grad_accum", "did you mean train.micro_batches?"),  # of other trainers
        ("train.Log-Interval", "did you mean metrics.log_interval?"),  # of another table
        ("data.mixing.num_stream_mixed", "did you mean num_streams_mixed?"),  # misspelt
        ("optimizer.learnig_rate", "did you mean optimizer.lr?"),  # and of others
        ("train.batch_size", f"did you mean {MIXING}?"),
        ("eval.batch_size", f"did you mean {MIXING} or batches?"),
        ("checkpoint.zzz", "known keys: background, every, every_minutes, keep_every, keep_last, remote, resume"),
        ("data.num_workers", EXPLAINED["num_workers"]),
    ],
)
def test_the_key_or_the_keys_that_may_be_meant(written, fix):
    assert hint(tuple(written.split(".")), RunConfig) == fix


def exists(key: str) -> bool:
    *table, name = key.split(".")
    return name in keys_of(RunConfig, tuple(table))


def test_the_keys_that_are_named_exist_and_the_unknown_ones_do_not():
    assert [key for key in OTHER_NAMES if not exists(key)] == []
    names = [name for names in OTHER_NAMES.values() for name in names.split()]
    assert len({*names, *EXPLAINED}) == len(names) + len(EXPLAINED)
    assert [name for name in (*names, *EXPLAINED, *SAME_KEYS, *REMOVED) if "." in name and exists(name)] == []


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


TABLES = '[[data.source]]\nname = "a"\nroot = "data"\n'


def config_of(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "x.toml"
    path.write_text(text + TABLES, encoding="utf-8")
    return load_config(path, overrides)


def value_of(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("name", "key"), SAME_KEYS.items())
def test_another_name_is_the_same_key(tmp_path: Path, name: str, key: str) -> None:
    steps = "" if key == "train.steps" else "train.steps = 9\n"
    own = config_of(tmp_path, steps, f"{key}=3")
    assert value_of(own, key) == 3
    assert config_of(tmp_path, steps, f"{name}=3") == own
    text = f"{steps}{name} = 3\n"
    assert to_toml(config_of(tmp_path, text)) == to_toml(own)
    assert value_of(config_of(tmp_path, text, f"{key}=2"), key) == 2, "an override replaces what the file says"


def test_a_key_under_both_names_is_refused_and_a_wrong_value_is_found_in_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.batch_size: is data\.mixing\.batch_size by another name"):
        config_of(tmp_path, "[train]\nsteps = 1\n[data]\nbatch_size = 2\n[data.mixing]\nbatch_size = 2\n")
    with pytest.raises(UserError, match=r"x\.toml:4: optimizer\.lr: must be > 0"):
        config_of(tmp_path, "[train]\nsteps = 1\n[optimizer]\nlearning_rate = 0\n")


def test_dotted_options_set_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of(tmp_path, "[train]\nsteps = 1\n")
    said = program(["check", "--config", tmp_path / "x.toml", "--optimizer.lrr", "1e-3"], capsys)
    assert (said.returncode, "optimizer.lrr: unknown key; did you mean lr?" in said.stderr) == (2, True)
    said = program(["check", "--config", tmp_path / "x.toml", "--optimizer.lr=-1"], capsys)
    assert "optimizer.lr: must be > 0.0, got -1" in said.stderr
    said = program(["check", "--optimizer.lr", "--config", tmp_path / "x.toml"], capsys)
    assert "--optimizer.lr: has no value" in said.stderr


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
