"""The verbs before a run: `train init`, `train check`, `train preview` and `train doctor`."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from trainer.cli.parts import PARTS
from trainer.cli.terminal import ConfigOption, SetOption, echo, require_config, uncollected
from trainer.errors import UserError
from trainer.tools.verbs import shared
from trainer.tools.verbs.shared import DeviceOption, JsonOption, coloured, output, print_json, put_text
from trainer.wording import counted

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.config.schema import RunConfig
    from trainer.lab.contracts import Report
    from trainer.tools.preview.summary import Preview
    from trainer.training.setup.plan import Plan
    from trainer.training.setup.sources import Source

WorldSizeOption = Annotated[int, Option("--world-size", "--nproc", min=1, help="World size to assume.")]
MOST_BYTES = 256_000_000  # of the data, to count what one rank draws of it; `train preview` counts any amount
SCHEMA_NAME = "config.schema.json"
COUNTED = 20_000  # rows over all data shards
EXIT_BREACH = 3
MEANINGS = {
    "precision": "on this machine",
    "data_shards": "parts that the data are read in",
    "cells_per_step": "rows of a step over all ranks, each a chunk of a document",
    "tokens_per_step": "at most, over all ranks",
    "tokens_per_micro": "tokens of a micro-batch over all ranks",
    "fill": "share of tokens_per_step that the run will have, as forecast",
    "groups_in_flight": "documents whose states a data shard keeps at once, at most",
    "capacity_to_change_ranks": "the same after a resume with another number of data shards",
    "ledger_capacity": "states that a data shard has room for",
    "ledger_mode": "which states are dropped",
    "ownership": "which rank keeps a document's state",
    "state_width": "numbers of a document's state",
}
COLOURS = {"held": "healthy", "broken": "error", "warning": "warning"}


def check(
    config: ConfigOption = None,
    overrides: SetOption = None,
    world_size: WorldSizeOption = 1,
    no_contract: Annotated[bool, Option("--no-contract", help="Do not run the model to check its contract.")] = False,
    defaults: Annotated[
        bool, Option("--defaults", help="On a terminal too, print keys that are not set, with their defaults.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Validate a config; print it (in a pipe, with all defaults), and the values derived from it.
    Takes train's --steps, --resume, --stdout, --profile, --strategy and --replicas too, as preview
    does."""
    config_path = require_config(config, "train check")
    with uncollected():
        import torch

        from trainer.config.load import load_config, located, to_toml
        from trainer.lab.contract_check import check_here, refuse_breaches, remarks
        from trainer.metrics.logger import get_logger
        from trainer.tools.preview.summary import make_preview
        from trainer.training.setup.plan import make_plan

    resolved = load_config(config_path, overrides or [])
    with located(config_path, overrides or []):
        plan = make_plan(resolved, Path(config_path), world_size, parts=PARTS)
        _refuse_what_a_run_would(plan)
        device = torch.device("cuda" if resolved.train.device != "cpu" and torch.cuda.is_available() else "cpu")
        preview = None  # of much data in one shard, which opening may tokenize
        if plan.facts.data_shards > 1 or sum(_num_bytes(each) for each in plan.sources) <= MOST_BYTES:
            preview = make_preview(plan, most=COUNTED)
        _warn(plan, preview, device)
        facts = _derived(plan, device) | _fill(plan, preview) | {"memory_megabytes": _megabytes(plan, device)}
        report = "--no-contract" if no_contract else check_here(plan)
        if not isinstance(report, str):
            refuse_breaches(plan, report)
    if isinstance(report, str):
        facts["forward_pass"] = facts["contract"] = f"not tried: {report}"
    else:
        for line in remarks(report):
            get_logger("check").warning("model: %s", line)
        facts["forward_pass"] = report["forward"].text
        if report["forward"].status == "held":
            facts["forward_pass"] = "ran"
        facts["contract"] = report.to_json() if as_json else report.summary()
    facts["sources"] = {source.name: _source(plan, source, preview) for source in plan.sources}
    facts["eval_sources"] = {
        source.name: {"streams": len(source.streams), "bytes": _num_bytes(source)} for source in plan.eval_sources
    }
    if as_json:
        print_json({"config": resolved.model_dump(mode="json"), "facts": facts})
        return
    facts["tokens_in_run"] = _tokens_in_run(plan, preview)
    # The values are comments, so that the output is itself a config.
    with_defaults = defaults or not sys.stdout.isatty()
    echo(to_toml(resolved, with_defaults=with_defaults))
    if not with_defaults:
        echo("# All other keys have their defaults; --defaults prints them.")
    echo(f"# {config_path} is valid. Derived values for {counted(world_size, 'rank')}:")
    _print_facts(facts)


