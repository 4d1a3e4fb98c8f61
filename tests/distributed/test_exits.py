"""Exit code 0 means that the run is over: a model that ends the process before that gets another one, and a reason."""

from __future__ import annotations

import json

import pytest

from tests.support.ranks import status
from tests.support.runs import ROOT, run, write_tiny_config

pytestmark = pytest.mark.distributed
FAULTY = ("--set", "model.target=tests.support.faulty_model:build", "--set", "model.contract=false")
WORDS = {
    "sys.exit": "UnexpectedExit: sys.exit(0) was called after step 6 (",
    "os._exit": "UnexpectedExit: os._exit(0) was called after step 6 (",
    "interrupt": "UnexpectedExit: KeyboardInterrupt was raised after step 6 (",
}


def run_with(fault, tmp_path, *, nproc=None):
    config = write_tiny_config(tmp_path)
    arguments = ["--config", config, "--run-dir", tmp_path / "run", "--steps", 10, "--stdout", "off", *FAULTY]
    extra = {"FAULT": json.dumps({"step": 7, **fault}), "PYTHONPATH": str(ROOT)}
    return run(*arguments, nproc=nproc, extra=extra)


@pytest.mark.parametrize("what", WORDS)
def test_a_model_that_ends_the_only_process_fails_the_run_and_the_reason_is_kept(tmp_path, what):
    ended = run_with({"what": what}, tmp_path)
    assert ended.returncode == 1, ended.stderr
    found = status(tmp_path / "run")
    assert (found["state"], found["last_step"]) == ("failed", 6)
    assert found["reason"].startswith(WORDS[what])
    assert "faulty_model.py:" in found["reason"]
    assert found["reason"] in ended.stderr


@pytest.mark.parametrize(("what", "rank"), [("sys.exit", 0), ("sys.exit", 1), ("os._exit", None)])
def test_a_model_that_ends_ranks_fails_the_run_on_all_of_them(tmp_path, what, rank):
    ended = run_with({"what": what, "rank": rank}, tmp_path, nproc=2)
    assert ended.returncode == 1, ended.stderr
    found = status(tmp_path / "run")
    assert found["state"] == "failed"
    assert WORDS[what] in found["reason"]
