"""A step of a run again: what data it read, and what came of them.

The step is repeated by a run in a temporary directory, from the nearest checkpoint before it. The run's own stays as it is.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import IGNORED, Ints
from trainer.config.load import load_config
from trainer.config.schema import ExtensionTable, RunConfig
from trainer.data.blend import BlendDataset
from trainer.data.groups import OpenStream
from trainer.data.mixing import StreamMixingDataset
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.extensions.digests import KINDS
from trainer.extensions.replayed import rows_file
from trainer.files import parse_json, read_lines
from trainer.tools.branching.run_branches import BranchFailed, run_program
from trainer.tools.branching.study import config_path_of
from trainer.tools.runs.load import RunRecord, load_run
from trainer.tools.trained.saved_model import config_of, refuse_code
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.restore import DataPolicy, check_data
from trainer.training.checkpointing.tensor_files import read_rank
from trainer.training.run_dir import RunDir
from trainer.training.setup.parts import make_blend
from trainer.training.setup.plan import Plan, make_plan

NUMBERS = ("loss", "grad_norm", "lr", "tokens_in_step", "tokens_seen")
"""Metrics of a step that depend on nothing but the run's numbers."""
Values = dict[int, dict[str, Any]]
"""Step -> name -> what the run's record says of it: digests, and `NUMBERS`."""


def recorded(run: RunRecord) -> Values:
    """What a run has recorded of its steps that another run of the same config must equal, to the bit."""
    found: Values = {}
    try:
        lines = list(map(parse_json, read_lines(run.path / "digests.jsonl")))
    except (OSError, ValueError):  # none, or cut off
        lines = []
    for line in lines:
        found[line["global_step"]] = {kind: line[kind] for kind in KINDS}
    for name in NUMBERS:
        for step, value in zip(*run.train.column(name), strict=True):
            found.setdefault(step, {})[name] = value
    return dict(sorted(found.items()))


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The names of both that differ; not a number equals itself."""
    return [name for name in first if name in second and repr(first[name]) != repr(second[name])]


@dataclass(frozen=True)
class Origin:
    """From where a step of a run can be repeated, and how.

    Args:
        config, environment: of the launch that trained the step.
        path: the checkpoint; None: the run's beginning.
        state: the checkpoint's state.json; empty without one.
    """

    run: RunRecord
    config: RunConfig
    environment: Mapping[str, Any]
    path: Path | None
    state: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The last step that is not repeated."""
        return int(self.state.get("step", 0))

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return int(self.environment.get("world_size", 1))

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run."""
        return make_plan(self.config, Path(), self.num_ranks, logs_doubts=False)

    def blends(self) -> Iterator[BlendDataset]:
        """What reads each data shard, as it is before the first step that is repeated."""
        num_shards = self.plan.facts.data_shards
        saved = range(checkpoint.data_shards(self.state) if self.path else 0)
        for shard in RankInfo().data_shards(num_shards):
            blend = make_blend(self.plan, shard)
            if self.path is not None:
                numbers = [shard.rank] if len(saved) == num_shards else saved
                states = [read_rank(self.path, number)["data"] for number in numbers]
                blend.load_state_dict(states[0] if len(saved) == num_shards else states)
            yield blend


def find_origin(run_dir: Path, step: int, *, before: int | None = None, trust_code: bool = False) -> Origin:
    """Where to begin so as to repeat `step`.

    Args:
        before: begin before this step; None: `step`.

    Raises:
        UserError: the run has no such step, its beginning is not known, its data changed, or its config names code.
    """
    run = load_run(run_dir, allow_empty=True)
    before = step if before is None else before
    kept = {
        checkpoint.step_of(path): path for path in checkpoint.complete_checkpoints(run_dir / checkpoint.CHECKPOINTS)
    }
    resumed = [restart.global_step for restart in run.restarts]
    # A launch that began after the step may have had another config; a checkpoint until then has that of the step.
    until = min((at for at in resumed if at >= step), default=None)
    of_launch = [path for at, path in kept.items() if until is not None and step <= at <= until]
    if of_launch:
        state = checkpoint.named(str(of_launch[-1]), checkpoint.read_state)
        config, environment = config_of(state, of_launch[-1]), state.get("environment", {})
    else:
        config, environment = load_config(RunDir(run_dir).resolved_config), run.environment
    refuse_code(config, run_dir, trusted=trust_code)
    trunk = Path(config.checkpoint.resume)
    if checkpoint.step_of(trunk.resolve()) >= 0 and (trunk / checkpoint.MARKER).is_file():
        kept.setdefault(checkpoint.step_of(trunk.resolve()), trunk.resolve())
    usable = [at for at in kept if at < before]
    path = kept[max(usable)] if usable else None
    problem, fix = "", "put it back where checkpoint.resume says"
    if path is None and resumed and resumed[0] > 0 and not any(at <= resumed[0] for at in run.steps):
        problem = f"began from a checkpoint of step {resumed[0]} that is gone"
    elif step > config.train.steps and not config.train.tokens:
        problem, fix = f"has {config.train.steps} steps, not {step}", "name one of them"
    if problem:
        raise UserError(str(run_dir), problem, fix)
    state = {} if path is None else checkpoint.named(str(path), checkpoint.read_state)
    base = config_path_of(environment, run_dir).absolute().parent
    origin = Origin(run, _at_home(config, base), environment, path, state)
    if of_launch == [] and until is not None:
        origin.notes.append(f"the config is that of a launch after step {until}: none is kept of the step's own")
    if changed := [at for at in resumed if origin.step < at < step]:
        origin.notes.append(f"resumed after step {changed[-1]}: settings that changed there hold here from the start")
    _check_data(origin, kept)
    return origin


def _at_home(config: RunConfig, base: Path) -> RunConfig:
    """The config with the paths of included files, which are relative to the run's first config, absolute."""
    sources = [
        each if each.include is None else each.model_copy(update={"include": str(base / each.include)})
        for each in config.data.source
    ]
    return config.model_copy(update={"data": config.data.model_copy(update={"source": sources})})


