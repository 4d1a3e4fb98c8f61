"""The verbs before a run: `train init`, `train check` and `train config`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer

from trainer.cli.parts import PARTS
from trainer.cli.terminal import ConfigOption, SetOption, echo, require_config, uncollected
from trainer.tools.verbs import shared
from trainer.tools.verbs.shared import JsonOption, print_json, put_text
from trainer.wording import counted, few, printable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.config.schema import RunConfig
    from trainer.tools.doubts import Content
    from trainer.training.build import Lanes
    from trainer.training.plan import Plan, Source

_world_size = Option("--world-size", "--nproc", min=1, max=10**6, help="World size to assume.")
WorldSizeOption = Annotated[int, _world_size]
SCHEMA_NAME = "config.schema.json"
config_app = Typer(help="The config's schema, and its keys.", no_args_is_help=True)


def check(
    config: ConfigOption = None,
    overrides: SetOption = None,
    world_size: WorldSizeOption = 1,
    no_contract: Annotated[bool, Option("--no-contract", help="Do not run the model to check its contract.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Validate a config; print the keys that it sets, and the values derived from it.
    Takes train's --steps, --resume, --stdout, --profile, --strategy and --replicas too."""
    config_path = require_config(config, "train check")
    with uncollected():
        import torch

        from trainer.config.load import load_config, located, to_toml
        from trainer.config.rules import needs_of_cuda
        from trainer.lab.contract_check import check_here, refuse_breaches
        from trainer.metrics.logger import get_logger
        from trainer.tools.doubts import contents
        from trainer.training.build import plan_lanes, runs_on
        from trainer.training.plan import make_plan, width_of

    resolved, logger = load_config(config_path, overrides or []), get_logger("check")
    with located(config_path, overrides or []):
        plan = make_plan(resolved, world_size, parts=PARTS)
        model = plan.weightless_model()  # built once: many layers take long
        _refuse_what_a_run_would(plan, model)
        device = torch.device("cuda" if resolved.train.device != "cpu" and torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            for unmet in needs_of_cuda(resolved.train):
                logger.warning("a run on this machine is refused: %s", unmet.message)
        content = contents(plan)
        facts = _derived(plan, model, device, plan_lanes(plan, width_of(model), device))
        report = "--no-contract" if no_contract else check_here(plan)
        if isinstance(report, str):
            facts["contract"] = f"not tried: {report}"
        else:
            refuse_breaches(plan, report)
            facts["contract"] = report.to_json() if as_json else report.summary()
    sources = {
        "sources": _sources(plan, content, runs_on(plan, model)),
        "parameter_groups": _parameter_groups(resolved, model),
        "frozen": [name for name, each in model.named_parameters() if not each.requires_grad],
        "eval_sources": {source.name: _source(source) for source in plan.eval_sources},
    }
    if as_json:
        print_json({"config": resolved.model_dump(mode="json"), "facts": facts | sources})
        return
    # The values are comments, so that the output is itself a config.
    echo(to_toml(resolved, with_defaults=False))
    echo("# All other keys have their defaults (train config docs).")
    echo(f"# {config_path} is valid. Derived values for {counted(world_size, 'rank')}:")
    for line in _lines_of(facts, sources):
        echo(f"#   {line}")


def _source(source: Source) -> dict[str, Any]:
    """Streams, modalities and bytes of a source."""
    modalities = sorted({stream.modality for stream in source.streams})
    size = sum(os.path.getsize(stream.path) for stream in source.streams)
    return {"streams": len(source.streams), "modalities": modalities, "bytes": size}


def _sources(plan: Plan, content: Mapping[str, Content], is_full: bool) -> dict[str, dict[str, Any]]:
    """The sources: shares at the beginning, and steps of an epoch in full or padded rows."""
    from trainer.config.rules import mixing_of, reads_lanes
    from trainer.data.groups import file_bytes
    from trainer.data.weights import positions

    of_unit = {unit: positions(unit, 0, plan.config.micro_batches) for unit in ("batch", "step")}
    weights = [source.weight.evaluate(of_unit[source.weight.unit]) for source in plan.sources]
    facts = {}
    for source, weight in zip(plan.sources, weights, strict=True):
        share = weight / sum(weights)
        own = facts[source.name] = {**_source(source), "share": share}
        if source.name in content:
            own |= content[source.name]._asdict()
            own["positions"] = own["tokens"] if is_full else own["padded"]  # 0: not known
            total = own["positions"] or own["tokens"]
            if share and total:
                per_micro = float(plan.facts.tokens_per_micro)
                if not reads_lanes(plan.config):  # shares are of micro-batches of one modality
                    mixing = mixing_of(plan.config, source.table)
                    sizes = mixing.batch_size_by_modality
                    rows = [sizes.get(each.modality, mixing.batch_size) for each in source.streams]
                    mean = harmonic_mean(rows, [*map(file_bytes, source.streams)])
                    per_micro = mean * plan.facts.data_shards * plan.config.data.seq_len * plan.config.data.values
                batches, micros = total / (share * per_micro), plan.config.micro_batches
                last = micros.step_of(int(batches))
                own["steps_per_epoch"] = last - 1 + (batches - micros.batches_before(last)) / micros.at(last)
    return facts


def _parameter_groups(config: RunConfig, model: nn.Module) -> list[dict[str, Any]]:
    """How the parameters are treated, of each group of the optimizer."""
    from trainer.lab.optimizers import is_for_muon
    from trainer.training.optimizer import parameter_groups

    table, found = config.optimizer, []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in parameter_groups(model, table):
        optimizer = table.target or ("adamw" if table.name == "muon" and not is_for_muon(group) else table.name)
        parameters = group.pop("params")
        numbers = sum(parameter.numel() for parameter in parameters)
        found.append({**group, "optimizer": optimizer, "numbers": numbers, "names": [names[id(p)] for p in parameters]})
    return found


def _lines_of(facts: Mapping[str, Any], sources: Mapping[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{part} {size:,.1f}" for part, size in value.items())
        elif isinstance(value, int):
            value = f"{value:,}"
        yield f"{name} = {value}"
    for group in sources["parameter_groups"]:
        settings = f"decay {group['weight_decay']:g}, learning rate x {group['lr_scale']:g}"
        names = dict.fromkeys(re.sub(r"(?<![^.])\d+(?=\.)", "*", name) for name in group["names"])
        shown = f"{group['numbers']:,} {group['role']} parameters: {group['optimizer']}, {settings}"
        yield f"{shown}: {printable(', '.join(names))}"
    if sources["frozen"]:
        yield f"not trained: {few(sources['frozen'])}"
    for kind, named in (("source", sources["sources"]), ("eval source", sources["eval_sources"])):
        yield from (f"{kind} {name}: {_in_words(found)}" for name, found in named.items())


def _in_words(source: Mapping[str, Any]) -> str:
    text = "a data set of your own" * bool(source.get("share", 1)) or "not read at first"
    if source["streams"]:
        text = f"{counted(source['streams'], 'stream')}, {source['bytes'] / 1e6:,.1f} MB"
        text += f", modalities {', '.join(source['modalities'])}"
    if "share" in source:
        text += f"; share {source['share']:.1%} at first"
    if "steps_per_epoch" in source:
        text += f", an epoch then takes {counted(source['steps_per_epoch'], 'step')}"
        if not source["documents"]:
            text += " at most" if source["positions"] else " without padding"
    return text


def _refuse_what_a_run_would(plan: Plan, model: nn.Module) -> None:
    """Raise UserError for what a run would refuse at its start; reads weights, but no data."""
    from trainer.import_path import refuse_arguments, resolve_target, with_own
    from trainer.lab.extensions import refuse_unfit_best
    from trainer.lab.models import recompute_blocks
    from trainer.lab.remote import Store
    from trainer.lab.sharding import output_layer, shard_units
    from trainer.lab.weights import check_fit, read_weights
    from trainer.tools.survey import refuse_empty
    from trainer.training import checkpoint
    from trainer.training.optimizer import build_optimizer
    from trainer.training.plan import make_auxiliary
    from trainer.training.record import check_config

    config = plan.config
    if config.model.weights is not None:
        weights, _ = read_weights(config.model.weights)
        check_fit(model, weights, key="model.weights", path=config.model.weights)
    for extension in config.extension:
        made = partial(resolve_target(extension.target, "extension.target"), None)
        refuse_arguments(made, extension.target, extension.args, key="extension.args")
    named = {f"source {each.name}": each.table for each in plan.sources if not each.is_off}
    named |= {f"eval source {each.name}": each.table for each in plan.eval_sources if config.eval.every}
    for name, table in named.items():
        if table.target is not None:
            given = with_own({"rank": 0, "world_size": 1}, {"seed": 0, "seq_len": 1, **table.args}, f"{name}: args")
            made = resolve_target(table.target, f"{name}: target")
            refuse_arguments(made, table.target, given, key=f"{name}: target")
    build_optimizer(model, config.optimizer, plan.parts)
    if config.objective.chunk_tokens:
        output_layer(model)
    refuse_unfit_best(plan, model, make_auxiliary(config.objective, model, plan.parts))
    if config.train.activation_checkpointing == "block":
        recompute_blocks(model)
    if plan.layout is not None:
        shard_units(model)
    refuse_empty([stream for source in (*plan.sources, *plan.eval_sources) for stream in source.streams])
    if config.checkpoint.remote is not None:
        Store(config.checkpoint.remote)  # which sends nothing
    resume = config.checkpoint.resume
    if resume not in ("off", "auto"):
        checkpoint.refuse_absent(resume)
        with checkpoint.loading(Path(resume), "state"):
            state = checkpoint.read_state(Path(resume))
        check_config(state["config"], config)


def _derived(plan: Plan, model: nn.Module, device: torch.device, lanes: Lanes) -> dict[str, Any]:
    """Derived values, and what a rank's model and its lanes' states take, in MB, by formulas."""
    from trainer.tools.doubts import model_bytes, why_no_noise_scale
    from trainer.tools.summary import alignment
    from trainer.training.build import state_bytes
    from trainer.training.plan import width_of

    config, batches, each = plan.config, plan.config.micro_batches, plan.facts.shards_per_rank
    trained, width = sum(part.numel() for part in model.parameters() if part.requires_grad), width_of(model)
    frozen = sum(part.numel() for part in model.parameters()) - trained
    facts = {**asdict(plan.facts), "parameters": trained, "vocab_size": plan.vocab_size}
    if lanes.sets:
        rows = config.data.mixing.batch_size
        num = lanes.num(rows)
        facts |= {"groups_in_flight": num, "ledger_capacity": config.ledger.capacity or num}
        facts["capacity_to_change_ranks"] = num * (plan.facts.data_shards + 1)
        facts["lanes"] = lanes.words(rows)
    if not plan.facts.tokens_per_step:  # a data set of one's own makes batches of any size
        del facts["tokens_per_step"], facts["tokens_per_micro"]
    facts |= {"precision": config.train.precision, "micro_batches": batches.most}
    implementation = getattr(model, "implementation", None)
    if implementation is not None and plan.has_built_in_model:
        facts["implementation"] = implementation(device, config.train.precision)
    if plan.facts.world_size > 1:
        facts["sharding"] = str(plan.layout or "none: each rank holds the whole model")
    if each > 1:
        passes = f"{batches.most * each} forward passes a step instead of {batches.most} of {each} times the rows"
        facts["data_shards"] = f"{plan.facts.data_shards}: each rank runs {each}, in {passes}"
    if batches.least < batches.most:
        facts["micro_batches"] = f"{batches.least} to {batches.most}; tokens_per_step are those of {batches.most}"
    if reason := why_no_noise_scale(config, plan.facts.world_size):
        facts["noise_scale"] = f"not measured: {reason}"
    if align := alignment(plan, model):
        facts["align"] = align
    facts["state_width"] = width
    sizes = model_bytes(plan, trained, frozen)
    sizes["states"] = facts["groups_in_flight"] * each * state_bytes(config.ledger, width)
    facts["memory_megabytes"] = {name: round(size / 1e6, 1) for name, size in sizes.items()}
    return facts


def init(
    paths: Annotated[list[str], Argument(help="A directory, files or globs.", metavar="PATH_TO_DATA...")],
    out: Annotated[str | None, Option(help="File to write; default: stdout.", metavar="X.TOML")] = None,
    force: shared.ForceOption = False,
    tokenizer: Annotated[str | None, Option(help="As data.tokenizer; default: bytes, or ids.", metavar="NAME")] = None,
    format: shared.FormatOption = "auto",
    dtype: Annotated[str | None, Option(help="Of headerless .bin files.", metavar="DTYPE")] = None,
    eod: shared.EodOption = None,
    column: shared.ColumnOption = None,
) -> None:
    """Inspect your data and write a commented config that trains on it."""
    from trainer.tools.reference_docs import render_config_schema
    from trainer.tools.survey import starter

    if out is not None:
        shared.refuse_existing(out, force=force)
        schema_path = Path(out).parent / SCHEMA_NAME
        with shared.writing(str(schema_path)):
            text = schema_path.exists() and schema_path.read_text("utf-8", "replace")
        if text and "BatchScheduleTable" not in text:  # of another program
            shared.refuse_existing(str(schema_path), force=force)
    text, notes = starter(paths, format=format, dtype=dtype, eod=eod, column=column, tokenizer=tokenizer)
    if out is None:
        echo(text, nl=False)
        return
    put_text(render_config_schema(), str(schema_path))
    put_text(f"#:schema {SCHEMA_NAME}\n{text}", out)
    for note in notes:
        echo(f"note: {note}", err=True)
    echo(f"next: train check --config {shlex.quote(str(out))}, then train with it", err=True)


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of a config; editors complete and check a TOML that starts with `#:schema FILE`."""
    from trainer.tools.reference_docs import render_config_schema

    echo(render_config_schema(), nl=False)


@config_app.command()
def docs() -> None:
    """Print every table and key with its type, default and meaning, as Markdown."""
    from trainer.tools.reference_docs import render_config_markdown

    echo(render_config_markdown(), nl=False)
