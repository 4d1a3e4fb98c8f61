"""The sources of the blend: included files resolved, weights multiplied, streams found. All before the process group."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.base import ScheduleTable, Weight
from trainer.config.data_tables import SourceTable
from trainer.config.load import load_dataset_file
from trainer.config.rules import least_steps, tokens_per_micro
from trainer.config.schema import RunConfig
from trainer.data.cache import ENTRY, Cache, Snapshot
from trainer.data.documents import IdBounds
from trainer.data.formats import FORMATS, file_kind, format_name, is_import_path
from trainer.data.layout import Stream, discover_direct, discover_nested, refuse_unheeded
from trainer.data.tokenize import TextFile, tokenize_files
from trainer.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from trainer.data.weights import ConstantWeight, ScheduledWeight, WeightSpec, compose_weights, first_all_zero
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.files import did_you_mean, is_url, write_json
from trainer.import_path import resolve_target
from trainer.metrics.logger import get_logger
from trainer.metrics.progress_bar import Report, now_and_then, progress_bar

if TYPE_CHECKING:
    from trainer.training.setup.plan import Plan


MAX_INCLUDE_DEPTH = 16


@dataclass(frozen=True)
class Source:
    """One leaf of the blend."""

    name: str
    """Names on the way down, joined by `.`."""
    table: SourceTable
    weight: WeightSpec
    streams: list[Stream]
    """Empty for a target; of weight 0, perhaps too."""
    copies: tuple[Snapshot, ...] = ()
    """Local copies of what URLs name; they stay while this exists."""
    tokens: Snapshot | None = None
    """What its streams' `tokens` lie in, likewise."""

    @property
    def is_off(self) -> bool:
        """Whether its weight is 0 from beginning to end: nothing of it is read."""
        return self.weight.zero_from() == 0

    @property
    def concentration(self) -> float:
        """Probability that two of its bytes come from the same stream: the sum of the squared shares of its files."""
        sizes = np.array([os.path.getsize(stream.path) for stream in self.streams] or [1], dtype=np.float64)
        shares = sizes / max(sizes.sum(), 1.0)
        return float(shares @ shares)


def resolve_sources(config: RunConfig, config_path: Path, num_shards: int) -> list[Source]:
    """Every leaf source, with its weight and streams.

    Raises:
        UserError: an included file has mistakes or includes itself, two schedules lie on one path, a source has no
            streams, or all weights are zero at some time of the run.
    """
    leaves: list[Source] = []
    cache = Cache(config.data.cache_dir, config.data.cache_gb)
    _collect(config.data.source, config_path, "", ConstantWeight(1.0), leaves, (config_path.resolve(),), cache)
    micro_tokens = tokens_per_micro(config, leaf_tables(leaves), num_shards)
    _refuse_unknown_steps(config, leaves)
    # What `auto` may come to: a gap would end the run. A length in tokens has the same number of batches for every m.
    batches = (config.micro_batches if config.train.tokens else config.micro_batches.fastest()).by_steps(micro_tokens)
    num_batches = batches.batches_before(least_steps(config, micro_tokens) + 1)
    gap = first_all_zero([leaf.weight for leaf in leaves], micro_batches=batches, num_batches=num_batches)
    if gap is not None:
        first, last = gap
        until = "the end" if last is None or last >= num_batches - 1 else f"batch {last}"
        problem = f"all weights are zero from batch {first} to {until} (the run has {num_batches} batches a rank)"
        raise UserError("data.source.weight", problem, "give a source a weight above 0 there")
    return leaves


def resolve_eval_sources(config: RunConfig) -> list[Source]:
    """The validation sets of `[[eval.source]]`, with their streams.

    Raises:
        UserError: a set has no streams.
    """
    cache = Cache(config.data.cache_dir, config.data.cache_gb)
    tables = [each.as_source() for each in config.eval.source]
    return [
        Source(table.name, table, ConstantWeight(1.0), *_streams(table, f"eval source {table.name}", cache))
        for table in tables
    ]


