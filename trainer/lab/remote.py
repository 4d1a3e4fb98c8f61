"""A run's checkpoints in a store that an fsspec URL names: `URL/step_00000100/`, as on disk.

Rank 0 puts a checkpoint there after it is published, the marker `COMPLETE` last: without it there
is none. A resume gets one, and verifies it like any other on disk. Credentials and endpoints are
those that the backend finds by itself: none stand in a config, which is copied into every run.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config.schema import CheckpointTable, RunConfig
from trainer.ending import StopRequest
from trainer.errors import UserError
from trainer.files import discard, remove_tree, sync_directory
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.logger import get_logger
from trainer.metrics.sinks import EventWriter
from trainer.training import Found, checkpoint
from trainer.training.checkpoint import MARKER, checkpoint_name, step_of
from trainer.training.run_dir import RunDir
from trainer.training.tensor_files import CheckpointError
from trainer.wording import error_text

KEY = "checkpoint.remote"
ABANDONED = "ABANDONED"  # the marker's name in a checkpoint of a branch that the run has left
# Stores that have keys, not directories: s3fs would make a bucket that does not exist.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}
CLOSE_SEC = 1800.0  # that the end of a run waits for the last upload

logger = get_logger(__name__)


class StoreError(Exception):
    """A store did not do what it was asked; one line with the URL and the reason."""


class Store:
    """The checkpoints below a URL. Methods raise StoreError if the backend fails.

    Raises UserError: the URL has a password or names no place, its protocol is unknown, or a
    package is missing.
    """

    def __init__(self, url: str) -> None:
        protocol, _, rest = url.partition("://")
        self.url = f"{protocol}://{rest.rstrip('/') or rest[:1]}"
        self._has_directories = protocol not in OBJECT_STORES
        fix = "write it as s3://BUCKET/PREFIX or file:///DIRECTORY"
        try:
            # Not by `urlsplit`, which a bracket in the password stops.
            if ":" in rest.partition("/")[0].rpartition("@")[0]:
                fix, self.url = "set the credentials in the environment", "a URL with a password in it"
                raise ValueError("every run would copy it into its config")
            if not rest.strip("/") or {*rest} & {*"*?["}:  # which a backend expands as it deletes
                raise ValueError("it names no bucket or directory, or several by *, ? or [")
            self._fs, root = importlib.import_module("fsspec.core").url_to_fs(self.url)
        except Exception as error:  # noqa: BLE001 - backends raise anything
            if isinstance(error, ImportError):
                fix = "run: pip install fsspec s3fs, or the package that is named"
            problem = f"{self.url} cannot be used as a store: {error_text(error)}"
            raise UserError(KEY, problem, fix) from None
        self._root = str(root).rstrip("/")

    def names(self) -> dict[int, set[str]]:
        """Step -> the files of its directory, complete or not."""
        steps: dict[int, set[str]] = {}
        with self._translating(""):
            for path in map(Path, self._fs.find(self._root)):
                if step_of(path.parent) >= 0 and path.parent.parent == Path(self._root):
                    steps.setdefault(step_of(path.parent), set()).add(path.name)
        return steps

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, newest first."""
        return sorted((step for step, names in self.names().items() if MARKER in names), reverse=True)

    def put(self, local: Path) -> bool:
        """Upload a checkpoint in place of any other of its step, marker last; False: it is there."""
        names, marker = [*checkpoint.listed_files(local), MARKER], self._path(local.name, MARKER)
        with self._translating(local.name):
            if self._fs.exists(marker) and self._fs.cat_file(marker) == (local / MARKER).read_bytes():
                return False
        self._remove(step_of(local))
        for name in names:
            with self._translating(f"{local.name}/{name}"):
                path = self._path(local.name, name)
                if self._has_directories:
                    self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(local / name), path)
                size, wanted = self._fs.info(path)["size"], (local / name).stat().st_size
                if size != wanted:
                    raise ValueError(f"has {size} bytes there, not {wanted}")
        return True

    def get(self, step: int, checkpoints: Path) -> Found:
        """Make the checkpoint a local one, in place of its like, and verify it.

        A CheckpointError: it is missing or damaged, and nothing is left of it here.
        """
        name = checkpoint_name(step)
        # Under its own name, by which `verify` knows its step.
        staging, target = checkpoints / f".tmp_{name}.remote" / name, checkpoints / name
        discard(staging.parent)
        staging.mkdir(parents=True)
        started = time.monotonic()
        try:
            self._get_file(name, MARKER, staging)
            for file in checkpoint.listed_files(staging):
                self._get_file(name, file, staging)
            state = checkpoint.verify(staging)
            if target.exists():
                remove_tree(target)
            staging.rename(target)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(staging), f"{self.url}/{name}")) from None
        finally:
            discard(staging.parent)
        sync_directory(checkpoints)
        logger.info("downloaded %s/%s in %.1f s", self.url, name, time.monotonic() - started)
        return target, state

    def _get_file(self, name: str, file: str, to: Path) -> None:
        with self._translating(f"{name}/{file}"):
            self._fs.get_file(self._path(name, file), str(to / file))

    def prune(self, *, keep_last: int, keep_every: int, spared: int = -1) -> None:
        """Delete checkpoints as those on disk are."""
        for step in self.steps()[keep_last:]:
            if step != spared and (not keep_every or step % keep_every):
                self._remove(step)

    def tidy(self, step: int) -> None:
        """Delete what interrupted uploads have left; mark checkpoints of later steps as abandoned."""
        for each, names in self.names().items():
            if not names & {MARKER, ABANDONED}:
                self._remove(each)
            elif MARKER in names and each > step:
                directory = self._path(checkpoint_name(each))
                logger.warning("%s: step %d is now %s", self.url, each, ABANDONED)
                with self._translating(checkpoint_name(each)):
                    self._fs.mv(f"{directory}/{MARKER}", f"{directory}/{ABANDONED}")

    def _remove(self, step: int) -> None:
        """Delete a checkpoint, if there is one; its marker first."""
        directory = self._path(checkpoint_name(step))
        with self._translating(checkpoint_name(step)):
            if self._fs.exists(f"{directory}/{MARKER}"):
                self._fs.rm_file(f"{directory}/{MARKER}")
            if self._fs.exists(directory):
                self._fs.rm(directory, recursive=True)

    def claim(self, name: str, *, is_own: bool, is_auto: bool) -> None:
        """Leave the run's name. Raises UserError: the store has checkpoints of another run, or of
        this one's name while it neither has some nor is `auto`: two would delete each other's."""
        if self.steps():
            with self._translating("RUN"):
                path, of = self._path("RUN"), name
                if self._fs.exists(path):
                    of = self._fs.cat_file(path).decode().strip() or name  # empty by a full disk
            if of != name or not (is_own or is_auto):
                problem = f"{self.url} holds the checkpoints of another run, {of}"
                fix = f"name a prefix of its own, or continue it: --resume auto --set run.name={of}"
                raise UserError(KEY, problem, fix)
        with self._translating("RUN"):
            if self._has_directories:
                self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._path("RUN"), f"{name}\n".encode())

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, *parts])

    @contextmanager
    def _translating(self, name: str) -> Iterator[None]:
        """Make one kind of error of whatever a backend raises, and another of a missing file."""
        try:
            self._fs.invalidate_cache()  # which shows what this process itself has seen
            yield
        except Exception as error:  # noqa: BLE001 - botocore's errors, aiohttp's, OSError
            kind = CheckpointError if isinstance(error, FileNotFoundError) else StoreError
            raise kind(f"{self.url}/{name}: {error_text(error)}".replace("/:", ":")) from None


