"""Exit code 0 means that the run is over: a model that ends the process before that gets another one, and a reason."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import sys
from contextlib import ExitStack, suppress

import pytest

from tests.support.fault_runs import LOST, keep, make_config
from tests.support.ranks import Launched, Ranks, last_logged, status
from tests.support.records import write_lock
from tests.support.runs import PROGRAM, ROOT, TIMEOUT_SEC, environment, rank_environment, run, write_tiny_config
from trainer.distributed.env import rank_info
from trainer.errors import UserError
from trainer.metrics.run_status import read_owner
from trainer.tools.verbs.records import entry_of

pytestmark = pytest.mark.distributed
FAULTY = ("--set", "model.target=tests.support.faulty_model:build", "--set", "model.contract=false")
WORDS = {
    "sys.exit": "UnexpectedExit: sys.exit(0) was called after step 6 (",
    "interrupt": "UnexpectedExit: KeyboardInterrupt was raised after step 6 (",
}


def run_with(fault, tmp_path, *more):
    config = write_tiny_config(tmp_path)
    arguments = ["--config", config, "--run-dir", tmp_path / "run", "--steps", 10, "--stdout", "off", *FAULTY, *more]
    extra = {"FAULT": json.dumps({"step": 7, **fault}), "PYTHONPATH": str(ROOT)}
    return run(*arguments, extra=extra)


@pytest.mark.parametrize("what", WORDS)
def test_a_model_that_ends_the_only_process_fails_the_run_and_the_reason_is_kept(tmp_path, what):
    ended = run_with({"what": what}, tmp_path)
    assert ended.returncode == 1, ended.stderr
    found = status(tmp_path / "run")
    assert (found["state"], found["last_step"]) == ("failed", 6)
    assert found["reason"].startswith(WORDS[what])
    assert "faulty_model.py:" in found["reason"]
    assert found["reason"] in ended.stderr


def test_a_model_that_ends_the_process_while_it_is_built_is_an_error_too(tmp_path):
    (tmp_path / "own.py").write_text("import sys\n\ndef build(vocab_size, dim, num_layers):\n    sys.exit(0)\n")
    arguments = ["--config", write_tiny_config(tmp_path), "--set", "model.target=own:build"]
    ended = run(*arguments, extra={"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 1, ended.stderr
    assert f"UnexpectedExit: sys.exit(0) was called ({tmp_path / 'own.py'}:4)" in ended.stderr


def test_a_resume_says_that_the_process_before_it_was_killed_and_the_record_does_too(tmp_path):
    saves, run_dir = ("--set", "checkpoint.every=4"), tmp_path / "run"
    kill = {"what": "signal", "name": "SIGKILL"}
    assert run_with(kill, tmp_path, *saves).returncode == -signal.SIGKILL
    killed = status(run_dir)
    assert killed["state"] == "running"
    reason = (
        f"process {killed['pid']} on {killed['host']} ended without a word at about step 6: it was killed, or crashed"
    )
    assert entry_of(run_dir, now=0.0).reason.startswith(reason)
    resumed = run_with({"step": 100}, tmp_path, *saves, "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    for said in (resumed.stderr, (run_dir / "logs" / "rank_000.log").read_text()):
        assert f"WARNING {run_dir}: {reason}" in said
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    restart = next(event for event in events if event["event"] == "restart")
    assert restart["previous"]["state"] == "died"
    assert restart["previous"]["last_step"] == 6
    assert status(run_dir)["state"] == "done"


def test_a_run_whose_process_was_killed_after_its_last_checkpoint_is_done_once_that_is_seen(tmp_path):
    assert run_with({"step": 100}, tmp_path).returncode == 0
    run_dir = tmp_path / "run"
    (run_dir / "status.json").write_text(json.dumps({**status(run_dir), "state": "running", "reason": ""}))
    again = run_with({"step": 100}, tmp_path, "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert "nothing is left to do" in again.stderr
    assert (status(run_dir)["state"], status(run_dir)["last_step"]) == ("done", 10)


def test_control_c_under_nproc_stops_with_a_checkpoint_and_exit_code_0(tmp_path, capfd):
    run_dir = tmp_path / "run"
    with Launched(write_tiny_config(tmp_path), run_dir, "--stdout", "json") as launched:
        launched.wait_for_step(3)
        os.killpg(launched.process.pid, signal.SIGINT)  # as a terminal does, to the launcher and to every rank
        _, stderr = launched.process.communicate(timeout=TIMEOUT_SEC)
    assert launched.process.returncode == 0, stderr
    assert "torch" not in stderr, "the ranks and the launcher have said it in their own words"
    left = [path.name for path in launched.temporary.iterdir()]
    assert not [name for name in left if name.startswith(("torchelastic", "trainer"))], left
    ended = status(run_dir)
    assert (ended["state"], ended["reason"]) == ("stopped", "stopped by SIGINT")
    assert (run_dir / "checkpoints" / f"step_{ended['last_step']:08d}" / "COMPLETE").exists()
    assert capfd.readouterr().out == launched.metrics.read_text(), "payloads that a signal interrupts are whole"


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["`train --nproc`", "torchrun"])
@pytest.mark.parametrize(("what", "rank"), [("sys.exit", 0), ("sys.exit", None), ("exit of C", 1)])
def test_code_that_ends_ranks_with_0_fails_the_run(tmp_path, what, rank, launcher):
    run_dir, own = tmp_path / "run", ("--set", "distributed.timeout_sec=12")
    fault = {"what": what, "rank": rank, "step": 7}
    with Launched(make_config(tmp_path), run_dir, *own, is_torchrun=launcher == "torchrun", fault=fault) as launched:
        _, said = launched.process.communicate(timeout=72)
    assert launched.process.returncode == 1, said
    found = status(run_dir)
    assert found["state"] == "failed", (found, said)
    if what != "exit of C":
        assert f"{what}(0) was called after step 6" in found["reason"]
    where, code = "both ranks" if rank is None else f"rank {rank} of two", f"`{what}(0)`"
    code = "C's `_exit(0)`" if what == "exit of C" else code
    keep(10, f"{code} at step 7 on {where} under {launcher}", lost=LOST)


START_TIMEOUT_SEC = 5
MOMENTS = {
    "before it opens the store": "trainer.distributed.env:rendezvous_store",
    "before the group begins": "torch.distributed:init_process_group",
    "before the first collective": "trainer.training.record:choose_run_dir",
}


KILLED = """
import os
import {0} as module
from trainer.cli.main import main
if os.environ["RANK"] == "0":
    module.{1} = lambda *_, **__: os.kill(os.getpid(), 9)
