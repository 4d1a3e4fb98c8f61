"""`[alert]`: rank 0 reports loss spikes and the end of the run to a command or a webhook.

Best effort and bounded in time: no alert ends a run, a spike's is not waited for, and the end waits
`WAIT_SEC` at most. It could go where whatever starts runs watches status.json.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any

from trainer.ending import within
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.wording import printable

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig
    from trainer.training.run import Run

logger = get_logger(__name__)
WAIT_SEC = 5.0  # a webhook that does not answer must not keep devices busy


class Alert(Extension):
    """Hears of each end from what writes status.json, even of a process that hangs."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        command = run.config.alert.command
        if command and shutil.which(command[0]) is None:
            problem = f"{printable(command[0])} is not found"
            raise UserError("alert.command", problem, "name a program of this machine")
        run.run_dir.on_end = partial(alert, run.config, run.run_dir.path, wait_sec=WAIT_SEC)


def alert(config: RunConfig, run_dir: Path, event: str, *, reason: str, step: int, wait_sec: float = 0.0) -> None:
    """Report that a run is `done`, `stopped` or `failed`, or had a `spike`, which does not end it;
    wait at most `wait_sec` for the delivery."""
    name = config.run.name
    state = "running" if event == "spike" else event
    said = {"event": event, "state": state, "reason": reason, "last_step": step, "run": name}
    said |= {"run_dir": str(run_dir), "host": socket.gethostname(), "time": time.time()}
    said["text"] = f"{name}: {event} at step {step}: {reason}"
    within(wait_sec, partial(_tell, config.alert.command, config.alert.url, said))


def _tell(command: list[str], url: str | None, said: dict[str, Any]) -> None:
    body = json.dumps(said).encode()  # the same for both ways
    quiet: Any = {"stdout": DEVNULL, "stderr": DEVNULL}
    try:
        if command:
            subprocess.run(command, input=body, timeout=WAIT_SEC, check=True, **quiet)
        if url is not None:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=WAIT_SEC).close()
    except Exception as error:  # noqa: BLE001 - a service may fail in any way
        logger.warning("the alert of %s did not arrive: %s", said["event"], error)
