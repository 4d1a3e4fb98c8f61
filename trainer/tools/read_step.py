"""What a step of a run read, from the data cursors of a checkpoint before it, without the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.arrays import IGNORED
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.config.rules import data_shards
from trainer.config.schema import RunConfig
from trainer.data.blend import BlendDataset
from trainer.data.groups import OpenStream
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.files import parse_json
from trainer.metrics.payload_contract import Restart
from trainer.metrics.run_status import usable
from trainer.options import MOST_MICRO_BATCHES
from trainer.tools.runs.load import RunRecord, changes_of, load_run
from trainer.tools.trained.saved_model import config_of, config_path_of, refuse_code
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.restore import check_data
from trainer.training.checkpointing.tensor_files import read_rank
from trainer.training.run_dir import RunDir
from trainer.training.setup.plan import Plan, make_plan
from trainer.training.setup.sources import make_blend, plan_lanes, recorded_sets
from trainer.wording import counted

LATER = "another launch of the run lies in between: the settings used here are those of {}"


@dataclass(frozen=True)
class Origin:
    """From where a step can be read."""

    plan: Plan  # of the launch that trained the step
    path: Path | None  # of the checkpoint; None: the run's beginning
    state: Mapping[str, Any]  # its state.json
    note: str

    @property
    def step(self) -> int:
        """The last step that is not read."""
        return int(self.state.get("step", 0))

    @cached_property
    def blends(self) -> list[BlendDataset]:
        """The readers of the data shards, before the first step that is read."""
        own = RankInfo().data_shards(self.plan.facts.data_shards)
        lanes = plan_lanes(self.plan, self.plan.state_width(), torch.device("cpu"))
        blends = [make_blend(self.plan, shard, lanes=lanes) for shard in own]
        if self.path is not None:
            with checkpoint.loading(self.path, "data cursors"):
                shards = range(self.state["data_shards"])
                states: list[Any] = [read_rank(self.path, number)["data"] for number in shards]
                if len(states) != len(blends):  # data of fewer or more shards is dealt anew
                    states = [states] * len(blends)
                for blend, state in zip(blends, states, strict=True):
                    blend.load_state_dict(state)
        return blends


def find_origin(run_dir: Path, step: int, *, trust_code: bool) -> Origin:
    """Where to begin, so as to read `step`.

    Raises UserError: there is no such step, its data changed, or its config names code.
    """
    run = load_run(run_dir)
    complete = checkpoint.complete_checkpoints(run_dir / checkpoint.CHECKPOINTS)
    kept = {checkpoint.step_of(path): path for path in complete}
    resumed = [each.global_step for each in run.restarts]
    # Launches after the step may have had another config; a checkpoint between has the step's own.
    since = len(run.restarts)
    while since and resumed[since - 1] >= step:
        since -= 1
    until, note = min(resumed[since:], default=0), ""
    path = next((path for at, path in sorted(kept.items()) if step <= at <= until), None)
    environment: Mapping[str, Any]
    if path is not None:
        saved = _state(path)
        config, environment = config_of(saved, path), usable(saved.get("environment", {}))
    else:
        config, environment, note = _before(run, run.restarts[since:][::-1])
    refuse_code(config, run_dir, trusted=trust_code)
    trunk = Path(config.checkpoint.resume).resolve()
    if checkpoint.step_of(trunk) >= 0 and (trunk / checkpoint.MARKER).is_file():
        kept.setdefault(checkpoint.step_of(trunk), trunk)
    start = max((at for at in kept if at < step), default=0)
    is_branch = resumed and resumed[0] and min(run.steps, default=step) > resumed[0]
    if is_branch and not start:
        problem = f"began from a checkpoint of step {resumed[0]} that is gone"
        raise UserError(str(run_dir), problem, "put it back where checkpoint.resume says")
    if step > config.train.steps and not config.train.tokens:
        problem = f"has {config.train.steps} steps, not {step}"
        raise UserError(str(run_dir), problem, "name one of them")
    size = environment.get("world_size") or 1
    shards = data_shards(config, size)
    if shards > MOST_MICRO_BATCHES:
        problem = f"says that it had {counted(shards, 'data shard')}: what env.json says cannot be"
        raise UserError(str(run_dir), problem, "correct it there")
    if any(start < at < step for at in resumed):
        note = LATER.format(f"step {step}")
    config = _with_absolute_includes(config, config_path_of(environment, run_dir).absolute().parent)
    plan = make_plan(config, Path(), size, parts=PARTS, logs_doubts=False)
    state: Mapping[str, Any] = {}
    witness: Mapping[str, Any] | None = None
    if start:
        witness = state = _state(kept[start])
    elif kept:  # a run's beginning has no record of its data: its first checkpoint says what they were
        witness = _state(kept[min(kept)])
    try:
        plan, _ = check_data(plan, witness, RankInfo())
    except UserError as error:
        error.key, error.fix = str(run_dir), "put the data back"
        raise
    plan = replace(plan, lane_sets=recorded_sets(plan, witness))
    return Origin(plan, kept.get(start), state, note)


def _state(path: Path) -> dict[str, Any]:
    return checkpoint.named(str(path), checkpoint.read_state)


def _before(run: RunRecord, later: Sequence[Restart]) -> tuple[RunConfig, Mapping[str, Any], str]:
    """Config and environment of a run before some launches, the newest of which is first: their
    changes, undone. And a note, if that cannot be: a key was not set."""
    sets, environment = {}, dict(run.environment)
    for each in later:  # of a key the value before the first of them stays
        for key, pair in changes_of(each):
            if key.startswith("env."):
                environment[key.removeprefix("env.")] = pair["before"]
            else:
                sets[key] = json.dumps(pair["before"])
    path = RunDir(run.path).resolved_config
    try:
        return load_config(path, [f"{key}={value}" for key, value in sets.items()]), usable(environment), ""
    except UserError:
        if not later:  # the file itself is damaged
            raise
        note = LATER.format(f"the launch after step {later[0].global_step}")
        return load_config(path), run.environment, note


def _with_absolute_includes(config: RunConfig, base: Path) -> RunConfig:
    """The config with included files, which are relative to its own file in `base`, by absolute paths."""
    sources = []
    for each in config.data.source:
        include = each.include and str(base / each.include)
        sources.append(each.model_copy(update={"include": include}))
    data = config.data.model_copy(update={"source": sources})
    return config.model_copy(update={"data": data})


def read_step(origin: Origin, step: int, *, with_text: bool) -> list[dict[str, Any]]:
    """The rows of a step, with their documents, by reading on from the data cursors."""
    plan, rows = origin.plan.config.micro_batches, list[dict[str, Any]]()
    first, start, stop = map(plan.batches_before, (origin.step + 1, step, step + 1))
    # The blends are read on from the checkpoint: batches before the step are drawn and dropped.
    for number in range(first, stop):
        for shard, blend in enumerate(origin.blends):
            batch = next(blend, None)
            if batch is not None and number >= start:
                place = {"shard": shard, "micro_batch": number - start}
                rows += [{**place, **row} for row in _rows_of(batch)]
    if with_text:
        _add_text(origin, rows)
    return sorted(rows, key=itemgetter("shard"))


def _rows_of(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Targets, source, stream, documents and cell of each row, as far as its data set says."""
    meta: Any = {}
    with suppress(ValueError):  # a data set of the user's own may have written another record
        meta = parse_json(str(batch.get("instability_meta_json", "{}")))
    counts = (np.asarray(batch["targets"]) != IGNORED).sum(1).tolist()
    for number, tokens in enumerate(counts):
        row: dict[str, Any] = {"row": number, "tokens": tokens}
        if not isinstance(meta, dict) or "rows" not in meta:
            source = (batch["dataset_labels"] or [None] * len(counts))[number]
            yield {**row, "source": source, "stream": None, "documents": None, "cell": None}
            continue
        documents = meta["rows"][number]
        first = (documents or [{"source": None, "stream": meta.get("stream")}])[0]
        row |= {"source": first["source"], "stream": first["stream"], "documents": documents}
        yield row | {"cell": meta["cell_indices"][number]}


def _add_text(origin: Origin, rows: Sequence[Mapping[str, Any]]) -> None:
    sources = {source.name: source.dataset for source in origin.blends[0].sources}

    @cache
    def opened(source: str, name: str) -> OpenStream:
        dataset: Any = sources[source]
        found = next(each for each in dataset.streams if each.relative_path == name)
        stream: OpenStream = dataset.open(found)
        return stream

    for row in rows:
        for each in row["documents"] or ():
            table = opened(each["source"], each["stream"]).documents
            ids = table.read(each["document"], each["start"], each["stop"])
            each["text"] = origin.plan.tokenizer.decode(ids)
