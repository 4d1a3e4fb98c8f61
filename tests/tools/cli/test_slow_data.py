"""Real runs on two sources, one of them slow: `data_bound` names it, the stage that is slow, and what helps there."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.in_process import train_here
from tests.support.runs import read_rows
from trainer.data import collate, shard_source
from trainer.data.formats import open_documents
from trainer.model import build
from trainer.tools import limits
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.diagnostics.rule import Outcome
from trainer.tools.runs.load import load_run

SECONDS = re.compile(r"time/.*/(tortoise|hare)")


def slow_down(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Have a stage take 0.05 s longer for what is of the source `tortoise`."""

    def slow(place: object, name: str, is_slow: Callable[..., bool]) -> None:
        call = getattr(place, name)

        def called(*arguments: Any, **settings: Any) -> Any:
            if is_slow(*arguments):
                time.sleep(0.05)
            return call(*arguments, **settings)

        monkeypatch.setattr(place, name, called)

    if stage == "open":
        slow(shard_source, "open_stream", lambda stream, *_: "tortoise" in stream.path)
    if stage == "read":
        slow(collate, "check_size", lambda source: "tortoise" in source.stream.path)


def build_slow(vocab_size: int, dim: int, num_layers: int, *, seconds: float) -> nn.Module:
    """For `[model] target`: beside its forward passes, reading fast files is nothing."""
    model = build(vocab_size, dim=dim, num_layers=num_layers)
    model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return model


def load_slowly(path: Path, options: Any) -> Any:
    """For `[[data.source]] format`."""
    time.sleep(0.05)
    return open_documents(path, format="jsonl", tokenizer=options.tokenizer)


CONFIG = """
[run]
name = "slow"
[train]
device = "cpu"
micro_batches = 2
[data]
seq_len = 8
prefetch = 0  # or a machine that is busy computes longer than the slow source reads
[data.mixing]
batching_mode = "per_stream"
num_streams_mixed = 1
[[data.source]]
name = "hare"
paths = ["hare/*.jsonl"]
[[data.source]]
name = "tortoise"
weight = 4.0
{tortoise}
[model]
target = "{module}:build_slow"
args = {{ seconds = {seconds} }}
contract = false
dim = 8
num_layers = 1
[metrics]
log_interval = 1
per_source = true
"""
FILES = 'paths = ["tortoise/*.jsonl"]'
FORMAT = FILES + f'\nformat = "{__name__}:load_slowly"'


def judged(directory: Path, monkeypatch: pytest.MonkeyPatch, stage: str, tortoise: str) -> Outcome:
    """What `data_bound` says of a run whose source `tortoise` is slow in a stage."""
    for name, word in (("hare", "fast"), ("tortoise", "slow")):
        (directory / name).mkdir()
        for number in range(8):  # a batch each, more than are kept open
            (directory / name / f"{number}.jsonl").write_text(json.dumps({"text": word[:1] * 6}) + "\n")
    config = directory / "config.toml"
    settings = {"module": __name__, "seconds": 0.1 if stage == "none" else 0.02}  # a busy machine makes gaps of 0.03 s
    config.write_text(CONFIG.format(tortoise=tortoise, **settings))
    monkeypatch.chdir(directory)
    slow_down(monkeypatch, stage)
    train_here(config, directory / "run", "train.steps=14")
    monkeypatch.setattr(limits, "BUSY_SECONDS", 0.3)
    (ruling,) = [each for each in diagnose(load_run(directory / "run")).rulings if each.rule.name == "data_bound"]
    return ruling.outcome


@pytest.mark.parametrize(
    ("stage", "tortoise", "words", "advice"),
    [
        ("open", FILES, "opening or tokenizing files", "fewer, larger files"),
        ("read", FILES, "reading opened files", "a faster disk"),
        ("own_code", FORMAT, "running the own code", "less work for each batch in its own code"),
    ],
)
def test_the_slow_source_and_stage_are_named(tmp_path, monkeypatch, stage, tortoise, words, advice):
    found = judged(tmp_path, monkeypatch, stage, tortoise)
    assert found.verdict == "finding"
    assert f"of the time of reading went into {words} of source tortoise" in found.sentence
    assert found.knob is not None
    assert advice in found.knob.suggested
    assert found.evidence[-1].key == f"time/{stage}/tortoise"
    seconds: dict[str, float] = {}
    for row in read_rows(tmp_path / "run" / "metrics.jsonl").values():
        for key in filter(SECONDS.fullmatch, row):
            seconds[key] = seconds.get(key, 0.0) + row[key]
    slow = seconds.pop(f"time/{stage}/tortoise")
    assert 0.6 < slow < 6.0  # at 0.05 s for each of the 28 batches that are of this source, of five about four
    assert sum(seconds.values()) < slow / 4, "no other source or stage has it"
