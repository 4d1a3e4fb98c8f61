"""The sinks of a run that are services: TensorBoard's files, and Weights & Biases, best effort.

wandb drops a second `log` of a step, so the training and evaluation payloads of a step are held
back until the step is over and sent as one row. It also drops steps that are not above its own
counter, so after a resume from an older checkpoint rows get the next unused numbers, and the x-axis
is the logged `global_step`. The counter is kept here: wandb's own is 0 when offline, and after a
resume until the first row is sent.
"""

from __future__ import annotations

import html
import importlib.util
import logging
import netrc
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from trainer.config.load import flatten
from trainer.config.schema import RunConfig
from trainer.ending import within
from trainer.files import read_lines
from trainer.metrics.best_effort import BestEffort, Diagnostics
from trainer.metrics.logger import get_logger
from trainer.metrics.payload_contract import all_values
from trainer.metrics.sinks import SAMPLE, BackgroundSink, Sink, display_key
from trainer.training import Found
from trainer.training.run_dir import RunDir

logger = get_logger(__name__)
messages = get_logger(f"{__name__}.wandb")  # wandb's own
messages.setLevel(logging.WARNING)
WandbMode = Literal["offline", "online", "disabled"]
SERVER = "https://api.wandb.ai"
STEP_KEY = "global_step"
_GRACE_SEC = 5.0
TIMEOUT_SEC = 60.0  # for an unreachable server, at the start and at the end
CLOSE_SEC = TIMEOUT_SEC + 2 * _GRACE_SEC  # longest `close`: timeout, grace period, teardown


def to_services(
    config: RunConfig, run_dir: RunDir, found: Found | None, diagnostics: Diagnostics
) -> tuple[list[Sink], str | None]:
    """The sinks that the config asks for, each in a thread, and the run's id in wandb."""
    table, settings, sinks = config.metrics, config.model_dump(mode="json"), list[Sink]()
    mode, run_id, first_step = table.wandb.mode, None, 0
    # From the checkpoint of another directory a run branches off, under an id of its own.
    if found is not None and run_dir.path.resolve() in found[0].resolve().parents:
        run_id = found[1].get("wandb_run_id")
    if mode == "auto":
        mode, why = resolve_mode()
        logger.info("wandb: %s, since %s", mode, why)
    if mode != "disabled":
        guard = diagnostics.best_effort("wandb")
        if run_id is not None:
            first_step = guard.run(unused_step, [run_dir.metrics, run_dir.events]) or 0
        wandb = WandbSink(
            mode=mode,
            project=table.wandb.project,
            run_dir=run_dir.path,
            run_id=run_id,
            first_step=first_step,
            config=settings,
            guard=guard,
        )
        run_id = wandb.run_id or run_id  # kept for the next resume if wandb fails now
        sinks.append(BackgroundSink(wandb, name="wandb", guard=guard, close_sec=CLOSE_SEC))
    if table.tensorboard:
        from trainer.lab.tensorboard import TensorboardSink

        board, guard = run_dir.path / "tensorboard", diagnostics.best_effort("tensorboard")
        sink = TensorboardSink(board, flatten(settings))
        sinks.append(BackgroundSink(sink, name="tensorboard", guard=guard))
    return sinks, run_id


def resolve_mode(environ: Mapping[str, str] = os.environ) -> tuple[WandbMode, str]:
    """(mode, why) of `auto`: WANDB_MODE, else online with a login; disabled without wandb."""
    if importlib.util.find_spec("wandb") is None:
        return "disabled", "the package is not installed (pip install wandb)"
    mode = environ.get("WANDB_MODE") or None
    match {"dryrun": "offline", "run": "online"}.get(mode or "", mode):
        case ("online" | "offline" | "disabled") as known:
            return known, f"WANDB_MODE={mode}"
        case str():
            return "disabled", f"WANDB_MODE={mode} is none of online, offline, disabled"
    if environ.get("WANDB_API_KEY"):
        return "online", "there is a login"
    server = environ.get("WANDB_BASE_URL") or SERVER
    # As `wandb login` leaves it, with the port; a process may have no home, and a URL be none.
    with suppress(OSError, RuntimeError, netrc.NetrcParseError, ValueError):
        logins = netrc.netrc(Path(environ.get("NETRC") or "~/.netrc").expanduser())
        if logins.authenticators(urlsplit(server).netloc) is not None:
            return "online", "there is a login"
    return "offline", f"there is no login for {server} (wandb login, WANDB_API_KEY; WANDB_BASE_URL)"


def unused_step(files: Iterable[Path]) -> int:
    """A number above all that wandb's own counter has had, by the metrics.jsonl and events.jsonl of
    earlier attempts. A row's is its step, or after a restart the next unused one, if that is more.
    """
    reached, num_after_restart = -1, 0
    for path in files:
        is_restarted = False
        for line in read_lines(path) if path.is_file() else ():
            if found := re.search(rb'"global_step":\s*(\d{1,18})\b', line):
                reached = max(reached, int(found[1]))
                is_restarted = is_restarted or b'"restart"' in line
                num_after_restart += is_restarted
    return reached + num_after_restart + 1


