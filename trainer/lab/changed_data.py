"""Resumes on files that moved, or changed: with `--accept-data-change` their sources begin the next epoch.

It could go if every corpus were frozen before a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.data.blend import ALL_RANKS, BlendDataset, parts_of, without_sources
from trainer.data.fingerprint import EVAL, Fingerprint, SourceChange, moved
from trainer.data.lanes import keep_places
from trainer.data.layout import renamed
from trainer.data.shard_source import ShardSource, StreamSource
from trainer.metrics.logger import get_logger
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.training.checkpointing.restore import DataCheck

logger = get_logger(__name__)
OPTION = "--accept-data-change"


def restart_changed(
    states: Sequence[Mapping[str, Any]], dataset: BlendDataset, check: DataCheck, *, holds_out: bool
) -> list[dict[str, Any]]:
    """The blend's states of all saving ranks, rewritten so that changed sources begin their next epoch."""
    assert check.saved is not None
    _log_removed_and_evaluated(check)
    rewritten = [without_sources(state, check.change.removed) for state in states]
    for source in dataset.sources:
        given: Any = source.dataset
        before = check.saved.sources.get(source.name)
        if before is None or source.name not in rewritten[0]["names"] or not isinstance(given, StreamSource):
            continue
        change, changed = check.change.sources.get(source.name), []
        if check.change.tokenizer:  # it makes other tokens of every file
            changed = list(check.now.sources[source.name])
        elif change is not None:
            changed = change.changed
        if change is None and not changed:
            continue
        index = rewritten[0]["names"].index(source.name)
        parts = given.restarted(parts_of(rewritten, index))
        for state in rewritten:
            state["sources"][index], state["ended"][index] = {ALL_RANKS: parts}, False
            if isinstance(given, ShardSource):
                state["lanes"] = keep_places(state["lanes"], given, [*before], changed)
        text = f"{OPTION}: source %s: %s; it begins its next epoch, of the files as they are"
        logger.warning(text, source.name, change or SourceChange(changed))
        if changed and holds_out:
            text = f"{OPTION}: source %s: documents are held out by their place in a stream: those of changed "
            text += "streams may have been trained on, and held-out losses do not compare with earlier ones"
            logger.warning(text, source.name)
    return rewritten


def _log_removed_and_evaluated(check: DataCheck) -> None:
    for name in check.change.removed:
        logger.warning(f"{OPTION}: source %s: continuing without it, since the config lacks it", name)
    text = f"{OPTION}: validation set %s: %s; its figures from here on do not compare with earlier ones"
    for name, each in check.change.sources.items():
        if name.startswith(EVAL):
            logger.warning(text, name.removeprefix(EVAL), each)


def with_former_names(plan: Plan, before: Fingerprint, marked: dict[str, dict[str, str]]) -> Plan:
    """Give files of `paths` that moved, or are spelled otherwise, the checkpoint's names, also in `marked`."""

    def kept(source: Source, prefix: str = "") -> Source:
        key, names = prefix + source.name, {}
        if source.table.paths is not None:
            names = moved(before.sources.get(key, {}), marked[key])
        if not names:
            return source
        files = counted(len(names), "file")
        logger.info("source %s: %s moved, by their fingerprints the checkpoint's", key, files)
        marked[key] = dict(sorted((names.get(name, name), mark) for name, mark in marked[key].items()))
        return replace(source, streams=renamed(source.streams, names))

    sources = [kept(source) for source in plan.sources]
    return replace(plan, sources=sources, eval_sources=[kept(source, EVAL) for source in plan.eval_sources])