def _num_bytes(source: Source) -> int:
    return sum(os.path.getsize(stream.path) for stream in source.streams)


def _refuse_what_a_run_would(plan: Plan) -> None:
    """Refuse what a run refuses before it builds anything. Reads weights, but no data.
    Raises UserError: the first of them."""
    from trainer.distributed.strategy import shard_units
    from trainer.files import is_url
    from trainer.lab.cellwise import recompute_blocks
    from trainer.lab.optimizers import resolve_own
    from trainer.lab.storage import Storage
    from trainer.lab.weights import check_fit, read_weights
    from trainer.model.protocol import output_layer
    from trainer.tools.corpus.documents import refuse_empty
    from trainer.training.setup.plan import make_auxiliary
    from trainer.training.step.optimizer import parameter_groups

    config, model = plan.config, plan.weightless_model()
    parent = plan.place(config.run.dir)
    if os.path.exists(parent) and not os.path.isdir(parent):
        raise UserError("run.dir", f"{config.run.dir} is not a directory", "name another one")
    if config.model.weights is not None:
        weights, _ = read_weights(plan.place(config.model.weights))
        check_fit(model, weights, key="model.weights", path=config.model.weights)
    groups = parameter_groups(model, config.optimizer)
    if config.optimizer.target is not None:
        resolve_own(config.optimizer.target, groups, config.optimizer)
    if config.objective.chunk_tokens:
        output_layer(model)
    make_auxiliary(config.objective, model, plan.parts)
    if config.train.activation_checkpointing == "block":
        recompute_blocks(model)
    if plan.layout is not None:
        shard_units(model)
    refuse_empty([stream for source in (*plan.sources, *plan.eval_sources) for stream in source.streams])
    _check_resume(config, plan.resume)
    for key, url in (("checkpoint.remote", config.checkpoint.remote), ("checkpoint.resume", plan.resume)):
        if url is not None and is_url(url):
            Storage(url, key=key)  # which sends nothing


def _check_resume(config: RunConfig, resume: str) -> None:
    """Refuse a checkpoint that a run could not resume from; no file is hashed.
    `resume`: `checkpoint.resume`, a path absolute. A URL is left to the run, which downloads it.
    Raises UserError: it is not there, not whole, or was made with another config."""
    from trainer.files import is_url
    from trainer.model.families import with_sizes
    from trainer.training.checkpointing import checkpoint
    from trainer.training.checkpointing.restore import check_config

    if resume not in ("off", "auto") and not is_url(resume):
        saved = checkpoint.named(resume, checkpoint.read_state)["config"]
        check_config(saved, with_sizes(config, saved))


def _tokens_in_run(plan: Plan, preview: Preview | None) -> str | int:
    """The number in words: with full batches, and as forecast."""
    most = plan.facts.tokens_in_run
    if plan.config.train.tokens or plan.config.micro_batches.auto is not None:
        return most
    if preview is None or any(source.tokens is None for source in preview.sources):
        return f"at most {most:,} (with full batches)"
    forecast = sum(source.tokens or 0.0 for source in preview.sources)
    return f"at most {most:,} (with full batches, about {forecast:,.0f} as forecast)"


def _warn(plan: Plan, preview: Preview | None, device: torch.device) -> None:
    """Log what a run on this machine would be refused for, and what the forecast shows."""
    from trainer.metrics.logger import get_logger
    from trainer.tools.preview.config_warnings import fill_warnings, mix_warnings

    logger = get_logger("check")
    for unmet in plan.unmet_needs(device):
        logger.warning("a run on this machine is refused: %s", unmet.message)
    if preview is not None:
        for warning in (*mix_warnings(plan, preview), *fill_warnings(plan, preview)):
            logger.warning("%s", warning.message)


