"""A store that is killed, fails, is slow or loses bytes, under real runs: the run goes on, and the store has only complete
checkpoints at every moment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, EXTRA, assert_same, keep, make_config, whole_run
from tests.support.ranks import Ranks, checkpoint_differences, last_logged
from tests.support.s3 import FaultyProxy, S3Server

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
STEPS = 60
SHORT = (*ARGUMENTS, "--steps", STEPS)
REMOTE = f'{EXTRA}remote = "s3://bucket/run"\n'
LAST = f"checkpoints/step_{STEPS:08d}"


class Watch:
    """Looks into the server's directory again and again: what is marked as complete must be."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.polls, self.seen = 0, set()
        self.violations: list[str] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.005):
            self.polls += 1
            for marker in self._directory.glob("step_*/COMPLETE"):
                self._look(marker)

    def _look(self, marker: Path) -> None:
        try:
            content = marker.read_bytes()
            files = json.loads(content)["files"]
        except (FileNotFoundError, ValueError):
            return
        self.seen.add(marker.parent.name)
        for name, expected in files.items():
            try:
                is_right = hashlib.sha256((marker.parent / name).read_bytes()).hexdigest() == expected["sha256"]
            except FileNotFoundError:
                is_right = False
            # Deleted meanwhile: the marker goes first.
            if not is_right and marker.exists() and marker.read_bytes() == content:
                self.violations.append(f"{marker.parent.name}/{name}")

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()
        assert self.polls > 10
        assert self.violations == []


def complete(directory: Path) -> list[str]:
    return sorted(path.parent.name for path in directory.glob("step_*/COMPLETE"))


def events_of(run_dir: Path, name: str) -> list[dict]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def num_puts(proxy: FaultyProxy) -> int:
    return sum(method == "PUT" and "/step_" in path for method, path in proxy.requests)


def main_until(ranks: Ranks, happens: Callable[[], bool]) -> bool:
    """Wait until it happens (True), or until rank 0 has ended; the others end while it uploads."""
    while ranks.processes[0].poll() is None:
        if happens():
            return True
        time.sleep(0.002)
    return False


def has_more_puts(proxy: FaultyProxy, before: int) -> bool:
    return num_puts(proxy) > before


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("remote")
    return whole_run(make_config(directory), directory / "run", "--steps", STEPS)


@pytest.fixture
def server(tmp_path):
    server = S3Server(tmp_path / "s3" / "root")
    yield server
    server.kill()


@pytest.fixture
def proxy(server):
    proxy = FaultyProxy(server.port)
    yield proxy
    proxy.close()


def started(tmp_path: Path, server: S3Server, run_dir: Path, *more: object, port: int | None = None) -> Ranks:
    config = make_config(tmp_path, REMOTE)
    line = ("--config", config, "--run-dir", run_dir, *SHORT, *more)
    logs = tmp_path / f"logs{len(list(tmp_path.glob('logs*')))}"
    return Ranks(line, logs=logs, extra=server.environment(port))


def same_as(untouched: Path, run_dir: Path, server: S3Server) -> None:
    """The run is the one without a store, and the store has its last checkpoint."""
    assert_same(untouched, run_dir, STEPS)
    assert complete(server.bucket / "run")[-1] == Path(LAST).name
    assert checkpoint_differences(untouched / LAST, server.bucket / "run" / Path(LAST).name) == []


def test_a_server_that_is_killed_in_uploads_gets_the_last_checkpoint(untouched, tmp_path, server, proxy):
    proxy.fault = lambda method, path: 0.1 if method == "PUT" else None  # longer uploads are easier to hit
    run_dir, kills = tmp_path / "run", 0
    watch = Watch(server.bucket / "run")
    with started(tmp_path, server, run_dir, port=proxy.port) as ranks:
        while kills < 5 and main_until(ranks, partial(has_more_puts, proxy, num_puts(proxy))):
            server.kill()
            kills += 1
            if kills == 2:  # so long that the client's own attempts do not suffice
                assert main_until(ranks, lambda: bool(events_of(run_dir, "remote_failed")))
            time.sleep(0.2)
            server.start()
        assert ranks.wait() == [0, 0], ranks.said()
        said = ranks.said()
    watch.end()
    assert kills >= 2
    assert "cannot be uploaded now" in said
    assert f"s3://bucket/run has the last checkpoint, step_{STEPS:08d}" in said
    assert events_of(run_dir, "remote_failed")
    same_as(untouched, run_dir, server)
    keep(9, "S3 server killed in an upload and started again", times=kills)


