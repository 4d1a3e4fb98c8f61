"""Reading configs: what is accepted, what is refused, and what the message says; and two configs compared."""

from __future__ import annotations

import itertools
import json
import os
import tomllib
from pathlib import Path

import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT, TINY, write_tiny_config
from trainer import options
from trainer.config import data_tables, schema
from trainer.config.load import flatten, line_of, load_config, to_toml
from trainer.errors import UserError

BASE = TINY.format(runs="runs", corpus="corpus")


def load(tmp_path: Path, text: str = BASE, *overrides: str):
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str = BASE, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *overrides)
    return [line.replace(f"{tmp_path}/", "") for line in str(caught.value.message).splitlines()]


def test_the_resolved_config_reads_back_as_itself(tmp_path):
    config = load(tmp_path)
    assert load(tmp_path, to_toml(config)) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=2.9", "train.steps: must be a valid integer, got 2.9"),
        ("train.steps=true", "train.steps: must be a valid integer, got true"),
        ("train.steps=" + "0x" + "f" * 6000, "train.steps: must be "),
        ("train.steps=0", "train: how long is the run? set steps, or tokens"),
        ("train.compile=flase", 'train.compile: must be one of auto, true, false; got "flase"'),
        ("optimizer.lr=nan", "optimizer.lr: must be a finite number, got NaN"),
        ("optimizer.betas=[0.9]", "optimizer.betas: must have at least 2 items, got [0.9]"),
        ("data.mixing.pick_mode=heaviest", 'must be one of weighted, uniform, round_robin; got "heaviest"'),
        ("gns.zzz=3", "gns.zzz: unknown key; known keys: enabled"),
        ("optimizer.momentum=0.5", "optimizer: momentum would have no effect with this name: remove them"),
        ("scheduler.decay_fraction=0.5", "scheduler: decay_fraction would have no effect with this name"),
        ("ledger.wipe_mode=full", 'wipe_mode "full" needs wipe_every >= 1'),
        ("data.source.first.weight=-1", "data.source.0.weight: must be greater than or equal to 0, got -1"),
        ("data.source.first.weight=heavy", 'data.source.0.weight: must be a valid number, got "heavy"'),
        ("data.source.second.weight={schedule='linear', points={a=1.0}}", "weight.points.a: is no whole number"),
        ("data.source.second.weight={schedule='linear', points={0=1, 00=2}}", "points.00: is no whole number"),
        ("data.source.first.weight.points.20=-1", "data.source.0.weight.points.20: must be greater than or equal to 0"),
        ("data.source.second.include='x.toml'", "exactly one of root, paths, include, target; got root, include"),
        ("data.source.0={name='a', include='x.toml', eod=1}", "eod is for files that are named here, not for include"),
        ("data.source.0={name='a', target='a:b', mixing={repeat=true}}", "mixing is for files that are named here"),
        ("data.source.third.weight=1", "data.source has no 'third': it is a list of first, second; use a number"),
        ("model.target=2024-01-01", 'model.target: must be an import path package.module:function; got "2024-01-01"'),
        ("run.name='../x'", 'run.name: must be letters, digits, "_", "." and "-", starting with a letter'),
        ("data.columns={}", "data.columns: must be a valid list, got a table"),
        ("data.source={name='a'}", "data.source: must be a list, got a table; write [[data.source]]"),
        ("train.steps.more=5", "train.steps has no 'more': it is 6"),
        ("train.steps", "is not of the form table.key=value"),
        ("data.targets=[0]", "data: targets and columns are those of series: set features"),
        ("model.args={x=[2024-01-01]}", "model.args: holds a date, NaN or infinity: write it as a string"),
        ("model.args.x=nan", "model.args: holds a date, NaN or infinity: write it as a string"),
        ('data.source.0.root=""', "data.source.0.root: must have at least 1 character"),
        ("optimizer.eps=1e308", "optimizer.eps: must be less than or equal to 1, got 1e+308"),
    ],
)
def test_refusals_name_key_value_and_fix(tmp_path, override, message):
    (line,) = refusal(tmp_path, BASE, override)
    assert message in line
    assert line.startswith(f"--set {override.partition('=')[0]}")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[run]\nname = \xff\n", "x.toml:2: encoding: is not UTF-8"),
        (b"[run\n", "x.toml:1: TOML: "),
        (b"[run]\nname = 1\nname = 2\n", "x.toml:3: TOML: cannot overwrite a value"),
        (b"a = [\n1,\n", "x.toml:3: TOML: "),
        (b"a = " + b"[" * 5000, "x.toml: TOML: cannot be read: "),
        (b"[train]\nsteps = " + b"1" * 6000, "x.toml"),
        (b"\xef\xbb\xbf[run]", "x.toml: train: is required but missing; add a table [train]\nx.toml: data: is"),
        (b"[train]\nsteps = 1\n[data]", "x.toml:3: data.source: is required but missing; add a table [[data.source]]"),
    ],
)
def test_files_that_are_no_config(tmp_path, data, message):
    path = tmp_path / "x.toml"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert message in caught.value.message.replace(f"{tmp_path}/", "")
    assert len(caught.value.message) < 300


