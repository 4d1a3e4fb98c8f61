"""Repeats a step of a run from the checkpoint before it, in a temporary directory."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from operator import index, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.arrays import IGNORED
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.config.rules import data_shards
from trainer.config.schema import ExtensionTable, RunConfig
from trainer.data.blend import BlendDataset
from trainer.data.groups import OpenStream
from trainer.distributed.env import RankInfo
from trainer.distributed.shards import own_part
from trainer.errors import UserError
from trainer.files import parse_json, read_lines, write_file
from trainer.lab.digests import BITS, KINDS
from trainer.metrics.payload_contract import Restart
from trainer.metrics.run_status import usable
from trainer.options import MOST_MICRO_BATCHES
from trainer.tools.branching.study import BranchFailed, config_path_of, run_program, with_tables
from trainer.tools.runs.load import RunRecord, load_run
from trainer.tools.trained.saved_model import config_of, refuse_code
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.restore import check_data
from trainer.training.checkpointing.tensor_files import read_rank
from trainer.training.extension import Extension
from trainer.training.run_dir import DIGESTS, RunDir
from trainer.training.setup.plan import Plan, make_plan
from trainer.training.setup.sources import make_blend
from trainer.wording import counted

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.data.batch import Carry, MicroBatch
    from trainer.objective.loss import ObjectiveOutput
    from trainer.training.run import Run, StepInFlight
    from trainer.training.step.step import StepOutcome

# Metrics of a step that repeating it must give again.
NUMBERS = ("loss", "grad_norm", "lr", "tokens_in_step", "tokens_seen")
# What does not follow from sums over ranks, which other numbers of ranks round otherwise.
UNROUNDED = ("batch", "lr", "tokens_in_step", "tokens_seen")
Values = dict[int, dict[str, Any]]  # step -> its digests and `NUMBERS`, as far as they were logged
MOST_THREADS, TINY = 1024, 1e-300
LATER = "another launch of the run lies in between: the settings used here are those of {}"


def recorded(run: RunRecord) -> Values:
    """The recorded values that another run must equal to the bit."""
    found: Values = {}
    path = run.path / DIGESTS
    lines = read_lines(path) if path.is_file() else ()
    for text in lines:
        with suppress(ValueError, TypeError, KeyError):  # a line that was cut off
            line = parse_json(text)
            digests = {kind: f"{int(line[kind], 16) % 4**BITS:x}" for kind in KINDS}
            found[index(line["global_step"])] = digests
    for name in NUMBERS:
        for step, value in zip(*run.train.column(name), strict=True):
            found.setdefault(step, {})[name] = value
    return dict(sorted(found.items()))


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The names of both that differ; NaN equals itself."""
    return [name for name in first if name in second and repr(first[name]) != repr(second[name])]


def relative_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """How far loss and gradient norm are apart at most, relative to the second's, as far as finite."""
    worst = 0.0
    for name in ("loss", "grad_norm"):
        if name in first and isinstance(second.get(name), float) and math.isfinite(first[name] - second[name]):
            worst = max(worst, abs(first[name] - second[name]) / max(abs(second[name]), TINY))
    return worst