def test_a_truncated_object_is_noticed_and_the_checkpoint_before_is_used(untouched, tmp_path, server):
    run_dir = tmp_path / "run"
    with started(tmp_path, server, run_dir) as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
    shutil.rmtree(run_dir)
    *_, before, last = complete(server.bucket / "run")
    assert last == Path(LAST).name
    damaged = server.bucket / "run" / last / "model_000.safetensors"
    os.truncate(damaged, damaged.stat().st_size - 1000)
    server.restart()
    with started(tmp_path, server, run_dir, "--resume", "auto") as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
        said = ranks.said()
    assert f"{Path(LAST).name}/model_000.safetensors: is damaged" in said
    assert f"resuming after step {int(before[-8:])}" in said
    assert complete(server.bucket / "run")[-1] == last
    for last in (run_dir / LAST, damaged.parent):
        assert checkpoint_differences(untouched / LAST, last) == []
    what = "run directory lost, and an object of the newest checkpoint truncated"
    keep(9, what, lost="steps since the checkpoint before, trained again")


def test_a_run_that_is_killed_in_uploads_and_loses_its_directory_comes_back_from_the_store(
    untouched, tmp_path, server, proxy
):
    proxy.fault = lambda method, path: 0.05 if method == "PUT" else None
    watch, losses, resumed = Watch(server.bucket / "run"), 0, []
    for attempt in range(4):
        run_dir = tmp_path / f"run{attempt}"
        before = len(complete(server.bucket / "run"))
        with started(tmp_path, server, run_dir, "--resume", "auto", port=proxy.port) as ranks:

            def is_in_an_upload(run_dir=run_dir) -> bool:
                if last_logged(run_dir / "metrics.jsonl") % 5 != 2 or not complete(server.bucket / "run"):
                    return False
                steps = [path for path in (server.bucket / "run").glob("step_*") if any(path.iterdir())]
                return any(not (path / "COMPLETE").exists() for path in steps)

            if ranks.until(is_in_an_upload):
                ranks.signal(signal.SIGKILL)
                losses += 1
            ranks.wait()
            resumed += [line for line in ranks.said(0).splitlines() if "resuming after step" in line]
            assert before == 0 or len(resumed) == attempt, ranks.said(0)
        if not losses > attempt:
            break
    run_dir = tmp_path / "last"
    with started(tmp_path, server, run_dir, "--resume", "auto") as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
    watch.end()
    assert losses >= 2
    assert checkpoint_differences(untouched / LAST, run_dir / LAST) == []
    assert complete(server.bucket / "run")[-1] == Path(LAST).name
    leftovers = [
        p.name for p in (server.bucket / "run").glob("step_*") if any(p.iterdir()) and not (p / "COMPLETE").exists()
    ]
    assert leftovers == []
    keep(9, "SIGKILL of all ranks in an upload, and the run directory lost", times=losses)


def test_a_store_that_hangs_at_the_end_is_waited_for_until_a_stop(tmp_path, server):
    run_dir = tmp_path / "run"
    with started(tmp_path, server, run_dir) as ranks:
        assert ranks.until(lambda: complete(server.bucket / "run") != []), ranks.said()
        server.signal(signal.SIGSTOP)
        assert main_until(ranks, lambda: '"done"' in (run_dir / "status.json").read_text())
        since = time.monotonic()
        time.sleep(1.0)
        ranks.signal(signal.SIGTERM, [0])
        assert ranks.wait() == [0, 0], ranks.said()
        said, seconds = ranks.said(0), time.monotonic() - since
    server.signal(signal.SIGCONT)
    assert f"does not have the last checkpoint: copy {run_dir / LAST} there" in said
    assert seconds < 15
    keep(9, "a store that stops answering (SIGSTOP), until the run ends and gets a SIGTERM")


def test_a_run_resumes_from_its_directory_while_the_store_is_down(untouched, tmp_path, server):
    run_dir = tmp_path / "run"
    with started(tmp_path, server, run_dir) as ranks:
        assert ranks.until(lambda: len(complete(run_dir / "checkpoints")) >= 2), ranks.said()
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    server.kill()
    with started(tmp_path, server, run_dir, "--resume", "auto") as ranks:
        assert main_until(ranks, lambda: "resuming after step" in ranks.said(0)), ranks.said()
        assert main_until(ranks, lambda: bool(events_of(run_dir, "remote_failed"))), ranks.said()
        server.start()
        assert ranks.wait() == [0, 0], ranks.said()
        said = ranks.said(0)
    assert "resuming without the store, and uploads are tried again during the run" in said
    same_as(untouched, run_dir, server)
    keep(9, "a store that is down when a killed run resumes")