def find_checkpoint(
    config: RunConfig, run_dir: RunDir, resume: str, prepare: Callable[[], None]
) -> tuple[Found | None, Uploads]:
    """The checkpoint to continue from, made a local one, and the uploads (rank 0).

    `prepare` makes and locks the run directory, before something is downloaded into it. Raises
    UserError: the store is unusable, or holds another run's checkpoints; or as `checkpoint.find`.
    """
    assert config.checkpoint.remote is not None
    store = Store(config.checkpoint.remote)
    uploads = Uploads(store, config.checkpoint)
    try:
        is_own = bool(checkpoint.complete_checkpoints(run_dir.checkpoints))
        store.claim(config.run.name, is_own=is_own, is_auto=resume == "auto")
        if resume == "auto":
            return _with_best(store, run_dir, _newest(store, run_dir, prepare)), uploads
    except (StoreError, CheckpointError) as error:
        # During an outage the directory's own checkpoints do.
        found = checkpoint.find(run_dir.checkpoints, resume)
        if found is None:
            raise UserError(KEY, f"cannot be used: {error}", "check the URL, endpoint and credentials") from None
        logger.warning("%s; resuming without the store, and each save tries it again", error)
        return found, uploads
    return checkpoint.find(run_dir.checkpoints, resume), uploads


def _newest(store: Store, run_dir: RunDir, prepare: Callable[[], None]) -> Found | None:
    """The newest whole checkpoint of the directory and the store; of one step the local one."""
    found, damaged = None, None
    try:
        found = checkpoint.find(run_dir.checkpoints, "auto")
    except UserError as error:
        damaged = error
    newest = -1 if found is None else step_of(found[0])
    left = {*map(step_of, run_dir.checkpoints.glob("abandoned/step_*"))}  # perhaps unmarked there
    later = [step for step in store.steps() if step > newest and not (found and step in left)]
    for step in later:
        prepare()  # not before: a run that is refused leaves no directory
        try:
            return store.get(step, run_dir.checkpoints)
        except CheckpointError as error:
            logger.warning("%s; falling back to the checkpoint before it", error)
    if damaged is not None:
        raise damaged
    if found is None and later:
        raise UserError("--resume auto", f"no checkpoint in {store.url} is whole", "start a new run")
    return found


