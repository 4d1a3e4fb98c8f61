"""status.json, the state of a run, and whether a `running` run is alive."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from trainer.errors import UserError
from trainer.files import (
    is_count,
    open_descriptor,
    open_plain,
    parse_json,
    read_bytes,
    read_json,
    refuse_special,
    write_json,
    write_new,
)

logger = logging.getLogger(__name__)
STATUS_NAME: Final = "status.json"
LOCK_NAME: Final = ".lock"
_METRICS_NAME: Final = "metrics.jsonl"
_TAIL_BYTES: Final = 1 << 20  # has the last row of any file
_ROOM_BYTES, _LONGEST_REASON = 32_768, 2000  # JSON takes up to 12 bytes for a character
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("state", "reason", "wandb_run_id", "host"), str),
    **dict.fromkeys(("last_step", "pid", "world_size", "threads", "parameters", "state_width", "tokens_per_step"), int),
    "time": (int, float),
    **dict.fromkeys(("command", "devices"), list),
}
TIMEOUT_SEC: Final = 600.0  # of a run that does not say another
UNWRITTEN_SEC: Final = 20.0  # of one whose lock says nothing


class Owner(NamedTuple):
    """The process whose run a directory holds, as its lock says; the defaults: unknown."""

    word: str = ""  # random
    host: str = "an unknown host"
    pid: int = 0
    place: str = ""  # where only this process has the number, see `_place`
    started: str = ""  # when it began, by its system: numbers are used again
    timeout_sec: float = TIMEOUT_SEC  # it shows itself more often
    is_over: bool = False  # it has given the directory back

    def lives(self, last_sign: float, limit_sec: float) -> bool:
        """Whether it lives; one that cannot be looked up from here does for `limit_sec` after
        `last_sign` (seconds since 1970)."""
        if self.is_over:
            return False
        if self.is_here:
            return _started(self.pid) == self.started
        return time.time() - last_sign <= limit_sec

    @property
    def is_here(self) -> bool:
        """Whether it can be looked up from here."""
        if "" in (self.place, self.started) or self.place != _place():
            return False
        try:
            os.kill(self.pid, 0)
        except PermissionError:  # another user's, which /proc may hide (`hidepid`)
            return _started(self.pid) != ""
        except (OSError, OverflowError):  # it is gone
            pass
        return True


class RunLock(AbstractContextManager["RunLock"]):
    """A run's directory that is this process's until `close`: a file says so by a random word.

    Every host sees it, unlike `flock`. A thread renews its time. A process that does not, such as
    one that is suspended, may lose the run to another one, which writes its own word. The file
    stays when the run is over: such a process must not take its absence for its own.
    """

    def __init__(self, directory: Path, timeout_sec: float) -> None:
        pid = os.getpid()
        self.directory = directory
        self.owner = Owner(secrets.token_hex(8), socket.gethostname(), pid, _place(), _started(pid), float(timeout_sec))
        self._every_sec = min(2.0, timeout_sec / 20)
        self._is_over = threading.Event()
        self.thread = threading.Thread(target=self._renew, name="run lock", daemon=True)

    def _renew(self) -> None:
        while not self._is_over.wait(self._every_sec):
            with suppress(OSError):
                self.check()
                os.utime(self.directory / LOCK_NAME)

    def check(self) -> None:
        """An OSError if another process has taken over the run: nothing more may be written."""
        refuse_taken_over(self.directory, self.owner.word.encode())

    def close(self) -> None:
        """Give the directory back, if it is still this process's."""
        self._is_over.set()
        self.thread.join(1.0)
        with suppress(OSError):
            self.check()
            write_json(self.directory / LOCK_NAME, self.owner._replace(is_over=True)._asdict(), sync=False)

    def __exit__(self, *_: object) -> None:
        self.close()


