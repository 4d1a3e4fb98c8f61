"""`train cbs`: real branches from a real checkpoint, interrupted and gone on with."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from tests.support.forks import Forked
from tests.support.grouped import run
from tests.support.in_process import Ended, exit_code, program
from tests.support.ranks import last_logged
from tests.support.runs import TIMEOUT_SEC, environment, read_rows, write_tiny_config
from trainer.ending import PARENT
from trainer.errors import UserError
from trainer.metrics.run_status import run_state, take_lock
from trainer.tools.branching import study

STEP = 8
OPTIONS = ("--at", STEP, "--seeds", 2, "--factors", "1/2,2", "--lr-grid", "1", "--tokens", 2_500)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 12 steps with checkpoints, an evaluation, and a weight that changes over its steps."""
    directory = tmp_path_factory.mktemp("trained")
    extra = "\n[eval]\nevery = 4\nbatches = 4\nholdout_fraction = 0.1\n[checkpoint]\nevery = 4\nkeep_last = 10\n"
    config = write_tiny_config(directory, extra)
    done = run("--config", config, "--run-dir", directory / "run", "--steps", 12, "--stdout", "off", cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory / "run"


def copied(trained, name) -> Path:
    return Path(shutil.copytree(trained, trained.with_name(name), symlinks=True))


def contents(run_dir) -> dict[str, object]:
    """All files of a run but those of its branches: content and time."""
    return {
        str(path.relative_to(run_dir)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and path.name != ".lock" and "cbs" not in path.relative_to(run_dir).parts
    }


def here(*arguments: object) -> Ended:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = exit_code(arguments)
    return Ended(code, out.getvalue(), err.getvalue())


def answer(run_dir) -> dict[str, object]:
    found = json.loads((run_dir / "cbs" / str(STEP) / "cbs.json").read_text())
    assert found.pop("run") == str(run_dir)
    return found


class Branch(Forked):
    """In the place of `subprocess.Popen`: a branch that is forked, by a server for which it does not look.

    In the middle of the first one that takes a step, this process gets a SIGTERM.
    """

    is_first = True

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdout: IO[bytes], **_: object) -> None:
        out = Path(str(stdout.name))
        self._metrics = out.with_name("metrics.jsonl")
        own = {name: value for name, value in env.items() if name != PARENT}
        super().__init__(command[command.index("--config") :], own, cwd=Path.cwd(), out=out, err=out)

    def poll(self) -> int | None:
        if Branch.is_first and last_logged(self._metrics) > STEP:
            Branch.is_first = False
            os.kill(os.getpid(), signal.SIGTERM)
        return super().poll()


@pytest.fixture(scope="module")
def whole(trained):
    """Branches, the first of which was interrupted in its midst and began again; and the files before."""
    run_dir = copied(trained, "whole")
    before = contents(run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "subprocess", SimpleNamespace(Popen=Branch, DEVNULL=None))
        patch.setattr(study, "POLL_SEC", 0.002)
        ended = here("cbs", run_dir, *OPTIONS)
        assert (ended.returncode, "the same command continues" in ended.stderr) == (0, True), ended.stderr
        assert not (run_dir / "cbs" / str(STEP) / "cbs.json").exists()
        stopped = [json.loads(path.read_text()) for path in run_dir.glob(f"cbs/{STEP}/batch_*/status.json")]
        assert any(each["state"] == "stopped" and each["last_step"] > STEP for each in stopped), stopped
        done = here("cbs", run_dir, *OPTIONS)
    assert done.returncode == 0, done.stderr
    return run_dir, before, done


def test_the_run_itself_is_not_changed(whole):
    run_dir, before, _ = whole
    assert contents(run_dir) == before


def test_the_branches_train_equal_tokens_with_the_stated_batch_and_rate(whole):
    run_dir, _, _ = whole
    found = answer(run_dir)
    lr = read_rows(run_dir / "metrics.jsonl")["train", STEP]["lr"]
    small, large = found["batches"]
    assert small["steps"] == 4 * large["steps"]
    assert (small["lr"], large["lr"]) == pytest.approx((lr * 0.5**0.5, lr * 2**0.5))
    for batch, name in ((small, "1_of_2"), (large, "2")):
        (branch,) = run_dir.glob(f"cbs/{STEP}/batch_{name}-*-seed_0")
        rows = read_rows(branch / "metrics.jsonl")
        logged = {step: row for (mode, step), row in rows.items() if mode == "train"}
        assert all(row["lr"] == pytest.approx(batch["lr"]) for row in logged.values())
        assert max(logged) == STEP + batch["steps"]
        assert sum(row["tokens_in_step"] for row in logged.values()) == pytest.approx(found["tokens"], rel=0.2)
        # 3 to 1 over 20 steps, and the next is step 9.
        assert "weight = 2.1\n" in (branch / "branch.toml").read_text()


def test_seeds_read_other_data_and_are_evaluated_on_the_same(whole):
    run_dir, _, _ = whole
    for name in ("1_of_2", "2"):
        first, second = (next(run_dir.glob(f"cbs/{STEP}/batch_{name}-*-seed_{seed}")) for seed in (0, 1))
        tokens = [
            [row.get("tokens_in_step") for row in read_rows(each / "metrics.jsonl").values()]
            for each in (first, second)
        ]
        assert tokens[0] != tokens[1]
    for batch in answer(run_dir)["batches"]:
        losses = batch["losses"]
        assert losses["0"] != losses["1"]
        assert losses["0"] == pytest.approx(losses["1"], rel=0.1)


def test_a_second_call_takes_what_is_there_and_refuses_to_mix(whole, capsys):
    run_dir, _, _ = whole
    before = answer(run_dir)["batches"][0]["losses"]
    assert not list(run_dir.glob("cbs/*/*/checkpoints"))
    again = program(["cbs", run_dir, *OPTIONS, "--tolerance", "5"], capsys)
    assert (again.returncode, "critical batch is" in " ".join(again.stdout.split())) == (0, True)
    assert "4 done" in again.stderr
    assert answer(run_dir)["critical"]["factor"] == "2"
    assert answer(run_dir)["batches"][0]["losses"] == before
    refused = program(["cbs", run_dir, *OPTIONS, "--tokens", "99999"], capsys)
    assert refused.returncode == 2
    assert "their losses do not compare" in refused.stderr


def test_a_mistake_is_one_line_and_trains_nothing(trained, capsys):
    refused = program(["cbs", trained, "--at", "9"], capsys)
    message = f"--at: {trained} has no checkpoint after step 9; use one of 4, 8, 12\n"
    assert (refused.returncode, refused.stderr) == (2, message)
    assert not list(trained.glob("cbs/*/*"))


def test_a_run_that_is_still_trained_is_refused(trained, capsys):
    run_dir = copied(trained, "running")
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another mistake, so that nothing would be trained if this one were not seen.
        refused = program(["cbs", run_dir, "--factors", "0"], capsys)
    assert refused.returncode == 2
    assert "is still being trained" in refused.stderr


def test_a_killed_run_is_not_taken_for_a_running_one_meanwhile(trained):
    run_dir = copied(trained, "killed")
    status = {"state": "running", "pid": os.getpid(), "host": socket.gethostname(), "time": 0.0}
    (run_dir / "status.json").write_text(json.dumps(status))
    with study.reserved(run_dir):
        assert run_state(run_dir)["state"] == "died"
        with pytest.raises(UserError, match="in use by another run"), study.reserved(run_dir):
            pass
        with pytest.raises(UserError, match="in use by another run"):
            take_lock(run_dir)


def test_a_branch_that_fails_is_named_and_the_others_are_kept(whole, tmp_path):
    run_dir = copied(whole[0], "failing")
    (branch,) = run_dir.glob(f"cbs/{STEP}/batch_2-*-seed_1")
    shutil.rmtree(branch)
    out, err = tmp_path / "out", tmp_path / "err"
    process = Forked(["cbs", run_dir, *OPTIONS], environment(), cwd=Path.cwd(), out=out, err=err)
    while not (branch / "status.json").exists():
        assert process.poll() is None, err.read_text()
        time.sleep(0.002)
    os.kill(json.loads((branch / "status.json").read_text())["pid"], signal.SIGKILL)
    assert process.wait(TIMEOUT_SEC) == 1
    assert "the branch failed with exit code -9" in err.read_text()
    assert len(list(run_dir.glob(f"cbs/{STEP}/*/result.json"))) == 3