def _with_best(store: Store, run_dir: RunDir, found: Found | None) -> Found | None:
    """`found`, once the best checkpoint (`checkpoint.keep_best`), if it is whole, is local too."""
    best = -1 if found is None else checkpoint.best_step(found[0])
    if not (run_dir.checkpoints / checkpoint_name(best) / MARKER).exists() and best in store.steps():
        try:
            store.get(best, run_dir.checkpoints)
        except CheckpointError as error:
            logger.warning("%s; resuming without the best checkpoint", error)
    return found


class Uploads:
    """Puts the newest checkpoint into the store, in a thread of rank 0 that no step waits for.

    Of those that are saved while another is uploaded, the newest waits. A failure costs one
    checkpoint of the store, never the run.
    """

    def __init__(self, store: Store, table: CheckpointTable) -> None:
        self._store = store
        self._retention = {"keep_last": table.keep_last, "keep_every": table.keep_every}
        self._queue: queue.SimpleQueue[Path | None] = queue.SimpleQueue()  # None: the run ends
        self._newest, self._busy, self._uploaded = Path(), Path(), Path()
        self._is_tidy = self._has_warned = False

    def begin(self, run_dir: RunDir, step: int, diagnostics: Diagnostics, *, is_over: bool = False) -> None:
        """Start, with a last checkpoint that the store lacks. `step`: the run continues from it;
        the store's later ones are another branch's, unless the run `is_over`."""
        self._checkpoints, self._step, self._is_tidy = run_dir.checkpoints, step, is_over
        # Of its own, and never closed: the thread may write an event until the process ends.
        self._events = EventWriter(run_dir.events)
        self._guard = diagnostics.best_effort("events of checkpoint.remote")
        self._thread = threading.Thread(target=self._run, name="remote checkpoints", daemon=True)
        self._thread.start()
        path = run_dir.checkpoints / checkpoint_name(step)
        if checkpoint.complete_checkpoints(run_dir.checkpoints)[:1] == [path]:
            self.publish(path)

    def publish(self, path: Path) -> None:
        """Note a complete checkpoint, and prune local ones but the one that is being uploaded."""
        self._newest = path
        self._queue.put(path)
        checkpoint.prune(self._checkpoints, **self._retention, spared=step_of(self._busy))

    def wait(self, stop: StopRequest) -> None:
        """Wait until the store has the last checkpoint, or a stop is requested meanwhile."""
        was_requested, end = stop.requested, time.monotonic() + CLOSE_SEC
        self._queue.put(None)
        while self._thread.is_alive() and time.monotonic() < end and (was_requested or not stop.requested):
            self._thread.join(0.1)
        checkpoint.prune(self._checkpoints, **self._retention, spared=step_of(self._busy))
        if self._newest.name and self._uploaded == self._newest:
            logger.info("%s has the last checkpoint, %s", self._store.url, self._uploaded.name)
        elif self._newest.name:
            logger.warning("%s does not have the last checkpoint: copy %s there", self._store.url, self._newest)

    def _run(self) -> None:
        for path in iter(self._queue.get, None):
            self._busy = path  # first: it may not be pruned from here on
            if path == self._newest:
                self._upload(path)
            self._busy = Path()

    def _upload(self, path: Path) -> None:
        started, step, self._uploaded = time.monotonic(), step_of(path), Path()
        try:
            if not self._is_tidy:
                self._store.tidy(self._step)
                self._is_tidy = True
            is_new, self._uploaded = self._store.put(path), path
            if is_new:
                seconds = time.monotonic() - started
                self._event("remote_uploaded", global_step=step, seconds=round(seconds, 3))
            best = checkpoint.best_step(path)
            source = path.with_name(checkpoint_name(best))  # a newer best may have had it pruned
            if best >= 0 and (source / MARKER).exists():
                self._busy = source
                self._store.put(source)
            self._store.prune(**self._retention, spared=best)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises
            self._event("remote_failed", global_step=step, error=error_text(error))
            if not self._has_warned:
                text = "after %s the store fails: %s; the run continues, and the next save will try again"
                logger.warning(text, path.name, error)
            self._has_warned = True

    def _event(self, name: str, **values: Any) -> None:
        self._guard.run(self._events.write, {"event": name, "url": self._store.url, **values})
