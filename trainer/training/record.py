"""The record of a run: its directory, the checkpoint that it continues and fits, and its sinks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from trainer.config.load import flatten, recorded_settings
from trainer.config.schema import RunConfig
from trainer.data.fingerprint import EVAL, FINGERPRINT_KEY, Fingerprint, blocks_per_file, compare, mark_files
from trainer.data.formats import files_of
from trainer.data.layout import refuse_empty_files
from trainer.distributed.env import RankInfo, from_main_rank, gather_from_ranks, raise_on_all_ranks
from trainer.distributed.strategy import num_parameters
from trainer.errors import UserError
from trainer.files import discard
from trainer.import_path import users_code
from trainer.metrics.logger import add_log_file, get_logger, remove_log_file
from trainer.metrics.run_status import dead, last_step
from trainer.metrics.sinks import BackgroundSink, EventWriter, JsonlSink, Sink, StdoutSink
from trainer.training import Found, Uploads, checkpoint, need
from trainer.training.build import runs_on
from trainer.training.extension import RunView
from trainer.training.plan import Plan, Source, width_of
from trainer.training.run_dir import RunDir, choose_run_dir, environment
from trainer.training.tensor_files import CheckpointError
from trainer.wording import printable

logger = get_logger(__name__)
MARK_SEC = 60.0  # network file systems may remember for so long what a directory had
Chosen = tuple[RunDir, Found | None, Uploads | None]


def place_run(plan: Plan, given: str | None, info: RankInfo, stack: ExitStack) -> Chosen:
    """The run's directory, the checkpoint to resume from, and rank 0's uploads."""
    placed: Chosen | None = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            try:  # on rank 0 alone: the ranks might see different directories
                placed = _place_on_main(plan, given, stack)
            except OSError as error:  # a name that is too long, a directory that may not be read
                place = printable(str(error.filename or given or plan.config.run.dir))
                problem = f"cannot be used: {error.strerror or error}"
                raise UserError(place, problem, "choose another place with --run-dir") from None
    answer: Any = placed and (placed[0].path, placed[1])  # rank 0 alone holds the uploads
    path, found = from_main_rank(answer, world_size=info.world_size)
    return placed or (RunDir(path), found, None)


def _place_on_main(plan: Plan, given: str | None, stack: ExitStack) -> Chosen:
    config, uploads = plan.config, None
    resume, restarts = config.checkpoint.resume, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_restarted = resume == "off" and restarts != "0"
    if is_restarted:  # by torchrun --max-restarts, as every rank of this attempt
        text = "torchrun restarted the ranks (restart %s): resuming from the newest checkpoint"
        logger.warning(text, restarts)
        resume = "auto"
    run_dir = choose_run_dir(config, given, resume, is_restarted=is_restarted)
    # Locked before its checkpoints are read: what another run is writing there looks like damage.
    if run_dir.path.exists() and not run_dir.is_new:
        stack.enter_context(run_dir.lock(config.distributed.timeout_sec))
    if restarts != "0" and resume != "auto":  # the checkpoint that the first attempt continued
        for saved in checkpoint.complete_checkpoints(run_dir.checkpoints):
            with suppress(CheckpointError):  # an earlier one says it, too
                if checkpoint.read_state(saved)["config"]["checkpoint"]["resume"] == resume:
                    resume = "auto"
                break
    if config.checkpoint.remote is not None:
        store = need(plan.parts.store, "checkpoint.remote")
        found, uploads = store.find_checkpoint(config, run_dir, resume, partial(_make_ready, run_dir, plan, stack))
    else:
        found = checkpoint.find(run_dir.checkpoints, resume)
    if found is None and resume == "auto":
        reached = last_step(run_dir.path)
        if reached:
            text = "--resume auto: %s was at step %d and has no checkpoint; starting at step 0"
            logger.warning(text, run_dir.path, reached)
        else:
            logger.info("--resume auto: no checkpoint in %s; starting at step 0", run_dir.path)
    elif found is not None:  # before the data are compared, which another tokenizer changes
        with checkpoint.loading(found[0], "config"):
            check_config(found[1]["config"], config)
    return run_dir, found, uploads


def _make_ready(run_dir: RunDir, plan: Plan, stack: ExitStack) -> None:
    """Make and lock the run's directory, if this process has not locked it."""
    if run_dir.owned is None:
        run_dir.claim()
        stack.enter_context(run_dir.lock(plan.config.distributed.timeout_sec))