def _refuse_unknown_steps(config: RunConfig, leaves: list[Source]) -> None:
    """Refuse weights by step where nobody knows ahead which step a micro-batch will belong to.

    The loader reads ahead, and the batch that it reads must not depend on how far.
    """
    by_step = next((leaf.name for leaf in leaves if leaf.weight.unit == "step"), None)
    if by_step is None or config.micro_batches.is_known_ahead:
        return
    is_auto = config.micro_batches.auto is not None
    planned = '"auto"' if is_auto else 'a schedule with unit = "tokens"'
    problem = f"source {by_step} has a weight by steps, and with {planned} nobody knows ahead which step a batch is of"
    fix = 'give that weight unit = "batch"' + ("" if is_auto else ', or micro_batches unit = "steps"')
    raise UserError("train.micro_batches", problem, fix)


def leaf_tables(sources: list[Source]) -> list[SourceTable]:
    """The tables of the leaves under their full names, as the rules of the config want them."""
    return [source.table.model_copy(update={"name": source.name}) for source in sources]


def _collect(
    tables: list[SourceTable],
    path: Path,
    prefix: str,
    outer: WeightSpec,
    leaves: list[Source],
    including: tuple[Path, ...],
    cache: Cache,
) -> None:
    for table in tables:
        name = f"{prefix}{table.name}"
        own = weight_spec(table.weight, f"{name}.weight")
        weight = compose_weights(outer, own, path_a=f"the weight of {prefix.rstrip('.')}", path_b=f"{name}.weight")
        if table.include is None:
            leaf = Source(name, table, weight, [])
            try:
                file = str(path) if prefix else ""  # of the config itself, `located` knows the line
                streams, copies = _streams(table, f"source {name}", cache, file=file)
                leaf = replace(leaf, streams=streams, copies=copies)
            except UserError:
                if not leaf.is_off:  # whose data may be gone
                    raise
            leaves.append(leaf)
            continue
        included = path.parent / table.include
        if included.resolve() in including or len(including) > MAX_INCLUDE_DEPTH:
            raise UserError(f"{name}.include", f"{table.include} includes itself", "break the circle", where=str(path))
        nested = load_dataset_file(included).source
        _collect(nested, included, f"{name}.", weight, leaves, (*including, included.resolve()), cache)


def weight_spec(weight: Weight, path: str) -> WeightSpec:
    """A config's weight as the value that the blend evaluates."""
    if isinstance(weight, ScheduleTable):
        return ScheduledWeight(weight.schedule, weight.points, scale=weight.scale, unit=weight.unit, path=path)
    return ConstantWeight(float(weight), path)


def _streams(
    table: SourceTable, source: str, cache: Cache, *, file: str = ""
) -> tuple[list[Stream], tuple[Snapshot, ...]]:
    """The streams of a source, and the local copies of what URLs name.

    Args:
        source: how messages name it.
        file: an included file that it is in.
    """
    key = f"{source}: {'paths' if table.root is None else 'root'}"
    try:
        if table.root is not None and is_url(table.root):
            streams, copy = _stores().stored_nested(table.root, table.modalities, format=table.format, cache=cache)
            return streams, (copy,)
        if table.root is not None:
            return discover_nested(table.root, table.modalities, format=table.format), ()
        if table.paths is not None and any(map(is_url, table.paths)):
            found: tuple[list[Stream], tuple[Snapshot, ...]]
            found = _stores().stored_direct(table.paths, format=table.format, cache=cache)
            return found
        if table.paths is not None:
            return discover_direct(table.paths, format=table.format), ()
    except UserError as error:
        problem, fix = error.problem if error.key == "paths" else f"{error.key}: {error.problem}", error.fix
        if table.root is not None and not is_url(table.root) and not Path(table.root).exists():
            made = f"make it (train data build pytext --out {table.root}, or train data build text), or set root to your data"
            fix = did_you_mean(str(table.root)) or made
        raise UserError(key, problem, fix, where=file) from None
    return [], ()


def _stores() -> Any:
    """What reads sources that are URLs."""
    return importlib.import_module("trainer.extensions.stored")


def check_reading(sources: Sequence[Source], eval_sources: Sequence[Source], tokenizer: Tokenizer) -> None:
    """Refuse options of sources that change nothing, or cannot be right.

    Raises:
        UserError: a format of the user's own cannot be imported; no file of a source heeds `dtype`, `eod`, `text_split` or
            `column`; or `eod` is outside the vocabulary.
    """
    named = [(f"source {source.name}", source) for source in sources]
    named += [(f"eval source {source.name}", source) for source in eval_sources]
    for name, source in named:
        table = source.table
        given = {"dtype": table.dtype, "eod": table.eod, "text_split": table.text_split, "column": table.column}
        if is_import_path(table.format):
            resolve_target(table.format, "format")
        refuse_unheeded(source.streams, table.format, given, source=name)
        # In a format of the user's own, eod means what its function makes of it.
        if table.eod is not None and not is_import_path(table.format):
            IdBounds.of(name, tokenizer).check_eod(table.eod, f"{name}: eod")


