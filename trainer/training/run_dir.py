"""The run directory: the files that a run writes, and its state."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.config.load import flatten, load_config, to_toml
from trainer.config.schema import RunConfig
from trainer.distributed.env import RankInfo, from_main_rank, raise_on_all_ranks
from trainer.errors import UserError
from trainer.files import read_bytes, refuse_special, remove_leftovers, write_file, write_json, write_new
from trainer.import_path import users_code
from trainer.metrics.logger import get_logger
from trainer.metrics.run_status import LOCK_NAME, STATUS_NAME, RunLock, judged, read_status, take_lock, write_status
from trainer.training.checkpoint import CHECKPOINTS, LATEST, refuse_absent

logger = get_logger(__name__)
METRICS, EVENTS, ENVIRONMENT = "metrics.jsonl", "events.jsonl", "env.json"
CONFIG, RESOLVED_CONFIG = "config.toml", "config.resolved.toml"
RECORDED_PACKAGES = ("torch", "numpy", "pydantic", "wandb", "trainer")
FINISHED = "done"
OWN_FILES = (METRICS, EVENTS, STATUS_NAME, CONFIG, RESOLVED_CONFIG, ENVIRONMENT, LOCK_NAME)


class RunDir:
    """Paths inside a run's directory, and its small JSON files. `claim` makes a new one."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.is_new = is_new
        self.owned: RunLock | None = None  # by this process, see `lock`
        self.wandb_run_id: str | None = None  # for status.json
        self.data = ""  # of the content of the data files, for env.json
        self.move_to(path)

    def move_to(self, path: Path) -> None:
        """Be the run in another directory."""
        self.path = path
        self.metrics = path / METRICS
        self.events = path / EVENTS
        self.status_file = path / STATUS_NAME
        self.resolved_config = path / RESOLVED_CONFIG
        self.checkpoints = path / CHECKPOINTS
        self.logs = path / "logs"

    def claim(self) -> None:
        """Make the directory (rank 0); a new run takes the next free name if another was faster."""
        with self.writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stem, count = self.path, 1
            # `mkdir` decides between runs that start together, also on a shared file system.
            while self.is_new:
                try:
                    self.path.mkdir()
                    return
                except FileExistsError:
                    count += 1
                    self.move_to(stem.with_name(f"{stem.name}-{count}"))
            self.path.mkdir(exist_ok=True)

    def has_saved(self) -> bool:
        """Whether there is a checkpoint, complete or not."""
        return any(self.checkpoints.glob("step_*"))

    def create(self) -> None:
        """Make the subdirectories, and remove files of killed processes (rank 0, locked)."""
        with self.writing():
            self.check_owner()
            self.logs.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            remove_leftovers(self.path)  # temporary files of atomic writes

    def mark(self) -> str:
        """Write a file for `refuse_unshared`; returns its name, which nobody has looked for yet."""
        name = f".tmp_step_{secrets.token_hex(8)}"  # as a save that is left over, which it would be
        with self.writing():
            write_new(self.checkpoints / name, b"")
        return name

    def refuse_unshared(self, name: str, patience_sec: float) -> None:
        """Refuse a directory in which this host does not see rank 0's mark, or may not write."""
        began, problem = time.monotonic(), ""
        # Listed, not looked up: opening the directory makes a network file system ask anew.
        while not problem and not any(each.name == name for each in self.checkpoints.glob(".tmp_step_*")):
            time.sleep(0.05)
            if time.monotonic() - began > patience_sec:
                problem = f"is not the directory of rank 0, whose file {name} was not seen for {patience_sec:.0f} s,"
        if not problem and not os.access(self.checkpoints, os.W_OK):
            problem = "cannot be written"
        if problem:
            place, fix = str(self.checkpoints.absolute()), "put --run-dir on a volume that all nodes share"
            raise unlike_here(place, problem, fix)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around writes: a failure is a UserError."""
        try:
            yield
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            where, fix = str(error.filename or self.path), "choose another place with --run-dir"
            raise UserError(where, problem, fix) from None

    def describe(self, config: RunConfig, source: Path, info: RankInfo, facts: Mapping[str, Any]) -> None:
        """Write config, read from `source`, and environment, with `facts` of model and step."""
        with self.writing():
            # A run that continues from it keeps the one written by hand.
            if source.resolve() != self.resolved_config.resolve():
                with users_code(str(source), "is gone", "keep it until the run has begun"):
                    content = read_bytes(source)
                write_file(self.path / CONFIG, content)
            write_file(self.resolved_config, to_toml(config))
            write_json(self.path / ENVIRONMENT, {**environment(info), "data": self.data, **facts})

    def lock(self, timeout_sec: float) -> RunLock:
        """Make the directory this process's until `close` (rank 0), see `take_lock`.

        A UserError if another process holds it, or if one of its files is a link or a pipe.
        """
        with self.writing():
            # Before anything is written: a link may point elsewhere, and a pipe blocks for ever.
            for path in (*(self.path / name for name in OWN_FILES), *self.logs.glob("rank_*")):
                refuse_special(path)
            if not (self.checkpoints / LATEST).is_symlink():  # as we make it
                refuse_special(self.checkpoints / LATEST)
            self.owned = take_lock(self.path, timeout_sec)
        return self.owned

    def check_owner(self) -> None:
        """An OSError if another process has taken over the run."""
        if self.owned is not None:
            self.owned.check()

    def status(self) -> dict[str, Any]:
        """The state of the run, see `judged`; for a run of this process, as in status.json."""
        return judged(read_status(self.status_file), self.path)

    def write_status(self, state: str, *, reason: str, step: int) -> None:
        """Write the state and why: `running`, `done`, `stopped`, `failed`."""
        self.check_owner()
        write_status(self.status_file, state, reason=reason, step=step, wandb_run_id=self.wandb_run_id)

    def leave_status(self, info: RankInfo, state: str, *, reason: str, step: int) -> None:
        """Write the state in which the run ends (only rank 0). A failure is logged."""
        if not info.is_main:
            return
        try:
            self.write_status(state, reason=reason, step=step)
        except OSError as error:
            # Not raised: the error that ended the run must not be hidden behind a second failure.
            logger.error("%s cannot be written: %s", self.status_file, error.strerror)

    def abandon(self, info: RankInfo, reason: str, *, step: int) -> None:
        """Write that the run failed, and unlock it: the process ends at once."""
        self.leave_status(info, "failed", reason=reason, step=step)
        if self.owned is not None:
            self.owned.close()

    def leave_reason(self, info: RankInfo, reason: str, *, step: int) -> None:
        """Write that the run failed, unless its end is recorded already (only rank 0)."""
        if info.is_main and self.status().get("state") in (None, "running"):
            self.leave_status(info, "failed", reason=reason, step=step)

    def rows_command(self, step: int) -> str:
        """The command that shows what a step has read."""
        return f"train data at {shlex.quote(str(self.path))} {step}"

    def log_file(self, rank: int) -> Path:
        """The log of one rank."""
        return self.logs / f"rank_{rank:03d}.log"


def unlike_here(subject: str, problem: str, fix: str) -> UserError:
    """The error of a rank whose host is not as rank 0's."""
    return UserError(subject, f"{problem} on {socket.gethostname()}", fix)


