"""status.json, the state of a run: how loops write it, and whether a `running` run is alive.

with run_status(directory, rank=rank):
    train()
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from trainer.errors import UserError
from trainer.files import is_count, open_descriptor, open_plain, parse_count, parse_json, read_json
from trainer.wording import error_text

logger = logging.getLogger(__name__)
STATUS_NAME: Final = "status.json"
LOCK_NAME: Final = ".lock"
OWN_LOOP: Final = "own"
"""`loop` in the status of a run that is not the trainer's: the trainer does not resume it."""
_METRICS_NAME: Final = "metrics.jsonl"
_TAIL_BYTES: Final = 1 << 20  # has the last row of any file
_ROOM_BYTES, _LONGEST_REASON = 4096, 2000
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("state", "reason", "wandb_run_id", "loop", "host"), str),
    **dict.fromkeys(("last_step", "pid", "world_size", "threads", "parameters", "state_width", "tokens_per_step"), int),
    "time": (int, float),
    **dict.fromkeys(("command", "devices"), list),
}


@contextmanager
def run_status(directory: Path | str, *, rank: int = 0) -> Iterator[None]:
    """Keep status.json for your own loop: `running`, then `done`, `stopped` or `failed`, and why.

    An exception is `failed` with its type and message, Ctrl-C is `stopped`, `SystemExit` with a
    code other than 0 is `failed`. A killed process leaves `running`, which readers take for `died`,
    since the directory's lock is free. A UserError if another process writes its run there.

    Args:
        directory: of the run; it is made.
        rank: other ranks than 0 do nothing.
    """
    if rank != 0:
        yield
        return
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    own: dict[str, Any] = {"loop": OWN_LOOP}
    world_size = parse_count(os.environ.get("WORLD_SIZE", ""))  # torchrun's, which the diagnosis needs
    if world_size is not None:
        own["world_size"] = world_size
    with take_lock(path):
        step = last_step(path)
        if step is not None:
            text = "%s has rows through step %d already, and those of this run follow them: "
            logger.warning(text + "another run needs another directory", path, step)
        write_status(path / STATUS_NAME, "running", reason="", step=step, **own)
        state, reason = "failed", ""
        try:
            yield
            state = "done"
        except BaseException as error:
            state, reason = _end_of(error)
            raise
        finally:
            # Before the lock is free: without a process, `running` would mean that it died.
            write_status(path / STATUS_NAME, state, reason=reason, step=last_step(path), **own)


def take_lock(directory: Path) -> BinaryIO:
    """The lock of a run's directory, held until the file is closed or the process ends.

    A UserError if another process holds it: two runs would spoil one record.
    """
    file = open_plain(directory / LOCK_NAME, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        problem = f"is in use by another run ({_process_of(read_status(directory / STATUS_NAME))})"
        raise UserError(str(directory), problem, "wait for it, stop it, or name another directory") from None
    except OSError as error:
        # Some network file systems have no locks; training there must be possible.
        text = "%s: its file system cannot lock it (%s); make sure that no other run uses it"
        logger.warning(text, directory, error.strerror)
    return file


def read_status(file: Path) -> dict[str, Any]:
    """The content of status.json; empty if it is missing or damaged: checkpoints decide."""
    try:
        return usable(read_json(file))
    except (OSError, ValueError):
        return {}


def usable(status: Mapping[str, Any]) -> dict[str, Any]:
    """The content of status.json or env.json without values that no writer has written."""
    return {key: value for key, value in status.items() if _is_usable(key, value)}


def _is_usable(key: str, value: Any) -> bool:
    if not isinstance(value, _TYPES.get(key, object)):
        return False
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    if isinstance(value, int):
        return is_count(value)
    return not isinstance(value, float) or 0 <= value < 2**63


def write_status(file: Path, state: str, *, reason: str, step: int | None, **more: Any) -> None:
    """Write the state of the run, `running`, `done`, `stopped` or `failed`, and why."""
    known = {"state": state, "reason": reason[:_LONGEST_REASON], "last_step": step, **more}
    known |= {"pid": os.getpid(), "host": socket.gethostname(), "time": round(time.time(), 3)}
    # In its place and always of one size, so that it needs no room on a full disk. Not synced: it
    # describes a live run.
    data = json.dumps(known, indent=1).encode().ljust(_ROOM_BYTES - 1) + b"\n"
    descriptor = open_descriptor(file, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def run_state(directory: Path) -> dict[str, Any]:
    """The content of status.json, corrected where its process cannot: see `judged`."""
    return judged(read_status(directory / STATUS_NAME), directory)


def judged(status: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The status of a run; `running` becomes `died`, with the reason, if nobody holds its lock."""
    if status.get("state") == "running" and not is_held(directory):
        status = read_status(directory / STATUS_NAME)  # it may have ended properly between the two looks
        if status.get("state") == "running":
            return dead(status, directory)
    return status


def dead(status: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The status of a run whose process is gone, though it says `running`."""
    steps = [step for step in (status.get("last_step"), last_step(directory)) if isinstance(step, int)]
    step = max(steps, default=None)
    where = f" at about step {step}" if steps else ""
    reason = f"{_process_of(status)} ended without a word{where}: it was killed, or crashed"
    return {**status, "state": "died", "reason": reason, "last_step": step}


def _process_of(status: dict[str, Any]) -> str:
    return f"process {status.get('pid', 'unknown')} on {status.get('host', 'the machine that wrote status.json')}"


def is_held(directory: Path) -> bool:
    """Whether a process holds the run's lock; true where it cannot be seen."""
    try:
        file = open_plain(directory / LOCK_NAME)
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks: the status decides
            return True
    return False


def last_step(directory: Path) -> int | None:
    """The step of the last complete row of metrics.jsonl; None without one."""
    try:
        with open_plain(directory / _METRICS_NAME) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(parse_json(line)["global_step"])
        except (ValueError, TypeError, KeyError, OverflowError):  # cut off, or no row
            continue
    return None


def _end_of(error: BaseException) -> tuple[str, str]:
    """(state, reason) of a run that ended with an exception."""
    # Lightning catches Ctrl-C and exits with 1.
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return "stopped", "stopped by SIGINT"
    if not isinstance(error, SystemExit):
        return "failed", error_text(error)
    if error.code in (None, 0):
        return "done", ""
    return "failed", f"exit: {error.code}"
