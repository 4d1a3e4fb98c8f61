"""`train mix`: other mixing weights for a run that is training.

The tool appends a request to mix.jsonl. Rank 0 looks for one on logged steps, chooses the step from which the weights hold, and
writes that to events.jsonl before any rank knows of it: a run that is killed in between finds it there when it resumes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainer.config.load import parse_value
from trainer.data.weights import ConstantWeight, ScheduledWeight, first_all_zero
from trainer.distributed.agree import from_main_rank
from trainer.errors import UserError
from trainer.files import is_count, parse_json, read_bytes, read_lines
from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension
from trainer.training.run_dir import REQUESTS

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.metrics.aggregate import Reported
    from trainer.training.run import Run
    from trainer.training.setup.record import Found

logger = get_logger(__name__)


def parse(settings: Sequence[str], names: Collection[str] | None) -> dict[str, float]:
    """The weights that settings such as `data.source.code.weight=2` give to sources with these names (None: not known)."""
    found = {}
    for text in settings:
        match = re.fullmatch(r"data\.source\.(.+)\.weight=(.*)", text)
        if match is None or (names is not None and match[1] not in names):
            fix = f"write --set data.source.NAME.weight=2, where NAME is {' or '.join(names or ['one of several'])}"
            raise UserError(f"--set {text}", "is not the weight of a source that the run mixes", fix)
        found[match[1]] = ConstantWeight(parse_value(match[2]), f"--set {text}").evaluate(0)
    return found


def announced(events: Path) -> list[bytes]:
    """The lines of a run's events that tell of a change, or of a refusal."""
    return [line for line in read_lines(events) if b'"mix"' in line] if events.is_file() else []


def changes_of(state: Mapping[str, Any], lines: Iterable[bytes], names: Collection[str]) -> dict[int, dict[str, float]]:
    """The changes that the state.json of a checkpoint ({}: none) and lines of events have for sources with these names."""
    saved = state.get("extensions", {}).get("mix") or {}
    changes = {int(batch): dict(weights) for batch, weights in saved.items()}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a damaged line, or one of a refusal
            if (event := parse_json(line))["event"] == "mix" and is_count(event["batch"]):
                settings = [f"{key}={pair['after']}" for key, pair in event["changed"].items()]
                changes.setdefault(event["batch"], {}).update(parse(settings, None))
    return {at: {name: to for name, to in changes[at].items() if name in names} for at in sorted(changes)}


def restore(run: Run, found: Found | None) -> None:
    """Take up the changes that a checkpoint and the run's events have. Every rank must call it, before anything is read."""
    lines = announced(run.run_dir.events) if run.info.is_main else ()
    known = changes_of({} if found is None else found[1], lines, open_sources(run))
    known = from_main_rank(known, world_size=run.info.world_size)
    for shard in run.state.shards:
        shard.dataset.changes = known
    for batch, weights in known.items():
        logger.info("train mix, whatever the config says: from micro-batch %d on %s", batch, weights)


def open_sources(run: Run) -> list[str]:
    """The names of those that can have another weight: not the ones that the config has turned off."""
    return [source.name for source in run.plan.sources if not source.is_off]


