"""The weights that `train mix` sets in a run that is training.

The verb appends a request to mix.jsonl. Rank 0 looks for one on logged steps, chooses the step from
which the weights hold, and writes that to events.jsonl before any rank knows of it: a run that is
killed in between finds it there on a resume.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.load import parse_value
from trainer.data.weights import ConstantWeight, ScheduledWeight, first_all_zero
from trainer.distributed.env import RankInfo, from_main_rank
from trainer.errors import UserError
from trainer.files import is_count, parse_json, read_bytes, read_lines
from trainer.metrics.aggregate import Reported
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.training.run_dir import REQUESTS, RunDir

if TYPE_CHECKING:
    from trainer.training.checkpointing.train_state import TrainState
    from trainer.training.run import Run
    from trainer.training.setup.plan import Plan
    from trainer.training.setup.record import Found

logger = get_logger(__name__)


def parse(settings: Sequence[str], names: Collection[str] | None) -> dict[str, float]:
    """Source -> weight, of settings such as `data.source.code.weight=2`. `names`: all sources;
    None: not known. Raises UserError: it is no such setting."""
    found = {}
    for text in settings:
        match = re.fullmatch(r"data\.source\.(.+)\.weight=(.*)", text)
        if match is None or (names is not None and match[1] not in names):
            fix = f"write --set data.source.NAME.weight=2, where NAME is {' or '.join(names or ['one of several'])}"
            raise UserError(f"--set {text}", "is not the weight of a source that the run mixes", fix)
        found[match[1]] = ConstantWeight(parse_value(match[2]), f"--set {text}").evaluate(0)
    return found


def mix_events(events: Path) -> list[bytes]:
    """The lines of a run's events about changes by `train mix`, refused ones included."""
    if not events.is_file():
        return []
    return [line for line in read_lines(events) if b'"mix"' in line]


def changes_of(state: Mapping[str, Any], lines: Iterable[bytes], names: Collection[str]) -> dict[int, dict[str, float]]:
    """The changes of a run so far: batch -> weights of the sources with these names. `state`: the
    state.json of a checkpoint; {}: none. `lines`: the run's events about `train mix`."""
    saved = state.get("extensions", {}).get("mix") or {}
    changes = {int(batch): dict(weights) for batch, weights in saved.items()}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a damaged line, or a refusal
            event = parse_json(line)
            if event["event"] == "mix" and is_count(event["batch"]):
                settings = [f"{key}={pair['after']}" for key, pair in event["changed"].items()]
                changes.setdefault(event["batch"], {}).update(parse(settings, None))
    return {at: {name: to for name, to in changes[at].items() if name in names} for at in sorted(changes)}


def restore_mix(plan: Plan, info: RankInfo, state: TrainState, run_dir: RunDir, found: Found | None) -> None:
    """Continue with the changes of a checkpoint and of the run's events (rank 0's count). Every
    rank must call it, before anything is read."""
    if len(plan.sources) == 1:
        return
    known: dict[int, dict[str, float]] = {}
    if info.is_main:
        saved = {} if found is None else found[1]
        known = changes_of(saved, mix_events(run_dir.events), open_sources(plan))
    known = from_main_rank(known, world_size=info.world_size)
    if known:
        for shard in state.shards:  # each has a blend of its own
            shard.dataset.changes = known
    for batch, weights in known.items():
        logger.info("train mix, whatever the config says: from micro-batch %d on %s", batch, weights)


def open_sources(plan: Plan) -> list[str]:
    """The names of the sources whose weight can change: those that are not off."""
    return [source.name for source in plan.sources if not source.is_off]


