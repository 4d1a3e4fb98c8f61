"""A run that refuses prints one message, from one rank, whichever ranks find the mistake and however late they are."""

from __future__ import annotations

import pytest

from tests.support.runs import run, write_tiny_config

pytestmark = pytest.mark.distributed
# A model of the user's own, whose module behaves differently on rank 0 and on rank 1. Importing it is a part of the validation.
MODULE = """
import os, time
rank = os.environ.get("RANK")
if rank == "0":
    {rank_0}
if rank == "1":
    {rank_1}
from trainer.model import build
"""


@pytest.mark.parametrize(
    ("rank_1", "function", "said"),
    [
        ("pass", "nothing", "--set model.target=own_model:nothing: model.target: own_model "),
        (
            'raise ValueError("of rank 1")',
            "build",
            "[rank 1] --set model.target=own_model:build: model.target: cannot import own_model: ",
        ),
    ],
    ids=["of all", "of rank 1"],
)
def test_a_mistake_is_printed_once_by_one_rank_however_late_rank_0_is(tmp_path, rank_1, function, said):
    (tmp_path / "own_model.py").write_text(MODULE.format(rank_0="time.sleep(3)", rank_1=rank_1))
    arguments = ["--config", write_tiny_config(tmp_path), "--set", f"model.target=own_model:{function}"]
    done = run(*arguments, nproc=2, extra={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert not (tmp_path / "runs").exists()
    assert said in done.stderr
    assert done.stderr.count("own_model:") == said.count("own_model:")


DATA = """
import numpy as np

def uncallable(rank, world_size, seed, seq_len):
    if rank == 1:
        raise TypeError("of rank 1")
    return batches(0, world_size, seed, seq_len)

def batches(rank, world_size, seed, seq_len):
    tokens = np.zeros((2, seq_len), dtype=np.int64)
    for _ in range(10**9):
        yield {"tokens": tokens, "targets": tokens, **({"of rank 1": tokens} if rank == 1 else {})}
"""


@pytest.mark.parametrize("function", ["uncallable", "batches"], ids=["while it starts", "in a step"])
def test_data_that_rank_1_alone_cannot_use_are_reported_once_with_its_rank(tmp_path, function):
    (tmp_path / "own_data.py").write_text(DATA)
    own = f"data.source=[{{name='own', target='own_data:{function}'}}]"
    config = write_tiny_config(tmp_path)
    done = run("--config", config, "--set", own, nproc=2, extra={"PYTHONPATH": str(tmp_path)})
    messages = [text for text in done.stderr.splitlines() if text.startswith("[rank 1]") and "of rank 1" in text]
    assert len(messages) == 1, done.stderr
    assert "Traceback" not in done.stderr
