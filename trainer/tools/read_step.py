"""What a step of a run read, from the data cursors of a checkpoint before it, without the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.arrays import weights_of
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.config.rules import data_shards
from trainer.data.blend import BlendDataset
from trainer.data.groups import OpenStream
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.files import parse_json
from trainer.import_path import users_code
from trainer.lab.loss_mask import MaskedTable
from trainer.lab.tokenized import tokenize_once
from trainer.metrics.logger import get_logger
from trainer.metrics.run_status import usable
from trainer.tools.runs.load import load_run
from trainer.tools.saved_model import config_of, refuse_code
from trainer.training import checkpoint
from trainer.training.build import make_blend, plan_lanes, recorded_sets
from trainer.training.plan import Plan, make_plan, width_of
from trainer.training.record import check_data
from trainer.training.run_dir import RunDir
from trainer.training.tensor_files import read_shard

logger = get_logger(__name__)


@dataclass(frozen=True)
class Origin:
    """From where a step can be read."""

    plan: Plan  # of the launch that trained the step
    step: int  # the last one that is not read
    blends: list[BlendDataset]  # the readers of the data shards after it


def find_origin(run_dir: Path, step: int, *, trust_code: bool) -> Origin:
    """Where to begin, so as to read `step`.

    Raises UserError: there is no such step, its data changed, or its config names code.
    """
    readable = partial(users_code, str(run_dir), "a checkpoint cannot be read", "name another step")
    saved: Mapping[str, Any] = {}
    run, complete = load_run(run_dir), checkpoint.complete_checkpoints(run_dir / checkpoint.CHECKPOINTS)
    kept = {checkpoint.step_of(path): path for path in complete}
    # The launch that trained the step saved the next checkpoint, if any is left; or it is the last.
    later = min((at for at in kept if at >= step), default=None)
    if later is None:
        config, environment = load_config(RunDir(run_dir).resolved_config), run.environment
    else:
        with readable():
            saved = checkpoint.read_state(kept[later])
        config, environment = config_of(saved, kept[later]), saved.get("environment", {})
    refuse_code(config, run_dir, trusted=trust_code)
    before = max((at for at in kept if at < step), default=0)
    path = kept.get(before)
    if path is None and config.checkpoint.resume not in ("off", "auto"):  # a branch of another run
        path = Path(config.checkpoint.resume)
    state: Mapping[str, Any] = {}
    if path is not None:
        with readable():
            state = checkpoint.read_state(path)
    begun = 0 if path in kept.values() else state.get("step", 0)  # of the run that it branched from
    if step <= begun or step > config.train.steps > 0:
        problem = f"has the steps {begun + 1} to {config.train.steps or 'the last'}, not {step}"
        raise UserError(str(run_dir), problem, "name one of them, or the run that it branched from")
    reached = max(*kept, *run.steps, run.status.get("last_step") or 0, 0)
    if step > reached:  # the last steps of a killed run may have no record
        logger.warning("%s trained %d steps on record; step %d would read:", run_dir, reached, step)
    for restart in run.restarts:  # between two checkpoints that are left
        if restart.details.get("changed") and (before or begun) < restart.global_step < (later or math.inf):
            problem = f"has other settings since step {restart.global_step}, and no checkpoint of it"
            raise UserError(str(run_dir), problem, "name a step behind a checkpoint that is left")
    size = usable(environment).get("world_size") or 1
    plan = make_plan(config, size, parts=replace(PARTS, messages=None))
    # A run's beginning has no record of its data: its first checkpoint says what they were.
    witness = state or saved
    try:
        check_data(plan, witness or None, RankInfo())
    except UserError as error:
        error.key, error.fix = str(run_dir), "put the data back"
        raise
    plan = tokenize_once(plan, RankInfo(), bool) or plan  # whose sizes deal the documents
    plan = replace(plan, recorded_sets=recorded_sets(plan, witness))
    lanes = plan_lanes(plan, width_of(plan.weightless_model()), torch.device("cpu"))
    own = RankInfo().data_shards(data_shards(config, size))
    blends = [make_blend(plan, shard, lanes=lanes) for shard in own]
    if path is not None:
        with readable():
            states: list[Any] = [read_shard(path, number)["data"] for number in range(state["data_shards"])]
            if len(states) != len(blends):  # data of fewer or more shards is dealt anew
                states = [states] * len(blends)
            for blend, cursor in zip(blends, states, strict=True):
                blend.load_state_dict(cursor)
    return Origin(plan, int(state.get("step", 0)), blends)


def read_step(origin: Origin, step: int, *, with_text: bool) -> list[dict[str, Any]]:
    """The rows of a step, with their documents, by reading on from the data cursors."""
    batches, rows = origin.plan.config.micro_batches, list[dict[str, Any]]()
    first, start, stop = map(batches.batches_before, (origin.step + 1, step, step + 1))
    # What a blend says it reads: the names of data sets of the user's own.
    own = {f"source {each.name}": each.name for each in origin.plan.sources if each.table.target}
    # The blends are read on from the checkpoint: batches before the step are drawn and dropped.
    for number in range(first, stop):
        for shard, blend in enumerate(origin.blends):
            batch = next(blend, None)
            if batch is not None and number >= start:
                place = {"shard": shard, "micro_batch": number - start}
                rows += [{**place, **row} for row in _rows_of(batch, own.get(blend.now_reading))]
    if with_text:
        _add_text(origin, rows)
    return sorted(rows, key=itemgetter("shard"))


def _rows_of(batch: Mapping[str, Any], own: str | None) -> Iterator[dict[str, Any]]:
    """Targets, source, stream, documents and cell of each row; the last three are None if `own`, a
    data set of the user's own of this name, made the batch."""
    counts = weights_of(np.asarray(batch["targets"])).sum(1).tolist()
    unknown = [None] * len(counts)
    meta: Any = {"source": own, "rows": unknown, "cell_indices": unknown}
    if own is None:
        meta = parse_json(str(batch["instability_meta_json"]))
    for number, (tokens, documents) in enumerate(zip(counts, meta["rows"], strict=True)):
        first = (documents or [meta])[0]  # a batch of one stream names it in any row
        place = {key: first.get(key) for key in ("source", "stream")} | {"documents": documents}
        yield {"row": number, "tokens": tokens, **place, "cell": meta["cell_indices"][number]}


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
            place = each["document"], each["start"], each["stop"]
            ids, decode = table.read(*place), origin.plan.tokenizer.decode
            each["text"] = decode(ids)
            if isinstance(table, MaskedTable):
                each["trained"] = [decode(ids[part]) for part in table.trained(*place)]
