"""Two torchrun agents that meet by c10d rendezvous: they train, one node is lost, it comes back, and the run is what it would
have been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.ranks import children, status
from tests.support.runs import (
    PROGRAM,
    ROOT,
    TIMEOUT_SEC,
    environment,
    free_port,
    losses,
    overrides,
    train,
    write_tiny_config,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = 200


class Node:
    """One agent with its rank, in a process group of its own, as on a machine of its own."""

    def __init__(
        self, folder: Path, name: str, port: int, sets: tuple[str, ...], fewest: int = 2, host: str = "first"
    ) -> None:
        self.log = folder / f"{name}.log"
        line = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={fewest}:2", "--nproc-per-node=1"]
        line += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two-nodes"]
        line += ["--local-addr=127.0.0.1", "--max-restarts=3"]
        # The host of the store is told by its address; on one machine both agents would match it.
        line += ["--monitor-interval=0.2", f"--rdzv-conf=is_host={int(name == host)},join_timeout={TIMEOUT_SEC}"]
        line[-1] += ",last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
        line += [str(PROGRAM), "--config", "tiny.toml", "--run-dir", "run", "--resume", "auto", *overrides(*sets)]
        env = environment(
            {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(line, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True)

    def lose(self) -> None:
        """End the agent and its ranks at once, without a word to the others."""
        for pid in (*children(self.process.pid), self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def wait_for(condition: Callable[[], bool], nodes: list[Node]) -> None:
    deadline = time.monotonic() + TIMEOUT_SEC
    while not condition():
        for node in nodes:
            assert node.process.poll() is None, node.said()[-3000:]
        assert time.monotonic() < deadline, nodes[0].said()[-3000:]
        time.sleep(0.1)


@pytest.fixture(params=["ddp", "fsdp"])
def sets(request) -> tuple[str, ...]:
    return "checkpoint.every=20", f"train.steps={STEPS}", f"distributed.strategy={request.param}"


@pytest.fixture
def start(tmp_path, sets) -> Iterator[Callable[[str], Node]]:
    write_tiny_config(tmp_path)
    nodes: list[Node] = []
    port = free_port()

    def start_one(name: str) -> Node:
        nodes.append(Node(tmp_path, name, port, sets))
        return nodes[-1]

    yield start_one
    for node in nodes:
        if node.process.poll() is None:
            node.lose()


def train_until_saved(start, folder: Path) -> tuple[Node, Node]:
    first, second = start("first"), start("second")
    wait_for(lambda: any((folder / "run" / "checkpoints").glob("step_*/COMPLETE")), [first, second])
    return first, second


def check_end(nodes: list[Node], folder: Path, sets: tuple[str, ...]) -> None:
    for node in nodes:
        assert node.process.wait(timeout=TIMEOUT_SEC) == 0, node.said()[-3000:]
    assert (status(folder / "run")["state"], status(folder / "run")["last_step"]) == ("done", STEPS)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("restart" in line for line in lines) == 1
    train(folder / "tiny.toml", folder / "uncut", *sets, nproc=2)  # both ranks on one machine, that nothing happened to
    assert losses(folder / "run" / "metrics.jsonl") == losses(folder / "uncut" / "metrics.jsonl")


def test_a_lost_node_comes_back_and_the_run_is_the_one_that_was_never_cut(start, tmp_path, sets):
    first, second = train_until_saved(start, tmp_path)
    second.lose()
    assert max(losses(tmp_path / "run" / "metrics.jsonl")) < STEPS, "it was lost too late"
    # The agent that is left restarts its rank, which waits at the rendezvous for a second node.
    wait_for(lambda: "failed (exitcode" in first.said(), [first])
    check_end([first, start("second")], tmp_path, sets)


def test_losing_the_node_of_the_rendezvous_ends_the_other_and_both_come_back(start, tmp_path, sets):
    first, second = train_until_saved(start, tmp_path)
    first.lose()
    assert max(losses(tmp_path / "run" / "metrics.jsonl")) < STEPS, "it was lost too late"
    # Without the store there is nothing to wait at: the scheduler (restartPolicy, requeue) starts both again.
    assert second.process.wait(timeout=TIMEOUT_SEC) != 0
    check_end([start("first"), start("second")], tmp_path, sets)
