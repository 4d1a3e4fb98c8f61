"""`train mix`: other mixing weights for a run that is training.

The tool appends a request to mix.jsonl. Rank 0 looks for one on logged steps, chooses the step from which the weights hold, and
writes that to events.jsonl before any rank knows of it: a run that is killed in between finds it there when it resumes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from trainer.config.load import parse_value
from trainer.data.weights import ConstantWeight, ScheduledWeight, first_all_zero
from trainer.distributed.agree import from_main_rank
from trainer.errors import UserError
from trainer.files import open_plain, parse_json, read_lines
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension

if TYPE_CHECKING:
    from trainer.metrics.aggregate import Reported
    from trainer.training.run import Run
    from trainer.training.setup.record import Found

logger = get_logger(__name__)
REQUESTS: Final = "mix.jsonl"
Changes = Mapping[int, Mapping[str, float]]
"""See `BlendDataset.changes`."""


def parse(settings: Sequence[str], names: Collection[str] | None) -> dict[str, float]:
    """The weights that settings such as `data.source.code.weight=2` give to sources.

    Args:
        names: of the sources that can have another weight; None: not known.

    Raises:
        UserError: something else is set, or no weight.
    """
    found = {}
    for text in settings:
        match = re.fullmatch(r"data\.source\.(.+)\.weight=(.*)", text)
        if match is None or (names is not None and match[1] not in names):
            which = "" if names is None else f", where NAME is {' or '.join(names)}"
            problem = "is not the weight of a source that the run reads"
            raise UserError(f"--set {text}", problem, f"write --set data.source.NAME.weight=2{which}")
        found[match[1]] = ConstantWeight(parse_value(match[2]), f"--set {text}").evaluate(0)
    return found


def _names(run: Run) -> list[str]:
    """The sources that can have another weight: nothing is open of one that the config has turned off."""
    return [source.name for source in run.plan.sources if not source.is_off]


def replay(run: Run, found: Found | None) -> None:
    """Take up the changes that a checkpoint and the run's events have. Every rank must call it, before anything is read."""
    saved = {} if found is None else found[1]["extensions"].get("mix") or {}
    own = _recorded(run, saved) if run.info.is_main else {}
    changes: Changes = from_main_rank(own, world_size=run.info.world_size)
    _tell(run, changes)
    for batch, weights in changes.items():
        logger.info("train mix, whatever the config says: from micro-batch %d on: %s", batch, _words(weights))


def _recorded(run: Run, saved: Mapping[str, Any]) -> Changes:
    """The changes of sources that can have another weight, in their order."""
    names = _names(run)
    changes = {int(batch): dict(weights) for batch, weights in saved.items()}
    with suppress(FileNotFoundError):
        for line in read_lines(run.run_dir.events):
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # a damaged line
                if b'"mix"' in line and (event := parse_json(line))["event"] == "mix":
                    pairs = [(key, pair["after"]) for key, pair in event["changed"].items()]
                    changes.setdefault(event["batch"], {}).update(parse([f"{key}={to}" for key, to in pairs], None))
    return {
        batch: weights
        for batch in sorted(changes)
        if (weights := {name: weight for name, weight in changes[batch].items() if name in names})
    }


def _tell(run: Run, changes: Changes) -> None:
    for shard in run.state.shards:
        shard.dataset.changes = changes


def _words(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())