logger = get_logger(__name__)
LEAST_BYTES = 4_000_000
"""Less text than this, two seconds of work, is tokenized where it is read."""


class Stopped(Exception):
    """Somebody asked for a stop meanwhile."""


def tokenize_once(plan: Plan, info: RankInfo, is_stopped: Callable[[], bool]) -> Plan:
    """The plan, with the tokens of its text in files that are mapped.

    Where that is not possible (a full disk, a damaged file), every rank tokenizes what it reads, and says what is wrong.

    Raises:
        Stopped: a stop was asked for.
    """
    if not isinstance(plan.tokenizer, HuggingFaceTokenizer) or multiprocessing.current_process().daemon:
        return plan
    make = partial(_tokenized, plan, info, is_stopped)
    return replace(plan, sources=[*map(make, plan.sources)], eval_sources=[*map(make, plan.eval_sources)])


def _tokenized(plan: Plan, info: RankInfo, is_stopped: Callable[[], bool], source: Source) -> Source:
    streams = [] if source.is_off else [each for each in source.streams if _is_text(each, source.table)]
    size = sum(os.path.getsize(stream.path) for stream in streams)
    if size < LEAST_BYTES:
        return source
    data = plan.config.data
    cache = Cache(data.cache_dir, data.cache_gb)
    key = _key(streams, source, Path(data.tokenizer))
    place = cache.directory / key
    what = f"tokenizing source {source.name} ({size / 1e6:,.0f} MB of text) once, into {place}"

    def look(report: Report, done: int, total: int, path: str) -> None:
        if is_stopped():
            raise Stopped
        report(done, total, path)

    def make() -> None:
        logger.info("%s", what)
        with cache.alone():
            place.mkdir(exist_ok=True)
            write_json(place / "plan.json", {"url": f"the tokens of source {source.name}", "bytes": size})
            cache.make_room(f"source {source.name}", size, size, place)
        with progress_bar(now_and_then(partial(logger.info, "tokenizing: %s"))) as report:
            tokenize_files(
                [
                    TextFile.cut(stream.path, source.table.format, place / "files" / f"{number:06d}.bin")
                    for number, stream in enumerate(streams)
                ],
                place / "files",
                tokenizer=data.tokenizer,
                text_split=source.table.text_split,
                column=source.table.column,
                workers=len(os.sched_getaffinity(0)),
                report=partial(look, report),
            )
        write_json(place / ENTRY, {"url": f"the tokens of source {source.name}", "files": len(streams)})

    try:
        held = cache.hold(
            key,
            place / "files",
            is_whole=(place / ENTRY).is_file,
            make=make,
            waiting=f"waiting for another process that is {what}",
            is_first=info.local_rank == 0,
            on_wait=lambda: look(lambda *_: None, 0, 0, ""),
        )
    except UserError as error:
        logger.warning("source %s: every rank tokenizes its text itself: %s", source.name, error.message)
        return source
    tokens = {stream.path: str(held.directory / f"{index:06d}.bin") for index, stream in enumerate(streams)}
    return replace(
        source, streams=[replace(stream, tokens=tokens.get(stream.path, "")) for stream in source.streams], tokens=held
    )


def _is_text(stream: Stream, table: SourceTable) -> bool:
    path = Path(stream.path)
    name = format_name(path, table.format)
    is_built_in = not is_import_path(name) and FORMATS[name].pieces is not None
    return is_built_in and file_kind(path, name, table.column) == "text"


def _key(streams: Sequence[Stream], source: Source, tokenizer: Path) -> str:
    """Of the tokens of these files: another one for files that changed."""
    files = [
        (os.path.abspath(each.path), os.stat(each.path).st_size, os.stat(each.path).st_mtime_ns) for each in streams
    ]
    table = source.table
    how = ["tokens", table.format, table.text_split, table.column, hashlib.sha256(tokenizer.read_bytes()).hexdigest()]
    return hashlib.sha256(json.dumps([how, files]).encode("utf-8", "surrogateescape")).hexdigest()[:24]