def _check_data(origin: Origin, kept: Mapping[int, Path]) -> None:
    """Refuse data that changed since a checkpoint of the run, be it a later one, was saved."""
    state = origin.state or (checkpoint.named(str(kept[min(kept)]), checkpoint.read_state) if kept else None)
    try:
        check_data(origin.plan, state, RankInfo(), DataPolicy())
    except UserError as error:
        error.key, error.fix = str(origin.run.path), error.fix.partition(", or add")[0]
        raise


class Documents:
    """Finds the documents of rows in the data of a run."""

    def __init__(self, blend: BlendDataset, decode: Any) -> None:
        self._sources = {source.name: source.dataset for source in blend.sources}
        self._open: dict[tuple[str, str], tuple[OpenStream, Ints]] = {}
        self._decode = decode

    def _stream(self, source: str, name: str) -> tuple[OpenStream, Ints]:
        """A stream, and the ids of its groups."""
        if (source, name) not in self._open:
            dataset = self._sources[source]
            assert isinstance(dataset, StreamMixingDataset)
            opened = dataset.open(next(stream for stream in dataset.streams if stream.relative_path == name))
            self._open[source, name] = opened, opened.groups.ids_of(np.arange(opened.groups.num_groups))
        return self._open[source, name]

    def of(self, meta: Mapping[str, Any], *, with_text: bool) -> list[list[dict[str, Any]]]:
        """The documents of each row of a micro-batch: number in the file, and the range of its target tokens; maybe their text.

        Empty if that is not known: a source of the user's own.
        """
        if meta.get("source") not in self._sources or not isinstance(meta.get("stream"), str):
            return []
        opened, ids = self._stream(meta["source"], meta["stream"])
        documents, groups, rows = opened.documents, opened.groups, []
        for group_id, cell in zip(meta["group_ids"], meta["cell_indices"], strict=True):
            row = []
            for owner in np.flatnonzero(ids == group_id)[:1]:
                packed = groups.segment_documents[groups.segment_offsets[owner] : groups.segment_offsets[owner + 1]]
                start = 0 if len(packed) else int(groups.first_cells[owner] + cell) * opened.seq_len
                for document in packed.tolist() or [int(groups.documents[owner])]:
                    length = int(documents.lengths[document])
                    stop = length if len(packed) else min(start + opened.seq_len, length)
                    found: dict[str, Any] = {"document": document, "start": start, "stop": stop}
                    if with_text:
                        found["text"] = self._decode(documents.read(document, start, stop))
                    row.append(found)
            rows.append(row)
        return rows


def rows_of(micros: Sequence[Mapping[str, Any]], documents: Documents, *, with_text: bool) -> list[dict[str, Any]]:
    """The rows of a step, from what `Replayed` notes of its micro-batches; of all data shards."""
    rows, count = [], dict.fromkeys((micro["shard"] for micro in micros), 0)
    for micro in sorted(micros, key=itemgetter("shard")):
        shard, number = micro["shard"], count[micro["shard"]]
        count[shard] += 1
        if micro["is_filler"]:
            continue
        try:
            meta = parse_json(micro["meta"])
        except ValueError:  # of a source of the user's own
            meta = {}
        meta = meta if isinstance(meta, dict) else {}
        found = documents.of(meta, with_text=with_text)
        for row, tokens in enumerate(micro["tokens"]):
            cells = meta.get("cell_indices")
            rows.append(
                {
                    "shard": shard,
                    "micro_batch": number,
                    "row": row,
                    "source": meta.get("source") or (micro["sources"] or [None] * (row + 1))[row],
                    "stream": meta.get("stream"),
                    "documents": found[row] if found else None,
                    "cell": cells[row] if cells else None,
                    "tokens": tokens,
                }
            )
            if "states" in micro:
                rows[-1]["state"] = micro["states"][row]
            if "losses" in micro:
                rows[-1]["loss"] = micro["losses"][row] / tokens if tokens else None
    return rows