class WandbSink:
    """Sends payloads to a wandb run.

    Attributes:
        run_id: the run's id, to be saved in checkpoints; None if the run could not be opened.
    """

    def __init__(
        self,
        *,
        mode: WandbMode,
        project: str,
        run_dir: Path,
        run_id: str | None = None,
        first_step: int = 0,
        config: Mapping[str, Any] | None = None,
        guard: BestEffort | None = None,
    ) -> None:
        """Open the run, or continue that of `run_id`.

        Args:
            run_dir: holds wandb's files, and names the run; WANDB_DIR and WANDB_NAME win.
            first_step: least of wandb's own counter, see `unused_step`.
            guard: of everything here; without it, failures are only warned of.
        """
        self.run_id: str | None = None
        self._guard = guard or BestEffort("wandb")
        self._run: Any = None
        self._is_online = False
        self._row: dict[str, Any] = {}
        self._row_step, self._next_own_step = 0, first_step
        self._guard.run(self._open, mode, project, run_dir, run_id, dict(config or {}))

    def _open(self, mode: WandbMode, project: str, run_dir: Path, run_id: str | None, config: dict[str, Any]) -> None:
        # Imported here: it takes most of a second, and only rank 0 needs it.
        import wandb

        directory = Path(os.environ.get("WANDB_DIR") or run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        # silent: wandb's own lines repeat every metric, partly on stdout.
        settings: dict[str, Any] = {"console": "off", "quiet": True, "silent": True}
        settings |= dict.fromkeys(("init_timeout", "login_timeout", "finish_timeout"), TIMEOUT_SEC)
        # Older releases of wandb lack some of the settings.
        silent = wandb.Settings(**{key: settings[key] for key in settings.keys() & wandb.Settings.model_fields})
        messages.disabled = False  # as an earlier run of this process may have left it
        wandb.setup()
        wandb.termsetup(silent, messages)
        begin = partial(
            wandb.init,
            project=project,
            id=run_id,
            name=os.environ.get("WANDB_NAME") or run_dir.name,
            config=config,
            resume="allow",
            dir=str(directory),
            settings=silent,
        )
        try:
            self._run = begin(mode=mode)
            self._is_online = mode == "online"
        except wandb.Error as error:
            if mode != "online":
                raise
            self._run = begin(mode="offline")
            text = "wandb: cannot begin online, and goes on offline (%s: %s)"
            logger.warning(text, type(error).__name__, " ".join(str(error).split()))
        self.run_id = self._run.id
        self._next_own_step = max(self._next_own_step, self._run.starting_step)
        # Otherwise the x-axis would be wandb's own counter.
        self._run.define_metric(STEP_KEY, hidden=True)
        self._run.define_metric("*", step_metric=STEP_KEY, step_sync=True)
        if self._is_online:
            logger.info("wandb: %s", self._run.url)

    def log(self, payload: Mapping[str, Any]) -> None:
        """Add one payload to the row of its step, sent when the next step begins or at `close`."""
        self._guard.run(self._log, payload)

    def _log(self, payload: Mapping[str, Any]) -> None:
        self._open_row(payload["global_step"])
        self._row |= {display_key(key): value for key, value in all_values(payload).items()}

    def _open_row(self, step: int) -> None:
        if self._row and step != self._row_step:
            self._send()
        self._row_step = step

    def _send(self) -> None:
        row, self._row = {**self._row, STEP_KEY: self._row_step}, {}
        # wandb drops steps that are not above its counter, as after a rewind.
        own_step = max(self._row_step, self._next_own_step)
        self._next_own_step = own_step + 1
        self._run.log(row, step=own_step, commit=True)

    def event(self, event: Mapping[str, Any]) -> None:
        """Send a sample as a panel with a slider over the steps; other events are not sent."""
        if event.get("event") == SAMPLE:
            self._guard.run(self._sample, event)

    def _sample(self, event: Mapping[str, Any]) -> None:
        import wandb

        self._open_row(event["global_step"])
        text = html.escape(f"{event['prompt']}\u2502{event['text']}")
        self._row["sample/text"] = wandb.Html(f"<pre style='white-space: pre-wrap'>{text}</pre>", inject=False)

    def close(self) -> None:
        """Send the last row and finish the run; gives up if wandb does not finish in time."""
        if self._run is None:
            return
        if self._row:
            self._guard.run(self._send)
        # wandb enforces the timeout itself; the grace period is for a dead service.
        is_done = within(TIMEOUT_SEC + _GRACE_SEC, partial(self._guard.run, self._run.finish))
        if not is_done or not self._guard.enabled:
            self.abandon()
        self._run = None

    def abandon(self) -> None:
        """Keep wandb from blocking the interpreter's exit if its service does not respond."""
        import wandb

        if messages.disabled:  # again
            return
        messages.disabled = True
        run = self._run  # `close` in its thread may end meanwhile
        if self._is_online and run is not None:
            text = "wandb: not everything has reached the server; upload it with: wandb sync %s"
            logger.info(text, run.settings.sync_dir)

        def leave() -> None:
            try:
                wandb.teardown()
            except Exception as error:  # noqa: BLE001 - it may fail in any way
                self._guard.fail(error)

        within(_GRACE_SEC, leave)
