"""A run that refuses prints one message, from one rank, whichever ranks find the mistake and however late they are."""

from __future__ import annotations

import pytest

from tests.support.runs import run, write_tiny_config

pytestmark = pytest.mark.distributed
# A module of the user's own that behaves differently on rank 0 and on rank 1. Importing it is a part of the validation.
MODULE = """
import os, time
import numpy as np
if os.environ["RANK"] == "0":
    time.sleep({delay})
elif {fails}:
    raise ValueError("of rank 1")
from trainer.model import build

def uncallable(rank, world_size, seed, seq_len):
    if rank == 1:
        raise TypeError("of rank 1")
    return batches(0, world_size, seed, seq_len)

def batches(rank, world_size, seed, seq_len):
    tokens = np.zeros((2, seq_len), dtype=np.int64)
    for _ in range(10**9):
        yield {{"tokens": tokens, "targets": tokens, **({{"of rank 1": tokens}} if rank == 1 else {{}})}}
"""


def refused(tmp_path, setting: str, *, delay: float = 0.0, fails: bool = False):
    (tmp_path / "own.py").write_text(MODULE.format(delay=delay, fails=fails))
    line = ["--config", write_tiny_config(tmp_path), "--set", setting]
    return run(*line, nproc=2, extra={"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("fails", "function", "said"),
    [
        (False, "nothing", "--set model.target=own:nothing: model.target: own "),
        (True, "build", "[rank 1] --set model.target=own:build: model.target: cannot import own: "),
    ],
)
def test_a_mistake_is_printed_once_by_one_rank_however_late_rank_0_is(tmp_path, fails, function, said):
    done = refused(tmp_path, f"model.target=own:{function}", delay=1, fails=fails)
    assert done.returncode == 2
    assert not (tmp_path / "runs").exists()
    assert said in done.stderr
    assert done.stderr.count("own:") == said.count("own:")


@pytest.mark.parametrize("function", ["uncallable", "batches"], ids=["while it starts", "in a step"])
def test_data_that_rank_1_alone_cannot_use_are_reported_once_with_its_rank(tmp_path, function):
    done = refused(tmp_path, f"data.source=[{{name='own', target='own:{function}'}}]")
    messages = [text for text in done.stderr.splitlines() if text.startswith("[rank 1]") and "of rank 1" in text]
    assert len(messages) == 1, done.stderr
    assert "Traceback" not in done.stderr