def begin_record(view: RunView, stack: ExitStack) -> None:
    """Lock the directory (`claim` may rename it), set later checkpoints aside, open the log."""
    run_dir, info, mark, found = view.run_dir, view.info, "", view.found
    with raise_on_all_ranks(world_size=info.world_size), run_dir.writing():
        if info.is_main:
            _make_ready(run_dir, view.plan, stack)
            run_dir.create()
            checkpoint.discard_staging(run_dir.checkpoints)
            if found is not None:
                found = checkpoint.set_aside_after(run_dir.checkpoints, view.first_step, found[0]), found[1]
            mark = run_dir.mark()
    run_dir.move_to(Path(from_main_rank(str(run_dir.path), world_size=info.world_size)))
    name, view.found = from_main_rank((mark, found), world_size=info.world_size)
    try:
        with raise_on_all_ranks(world_size=info.world_size), run_dir.writing():
            # Not longer than the others wait for this rank.
            run_dir.refuse_unshared(name, min(MARK_SEC, view.config.distributed.timeout_sec / 2))
            stack.callback(remove_log_file, add_log_file(run_dir.log_file(info.rank)))
    finally:
        if info.is_main:
            discard(run_dir.checkpoints / name)


def open_record(view: RunView, stack: ExitStack, config_path: Path | None, stdout: TextIO | None) -> None:
    """Open events.jsonl, sinks and status.json on rank 0. Every rank must call it."""
    run_dir, state, diagnostics, step = view.run_dir, view.state, view.diagnostics, view.first_step
    with raise_on_all_ranks(world_size=view.info.world_size), run_dir.writing():
        if view.info.is_main:
            view.events = events = EventWriter(run_dir.events)
            stack.callback(diagnostics.best_effort("end of events.jsonl").run, events.close)
            diagnostics.write_with(events.write)
            # Without a checkpoint too: the record of an earlier attempt continues.
            is_restart = run_dir.metrics.exists() or view.found is not None
            sinks, run_dir.wandb_run_id = make_sinks(view, stdout or sys.stdout)
            state.tracker.init_backends(sinks)
            if is_restart:
                previous = _previous(run_dir, step)
                state.tracker.log_restart(step)
                events.write({"event": "restart", "global_step": step, **_continued(view), "previous": previous})
            # After the event of changed settings, in case this process is killed between.
            if config_path is not None:
                facts = {
                    "parameters": num_parameters(state.model),
                    "state_width": width_of(state.model),
                    "tokens_per_step": view.plan.facts.tokens_per_step,
                    "align": "stream" if runs_on(view.plan, state.model) else "document",
                }
                run_dir.describe(view.config, config_path, view.info, facts)
            run_dir.write_status("running", reason="", step=step)
    stack.callback(state.tracker.close)


def _previous(run_dir: RunDir, step: int) -> dict[str, Any]:
    """The end of the attempt that this one continues after `step`; warns if it died."""
    previous = run_dir.status()
    if previous.get("state") == "running":  # and this process has its lock
        previous = dead(previous, run_dir.path)
    if previous.get("state") == "died":
        logger.warning("%s: %s; continuing from step %d", run_dir.path, previous["reason"], step)
    return {key: previous.get(key) for key in ("state", "reason", "last_step")}