def _derived(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Derived values, without the memory of a step and the model's contract.
    Raises UserError: the model lacks the state that a setting needs."""
    from trainer.config.rules import why_no_noise_scale
    from trainer.training.setup.plan import ledger_bytes

    config, batches, each = plan.config, plan.config.micro_batches, plan.facts.shards_per_rank
    facts = {**asdict(plan.facts), "parameters": plan.num_parameters(), "vocab_size": plan.vocab_size}
    facts["precision"] = config.train.precision
    implementation = getattr(plan.weightless_model(), "implementation", None)
    if implementation is not None:
        facts["implementation"] = implementation(device, config.train.precision)
    if plan.facts.world_size > 1:
        facts["sharding"] = str(plan.layout or "none: each rank holds the whole model")
    if each > 1:
        passes = f"{batches.most * each} forward passes a step instead of {batches.most} of {each} times the rows"
        facts["data_shards"] = f"{plan.facts.data_shards}: each rank runs {each}, in {passes}"
    facts["micro_batches"] = batches.first
    if not batches.is_constant:
        steps = f"cells_per_step and tokens_per_step are those of {batches.most}"
        facts["micro_batches"] = f"{batches.least} to {batches.most}; {steps}"
    reason = why_no_noise_scale(config, plan.facts.world_size)
    if reason is not None:
        facts["noise_scale"] = f"not measured: {reason}"
    width = plan.state_width()
    if width:
        facts["state_width"] = width
        facts["ledger_megabytes"] = round(each * ledger_bytes(config.ledger, width) / 1e6, 1)
    return facts


def _fill(plan: Plan, preview: Preview | None) -> dict[str, Any]:
    """How full the rows will be, and how documents lie in them."""
    from trainer.tools.summary import alignment

    facts: dict[str, Any] = {}
    align = alignment(plan, None)
    if align:
        facts["align"] = align
    if preview is None:
        facts["fill"] = "not forecast of so much data; train preview does"
    elif not preview.has_full_rows:
        facts["fill"] = 'forecast of full rows only (data.mixing.batching_mode = "per_row")'
    elif preview.fill is not None:
        facts["fill"] = round(preview.fill.mean, 4)
    return facts


def _source(plan: Plan, source: Source, preview: Preview | None) -> dict[str, Any]:
    """Streams and modalities of a source, and how much of it is read behind a cut."""
    modalities = sorted({stream.modality for stream in source.streams})
    found: dict[str, Any] = {"streams": len(source.streams), "modalities": modalities}
    if preview is not None and source.streams:
        view = next(each for each in preview.sources if each.name == source.name)
        found["behind_cuts_share"] = view.behind_cuts_share
        found["state_reach_tokens"] = plan.config.max_group_rows * plan.config.row_tokens
    return found


def _megabytes(plan: Plan, device: torch.device) -> dict[str, float] | str:
    """In MB (1e6 bytes), or why that is not known; warns if the machine has less."""
    from trainer.distributed.strategy import bypassed
    from trainer.import_path import format_error
    from trainer.lab.memory import predict_memory, resident_bytes
    from trainer.metrics.logger import get_logger
    from trainer.tools.doubts import memory_bytes

    try:
        memory = predict_memory(plan)
    except TimeoutError:
        return "not known: it would take long to find out"
    except Exception as error:
        # Under a strategy that shards, the same error would end the run.
        if plan.facts.world_size > 1 and plan.config.distributed.strategy != "ddp":
            if isinstance(error, UserError):
                raise
            found = bypassed(error)
            if found is not None:
                raise found from None
        return f"not known: the step cannot run without numbers ({format_error(error)})"
    needs = {**memory.parts(), "peak": memory.peak}
    process = resident_bytes()
    if device.type == "cpu" and process:
        needs["process"] = process
    if needs["peak"] > memory_bytes(device):
        text = "a step's tensors take %.1f GB per rank at their most; %s has %.1f GB of memory here"
        get_logger("check").warning(text, needs["peak"] / 1e9, device.type, memory_bytes(device) / 1e9)
    return {name: round(size / 1e6, 1) for name, size in needs.items()}


def _print_facts(facts: dict[str, Any]) -> None:
    memory, sources, evals = (facts.pop(name) for name in ("memory_megabytes", "sources", "eval_sources"))
    for name, value in facts.items():
        line = f"#   {name} = {value}"
        if isinstance(value, int):
            line = f"#   {name} = {value:,}"
        if name in MEANINGS:
            line += f"   ({MEANINGS[name]})"
        echo(line)
    if isinstance(memory, dict):
        memory = ", ".join(f"{name} {size:,.1f}" for name, size in memory.items()) + " MB"
    echo(f"#   memory per rank: {memory}")
    for name, found in sources.items():
        what = "a data set of your own"
        if found["streams"]:
            what = f"{counted(found['streams'], 'stream')}, modalities {', '.join(found['modalities'])}"
        echo(f"#   source {name}: {what}")
        if found.get("behind_cuts_share"):
            reach = f"at most {found['state_reach_tokens']:,} tokens (data.max_group_cells)"
            what = f"{found['behind_cuts_share']:.1%} of the tokens follow a cut of their document"
            echo(f"#     {what}: their state reaches back to the cut, {reach}")
    for name, found in evals.items():
        echo(f"#   eval source {name}: {counted(found['streams'], 'stream')}, {found['bytes'] / 1e6:,.1f} MB")


def preview(
    config: ConfigOption = None,
    overrides: SetOption = None,
    world_size: WorldSizeOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Forecast sampling, memory and wait times, and warn about harmful settings. Nothing is trained."""
    config_path = require_config(config, "train preview")
    from trainer.config.load import load_config, located
    from trainer.tools.preview.config_warnings import find_warnings
    from trainer.tools.preview.show import print_preview
    from trainer.tools.preview.summary import make_preview
    from trainer.training.setup.plan import make_plan

    resolved = load_config(config_path, overrides or [])
    with _collected_warnings() as logged, located(config_path, overrides or []):
        plan = make_plan(resolved, Path(config_path), world_size, parts=PARTS, logs_doubts=False)
        forecast = make_preview(plan)
    warnings = find_warnings(plan, forecast)
    if as_json:
        found = [{**asdict(each), "message": each.message} for each in warnings]
        print_json({"schema_version": 2, "config": config_path, **asdict(forecast), "warnings": found})
        return
    print_preview(forecast, warnings, output(), num_logged=len(logged))


@contextmanager
def _collected_warnings() -> Iterator[list[logging.LogRecord]]:
    """The warnings that are logged within the block."""
    from logging.handlers import BufferingHandler  # which imports sockets and more

    from trainer.metrics.logger import ROOT

    handler = BufferingHandler(sys.maxsize)
    handler.setLevel(logging.WARNING)
    logging.getLogger(ROOT).addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logging.getLogger(ROOT).removeHandler(handler)


def doctor(
    model: Annotated[
        str | None, Option(help="As model.target, or as model.family.", metavar="PACKAGE.MODULE:FUNCTION|FAMILY")
    ] = None,
    hf: Annotated[
        str | None,
        Option(help="A model of transformers: a directory of save_pretrained.", metavar="PATH"),
    ] = None,
    args: Annotated[str, Option(help="As model.args, a TOML table: '{ heads = 4 }'.", metavar="TABLE")] = "{}",
    vocab_size: Annotated[int, Option(min=2, help="Number of token ids.")] = 257,
    dim: Annotated[int, Option(min=1, help="As model.dim.")] = 64,
    num_layers: Annotated[int, Option(min=1, help="As model.num_layers.")] = 2,
    seq_len: Annotated[int, Option(min=1, help="As data.seq_len.")] = 64,
    device: DeviceOption = "cpu",
    node: Annotated[
        bool, Option("--node", help="Check this machine instead; under torchrun, the network too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that a model carries its state, is causal and keeps rows apart. Exit code 0: it does,
    3: it does not, or that could not be checked."""
    if node:
        _check_node()
        return
    from trainer.config.load import parse_value
    from trainer.distributed.env import pick_device
    from trainer.lab.contracts import check_model

    given: Any = parse_value(args)
    if not isinstance(given, dict):
        raise UserError("--args", f"must be a TOML table, got {args}", "write --args '{ heads = 4 }'")
    if (model is None) == (hf is None):
        raise UserError("train doctor", "needs one model", "name it with --model or with --hf")
    on, name = pick_device(device), str(hf or model)
    built: nn.Module
    if hf is not None:
        from trainer.tools.hugging_face import load

        built, vocab_size, what = load(hf)
        name = f"{name} ({what})"
    else:
        built = _build(name, given, vocab_size, dim, num_layers, seq_len)
    built = built.to(on)
    report = check_model(built, vocab_size=vocab_size, seq_len=seq_len)
    if as_json:
        print_json({"model": hf or model, "args": given, **report.to_json()})
    else:
        _print_report(name, report)
    if report.breaches or report.unchecked:
        raise typer.Exit(EXIT_BREACH)


def _check_node() -> None:
    import socket
    from threading import Timer

    from trainer.tools import limits
    from trainer.tools.inspection.node import NodeCheck

    check, host = NodeCheck(), socket.gethostname()

    def leave() -> None:  # what hangs cannot be ended otherwise
        echo(f"{host}: no answer within {limits.NODE_SECONDS:g} s: {check.doing}", err=True)
        os._exit(EXIT_BREACH)

    timer = Timer(limits.NODE_SECONDS, leave)
    timer.start()
    problem = check.run(limits.NODE_SECONDS)
    timer.cancel()
    for line in (*check.lines, problem or "this node can train"):
        echo(f"{host}: {line}")
    if problem:
        raise typer.Exit(EXIT_BREACH)


def _build(name: str, args: dict[str, Any], vocab_size: int, dim: int, num_layers: int, seq_len: int) -> nn.Module:
    """The model of `--model`, which may take its arguments as it likes."""
    from trainer.config.schema import ModelTable
    from trainer.import_path import resolve_target, users_code
    from trainer.lab.contracts.adapted import adapt
    from trainer.lab.contracts.subject import CallFailed
    from trainer.training.setup.plan import build_model

    sizes = {"vocab_size": vocab_size, "dim": dim, "num_layers": num_layers}
    if ":" in name:
        target = resolve_target(name, "--model")
        with users_code("--model", f"{name} fails"):
            taken = inspect.signature(target).parameters
            made = target(**{key: size for key, size in sizes.items() if key in taken}, **args)
        # Anybody's module is adapted; one that keeps the protocol comes back as it is.
        if hasattr(made, "forward"):
            try:
                adapted = adapt(made)
            except CallFailed as error:
                fix = "give it token ids [B, T], and let it return logits"
                raise UserError("--model", f"{name}: {error}", fix) from None
            if adapted is not made:
                return adapted
    settings: dict[str, Any] = {"target" if ":" in name else "family": name, "args": args}
    table = ModelTable.model_construct(**settings, dim=dim, num_layers=num_layers)
    return build_model(table, vocab_size, seq_len=seq_len, parts=PARTS)


def _print_report(model: str, report: Report) -> None:
    from trainer.tools.fitted_table import Column, fitted_table

    verdicts = report.verdicts
    columns = [
        Column("check", [verdict.check for verdict in verdicts]),
        Column("verdict", [coloured(COLOURS.get(v.status, "unknown"), v.status) for v in verdicts]),
        Column("observation", [escape(verdict.text) for verdict in verdicts], wraps=True),
    ]
    console = output()
    console.print(fitted_table(columns, width=console.width, box=None, pad_edge=False))
    breaches = ", ".join(verdict.check for verdict in report.breaches)
    summary = coloured("healthy", "keeps the contract")
    if breaches:
        summary = coloured("findings", f"breaks {breaches}")
    elif report.unchecked:
        first = report.unchecked[0]
        summary = coloured("findings", f"was not checked for {first.check}") + f": {escape(first.text)}"
    console.print(f"{escape(model)} {summary} ({report.how}; {report.seconds:.1f} s)", highlight=False)


def init(
    paths: Annotated[list[str], Argument(help="Your data: a directory, files or globs.", metavar="PATH_TO_DATA...")],
    out: Annotated[str | None, Option(help="File to write; default: stdout.", metavar="X.TOML")] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
    tokenizer: Annotated[
        str | None,
        Option(help="As data.tokenizer; default: a tokenizer.json of the data, bytes, or ids.", metavar="NAME"),
    ] = None,
    format: shared.FormatOption = "auto",
    dtype: Annotated[str | None, Option(help="Of headerless .bin files; default: guessed.", metavar="DTYPE")] = None,
    eod: shared.EodOption = None,
    column: shared.ColumnOption = None,
    minutes: Annotated[
        float, Option(min=0, help="Longest time of the run, from a few timed steps; 0: one pass, untimed.")
    ] = 5.0,
) -> None:
    """Inspect your data and write a commented config that trains on it."""
    from trainer.tools.init.starter import render_starter
    from trainer.tools.init.survey import make_starter, timed
    from trainer.tools.reference_docs import render_config_schema

    if out is not None:
        shared.refuse_existing(out, force=force)
    starter = make_starter(paths, format=format, dtype=dtype, eod=eod, column=column, tokenizer=tokenizer)
    if minutes:
        starter = timed(starter, minutes)
    put_text(render_starter(starter, schema=None if out is None else SCHEMA_NAME), out)
    if out is not None:
        put_text(render_config_schema(), str(Path(out).with_name(SCHEMA_NAME)))
        for note in starter.notes:
            echo(f"note: {note}", err=True)
        echo(f"{starter.sizes.steps:,} steps: {starter.length}", err=True)
        echo(f"next: train check --config {out}, then: train --config {out}", err=True)