@dataclass(frozen=True)
class Origin:
    """From where a step can be repeated."""

    run: RunRecord
    config: RunConfig  # of the launch that trained the step, as `environment`
    environment: Mapping[str, Any]
    plan: Plan
    path: Path | None  # of the checkpoint; None: the run's beginning
    state: Mapping[str, Any]  # its state.json
    note: str

    @property
    def step(self) -> int:
        """The last step that is not repeated."""
        return int(self.state.get("step", 0))

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the run."""
        return self.plan.facts.world_size

    @cached_property
    def blends(self) -> list[BlendDataset]:
        """The readers of the data shards, before the first step that is repeated."""
        own = RankInfo().data_shards(self.plan.facts.data_shards)
        blends = [make_blend(self.plan, shard) for shard in own]
        if self.path is not None:
            with checkpoint.loading(self.path, "data cursors"):
                shards = range(self.state["data_shards"])
                states = [read_rank(self.path, number)["data"] for number in shards]
                for number, blend in enumerate(blends):
                    # Data of fewer or more shards is dealt anew.
                    blend.load_state_dict(states[number] if len(states) == len(blends) else states)
        return blends


def _state(path: Path) -> dict[str, Any]:
    return checkpoint.named(str(path), checkpoint.read_state)


def _before(run: RunRecord, later: Sequence[Restart]) -> tuple[RunConfig, Mapping[str, Any], str]:
    """Config and environment of a run before some launches, the newest of which is first: their
    changes, undone. And a note, if that cannot be: a key was not set."""
    before: dict[str, Any] = {}
    for each in later:
        changed = each.details.get("changed")
        if isinstance(changed, Mapping):
            # The newest is first, so of a key the pair of the first launch stays.
            before |= {key: pair.get("before") for key, pair in changed.items() if isinstance(pair, Mapping)}
    sets, environment = [], dict(run.environment)
    for key, value in before.items():
        if key.startswith("env."):
            environment[key.removeprefix("env.")] = value
        else:
            sets.append(f"{key}={json.dumps(value)}")
    path = RunDir(run.path).resolved_config
    try:
        return load_config(path, sets), usable(environment), ""
    except UserError:
        if not later:  # the file itself is damaged
            raise
        note = LATER.format(f"the launch after step {later[0].global_step}")
        return load_config(path), run.environment, note


def find_origin(run_dir: Path, step: int, *, before: int, trust_code: bool) -> Origin:
    """Where to begin, before the step `before`, so as to repeat `step`.
    Raises UserError: there is no such step, its data changed, or its config names code."""
    run = load_run(run_dir, allow_empty=True)
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
    start = max((at for at in kept if at < before), default=0)
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
    state: Mapping[str, Any] = _state(kept[start]) if start else {}
    # A run's beginning has no record of its data: that of its first checkpoint says what they were.
    witness = state or (_state(kept[min(kept)]) if kept else None)
    try:
        plan, _ = check_data(plan, witness, RankInfo())
    except UserError as error:
        error.key, error.fix = str(run_dir), "put the data back"
        raise
    return Origin(run, config, environment, plan, kept.get(start), state, note)


def _with_absolute_includes(config: RunConfig, base: Path) -> RunConfig:
    """The config with included files, which are relative to its own file in `base`, by absolute paths."""
    sources = []
    for each in config.data.source:
        include = each.include and str(base / each.include)
        sources.append(each.model_copy(update={"include": include}))
    data = config.data.model_copy(update={"source": sources})
    return config.model_copy(update={"data": data})


def rows_of(origin: Origin, micros: Sequence[Mapping[str, Any]], *, with_text: bool) -> list[dict[str, Any]]:
    """The rows of a step, from the micro-batches as `Replayed` notes them, with their documents."""
    sources = {source.name: source.dataset for source in origin.blends[0].sources}

    @cache
    def opened(source: str, name: str) -> OpenStream:
        dataset: Any = sources[source]
        found = next(each for each in dataset.streams if each.relative_path == name)
        stream: OpenStream = dataset.open(found)
        return stream

    rows, count = [], Counter[int]()
    for micro in sorted(micros, key=itemgetter("shard")):
        place = {"shard": micro["shard"], "micro_batch": count[micro["shard"]]}
        count[micro["shard"]] += 1
        if micro["is_filler"]:
            continue
        meta = _meta(micro["meta"])
        for number, tokens in enumerate(micro["tokens"]):
            row: dict[str, Any] = {**place, "row": number, "tokens": tokens}
            row |= _held(micro, meta, number)
            if with_text:
                for each in row["documents"] or ():
                    table = opened(each["source"], each["stream"]).documents
                    ids = table.read(each["document"], each["start"], each["stop"])
                    each["text"] = origin.plan.tokenizer.decode(ids)
            if "states" in micro:
                row["state"] = micro["states"][number]
            if "losses" in micro:
                row["loss"] = micro["losses"][number] / tokens if tokens else None
            rows.append(row | micro.get("faults", {}))
    return rows


def _held(micro: Mapping[str, Any], meta: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Source, stream, documents and cell of a row, as far as its data set says."""
    if "rows" not in meta:  # a data set of the user's own
        source = micro["sources"][number] if micro["sources"] else None
        return {"source": source, "stream": meta.get("stream"), "documents": None, "cell": None}
    documents = [dict(each) for each in meta["rows"][number]]
    first, *_ = [*documents, {"source": None, "stream": meta.get("stream")}]
    found = {"source": first["source"], "stream": first["stream"], "documents": documents}
    return {**found, "cell": meta["cell_indices"][number]}


def _meta(text: str) -> Mapping[str, Any]:
    """The record of where a micro-batch lies; empty if a source of the user's own wrote another."""
    with suppress(ValueError):
        found = parse_json(text)
        if isinstance(found, dict):
            return found
    return {}


def _tokens(targets: Any) -> list[int]:
    """The number of targets in each row."""
    counts: list[int] = (targets != IGNORED).sum(1).tolist()
    return counts


def read_step(origin: Origin, step: int) -> list[dict[str, Any]]:
    """The micro-batches of a step, as `rows_of` takes them, by reading on from the data cursors."""
    plan, micros = origin.plan.config.micro_batches, []
    first, start, stop = map(plan.batches_before, (origin.step + 1, step, step + 1))
    # The blends are read on from the checkpoint: batches before the step are drawn and dropped.
    for number in range(first, stop):
        for shard, blend in enumerate(origin.blends):
            batch = next(blend, None)
            if batch is not None and number >= start:
                found = {"shard": shard, "is_filler": False, "sources": batch["dataset_labels"]}
                found["meta"] = str(batch.get("instability_meta_json", "{}"))
                micros.append({**found, "tokens": _tokens(np.asarray(batch["targets"]))})
    return micros