class Mix(Extension):
    """Answers requests, and reports the weights with `metrics.per_source`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._dataset = run.state.dataset
        self._requests = run.run_dir.path / REQUESTS
        # Nobody waits any more for an answer to what an earlier process was asked.
        self._offset = self._requests.stat().st_size if self._requests.exists() else 0
        if run.config.metrics.per_source:
            self.metric_keys = [f"blend/weight/{source.name}" for source in run.plan.sources]

    def drain_metrics(self) -> Mapping[str, Reported]:
        """Take up what is asked (rank 0). Returns the weights, as shares."""
        position = self.run.position
        pairs = zip(position.data_states, self.run.last_read, strict=True)
        read = max((state["batch_index"] for state, micro in pairs if not micro.is_filler), default=0)
        if not read:  # this rank has come to the end of its data, and cannot say where the others are
            return {}
        for line in self._new_lines() if self.run.info.is_main else ():
            try:
                request = parse_json(line)
                self._take_up(list(map(str, request["set"])), str(request["id"]), read)
            except (ValueError, KeyError, TypeError):
                logger.warning("%s has a line that is no request", self._requests)
        shares = self._dataset.shares_at(position.step, read - 1) if self.metric_keys else []
        return dict(zip(self.metric_keys, shares, strict=True))

    def _new_lines(self) -> list[bytes]:
        with suppress(FileNotFoundError), open_plain(self._requests) as file:
            file.seek(self._offset)
            lines = b"".join(file.read().rpartition(b"\n")[:2])
            self._offset += len(lines)
            return lines.splitlines()
        return []

    def _take_up(self, settings: Sequence[str], number: str, read: int) -> None:
        """Announce a change and have it told to all ranks; or refuse it."""
        step, batch = self._first_unread(read)
        event: dict[str, Any] = {"global_step": step, "batch": batch, "request": number}
        after: dict[str, float] = {}
        try:
            after = parse(settings, _names(self.run))
            problem = self._problem(changes := self._with(batch, after))
        except UserError as error:
            problem = error.message
        if problem:
            logger.warning("train mix: %s", problem)
            self.run.event({"event": "mix_refused", **event, "problem": problem})
            return
        names = [source.name for source in self._dataset.sources]
        before = dict(zip(names, self._dataset.weights_at(step, batch), strict=True))
        pairs = {name: {"before": before[name], "after": weight} for name, weight in after.items()}
        changed = {f"data.source.{name}.weight": pair for name, pair in pairs.items()}
        if self.run.events is not None:
            self.run.events.write({"event": "mix", **event, "changed": changed})
        self._dataset.changes = changes
        self.run.extensions.asks = True
        logger.info("train mix: from step %d (micro-batch %d) on: %s", step, batch, _words(after))

    def _with(self, batch: int, weights: Mapping[str, float]) -> Changes:
        former = self._dataset.changes
        return dict(sorted({**former, batch: {**former.get(batch, {}), **weights}}.items()))

    def _problem(self, changes: Changes) -> str:
        specs, plan = [], self.run.plan
        for source in self._dataset.sources:
            later = {first: at[source.name] for first, at in changes.items() if source.name in at}
            specs.append(ScheduledWeight("step", {0: 1.0, **later}) if later else source.weight)
        gap = first_all_zero(specs, micro_batches=plan.batches_by_steps, num_batches=plan.num_batches)
        return f"all weights would be zero from micro-batch {gap[0]} on" if gap else ""

    def _first_unread(self, read: int) -> tuple[int, int]:
        """The first step of which no rank can have read anything when it is told, and its first micro-batch."""
        position, plan = self.run.position, self.run.config.micro_batches
        # Two steps may be read until then, and a loader is so many batches ahead.
        least = read + 2 * plan.most + self.run.config.data.prefetch + 1
        step, batch = position.step + 1, read
        while batch < least:
            # Where the batch may grow, the micro-batch is what counts: the step is that of a batch that stays.
            batch += plan.at(step, 0) if plan.is_known_ahead else position.micro_batches
            step += 1
        return step, batch

    def to_exchange(self) -> Changes:
        """All changes so far; rank 0's count."""
        return self._dataset.changes

    def exchanged(self, by_rank: Sequence[Changes | None]) -> None:
        """Change the weights on this rank."""
        if by_rank[0] is not None:
            _tell(self.run, by_rank[0])

    def state_dict(self) -> dict[str, Any]:
        """All changes so far, those to come included."""
        return {str(batch): weights for batch, weights in self._dataset.changes.items()}
