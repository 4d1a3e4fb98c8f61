"""Settings that cannot be meant; and, for `train check`, what a run has to read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.data_tables import SourceTable
from trainer.config.rules import data_shards, tokens_per_micro
from trainer.config.schema import RunConfig
from trainer.data.formats import FORMATS, format_name, load_documents, takes_option
from trainer.data.groups import file_bytes, nothing_left, open_stream
from trainer.data.layout import files_below, is_data, modalities_of
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.tools import limits
from trainer.training.build import reading
from trainer.training.optimizer import Length, make_schedule
from trainer.training.plan import Plan, Source
from trainer.wording import counted, few, printable

logger = get_logger(__name__)

Doubt = tuple[str, str, str]
"""Key, problem and fix."""


def planned(plan: Plan) -> None:
    """Warn of settings of a run that work, but hardly as meant."""
    sources, eval_sources = plan.sources, plan.eval_sources
    read = [source for source in sources if not source.is_off]
    found = [*trained_on(read, eval_sources), *_doubted_settings(plan)]
    found += [*_unread(sources, eval_sources), *_unmasked(read, eval_sources)]
    if plan.config.eval.holdout_fraction > 0:
        found += _leaks(read)
    for doubt in found:
        logger.warning("%s", UserError(*doubt).message)


def _doubted_settings(plan: Plan) -> Iterator[Doubt]:
    config, evaluation, optimizer = plan.config, plan.config.eval, plan.config.optimizer
    if (plan.eval_sources or evaluation.target is not None) and not evaluation.every:
        problem = "is 0: the run evaluates neither [[eval.source]] nor eval.target"
        yield "eval.every", problem, "set it to the number of steps between evaluations"
    if optimizer.lr > limits.LARGEST_LR and optimizer.name == "adamw" and optimizer.target is None:
        problem = f"{optimizer.lr:g}: AdamW moves every weight by about this much in every step"
        yield "optimizer.lr", problem, "set it between 1e-5 and 1e-2"
    share, steps = 1 - config.train.ema, plan.facts.steps
    if 0 < share * steps < 2 and share < 1:  # most of the average would be the first weights
        yield "train.ema", f"averages about {1 / share:,.0f} steps of {steps:,}", "lower it"
    for unit, length in (("steps", steps), ("tokens", config.train.tokens)):
        warmup = getattr(config.scheduler, f"warmup_{unit}")
        if length and warmup - 1 > limits.LONG_WARMUP * length:  # its last step has the whole rate
            problem = f"{warmup:,} of {length:,} {unit}: most of the run is below the learning rate"
            yield f"scheduler.warmup_{unit}", problem, f"set it to at most {max(length // 10, 1):,}"


def warn_of_rate_change(saved: Mapping[str, Any], plan: Plan, reached: int) -> None:
    """Warn where a resume from a checkpoint of this state makes the learning rate jump."""
    try:
        before = RunConfig.model_validate(saved["config"])
        length = Length.of(before, tokens_per_micro(before, saved["data_shards"]))
        then = make_schedule(before, length)(reached)
    except ValueError:  # of an earlier version; its differences are logged anyway
        return
    now = make_schedule(plan.config, plan.length)(min(reached, plan.length.total))
    if length.is_in_tokens == plan.length.is_in_tokens and abs(now - then) > limits.RATE_MARGIN * max(then, now):
        text = "the learning rate jumps from %.3g to %.3g: the schedule spans the whole run, as set now"
        logger.warning(text, then, now)


def _unread(sources: Sequence[Source], eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    """Modalities of a root that no source reads."""
    readers: dict[str, list[SourceTable]] = {}
    for source in (*sources, *eval_sources):
        if source.streams and source.table.root is not None:
            readers.setdefault(os.path.realpath(source.table.root), []).append(source.table)
    read = {_identity(stream.path) for source in (*sources, *eval_sources) for stream in source.streams}
    for root, tables in readers.items():
        unread = []
        for name, path in modalities_of(Path(root)).items():
            with suppress(UserError):  # a directory that cannot be read
                files = [str(each) for each in files_below(path) if is_data(each, tables[0].format)]
                unread += [name] * (bool(files) and read.isdisjoint(map(_identity, files)))
        if unread and all(table.modalities is not None for table in tables):
            problem = f"has modalities that no source reads: {few(unread)}"
            yield f"root {tables[0].root}", problem, "add them to modalities of a source, or a source of their own"


def _leaks(sources: Sequence[Source]) -> Iterator[Doubt]:
    """Files that are read in several ways: which documents are held out depends on the name of the
    stream and on their numbers in it."""
    ways: dict[tuple[int, int], dict[tuple[Any, ...], str]] = {}
    for source in sources:
        for stream in source.streams:
            name, table = format_name(Path(stream.path), source.table.format), source.table
            cuts = [getattr(table, key) for key in ("text_split", "eod") if takes_option(name, key)]
            of_file = ways.setdefault(_identity(stream.path), {})
            of_file.setdefault((stream.relative_path, *cuts), source.name)
    twice = [found for found in ways.values() if len(found) > 1]
    if twice:
        named = list(twice[0].items())[:2]
        first = " and ".join(f"{printable(name)} (source {source})" for (name, *_), source in named)
        files = f"{counted(len(twice), 'file')} in several ways, such as {first}"
        fix = "read a file once, or in each source with the same root, text_split and eod"
        yield "eval.holdout_fraction", f"{files}: each trains on what the other holds out", fix


def _unmasked(sources: Sequence[Source], eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    """Validation sets without `loss_mask` where training has one."""
    masks = sorted({source.table.loss_mask for source in sources if source.table.loss_mask})
    plain = []
    for each in eval_sources:
        formats = {format_name(Path(stream.path), each.table.format) for stream in each.streams}
        if not each.table.loss_mask and any(takes_option(name, "loss_mask") for name in formats):
            plain.append(each.name)
    if masks and plain:
        problem = f"all tokens count, and training has loss_mask = {few(masks)}"
        yield f"eval source {few(plain)}", problem, "set loss_mask, unless prompts are to count"


def trained_on(sources: Sequence[Source], eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    """Validation sets with files that are trained on."""
    trained = {_identity(stream.path): source.name for source in sources for stream in source.streams}
    for each in eval_sources:
        shared = [stream for stream in each.streams if _identity(stream.path) in trained]
        if shared:
            source = trained[_identity(shared[0].path)]
            problem = f"{counted(len(shared), 'file')} trained on too, by source {source}: {printable(shared[0].relative_path)}"
            yield f"eval source {each.name}", problem, "leave them out of one of the two"


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


MOMENTS = {"adamw": 2, "muon": 1, "sgd": 0}
"""Numbers per parameter that an optimizer keeps at least."""


def model_bytes(plan: Plan, trained: int, frozen: int) -> dict[str, int]:
    """Bytes of a rank's weights, gradients, optimizer (not of the user's own) and averages, of so
    many `trained` and `frozen` parameters; of a sharded model, those of its shards."""
    shards = plan.layout.shards if plan.layout is not None else 1
    held = -(-trained // shards)
    found = {"weights": 4 * held + 4 * -(-frozen // shards), "gradients": 4 * held}
    if plan.config.optimizer.target is None:
        moments = MOMENTS[plan.config.optimizer.name] or int(plan.config.optimizer.momentum > 0)
        found["optimizer"] = 4 * held * moments
    if plan.config.train.ema:
        found["averages"] = 4 * held
    return found


OPENED_BYTES = 64_000_000  # of all sources, and of all validation sets, which may have to be tokenized


class Content(NamedTuple):
    """An epoch of a source."""

    tokens: int  # of text that is not opened: its bytes; 0: not known, see `_by_bytes`
    documents: int = 0  # that are not held out, or their parts; 0: not opened
    padded: int = 0  # tokens, with what fills the last cell of each document; 0: not opened


def contents(plan: Plan) -> dict[str, Content]:
    """The content of each source of files that is read, counted, or by bytes if there are many.
    Raises UserError: a file, also of a validation set, is damaged, or a source has no document."""
    for own in ([*plan.eval_sources] * (plan.config.eval.every > 0), plan.sources):
        read = [source for source in own if source.streams and not source.is_off]
        size = sum(file_bytes(stream) for source in read for stream in source.streams)
        measure = _opened if size <= OPENED_BYTES else _by_bytes
        found = {source.name: measure(plan, source) for source in read}
    return found


def _opened(plan: Plan, source: Source) -> Content:
    cut, read, _ = reading(plan, source, is_whole=any(source is each for each in plan.eval_sources))
    found, refuse_unfit = [], getattr(plan.tokenizer, "refuse_unfit", None)  # of series
    lacks_held_out = cut.holdout_fraction > 0 and plan.config.eval.every > 0
    for stream in source.streams:  # one at a time: a mapped file keeps a descriptor
        opened = open_stream(stream, read, cut)
        found.append(opened.num_tokens())
        lacks_held_out &= np.count_nonzero(opened.documents.lengths) == len({*opened.groups.documents.tolist()})
        if refuse_unfit is not None:
            for document, length in enumerate(opened.documents.lengths.tolist()):
                refuse_unfit(stream.path, document, 0, opened.documents.read(document, 0, length))
    sizes = np.concatenate(found)
    if not len(sizes) or lacks_held_out:
        raise nothing_left(f"source {source.name}")
    padded, values = -(-sizes // cut.seq_len) * cut.seq_len, plan.config.data.values
    return Content(int(sizes.sum()) * values, len(sizes), int(padded.sum()) * values)


def _by_bytes(plan: Plan, source: Source) -> Content:
    """By bytes of text; 0 if a file is or may be compressed, or is of a format of the user's own."""
    _, read, _ = reading(plan, source)
    tokens = 0
    for stream in source.streams:
        name = format_name(Path(stream.path), source.table.format)
        row = FORMATS.get(name)
        if row is None or name in ("parquet", "arrow", "jsonl_compressed"):
            return Content(0)
        if row.pieces is not None:
            tokens += file_bytes(stream)
        else:  # ids, of which nothing is read without an id to look for
            tokens += len(load_documents(stream.path, replace(read, eod=None)).tokens)
    return Content(tokens * plan.config.data.values)


def why_no_noise_scale(config: RunConfig, world_size: int) -> str | None:
    """Why a run cannot measure the gradient noise scale; None if it can."""
    if not config.gns.enabled:
        return "gns.enabled = false"
    if data_shards(config, world_size) * config.micro_batches.most > 1:
        return None
    reason = "one micro-batch per step on one rank has a single batch size, and two are compared"
    return f"{reason}; set train.micro_batches = 2 (half the data.mixing.batch_size keeps a step's size)"