def refuse_unlike(config: RunConfig, info: RankInfo) -> None:
    """Refuse other settings or versions of packages than rank 0 has. Collective."""
    packages = {f"package {name}": _version(name) for name in ("torch", "numpy", "trainer")}
    own = {**flatten(config.model_dump(mode="json")), **packages}
    first = from_main_rank(own, world_size=info.world_size)
    with raise_on_all_ranks(world_size=info.world_size):
        for key in {**first, **own}:
            if first.get(key) != own.get(key):
                problem = f"is {own.get(key)!r}, and {first.get(key)!r} on rank 0: the ranks differ,"
                raise unlike_here(key, problem, "give all ranks one config and one installation")


def choose_run_dir(
    config: RunConfig, given: str | None, resume: str, *, is_restarted: bool = False, now: float | None = None
) -> RunDir:
    """The run's directory; called on rank 0 alone, since others might see another one.

    `given` (--run-dir) wins. Otherwise `resume = auto` takes the newest run of this name that has a
    checkpoint and is not done, and a checkpoint's path the run that it belongs to. Otherwise it is
    a new one, named by the time. If torchrun `is_restarted`, no run but the newest is continued.

    A UserError if there is no such checkpoint, or if the directory is refused, see `refuse_taken`.
    """
    if given is not None:
        run = RunDir(Path(given))
        before = run.resolved_config
        if is_restarted and before.exists() and before.read_bytes() != to_toml(config).encode():
            resume = "off"  # it is another run's, for which the first attempt was refused
        refuse_taken(given, resume)
        return run
    parent = Path(config.run.dir)
    if resume == "auto":
        # Date, time, and a number if two runs began in the same second.
        pattern = re.compile(rf"{re.escape(config.run.name)}-\d{{8}}-\d{{6}}(-\d+)?")
        paths = sorted(path for path in parent.glob("*") if pattern.fullmatch(path.name))
        earlier = map(RunDir, paths[-1:] if is_restarted else paths)
        open_runs = [run for run in earlier if run.has_saved() and run.status().get("state") != FINISHED]
        if open_runs:
            return open_runs[-1]
    elif resume != "off":
        refuse_absent(resume, is_of_run=True)
        return RunDir(Path(resume).absolute().parent.parent)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return RunDir(parent / f"{config.run.name}-{stamp}", is_new=True)


def refuse_taken(given: str, resume: str) -> None:
    """Refuse a directory with another program's record, or a run not to be resumed: by `off`, or a
    checkpoint that is neither its own nor what its last launch was to continue; by `auto`, if that
    launch saved nothing. One that logged and saved nothing may be begun anew in its directory."""
    run = RunDir(Path(given))
    held, fix, before = "", "name another directory", "off"
    with suppress(UserError):  # the same command again, such as by torchrun
        before = load_config(run.resolved_config).checkpoint.resume
    continues = resume == "auto" or (resume == before != "off")
    if resume != "off" and not continues:
        refuse_absent(resume)
        continues = run.checkpoints.resolve() in Path(resume).resolve().parents
    has_rows = run.metrics.exists() and run.metrics.stat().st_size > 0
    is_running = run.status().get("state") == "running"  # it may have just begun
    if not continues and (has_rows or is_running or run.has_saved()):
        held, fix = "a run already", f"continue it with --resume auto, or {fix}"
    elif resume == "auto" and before not in ("auto", "off") and not run.has_saved():
        held, fix = "a run that has saved nothing", f"begin it again with --resume {before}, or {fix}"
    elif has_rows and not run.resolved_config.exists() and not run.has_saved():
        held = "a metrics.jsonl that is not of a run of this program"
    if held:
        raise UserError("--run-dir", f"{given} holds {held}", fix)


def environment(info: RankInfo) -> dict[str, Any]:
    """Versions, machine and command of this run."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "world_size": info.world_size,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": sys.argv,
    }


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None