main()
"""


def test_the_others_end_in_time_and_say_why_in_one_line(tmp_path):
    arguments = ("--config", write_tiny_config(tmp_path), "--set", f"distributed.timeout_sec={START_TIMEOUT_SEC}")
    groups: dict[str, Ranks] = {}
    with ExitStack() as stack:  # all of them at once: each waits for its time to pass
        for moment, function in MOMENTS.items():
            line = (*arguments, "--run-dir", tmp_path / moment / "run")
            ranks = Ranks(line, logs=tmp_path / moment, program=KILLED.format(*function.split(":")))
            groups[moment] = stack.enter_context(ranks)
        for moment, ranks in groups.items():
            codes, said = ranks.wait(START_TIMEOUT_SEC + 60), ranks.said(1)
            assert codes == [-signal.SIGKILL, 1], (moment, said)
            assert "Traceback" not in said, moment
            lines = [each for each in said.splitlines() if "rank 1: another rank has ended or does not answer" in each]
            assert len(lines) == 1, (moment, said)


UNMOUNTED = """
from pathlib import Path
from trainer.training.run_dir import RunDir
RunDir.move_to = lambda self, path, own=RunDir.move_to: own(self, Path(str(path).replace("/first/", "/second/")))
"""
UNLIKE = {
    UNMOUNTED: "second/run/checkpoints: is not the directory of rank 0, whose file .tmp_step_",
    "sys.argv += ['--set', 'optimizer.lr=0.02']": "optimizer.lr: is 0.02, and 0.01 on rank 0: the ranks differ, on ",
}


@pytest.mark.slow
@pytest.mark.parametrize("does", UNLIKE, ids=["another directory", "another config"])
def test_a_rank_whose_host_is_not_as_that_of_rank_0_is_refused_by_name(tmp_path, does):
    run_dir, code = tmp_path / "first" / "run", f"if os.environ['RANK'] == '1':\n    exec({does!r})\nmain()"
    arguments = ("--config", write_tiny_config(tmp_path), "--run-dir", run_dir, "--set", "optimizer.lr=0.01")
    arguments += ("--set", "distributed.timeout_sec=10")
    code = f"import os, sys\nfrom trainer.cli.main import main\n{code}"
    with Ranks(arguments, logs=tmp_path / "logs", program=code) as ranks:
        assert ranks.wait() == [2, 2], ranks.said()
    said = ranks.said(1)
    assert UNLIKE[does] in said
    assert f" on {socket.gethostname()}; " in said
    if does == UNMOUNTED:
        assert list((run_dir / "checkpoints").iterdir()) == [], "the file is gone again"


STEPS = 100_000


def test_a_second_run_in_a_busy_directory_is_told_so_and_the_first_ends_if_another_host_s_takes_over(tmp_path):
    config, run_dir = write_tiny_config(tmp_path, "[checkpoint]\nevery = 1\n"), tmp_path / "run"
    arguments = ("--config", config, "--run-dir", run_dir)
    with Ranks((*arguments, "--steps", STEPS), logs=tmp_path / "logs", world_size=1) as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 3), ranks.said()
        second = run(*arguments, "--resume", "auto", "--steps", 3)
        assert second.returncode == 2
        assert "is in use by another run" in second.stderr
        assert "damaged" not in second.stderr
        assert "falling back" not in second.stderr
        write_lock(run_dir)
        (run_dir / "status.json").write_text("{}")
        last = last_logged(run_dir / "metrics.jsonl")
        assert ranks.wait() == [1], ranks.said()
        assert "process 1 on elsewhere has taken over this run, which ends here without writing" in ranks.said()
    assert last_logged(run_dir / "metrics.jsonl") <= last + 1  # one may just have been written
    assert (status(run_dir), read_owner(run_dir).host) == ({}, "elsewhere")
    assert not (run_dir / "checkpoints" / "abandoned").exists()
    keep(7, "a second run in a directory in use")


@pytest.mark.slow
def test_a_closed_terminal_stops_the_run_with_a_checkpoint(tmp_path):
    config, run_dir = write_tiny_config(tmp_path), tmp_path / "run"
    line = [sys.executable, str(PROGRAM), "--config", str(config), "--run-dir", str(run_dir), "--steps", str(STEPS)]
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup, which a run heeds
        os.execve(sys.executable, line, environment({"PYTHONPATH": str(PROGRAM.parent)}))
    try:
        os.set_blocking(terminal, False)
        while last_logged(run_dir / "metrics.jsonl") < 3:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            with suppress(BlockingIOError):
                os.read(terminal, 65536)
        os.close(terminal)
        _, code = os.waitpid(child, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    ended = status(run_dir)
    assert (ended["state"], ended["reason"]) == ("stopped", "stopped by SIGHUP")
    assert (run_dir / "checkpoints" / f"step_{ended['last_step']:08d}" / "COMPLETE").exists()
    assert os.waitstatus_to_exitcode(code) == 0
    keep(3, "SIGHUP: a terminal that is closed")


WRONG = "RANK=" + "9" * 5000, "RANK=2", "LOCAL_RANK=-1", "MASTER_ADDR=", "MASTER_ADDR=.a", "MASTER_PORT=99999"


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[:20])
def test_an_environment_that_no_launcher_makes_is_a_mistake(wrong, monkeypatch):
    for name, value in (rank_environment(0, 2, 29500) | dict([wrong.split("=")])).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="not as torchrun sets them"):
        rank_info()
