"""After a run nothing of its process group is left: threads that outlive it can abort the process at its end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.gloo import gloo_threads, run_on_ranks
from tests.support.runs import TIMEOUT_SEC, command, environment, write_tiny_config

# The config names this module's builder; imported there, it says at the end of the process which threads are left.
MODULE = """
import atexit, json, os
from pathlib import Path
from tests.support.gloo import gloo_threads, gloo_threads_left
from trainer.model import build as build_reference

def report():
    Path(__file__).with_name("threads" + os.environ["RANK"]).write_text(json.dumps(gloo_threads_left()))

atexit.register(report)

def build(vocab_size, dim, num_layers):
    assert gloo_threads()
    return build_reference(vocab_size, dim, num_layers)
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_a_finished_run_leaves_no_thread_of_its_process_group(tmp_path: Path) -> None:
    (tmp_path / "with_report.py").write_text(MODULE, encoding="utf-8")
    config = write_tiny_config(tmp_path)
    text = config.read_text(encoding="utf-8").replace(
        "[model]", '[model]\ncontract = false\ntarget = "with_report:build"'
    )
    config.write_text(text, encoding="utf-8")
    done = subprocess.run(
        command(["--config", config], nproc=2),
        env=environment({"PYTHONPATH": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SEC,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"threads{rank}").read_text()) for rank in (0, 1)] == [[], []]


def threads_within(rank: int, world_size: int) -> list[str]:
    return gloo_threads()


@pytest.mark.distributed
def test_threads_of_a_living_group_are_seen() -> None:
    assert all(run_on_ranks(threads_within, 2))