def _continued(view: RunView) -> dict[str, Any]:
    """The checkpoint that the run continues and the settings that changed since, for the record."""
    if view.found is None:
        return {"checkpoint": None}
    path, saved = view.found
    changed = changed_settings(saved["config"], saved.get("environment", {}), view.config, environment(view.info))
    named = {key: {"before": before, "after": after} for key, (before, after) in changed.items()}
    return {"checkpoint": path.name, "changed": named}


def make_sinks(view: RunView, stdout: TextIO) -> tuple[list[Sink], str | None]:
    """The sinks of a run, and its id in wandb. Those that may wait have a thread."""
    config, mode, diagnostics = view.config, view.config.metrics.stdout, view.diagnostics
    if mode == "auto":
        mode = "line" if stdout.isatty() else "json"
    # The record first: if it cannot be written, no other sink should report the step.
    sinks: list[Sink] = [JsonlSink(view.run_dir.metrics)]
    if mode != "off":
        to_stdout: Sink = StdoutSink(mode, stream=stdout)
        if not stdout.isatty():
            to_stdout = BackgroundSink(to_stdout, name="stdout", guard=diagnostics.best_effort("stdout"))
        sinks.append(to_stdout)
    if mode == "json" and sys.stderr.isatty():
        # Payloads go to a program, and a terminal is open: human-readable lines go to stderr.
        sinks.append(StdoutSink("line", stream=sys.stderr))
    services, table = view.plan.parts.sinks, config.metrics
    if table.tensorboard or table.wandb.mode not in ("auto", "disabled"):
        services = need(services, "metrics.tensorboard" if table.tensorboard else "metrics.wandb.mode")
    if services is None:
        return sinks, None
    further, wandb_run_id = services.to_services(config, view.run_dir, view.found, diagnostics)
    return [*sinks, *further], wandb_run_id


# Changing these changes the shapes of weights, the data, or which tokens the stored states follow;
# the data set itself refuses what changes its cells.
BREAKING = (
    *("model.", "data.tokenizer", "data.vocab_size", "data.seq_len"),
    *("run.seed", "optimizer.name", "optimizer.target", "optimizer.group"),
)
# The checkpoint has its own weights; the contract only refuses models.
HARMLESS = ("model.weights", "model.contract")
# These say where and how a run is executed, not what it computes.
SILENT = (
    *("run.", "metrics.", "sample.", "checkpoint.", "distributed.", "train.device"),
    *("data.cache_", *HARMLESS),
)
# But this is reported: a model that needs shards may be resumed without them by mistake.
SAID = ("distributed.strategy",)