def take_lock(directory: Path, timeout_sec: float = TIMEOUT_SEC) -> RunLock:
    """Make a run's directory this process's. A UserError if another one's run is there.

    A process of another host or container cannot be looked up: this waits until it shows itself,
    and is refused, or until it has not for 0.8 times `timeout_sec`, or its own if less.
    """
    lock, first_sign = RunLock(directory, timeout_sec), 0.0
    while True:
        with suppress(FileExistsError):
            write_new(directory / LOCK_NAME, json.dumps(lock.owner._asdict()).encode())
            break
        owner, sign = read_owner(directory), _last_sign(directory)
        if owner is None:  # just removed
            refuse_special(directory / LOCK_NAME)  # a link to nothing would stay
            continue
        if owner.word == lock.owner.word:
            break
        limit_sec = min(0.8 * timeout_sec, owner.timeout_sec)  # others may wait in a collective
        if not owner.lives(sign, limit_sec):
            write_json(directory / LOCK_NAME, lock.owner._asdict(), sync=False)
            time.sleep(0.1)  # of several that do so at once, the last one has it
            continue
        who = f"process {owner.pid} on {owner.host}"
        if owner.is_here or 0 < first_sign < sign:
            problem = f"is in use by another run ({who})"
            raise UserError(str(directory), problem, "wait for it, stop it, or name another directory")
        if not first_sign:
            first_sign = sign
            text = "%s: %s had it last, and cannot be looked up from here; waiting up to %.0f s for a sign of it"
            logger.warning(text, directory, who, limit_sec)
        time.sleep(1.0)
    lock.thread.start()
    return lock


def refuse_taken_over(directory: Path, word: bytes) -> None:
    """An OSError if the run now belongs to another process than the one that wrote this word."""
    try:
        found = read_bytes(directory / LOCK_NAME)
    except (OSError, ValueError):  # somebody removed it: no other process has it
        return
    if found and word not in found:
        owner = read_owner(directory) or Owner()
        problem = f"process {owner.pid} on {owner.host} has taken over this run, which ends here without writing"
        raise OSError(errno.ESTALE, problem, str(directory))


def read_owner(directory: Path) -> Owner | None:
    """Whose run it is; None: nobody's."""
    try:
        found = read_json(directory / LOCK_NAME)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):  # being written, or a full disk or a kill has kept it from that
        return Owner(timeout_sec=UNWRITTEN_SEC)
    defaults = Owner()._asdict()
    return Owner(**{key: found[key] for key in defaults if type(found.get(key)) is type(defaults[key])})


def _last_sign(directory: Path) -> float:
    """When the run's process last renewed the lock."""
    # Opened, since a network file system answers `stat` from its cache.
    with suppress(OSError), open_plain(directory / LOCK_NAME) as file:
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def _place() -> str:
    """Host, boot and namespace, within which a process id names one process; empty: unknown.

    Containers often share a host's name, and all have a process 1.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # the /proc of another namespace
            return ""
        boot = read_bytes(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in its system's ticks; empty: it is gone, a zombie, or hidden."""
    try:
        # Behind its name, which may hold anything, from field 3 of proc(5) on; 22 is the start.
        fields = read_bytes(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    except OSError:
        return ""
    if fields[0] in (b"Z", b"X"):
        return ""
    return fields[19].decode()


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
    known = {
        "state": state,
        "reason": reason[:_LONGEST_REASON],
        "last_step": step,
        **more,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": round(time.time(), 3),
    }
    # In its place and always of one size, so that it needs no room on a full disk. Not synced: it
    # describes a live run.
    data = json.dumps(known, indent=1).encode().ljust(_ROOM_BYTES - 1) + b"\n"
    with open(open_descriptor(file, os.O_RDWR | os.O_CREAT), "r+b") as target:  # all, or an OSError
        target.write(data)
        target.truncate()


def judged(status: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The status of a run; `running` becomes `died`, with the reason, if its process is gone."""
    if status.get("state") == "running" and not is_held(directory):
        status = read_status(directory / STATUS_NAME)  # it may have ended properly meanwhile
        if status.get("state") == "running":
            return dead(status, directory)
    return status


def dead(status: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The status of a run whose process is gone, though it says `running`."""
    steps = [step for step in (status.get("last_step"), last_step(directory)) if isinstance(step, int)]
    step = max(steps, default=None)
    where = f" at about step {step}" if steps else ""
    process, host = status.get("pid", "unknown"), status.get("host", "the machine that wrote status.json")
    reason = f"process {process} on {host} ended without a word{where}: it was killed, or crashed"
    return {**status, "state": "died", "reason": reason, "last_step": step}


def is_held(directory: Path) -> bool:
    """Whether the run's process lives, or was heard of recently where it cannot be looked up."""
    owner = read_owner(directory)
    return owner is not None and owner.lives(_last_sign(directory), owner.timeout_sec)


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