class Mix(Extension):
    """Answers requests, and reports the weights with `metrics.per_source`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._dataset, self._requests = run.state.dataset, run.run_dir.path / REQUESTS
        self._known: set[bytes] = set()
        self._seen: tuple[int, ...] = ()
        self._problem = ""
        self._new_requests()  # nobody waits any more for an answer to what an earlier process was asked
        if run.config.metrics.per_source:
            self.metric_keys = [f"blend/weight/{source.name}" for source in self._dataset.sources]

    def drain_metrics(self) -> Mapping[str, Reported]:
        """Take up what is asked (rank 0). Returns the weights, as shares."""
        read = max(state["batch_index"] for state in self.run.position.data_states)
        # At the end of its data rank 0 cannot say where the others are.
        if self.run.info.is_main and not all(micro.is_filler for micro in self.run.last_read):
            for line in self._new_requests():
                try:
                    self._take_up(parse_json(line), read)
                except Exception as error:  # noqa: BLE001 - this must stay on, to tell all ranks of what is decided
                    logger.warning("train mix: a request failed: %r", error)
        shares = self._dataset.shares_at(self.run.position.step, read - 1)
        return dict(zip(self.metric_keys, shares, strict=False))

    def _new_requests(self) -> list[bytes]:
        """The complete lines that no earlier call has seen, even if their file was cut or replaced meanwhile."""
        lines: Iterable[bytes] = ()
        try:
            found = self._requests.stat()
            if (seen := (found.st_ino, found.st_size, found.st_mtime_ns)) != self._seen:
                lines = dict.fromkeys(read_bytes(self._requests).splitlines(keepends=True))
                self._seen, self._problem = seen, ""
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # no reason to be off: what was decided must reach all ranks
            if self._problem != str(error):
                self._problem = str(error)
                logger.warning("train mix: requests cannot be read: %s", error)
        new = [line for line in lines if line.endswith(b"\n") and line not in self._known]
        self._known.update(new)
        return new

    def _take_up(self, request: Mapping[str, Any], read: int) -> None:
        """Announce a change and have the exchange pass it to all ranks, or refuse it."""
        blend, plan, after, specs, problem = self._dataset, self.run.plan, {}, [], ""
        # Two steps may be read until all ranks know, and a loader is `prefetch` batches ahead.
        least = read + 2 * plan.config.micro_batches.most + plan.config.data.prefetch + 1
        step, batch, ms = self.run.position.step + 1, read, plan.config.micro_batches
        while batch < least:
            # Where the batch may grow, the micro-batch is what counts: the step is that of a batch that stays.
            batch += ms.at(step, 0) if ms.is_known_ahead else self.run.position.micro_batches
            step += 1
        try:
            after = parse(request["set"], open_sources(self.run))
        except UserError as error:
            problem = error.message
        changes = dict(sorted({**blend.changes, batch: {**blend.changes.get(batch, {}), **after}}.items()))
        for source in blend.sources:
            later = {first: at[source.name] for first, at in changes.items() if source.name in at}
            specs.append(ScheduledWeight("step", {0: 1.0, **later}) if later else source.weight)
        if step > (last := self._last_step()):
            problem = f"the run ends after step {last}, before new weights could hold"
        elif gap := first_all_zero(specs, micro_batches=plan.batches_by_steps, num_batches=plan.num_batches):
            problem = f"all weights would be zero from micro-batch {gap[0]} on"
        before = {each.name: weight for each, weight in zip(blend.sources, blend.weights_at(step, batch), strict=True)}
        changed = {f"data.source.{name}.weight": {"before": before[name], "after": to} for name, to in after.items()}
        answer = {"problem": problem} if problem else {"changed": changed}
        assert self.run.events is not None
        self.run.events.write({"event": "mix", "global_step": step, "batch": batch, "request": request["id"], **answer})
        logger.info("train mix: %s", problem or f"from step {step} (micro-batch {batch}) on {after}")
        if not problem:
            blend.changes, self.run.extensions.asks = changes, True

    def _last_step(self) -> int:
        """The last step of the run; where its length is in tokens, an estimate from the tokens per step so far."""
        position, left = self.run.position, self.run.length.total - self.run.position.reached
        return position.last_step or position.step + -(-left * position.step // max(position.tokens, 1))

    def to_exchange(self) -> Mapping[int, Mapping[str, float]]:
        """All changes so far; rank 0's count."""
        return self._dataset.changes

    def exchanged(self, by_rank: Sequence[Any]) -> None:
        """Change the weights on this rank."""
        for shard in self.run.state.shards if by_rank[0] else ():
            shard.dataset.changes = by_rank[0]

    def state_dict(self) -> dict[str, Any]:
        """All changes so far, those to come included."""
        return {str(batch): weights for batch, weights in self._dataset.changes.items()}