class MixWeights(Extension):
    """Applies the weights that `train mix` sets, and reports them with `metrics.per_source`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._dataset = run.state.dataset
        self._known: set[bytes] = set()
        self._problem = ""
        # Skips requests to an earlier process: nobody waits for their answers any more.
        if run.info.is_main:
            self._new_lines()
        if run.config.metrics.per_source:
            self.metric_keys = [f"blend/weight/{source.name}" for source in self._dataset.sources]

    def drain_metrics(self) -> Mapping[str, Reported]:
        """Answer requests (rank 0). Returns the weights, as shares."""
        read = max(state["batch_index"] for state in self.run.position.data_states)
        # At the end of its data rank 0 cannot say where the others are.
        if self.run.info.is_main and not all(micro.is_filler for micro in self.run.reading.last):
            for line in self._new_lines():
                try:
                    self._take_up(parse_json(line), read)
                except Exception as error:  # noqa: BLE001 - earlier decisions must still reach all ranks
                    logger.warning("train mix: a request failed: %r", error)
        shares = self._dataset.shares_at(self.run.position.step, read - 1)
        return dict(zip(self.metric_keys, shares, strict=False))

    def to_exchange(self) -> Mapping[int, Mapping[str, float]]:
        """All changes so far; rank 0's are used."""
        return self._dataset.changes

    def exchanged(self, by_rank: Sequence[Any]) -> None:
        """Change the weights on this rank."""
        if by_rank[0]:
            for shard in self.run.state.shards:
                shard.dataset.changes = by_rank[0]

    def state_dict(self) -> dict[str, Any]:
        """All changes so far, those to come included."""
        return {str(batch): weights for batch, weights in self._dataset.changes.items()}

    def _new_lines(self) -> list[bytes]:
        """The complete lines that are new, even if the file was cut or replaced meanwhile."""
        lines: list[bytes] = []
        try:
            lines = read_bytes(self.run.run_dir.path / REQUESTS).splitlines(keepends=True)
            self._problem = ""
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # what was decided before must still reach all ranks
            if self._problem != str(error):
                self._problem = str(error)
                logger.warning("train mix: requests cannot be read: %s", error)
        new = [line for line in dict.fromkeys(lines) if line.endswith(b"\n") and line not in self._known]
        self._known.update(new)
        return new

    def _take_up(self, request: Mapping[str, Any], read: int) -> None:
        """Announce a change, and have the exchange pass it to all ranks; or refuse it."""
        run, blend = self.run, self._dataset
        step, batch = self._effective_from(read)
        after, problem = dict[str, float](), ""
        try:
            after = parse(request["set"], open_sources(run.plan))
        except UserError as error:
            problem = error.message
        changes = {**blend.changes, batch: {**blend.changes.get(batch, {}), **after}}
        changes = dict(sorted(changes.items()))  # ascending, as a schedule reads them
        problem = self._refusal(step, changes) or problem
        event = {"event": "mix", "global_step": step, "batch": batch, "request": request["id"]}
        assert run.events is not None
        if problem:
            run.events.write({**event, "problem": problem})
            logger.info("train mix: %s", problem)
            return
        names = [source.name for source in blend.sources]
        before = dict(zip(names, blend.weights_at(step, batch), strict=True))
        changed = {f"data.source.{name}.weight": {"before": before[name], "after": to} for name, to in after.items()}
        run.events.write({**event, "changed": changed})
        logger.info("train mix: from step %d (micro-batch %d) on %s", step, batch, after)
        # The other ranks hear of it in the exchange.
        blend.changes, run.extensions.asks = changes, True

    def _effective_from(self, read: int) -> tuple[int, int]:
        """The first (step, micro-batch) for which a change can reach all ranks."""
        run, micro_batches = self.run, self.run.config.micro_batches
        # Two steps may be read until all ranks know, and a loader is `prefetch` batches ahead.
        least = read + 2 * micro_batches.most + run.config.data.prefetch + 1
        step, batch = run.position.step + 1, read
        while batch < least:
            num_micros = run.position.micro_batches  # the batch counts: the step may come sooner
            if micro_batches.is_known_ahead:
                num_micros = micro_batches.at(step, 0)
            step, batch = step + 1, batch + num_micros
        return step, batch

    def _refusal(self, step: int, changes: Mapping[int, Mapping[str, float]]) -> str:
        """Why a run cannot use these changes from this step on; empty if it can."""
        run = self.run
        position, left = run.position, run.length.total - run.position.reached
        # Where its length is in tokens, an estimate from the tokens per step so far.
        last = position.last_step or position.step + -(-left * position.step // max(position.tokens, 1))
        if step > last:
            return f"the run ends after step {last}, before new weights could hold"
        specs = []
        for source in run.state.dataset.sources:
            points = {at: own[source.name] for at, own in changes.items() if source.name in own}
            specs.append(ScheduledWeight("step", {0: 1.0, **points}) if points else source.weight)
        plan = run.plan
        gap = first_all_zero(specs, micro_batches=plan.batches_by_steps, num_batches=plan.num_batches)
        return f"all weights would be zero from micro-batch {gap[0]} on" if gap else ""