def read_step(origin: Origin, step: int, *, with_text: bool) -> list[dict[str, Any]]:
    """The rows that a step read, found by reading on from the data cursors, without the model.

    Raises:
        UserError: how many micro-batches a step has is not known without it.
    """
    plan = origin.plan.config.micro_batches
    if not plan.is_known_ahead:
        raise UserError("train.micro_batches", "depends on what the run measures", f"use train replay --step {step}")
    first, start, stop = map(plan.batches_before, (origin.step + 1, step, step + 1))
    blends, micros = list(origin.blends()), []
    for number in range(stop - first):
        for shard, blend in enumerate(blends):
            batch = next(blend, None)
            if batch is not None and number >= start - first:
                meta, sources = str(batch.get("instability_meta_json", "{}")), batch["dataset_labels"]
                tokens = (np.asarray(batch["targets"]) != IGNORED).sum(1).tolist()
                micros.append({"shard": shard, "meta": meta, "is_filler": False, "sources": sources, "tokens": tokens})
    return rows_of(micros, Documents(blends[0], origin.plan.tokenizer.decode), with_text=with_text)


@dataclass(frozen=True)
class Replay:
    """What came of a step that was repeated.

    Args:
        num_ranks: of the replay.
        values: of the replay's logged steps, as in `recorded`.
        micros: what `Replayed` noted of the step.
        failure: why the replay ended, if it did not by itself.
    """

    origin: Origin
    step: int
    num_ranks: int
    values: Values
    micros: list[dict[str, Any]]
    failure: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether it must equal the record to the bit: on as many ranks sums are rounded alike."""
        return self.num_ranks == self.origin.num_ranks

    def parts(self) -> dict[str, float]:
        """The components of the step's loss, per token."""
        tokens = sum(sum(micro["tokens"]) for micro in self.micros)
        found: dict[str, float] = {}
        for micro in self.micros:
            for name, total in micro.get("parts", {}).items():
                found[name] = found.get(name, 0.0) + total / max(tokens, 1)
        return found


def replay(origin: Origin, step: int, *, num_ranks: int | None = None, logs_all: bool = False) -> Replay:
    """Repeat the run up to `step`.

    Args:
        num_ranks: None: as many as the run's.
        logs_all: every step, and not those alone that the run logged.

    Raises:
        BranchFailed: it did not come to the step.
    """
    num_ranks, threads, failure = num_ranks or origin.num_ranks, origin.environment.get("threads"), ""
    is_exact = num_ranks == origin.num_ranks
    environment = {"OMP_NUM_THREADS": str(threads)} if threads and is_exact else {}
    with tempfile.TemporaryDirectory(prefix="trainer-replay-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        shards = 0 if is_exact else origin.plan.facts.data_shards
        config = replay_config(origin, step, shards=shards, logs_all=logs_all)
        try:
            run_program(num_ranks, config, folder, environment, lambda: False)
        except BranchFailed as error:
            failure = error.reason
            if not (folder / rows_file(0)).is_file() or not read_rows(folder):
                raise
        micros = read_rows(folder)
        values = recorded(load_run(folder, allow_empty=True))
    if not micros:
        raise BranchFailed(f"{origin.run.path}: the data end after step {max(values, default=origin.step)}")
    return Replay(origin, step, num_ranks, values, micros, failure)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """What `Replayed` noted, on all ranks."""
    files = folder.glob(rows_file(0).replace("0", "*"))
    return [micro for file in files for micro in json.loads(file.read_text(encoding="utf-8"))]


def replay_config(origin: Origin, step: int, *, shards: int, logs_all: bool) -> RunConfig:
    """The run's config, from the origin's checkpoint to `step`, which keeps nothing but digests and rows."""
    config, resume = origin.config, "off" if origin.path is None else str(origin.path.absolute())
    changed: dict[str, dict[str, Any]] = {
        "train": {"spike_sigma": 0.0},
        "eval": {"every": 0},
        "sample": {"every": 0},
        "metrics": {"profile": 0, "stdout": "off", "tensorboard": False, "digests": "write"},
        "checkpoint": {"every": 0, "every_minutes": 0.0, "remote": None, "resume": resume},
        "distributed": {"shards": shards or config.distributed.shards},
    }
    changed["metrics"] |= {"log_interval": 1} if logs_all else {}
    changed["metrics"]["wandb"] = config.metrics.wandb.model_copy(update={"mode": "disabled"})
    tables = {table: getattr(config, table).model_copy(update=update) for table, update in changed.items()}
    rides = ExtensionTable(target="trainer.extensions.replayed:Replayed", args={"step": step})
    return config.model_copy(update={**tables, "extension": [*config.extension, rides]})