@dataclass(frozen=True)
class Replay:
    """A step that was repeated."""

    num_ranks: int
    is_exact: bool  # it must equal the record: on as many ranks sums round alike
    values: Values  # of the logged steps until then
    micros: list[dict[str, Any]]  # as `Replayed` notes them
    failure: str  # why it ended, if not by itself


def replay(
    origin: Origin,
    step: int,
    *,
    num_ranks: int | None = None,
    logs_all: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Replay:
    """Repeat the run up to `step`.
    `num_ranks`: by default, the run's. `logs_all`: log every step, not only those that it logged.
    Raises BranchFailed: it did not come to the step."""
    own, threads, failure = origin.num_ranks, origin.environment.get("threads"), ""
    num_ranks = num_ranks or own
    changed: dict[str, dict[str, Any]] = {
        "train": {"spike_sigma": 0.0},
        "eval": {"every": 0},
        "metrics": {"digests": "write"},
        "checkpoint": {"resume": "off"},
        "distributed": {},
    }
    if logs_all:
        changed["metrics"]["log_interval"] = 1
    if origin.path is not None:
        changed["checkpoint"]["resume"] = str(origin.path.absolute())
    if num_ranks != own:  # the same rows, on other ranks
        changed["distributed"]["shards"] = origin.plan.facts.data_shards
    # Sums round alike on as many ranks and threads.
    if num_ranks != own or threads not in range(1, MOST_THREADS):
        threads = None
    rides = ExtensionTable(target="trainer.tools.branching.replay:Replayed", args={"step": step})
    config = with_tables(origin.config, changed)
    config = config.model_copy(update={"extension": [*origin.config.extension, rides]})
    with tempfile.TemporaryDirectory(prefix="trainer-replay-", ignore_cleanup_errors=True) as name:
        try:
            run_program(num_ranks, config, Path(name), should_stop, threads=threads)
        except BranchFailed as error:
            failure = error.reason.splitlines()[-1]
        micros = []
        for file in Path(name).glob("replayed_*.json"):
            micros += json.loads(file.read_text(encoding="utf-8"))
        again = load_run(name, allow_empty=True)
        values = recorded(again)
    if should_stop():
        raise BranchFailed("stopped")
    if not micros:
        reason, last = str(again.status.get("reason")).partition(";")[0], again.status.get("last_step")
        ended = f"the run has no such step: it ends after step {last} ({reason})"
        raise BranchFailed(failure or ended)
    return Replay(num_ranks, num_ranks == own, values, micros, failure)


class Replayed(Extension):
    """Ends the run after `step`, whatever its length, and writes the rows that the step read.

    They are written however the run ends; a step that raises leaves those until then.
    """

    def __init__(self, run: Run, *, step: int) -> None:
        super().__init__(run)
        self._step = step
        self._micros: list[dict[str, Any]] = []
        self._num_done = 0
        # Not `train.steps`: schedules go by the length of the run, which must stay.
        run.position.last_step = step
        run.position.evaluation_is_due = False

    def window_read(self, step: int, window: Sequence[MicroBatch]) -> None:
        if step != self._step:
            return
        for micro in window:
            found = {"shard": self.run.state.shards[micro.shard].number, "meta": micro.meta}
            found |= {"is_filler": micro.is_filler, "sources": micro.extras.get("dataset_labels")}
            self._micros.append({**found, "tokens": _tokens(micro.targets)})

    def state_found(self, micro: MicroBatch, carry: Carry, state: Tensor) -> None:
        """Note which rows continue from a state: the ledger gives zeros where it holds none."""
        if not self._micros:
            return
        names = []
        continues = (carry.group_ids >= 0) & (carry.cell_index > 0)
        for is_held, has_begun in zip((state != 0).any(1).tolist(), continues, strict=True):
            if not has_begun:
                names.append("fresh")
            else:
                names.append("carried" if is_held else "cold")
        self._micros[self._num_done]["states"] = names

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Note each row's loss, in nats, and whether gradients are finite."""
        if not self._micros:
            return
        noted = self._micros[self._num_done]
        noted["faults"] = {}
        if result.token_loss is not None:
            noted["losses"] = result.token_loss.double().sum(1).tolist()
        for each in self.run.model.parameters():
            if each.grad is not None and not own_part(each.grad).isfinite().all():
                noted["faults"]["gradient"] = "not finite"
        self._num_done += 1

    def step_finished(self, taken: StepInFlight, outcome: StepOutcome) -> None:
        """No checkpoint is needed."""
        self.run.saver.last_saved = taken.step

    def closed(self) -> None:
        text = json.dumps(self._micros)
        write_file(self.run.run_dir.path / f"replayed_{self.run.info.rank}.json", text, sync=False)