def check_config(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse a config that does not fit the checkpoint's state, and warn about other changes."""
    changed = changed_settings(saved, {}, config, {})
    # A validation set that is read otherwise is another set.
    sets = {each["name"] for each in saved["eval"]["source"]} & {each.name for each in config.eval.source}
    how = ("format", "dtype", "eod", "text_split", "column", "loss_mask")
    of_sets = {f"eval.source.{name}.{key}" for name in sets for key in how}
    breaking = [key for key in changed if key in of_sets or (key.startswith(BREAKING) and key not in HARMLESS)]
    if breaking:
        listed = ["{}: {!r} -> {!r}".format(key, *changed[key]) for key in breaking]
        problem = f"the checkpoint was made with another config: {', '.join(listed)}"
        raise UserError("--resume", problem, "restore its settings, or start a new run")
    for key, (before, after) in changed.items():
        if key in SAID or not key.startswith(SILENT):
            logger.warning("resuming with another config: %s: %r -> %r", key, before, after)
        if key == "train.ema" and not after:
            logger.warning("the averaged weights of the checkpoint are dropped")


def changed_settings(
    saved: Mapping[str, Any], saved_environment: Mapping[str, Any], config: RunConfig, environment: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """The settings and versions that differ from a checkpoint's: before, after; None: not set."""
    before = recorded_settings(saved, saved_environment)
    now = recorded_settings(config.model_dump(mode="json"), environment)
    chosen = flatten(config.model_dump(mode="json", exclude_defaults=True))
    # A key that the saved config lacks is newer than the checkpoint: the default was used.
    unchanged = now.keys() - before.keys() - chosen.keys()
    if config.train.tokens:  # the steps are a forecast, by the number of ranks
        unchanged |= {"train.steps"}
    found = {key: (before.get(key), now.get(key)) for key in sorted((before.keys() | now.keys()) - unchanged)}
    return {key: (was, then) for key, (was, then) in found.items() if was != then}


def check_data(plan: Plan, saved: Mapping[str, Any] | None, info: RankInfo) -> Fingerprint:
    """Fingerprint the data files and compare them with a checkpoint's. Each rank reads its share.

    `saved`: the checkpoint's state.json; None for a run that begins. A UserError if a file cannot
    be read, or is empty, or if the data changed.
    """
    world_size = info.world_size
    sources = {source.name: source for source in plan.sources}
    sources |= {EVAL + each.name: each for each in plan.eval_sources}
    before = None
    with raise_on_all_ranks(world_size=world_size):
        if saved is not None:
            with users_code("--resume", "the checkpoint is damaged", "use another checkpoint"):
                before = Fingerprint(**saved[FINGERPRINT_KEY])
        names, files = _data_files(sources, plan.config.data.tokenizer)
        # Sampled as the checkpoint was, or nothing could be compared.
        blocks = before.blocks if before is not None else blocks_per_file(len(files))
        own = mark_files(files[info.rank :: world_size], blocks=blocks)
    marks = [""] * len(files)
    for rank, found in enumerate(gather_from_ranks(own, world_size=world_size)):
        marks[rank::world_size] = found
    tokenizer = marks.pop() if len(files) > len(names) else ""
    by_file = dict(zip(names, marks, strict=True))
    with raise_on_all_ranks(world_size=world_size):
        # Refused now: a run would find them when it comes to read them, perhaps hours later.
        empty = [": ".join(name) for name, mark in by_file.items() if mark.startswith("0:")]
        refuse_empty_files(empty, len(names))
    now = Fingerprint(blocks, tokenizer, _by_source(by_file, sources, before))
    if before is not None:
        changed = compare(before, now)
        with raise_on_all_ranks(world_size=world_size):
            if changed:
                problem = f"the data changed since the checkpoint was saved: {'; '.join(changed)}"
                fix = "put the data back, or start a new run from the weights (train export, then model.weights)"
                raise UserError("--resume", problem, fix)
        for name in before.sources.keys() - now.sources.keys():
            if not name.startswith(EVAL):
                logger.warning("source %s: it is in the checkpoint, and the config lacks it", name)
    return now


def _by_source(
    by_file: Mapping[tuple[str, str], str], sources: Mapping[str, Source], before: Fingerprint | None
) -> dict[str, dict[str, str]]:
    """The marks of all files by source; if one is off, the checkpoint's: it may be read again."""
    marked: dict[str, dict[str, str]] = {name: {} for name in sources}
    for (name, path), mark in by_file.items():
        marked[name][path] = mark
    for name, source in sources.items():
        if source.is_off:
            logger.info("source %s has weight 0: nothing of it is read", name)
            if before is not None:
                marked[name] = dict(before.sources.get(name, {}))
    return marked


def _data_files(sources: Mapping[str, Source], tokenizer: str) -> tuple[list[tuple[str, str]], list[Sequence[Path]]]:
    """(source, stream) of each stream, and its files; the tokenizer's file, if any, comes last."""
    names: list[tuple[str, str]] = []
    files: list[Sequence[Path]] = []
    for name, source in sources.items():
        if not source.is_off:
            names += [(name, stream.relative_path) for stream in source.streams]
            files += [files_of(Path(stream.path), source.table.format) for stream in source.streams]
    if tokenizer.endswith(".json"):
        files.append([Path(tokenizer)])
    return names, files
