"""The schema that the verb prints fits every shipped config."""

from __future__ import annotations

import json
import tomllib

import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT

jsonschema = pytest.importorskip("jsonschema")
SHIPPED = sorted((ROOT / "train_configs").rglob("*.toml"))


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
