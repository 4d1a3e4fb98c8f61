"""The sources of the blend, resolved before the process group starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.data_tables import ScheduleTable, SourceTable, Weight
from trainer.config.load import load_dataset_file
from trainer.config.rules import least_steps, tokens_per_micro
from trainer.config.schema import RunConfig
from trainer.data.documents import IdBounds
from trainer.data.formats import is_import_path
from trainer.data.layout import Stream, discover_direct, discover_nested, refuse_unheeded
from trainer.data.tokenizer import Tokenizer
from trainer.data.weights import ConstantWeight, ScheduledWeight, WeightSpec, compose_weights, first_all_zero
from trainer.errors import UserError
from trainer.files import is_url
from trainer.import_path import resolve_target

MAX_INCLUDE_DEPTH = 16


@dataclass(frozen=True)
class Source:
    """One leaf of the blend."""

    name: str  # names of the enclosing sources and its own, joined by `.`
    table: SourceTable
    weight: WeightSpec
    streams: list[Stream]  # empty for a custom target; perhaps also with weight 0

    @property
    def is_off(self) -> bool:
        """Whether its weight is always 0, so that nothing of it is read."""
        return self.weight.zero_from() == 0


def resolve_sources(config: RunConfig, config_path: Path, num_shards: int) -> list[Source]:
    """Every leaf source, with its weight and streams."""
    including = (config_path.resolve(),)
    leaves = [*_leaves(config.data.source, config_path, "", ConstantWeight(1.0), including)]
    micro_tokens = tokens_per_micro(config, leaf_tables(leaves), num_shards)
    batches = config.micro_batches
    num_batches = batches.batches_before(least_steps(config, micro_tokens) + 1)
    # A gap would end the run, perhaps after days.
    weights = [leaf.weight for leaf in leaves]
    gap = first_all_zero(weights, batches, num_batches)
    if gap is not None:
        problem = f"all weights are zero from batch {gap} on (the run has {num_batches} batches a rank)"
        raise UserError("data.source.weight", problem, "give a source a weight above 0 there")
    return leaves


def resolve_eval_sources(config: RunConfig) -> list[Source]:
    """The validation sets of `[[eval.source]]`."""
    tables = {each.name: each.as_source() for each in config.eval.source}
    weight = ConstantWeight(1.0)
    return [Source(name, each, weight, _streams(each, f"eval source {name}")) for name, each in tables.items()]


def leaf_tables(sources: list[Source]) -> list[SourceTable]:
    """The tables of the leaves under their full names, for the rules of the config."""
    return [source.table.model_copy(update={"name": source.name}) for source in sources]


def _leaves(
    tables: list[SourceTable], path: Path, prefix: str, outer: WeightSpec, including: tuple[Path, ...]
) -> Iterator[Source]:
    """The leaves of the tables in a file `path`, whose weights are multiplied by `outer`."""
    for table in tables:
        name = f"{prefix}{table.name}"
        own = weight_spec(table.weight, f"{name}.weight")
        above = f"the weight of {prefix.rstrip('.')}"
        weight = compose_weights(outer, own, path_a=above, path_b=f"{name}.weight")
        if table.include is None:
            leaf = Source(name, table, weight, [])
            try:
                # `located` knows the line of a mistake in the config itself.
                file = str(path) if prefix else ""
                leaf = replace(leaf, streams=_streams(table, f"source {name}", file=file))
            except UserError:
                if not leaf.is_off:  # whose data may be gone
                    raise
            yield leaf
            continue
        included = path.parent / table.include
        if included.resolve() in including or len(including) > MAX_INCLUDE_DEPTH:
            problem = f"{table.include} includes itself"
            raise UserError(f"{name}.include", problem, "break the circle", where=str(path))
        nested = load_dataset_file(included).source
        yield from _leaves(nested, included, f"{name}.", weight, (*including, included.resolve()))


def weight_spec(weight: Weight, path: str) -> WeightSpec:
    """A config's weight as the value that the blend evaluates."""
    if isinstance(weight, ScheduleTable):
        return ScheduledWeight(weight.schedule, weight.points, scale=weight.scale, unit=weight.unit, path=path)
    return ConstantWeight(float(weight), path)


def _streams(table: SourceTable, name: str, *, file: str = "") -> list[Stream]:
    """The streams of a source, called `name` in messages. `file`: an included file that it is in."""
    root, paths = table.root, table.paths
    key, given = f"{name}: paths", paths or []
    if root is not None:
        key, given = f"{name}: root", [root]
    for url in filter(is_url, given):
        fix = "mount the store, or copy the data to a disk first (docs/mixing.md)"
        raise UserError(key, f"{url} is a URL, and data is read from files", fix, where=file)
    try:
        if root is not None:
            return discover_nested(root, table.modalities, format=table.format)
        return discover_direct(paths, format=table.format) if paths is not None else []
    except UserError as error:
        raise UserError(key, f"{error.key}: {error.problem}", error.fix, where=file) from None


def check_reading(
    sources: Sequence[Source], eval_sources: Sequence[Source], tokenizer: Tokenizer, eod: int | None
) -> None:
    """Refuse formats that cannot be imported, options without effect, and an `eod` out of range."""
    if eod is not None:
        IdBounds.of("data", tokenizer).check_eod(eod, "data.eod")
    named = [(f"source {source.name}", source) for source in sources]
    named += [(f"eval source {source.name}", source) for source in eval_sources]
    for name, source in named:
        table = source.table
        given = {name: getattr(table, name) for name in ("dtype", "eod", "text_split", "column", "loss_mask")}
        if is_import_path(table.format):
            resolve_target(table.format, "format")
        refuse_unheeded(source.streams, table.format, given, source=name)
        # A custom format's function decides what eod means.
        if table.eod is not None and not is_import_path(table.format):
            IdBounds.of(name, tokenizer).check_eod(table.eod, f"{name}: eod")
