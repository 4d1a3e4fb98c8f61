"""Two configs compared: what differs is said, key by key, and nothing else."""

from __future__ import annotations

import json
import tomllib

import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT, write_tiny_config
from trainer.config.load import differences, load_config, render_differences

jsonschema = pytest.importorskip("jsonschema")
SHIPPED = sorted((ROOT / "train_configs").rglob("*.toml"))


def changed(tmp_path, *overrides):
    path = write_tiny_config(tmp_path)
    return differences(load_config(path), load_config(path, overrides))


def test_equal_configs_do_not_differ_and_a_default_written_out_is_no_difference(tmp_path):
    assert changed(tmp_path) == []
    assert changed(tmp_path, "metrics.smoothing_alpha=0.1") == []


def test_sources_are_matched_by_name(tmp_path):
    found = changed(tmp_path, "data.source.second.weight=2.0", "optimizer.lr=0.5")
    assert [(each.key, each.first, each.second) for each in found] == [
        ("data.source.second.weight", 1.0, 2.0),
        ("optimizer.lr", 0.001, 0.5),
    ]


def test_each_printed_value_is_toml(tmp_path):
    found = changed(tmp_path, 'run.name="other"', "data.source.second.modalities=['b','c']", "eval.every=3")
    lines = render_differences(found, "a", "b").splitlines()
    assert lines[:2] == ["--- a", "+++ b"]
    assert {"-eval.every = 0", "+eval.every = 3"} < set(lines)
    for line in lines[2:]:
        assert tomllib.loads(line[1:])


def test_the_verb_says_it_by_its_exit_code(tmp_path, capsys):
    path = write_tiny_config(tmp_path)
    other = tmp_path / "other.toml"
    other.write_text(path.read_text().replace("steps = 6", "steps = 7"))
    result = program(["config", "diff", str(path), str(other)], capsys)
    assert result.returncode == 1
    assert result.stdout.splitlines()[2:] == ["-train.steps = 6", "+train.steps = 7"]
    assert program(["config", "diff", str(path), str(path)], capsys).returncode == 0


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_names_the_schema_and_fits_it(path):
    text = path.read_text(encoding="utf-8")
    named = text.splitlines()[0].removeprefix("#:schema ")
    schema = (path.parent / named).resolve()
    assert schema == ROOT / "docs" / "config.schema.json"
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    assert not list(validator.iter_errors(tomllib.loads(text)))
    broken = tomllib.loads(text)
    broken["train"]["stepz"] = 1
    assert list(validator.iter_errors(broken)), "the schema refuses unknown keys"
