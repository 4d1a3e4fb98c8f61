"""Nasty values for every key of the schema: each is accepted or refused with one message."""

from __future__ import annotations

import random
import time
import tomllib
from pathlib import Path

import jsonschema
import pytest

from tests.support.config_fuzz import schema_keys
from tests.support.in_process import program
from tests.support.runs import write_tiny_config
from trainer.config.load import apply_override, load_config
from trainer.config.schema import RunConfig
from trainer.errors import UserError

CPU_SEC = 10.0
RICH = """
[eval]
every = 10
holdout_fraction = 0.2

[ledger]
wipe_mode = "periodic_stale"
stale_threshold = 9
capacity = 64

[objective]
coord = { first_token = 3, num_bins = 8, sigma = 1.0 }

[metrics.wandb]
mode = "disabled"

[[optimizer.group]]
match = "*"
"""
# TOML values. The first make no sense for any key but the text of a prompt.
LONG = f"1{'0' * 39}", "1" * 6000, f"0x{'f' * 6000}", f'"{"x" * 5000}"'
SENSELESS = ["-1", "-1.0", "1e39", "1e308", "inf", '"a\\u0000b"', *LONG]
NASTY = ["0", "1", "1000000000", "0.5", "1e-308", "true", "[]", '[""]', "{}"]
NASTY += ['""', '"s3://[x/y"', '"/etc/passwd"', '"/dev/zero"']
SCHEMA = RunConfig.model_json_schema()
KEYS = [(".".join(map(str, path)), node) for path, node in schema_keys(SCHEMA)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz")
    text = write_tiny_config(directory).read_text(encoding="utf-8").replace("[ledger]\ncapacity = 32\n", "")
    text += RICH
    (directory / "base.toml").write_text(text, encoding="utf-8")
    return directory, text


def check_in_process(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """`train check <arguments>` as the program does it, in this process."""
    began = time.process_time()
    ended = program(["check", *arguments], capsys)
    took = time.process_time() - began
    code, out, err = ended.returncode, ended.stdout, ended.stderr
    assert code in (0, 2), (code, err)
    assert "Traceback" not in err, err
    assert (code == 0) == bool(out), (code, out, err)
    said = [line for line in err.splitlines() if not line.startswith("[rank 0] WARNING ")]
    assert (code == 2) == bool(said), (code, out, err)
    assert took < CPU_SEC, f"{took:.1f} s of CPU"
    return code


def arguments_of(path: Path, sets: list[str]) -> list[str]:
    return ["--config", str(path), *(part for each in sets for part in ("--set", each))]


def test_every_number_and_text_of_the_schema_is_bounded():
    numbers = [(key, node) for key, node in KEYS if node.get("type") in ("integer", "number")]
    texts = [(key, node) for key, node in KEYS if node.get("type") == "string"]
    assert len(numbers) > 60
    assert len(texts) > 30
    assert not [k for k, n in numbers if not ({"maximum", "exclusiveMaximum"} & n.keys())]
    assert not [k for k, n in numbers if not ({"minimum", "exclusiveMinimum"} & n.keys())]
    assert not [k for k, n in texts if not ({"enum", "const", "maxLength"} & n.keys())]


@pytest.mark.parametrize("values", [3, pytest.param(len(SENSELESS), marks=pytest.mark.faults)])
def test_no_senseless_value_of_any_key_is_accepted_and_the_others_are_checked(base, capsys, values):
    directory, text = base
    (directory / "base.toml").write_text(text, encoding="utf-8")
    program(["check", "--config", str(directory / "base.toml")], capsys)  # imports torch
    schema = jsonschema.Draft202012Validator(SCHEMA)
    accepted, draw = [], random.Random(7)
    for key in sorted({key for key, _ in KEYS if not key.endswith(".some")}):
        for value in (*draw.sample(SENSELESS, values), *draw.sample(NASTY, min(values, 4))):
            override = f"{key}={value}"
            try:
                load_config(directory / "base.toml", [override])
            except UserError:
                continue
            raw = tomllib.loads(text)
            apply_override(raw, override)
            assert schema.is_valid(raw), override
            accepted.append((key, value))
    assert {key for key, value in accepted if value in SENSELESS} <= {"sample.prompt"}
    for key, value in draw.sample(accepted, 2 * values):
        check_in_process(arguments_of(directory / "base.toml", [f"{key}={value}"]), capsys)
