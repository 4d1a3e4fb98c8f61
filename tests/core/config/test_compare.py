"""Two configs compared: what differs is said, key by key, and nothing else."""

from __future__ import annotations

import json
import tomllib

import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT, write_tiny_config
from trainer.config.load import load_config, to_toml

jsonschema = pytest.importorskip("jsonschema")
SHIPPED = sorted((ROOT / "train_configs").rglob("*.toml"))


def changed(tmp_path, capsys, overrides):
    """What the verb says of a config and of one with overrides, all of its defaults written out."""
    path, other = write_tiny_config(tmp_path), tmp_path / "other.toml"
    other.write_text(to_toml(load_config(path, overrides)))
    return program(["config", "diff", path, other], capsys).stdout


def test_a_default_written_out_is_no_difference_and_sources_are_matched_by_name(tmp_path, capsys):
    lines = changed(tmp_path, capsys, ["data.source.second.weight=2.0", "optimizer.lr=0.5"]).splitlines()
    weights = ["-data.source.second.weight = 1.0", "+data.source.second.weight = 2.0"]
    assert lines[2:] == [*weights, "-optimizer.lr = 0.001", "+optimizer.lr = 0.5"]


def test_each_printed_value_is_toml(tmp_path, capsys):
    overrides = ['run.name="other"', "data.source.second.modalities=['b','c']", "eval.every=3"]
    lines = changed(tmp_path, capsys, overrides).splitlines()
    assert {"-eval.every = 0", "+eval.every = 3"} < set(lines)
    for line in lines[2:]:
        assert tomllib.loads(line[1:])


def test_the_verb_says_it_by_its_exit_code(tmp_path, capsys):
    path, other = write_tiny_config(tmp_path), tmp_path / "other.toml"
    other.write_text(path.read_text().replace("steps = 6", "steps = 7"))
    result = program(["config", "diff", path, other], capsys)
    assert result.returncode == 1
    assert result.stdout.splitlines()[2:] == ["-train.steps = 6", "+train.steps = 7"]
    assert program(["config", "diff", path, path], capsys).returncode == 0


def test_each_shipped_config_names_the_printed_schema_and_fits_it(capsys):
    schema = ROOT / "docs" / "config.schema.json"
    assert program(["config", "schema"], capsys).stdout == schema.read_text(encoding="utf-8")
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    for path in SHIPPED:
        text = path.read_text(encoding="utf-8")
        assert (path.parent / text.splitlines()[0].removeprefix("#:schema ")).resolve() == schema, path
        raw = tomllib.loads(text)
        assert not list(validator.iter_errors(raw)), path
        raw["train"]["stepz"] = 1
        assert list(validator.iter_errors(raw)), "the schema refuses unknown keys"
