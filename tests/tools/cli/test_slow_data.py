"""A real run on two sources, one of them slow: `data_bound` names it, the stage that is slow, and what helps there."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.in_process import train_here
from trainer.data import collate, shard_source
from trainer.data.documents import ReadOptions
from trainer.data.formats import load_documents
from trainer.model import build
from trainer.tools import limits
from trainer.tools.diagnostics.diagnose import diagnose
from trainer.tools.diagnostics.run import STAGES
from trainer.tools.runs.load import load_run

SECONDS = re.compile(r"time/.*/(tortoise|hare)")


def build_slow(vocab_size: int, dim: int, num_layers: int, *, seconds: float) -> nn.Module:
    """For `[model] target`: beside its forward passes, reading fast files is nothing."""
    model = build(vocab_size, dim=dim, num_layers=num_layers)
    model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return model


def load_slowly(path: Path, options: Any) -> Any:
    """For `[[data.source]] format`."""
    time.sleep(0.1)
    return load_documents(path, ReadOptions(options.tokenizer, format="jsonl"))


CONFIG = f"""
[run]
name = "slow"
[train]
device = "cpu"
micro_batches = 2
[data]
seq_len = 8
prefetch = 0  # or a machine that is busy hides what the slow source takes
[data.mixing]
batching_mode = "per_stream"
num_streams_mixed = 1
[[data.source]]
name = "hare"
paths = ["hare/*.jsonl"]
[[data.source]]
name = "tortoise"
weight = 4.0
paths = ["tortoise/*.jsonl"]
format = "{__name__}:load_slowly"
[model]
target = "{__name__}:build_slow"
args = {{ seconds = 0.02 }}  # a busy machine makes gaps of 0.03 s
contract = false
dim = 8
num_layers = 1
[metrics]
log_interval = 1
per_source = true
"""


# Stage: the call that takes 0.1 s longer for what is of the source `tortoise`.
SLOW = {
    "open": (shard_source, "open_stream", lambda stream, *_: "tortoise" in stream.path),
    "read": (collate, "check_size", lambda source: "tortoise" in source.stream.path),
}


@pytest.mark.parametrize("stage", ["open", "read", "own_code"])
def test_the_slow_source_and_stage_are_named(tmp_path, monkeypatch, stage):
    for name, word in (("hare", "fast"), ("tortoise", "slow")):
        (tmp_path / name).mkdir()
        for number in range(8):  # a batch each, more than are kept open
            (tmp_path / name / f"{number}.jsonl").write_text(json.dumps({"text": word[:1] * 6}) + "\n")
    config = CONFIG
    if stage in SLOW:
        place, name, is_slow = SLOW[stage]
        call = getattr(place, name)

        def called(*arguments):
            time.sleep(0.1 * is_slow(*arguments))
            return call(*arguments)

        monkeypatch.setattr(place, name, called)
        config = re.sub("format = .*", "", CONFIG)
    (tmp_path / "config.toml").write_text(config)
    monkeypatch.chdir(tmp_path)
    train_here(tmp_path / "config.toml", tmp_path / "run", "train.steps=14")
    monkeypatch.setattr(limits, "BUSY_SECONDS", 0.3)
    run = load_run(tmp_path / "run")
    (found,) = [each.outcome for each in diagnose(run).rulings if each.rule.name == "data_bound"]
    assert found.verdict == "finding"
    assert found.sentence.endswith(f"time/{stage}/tortoise took most")
    assert found.knob is not None
    assert found.knob.suggested == STAGES[stage]
    seconds = {key: math.fsum(run.column(key)[1]) for key in filter(SECONDS.fullmatch, run.keys)}
    slow = seconds.pop(f"time/{stage}/tortoise")
    assert 1.2 < slow < 12.0  # at 0.1 s for each of the 28 batches that are of this source, of five about four
    assert sum(seconds.values()) < slow / 4, "no other source or stage has it"
