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
from typing import NamedTuple

import pytest

from tests.support.runs import PROGRAM, TIMEOUT_SEC, environment, free_port, losses, run, write_tiny_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = 200
SETTINGS = ["--set", "checkpoint.every=20", "--set", f"train.steps={STEPS}"]


class Strategy(NamedTuple):
    """How the ranks share the model."""

    name: str
    ranks_per_node: int = 1

    def settings(self, *more: str) -> list[str]:
        words = [f"distributed.strategy={self.name}", *more]
        return [*SETTINGS, *(word for each in words for word in ("--set", each))]


DDP, FSDP, HSDP = Strategy("ddp"), Strategy("fsdp"), Strategy("hsdp", ranks_per_node=2)  # one replica per node


class Node:
    """One agent with its ranks, in a process group of its own, as on a machine of its own."""

    def __init__(self, folder: Path, name: str, port: int, strategy: Strategy) -> None:
        self.log = folder / f"{name}.log"
        ranks = strategy.ranks_per_node
        options = [
            "--nnodes=2",
            f"--nproc-per-node={ranks}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
        ]
        options += ["--rdzv-id=two-nodes", "--local-addr=127.0.0.1", "--max-restarts=3", "--monitor-interval=0.2"]
        # The host of the store is told by its address; on one machine both agents would match it.
        options += [f"--rdzv-conf=is_host={int(name == 'first')},join_timeout={TIMEOUT_SEC}"]
        line = [sys.executable, "-m", "torch.distributed.run", *options, str(PROGRAM)]
        arguments = ["--config", "tiny.toml", "--run-dir", "run", "--resume", "auto", *strategy.settings()]
        env = environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"})
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*line, *arguments], env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )

    def lose(self) -> None:
        """End the agent and its ranks at once, without a word to the others."""
        for pid in (self.process.pid, *children_of(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def children_of(pid: int) -> list[int]:
    """All processes below `pid`, from /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return sorted(found - {pid})


def wait_for(condition: Callable[[], bool], nodes: list[Node]) -> None:
    deadline = time.monotonic() + TIMEOUT_SEC
    while not condition():
        for node in nodes:
            assert node.process.poll() is None, node.said()[-3000:]
        assert time.monotonic() < deadline, nodes[0].said()[-3000:]
        time.sleep(0.1)


@pytest.fixture(params=[DDP], ids=lambda strategy: strategy.name)
def strategy(request) -> Strategy:
    return request.param


@pytest.fixture
def start(tmp_path, strategy) -> Iterator[Callable[[str], Node]]:
    write_tiny_config(tmp_path)
    nodes: list[Node] = []
    port = free_port()

    def start_one(name: str) -> Node:
        nodes.append(Node(tmp_path, name, port, strategy))
        return nodes[-1]

    yield start_one
    for node in nodes:
        if node.process.poll() is None:
            node.lose()


@pytest.fixture
def uncut_losses(tmp_path_factory, strategy) -> dict[int, float]:
    """Of the same run with all ranks on one machine, that nothing happened to."""
    folder = tmp_path_factory.mktemp("uncut")
    config = write_tiny_config(folder)
    settings = strategy.settings("distributed.replicas=2") if strategy == HSDP else strategy.settings()
    ranks = 2 * strategy.ranks_per_node
    whole = run("--config", config.name, "--run-dir", "run", *settings, nproc=ranks, cwd=folder)
    assert whole.returncode == 0, whole.stderr
    return losses(folder / "run" / "metrics.jsonl")


def train_until_saved(start, folder: Path) -> tuple[Node, Node]:
    first, second = start("first"), start("second")
    wait_for(lambda: any((folder / "run" / "checkpoints").glob("step_*/COMPLETE")), [first, second])
    return first, second


def check_end(nodes: list[Node], folder: Path, uncut: dict[int, float], strategy: Strategy) -> None:
    for node in nodes:
        assert node.process.wait(timeout=TIMEOUT_SEC) == 0, node.said()[-3000:]
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["state"], status["last_step"]) == ("done", STEPS)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("event") == "restart" for line in lines) == 1
    assert json.loads((folder / "run" / "env.json").read_text())["world_size"] == 2 * strategy.ranks_per_node
    if strategy == HSDP:
        assert "hsdp: 2 replicas of 2 shards" in nodes[0].said() + nodes[1].said()
    assert losses(folder / "run" / "metrics.jsonl") == uncut


@pytest.mark.parametrize("strategy", [DDP, FSDP, HSDP], ids=lambda strategy: strategy.name, indirect=True)
def test_a_lost_node_comes_back_and_the_run_is_the_one_that_was_never_cut(start, tmp_path, uncut_losses, strategy):
    first, second = train_until_saved(start, tmp_path)
    second.lose()
    assert max(losses(tmp_path / "run" / "metrics.jsonl")) < STEPS, "it was lost too late"
    # The agent that is left restarts its rank, which waits at the rendezvous for a second node.
    wait_for(lambda: "failed (exitcode" in first.said(), [first])
    check_end([first, start("second")], tmp_path, uncut_losses, strategy)


def test_losing_the_node_of_the_rendezvous_ends_the_other_and_both_come_back(start, tmp_path, uncut_losses, strategy):
    first, second = train_until_saved(start, tmp_path)
    first.lose()
    assert max(losses(tmp_path / "run" / "metrics.jsonl")) < STEPS, "it was lost too late"
    # Without the store there is nothing to wait at: the scheduler (restartPolicy, requeue) starts both again.
    assert second.process.wait(timeout=TIMEOUT_SEC) != 0
    check_end([start("first"), start("second")], tmp_path, uncut_losses, strategy)
