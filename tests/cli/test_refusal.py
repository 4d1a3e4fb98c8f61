"""A run that refuses prints one message, from one rank, whichever ranks find the mistake and however late they are."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.runs import ROOT, TIMEOUT_SEC, command, environment, run, write_tiny_config

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


@pytest.mark.parametrize("slow", ["rank_0", pytest.param("rank_1", marks=pytest.mark.slow)])
def test_a_mistake_of_all_ranks_is_printed_once_by_rank_0_however_slow_a_rank_is(tmp_path, slow):
    waits = {"rank_0": "pass", "rank_1": "pass", slow: "time.sleep(3)"}
    (tmp_path / "own_model.py").write_text(MODULE.format(rank_0=waits["rank_0"], rank_1=waits["rank_1"]))
    line = command(["--config", write_tiny_config(tmp_path), "--set", "model.target=own_model:nothing"], nproc=2)
    env = environment({"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False)
    assert done.returncode == 1  # torchrun turns every failure into 1
    assert str(ROOT / "train") + '", line' not in done.stderr, "no traceback of the program"
    assert not (tmp_path / "runs").exists()
    assert done.stderr.count("model.target: own_model has no function nothing") == 1
    assert "[rank 1]" not in done.stderr
    assert done.stderr.count("exitcode  : 2 ") == 2, "each rank ends with the code for mistakes"


@pytest.mark.parametrize(
    "rank_0", ["time.sleep(3)", pytest.param("os._exit(7)", marks=pytest.mark.slow)], ids=["late", "dead"]
)
def test_a_mistake_of_rank_1_alone_is_printed_once_with_its_rank(tmp_path, rank_0):
    (tmp_path / "own_model.py").write_text(MODULE.format(rank_0=rank_0, rank_1='raise ValueError("of rank 1")'))
    arguments = ["--config", write_tiny_config(tmp_path), "--set", "model.target=own_model:build"]
    done = run(*arguments, nproc=2, extra={"PYTHONPATH": str(tmp_path)})
    assert done.returncode in (2, 7)
    assert not (tmp_path / "runs").exists()
    assert done.stderr.count("of rank 1") == 1
    assert "[rank 1] --set model.target=own_model:build: model.target: own_model fails on import" in done.stderr


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
