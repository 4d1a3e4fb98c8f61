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
    assert program(["config", "diff", path, path], capsys).returncode == 0
    found = program(["config", "diff", path, other], capsys)
    assert found.returncode == 1
    return found.stdout


def test_a_default_written_out_is_no_difference_and_sources_are_matched_by_name(tmp_path, capsys):
    lines = changed(tmp_path, capsys, ["data.source.second.weight=2.0", "optimizer.lr=0.5"]).splitlines()
    weights = ["-data.source.second.weight = 1.0", "+data.source.second.weight = 2.0"]
    assert lines[2:] == [*weights, "-optimizer.lr = 0.001", "+optimizer.lr = 0.5"]
    assert all(tomllib.loads(line[1:]) for line in lines[2:])


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