def test_a_directory_a_pipe_a_device_or_a_nul_byte_is_no_config(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UserError, match=f"^{path}: cannot be read: not a plain file"):
            load_config(path)
    with pytest.raises(UserError, match="cannot be"):
        load_config("x\0.toml")


def test_overrides_win_in_order_and_make_tables(tmp_path):
    config = load(tmp_path, BASE, "train.steps=7", "train.steps=8", "gns.enabled=false", "data.source.1.weight=2")
    assert config.train.steps == 8
    assert config.gns.enabled is False
    assert config.data.source[1].weight == 2.0
    named = BASE.replace('"second"', '"first.more"')  # which begins with the name of another
    assert load(tmp_path, named, "data.source.first.more.weight=2").data.source[1].weight == 2.0
    overrides = ["data.mixing={batch_size=3}", "data.mixing.batch_size=0"]
    (line,) = refusal(tmp_path, BASE, *overrides)
    assert line.startswith(f"--set {overrides[1]}: data.mixing.batch_size: ")


def test_a_mistake_names_the_line_of_its_key_or_of_the_table_around_it(tmp_path):
    text = BASE.replace("steps = 6", "steps = 6.5").replace("[data.mixing]", "[data.mixing]\nnum_active = 3")
    text = text.replace('name = "second"', 'name = "sec ond"')
    lines = text.splitlines()
    wrong = ["steps = 6.5", "num_active = 3", 'name = "sec ond"']
    found = refusal(tmp_path, text)
    assert [int(line.split(":")[1]) for line in found] == [lines.index(each) + 1 for each in wrong]
    keys = ["train.steps", "data.mixing.num_active", "data.source.1.name"]
    assert [line.split(": ")[1] for line in found] == keys


def test_a_key_that_is_written_in_another_form_is_found_too():
    text = "[a]\nb.c = 1 # [x] '''\n'd e' = { f = 1 }\n[[a.g]]\n[[a.g]]\nh = '''\n[k]\nj = 1'''\n[a.g.i]\nj = 1\n"
    keys = [("a",), ("a", "b", "c"), ("a", "d e", "f"), ("a", "g", 1), ("a", "g", 1, "h"), ("a", "g", 1, "i", "j")]
    assert [line_of(text, key) for key in keys] == [1, 2, 3, 5, 6, 10]
    assert line_of(text, ("k",)) is None


@pytest.mark.parametrize("pair", ["Coord", "Ledger", "Mixing", "Objective", "Strategy Distributed", "Tracker Metrics"])
def test_options_are_checked_as_their_table_is(pair: str) -> None:
    tables = {**vars(data_tables), **vars(schema)}
    own, its = getattr(options, f"{pair.split()[0]}Options"), tables[f"{pair.split()[-1]}Table"]
    assert issubclass(its, own)
    needed = {"first_token": 1, "num_bins": 2, "sigma": 1.0} if pair == "Coord" else {}
    for key in vars(own(**needed)).keys() - {"coord"}:
        assert its.model_fields[key].description
        for make, value in itertools.product((own, its), ([], -1, 10**16)):
            with pytest.raises(ValueError, match=key):
                make(**{**needed, key: value})


def test_a_default_written_out_is_no_difference_and_sources_are_matched_by_name(tmp_path):
    path, other = write_tiny_config(tmp_path), tmp_path / "other.toml"
    other.write_text(to_toml(load_config(path, ["data.source.second.weight=2.0", "optimizer.lr=0.5"])))
    before, after = (flatten(load_config(each).model_dump(mode="json")) for each in (path, other))
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert changed == {"data.source.second.weight": (1.0, 2.0), "optimizer.lr": (0.001, 0.5)}
    assert flatten({"x": [{"name": "a"}] * 2}) != flatten({"x": [{"name": "b"}] * 2})


def test_each_shipped_config_names_the_printed_schema_and_fits_it(capsys):
    jsonschema = pytest.importorskip("jsonschema")
    schema = ROOT / "docs" / "config.schema.json"
    assert program(["config", "schema"], capsys).stdout == schema.read_text(encoding="utf-8")
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "train_configs").rglob("*.toml")):
        text = path.read_text(encoding="utf-8")
        assert (path.parent / text.splitlines()[0].removeprefix("#:schema ")).resolve() == schema, path
        raw = tomllib.loads(text)
        assert not list(validator.iter_errors(raw)), path
        raw["train"]["stepz"] = 1
        assert list(validator.iter_errors(raw)), "the schema refuses unknown keys"
