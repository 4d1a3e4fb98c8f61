"""`train check`: what it derives, what is not measured, and where a mistake is written."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.in_process import Ended, program
from tests.support.runs import overrides, write_tiny_config
from trainer.config.load import load_config

BY_BATCH = "data.source.first.weight=1.0"  # the tiny config's follows steps, which grown batches refuse

FULL_ROWS = ('data.mixing={batching_mode="per_row",batch_size=4,num_streams_mixed=2}', "data.max_group_cells=0")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_tiny_config(tmp_path)


def checked(config: Path, capsys: pytest.CaptureFixture[str], *sets: str) -> Ended:
    return program(["check", "--config", config, "--no-contract", *overrides(*sets)], capsys)


def test_a_rule_between_tables_says_where_its_key_is_written(config, capsys):
    config.write_text(config.read_text() + "\n[distributed]\nreplicas = 2\n")
    line = len(config.read_text().splitlines())
    assert checked(config, capsys, BY_BATCH).mistake.startswith(f"{config}:{line}: distributed.replicas: 2 replicas, ")
    overridden = checked(config, capsys, BY_BATCH, "distributed.replicas=3")
    assert overridden.mistake.startswith("--set distributed.replicas=3: distributed.replicas: 3 replicas, but")


EVAL = """
[eval]
every = 2
[[eval.source]]
name = "unseen"
paths = ["unseen/*.txt"]
"""


def test_validation_sets_are_listed_and_an_empty_file_is_refused_as_a_run_refuses_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write_tiny_config(tmp_path, EVAL)
    (tmp_path / "unseen").mkdir()
    for name in "ab":
        (tmp_path / "unseen" / f"{name}.txt").write_text("some text. " * 20_000)
    facts = json.loads(program(["check", "--config", config, "--json"], capsys).stdout)["facts"]
    assert facts["contract"] == "not tried: a built-in model, which the tests prove"
    assert facts["eval_sources"] == {"unseen": {"streams": 2, "modalities": ["unseen"], "bytes": 440_000}}
    (tmp_path / "unseen" / "empty.txt").touch()
    assert "unseen/empty.txt: 1 empty file of 11, which is refused" in checked(config, capsys).mistake


def test_each_parameter_is_shown_with_what_trains_it(config, capsys):
    own = "model={target='tests.lab.training.test_averages_and_best:build', args={dtype='float32'}}"
    said = checked(config, capsys, own, "optimizer.name=muon").stdout
    assert re.search(r"#   [\d,]+ matrix parameters: muon, decay 0\.\d+, learning rate x 1: blocks\.\*\.", said)
    assert all(f"{role} parameters: adamw, decay 0" in said for role in ("embedding", "output", "vector"))
    assert "#   not trained: blocks.0.mlp_norm.weight\n" in said


def test_the_keys_that_are_set_are_shown_as_a_config(config, capsys):
    arguments = ("check", "--config", config, "--no-contract")
    shown = program((*arguments, "--set", "optimizer.betas=[0.8, 0.9]"), capsys).stdout
    assert "\n#   precision = fp32\n" in shown
    given = tomllib.loads(shown)
    assert given["optimizer"] == {"betas": [0.8, 0.9]}
    assert given["train"] == tomllib.loads(config.read_text())["train"]
    assert "is valid. Derived values for 1 rank" in shown
    again = config.with_name("again.toml")
    again.write_text(shown)
    assert load_config(again) == load_config(config, ["optimizer.betas=[0.8, 0.9]"])


def test_shares_epochs_and_alignment_of_the_sources(config, capsys):
    weights = (*FULL_ROWS, BY_BATCH, "data.source.second.weight=3")
    at_step_1 = "data.source.second.weight={schedule='step', unit='step', points={0=9, 1=3}}"
    uneven = [BY_BATCH, at_step_1, "data.mixing.batching_mode=device_per_stream"]
    grown = "train.micro_batches={schedule='step', points={0=1, 10=2}}"
    for align, cell, single in (("stream", 1, 9), ("document", load_config(config).data.seq_len, 0), ("", 16, 0)):
        sets = (*weights, f'data.align="{align}"') if align else uneven
        full = checked(config, capsys, *sets, *[grown] * bool(single)).stdout
        assert not align or re.search(f"capacity_to_change_ranks = 32\n(#.*\n)+#   align = {align}: ", full)
        named = re.findall(r"source (\w+): .*; share ([\d.]+)% at first, .* takes ([\d,]+) steps$", full, re.M)
        assert [(name, share) for name, share, _ in named] == [("first", "25.0"), ("second", "75.0")]
        for name, share, steps in named:
            files = (config.parent / "corpus" / {"first": "a", "second": "b"}[name]).glob("*.jsonl")
            sizes = [len(json.loads(line)["text"]) for path in files for line in path.read_text().splitlines()]
            positions = sum(-(-size // cell) * cell for size in sizes)  # with padding behind a document
            batches = 100 / float(share) * positions / (64 if align or name == "first" else 32)
            assert float(steps.replace(",", "")) == pytest.approx(single + (batches - single) / 2, abs=0.6)
    own = ("model.target=tests.support.models:DropoutModel", "model.contract=false")
    padded = checked(config, capsys, *FULL_ROWS, *own)
    assert "document: each begins a row, since DropoutModel does not declare resets_in_one_pass" in padded.stdout
