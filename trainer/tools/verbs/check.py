"""`train check`: whether a config is valid, and the values derived from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.cli.imports import uncollected
from trainer.cli.options import (
    ConfigOption,
    JsonOption,
    ReplicasOption,
    SetOption,
    StrategyOption,
    require_config,
)
from trainer.cli.terminal import echo
from trainer.wording import counted

if TYPE_CHECKING:
    import torch

    from trainer.tools.preview.summary import Preview
    from trainer.training.setup.plan import Plan

TEMPORARY = ("gradients", "peak", "process")
MOST_BYTES = 256_000_000  # of the data, to count what one rank draws of it; `train preview` counts any amount
COUNTED = 20_000  # micro-batches over all ranks


def check(
    config: ConfigOption = None,
    overrides: SetOption = None,
    world_size: Annotated[int, typer.Option("--world-size", "--nproc", min=1, help="World size to assume.")] = 1,
    strategy: StrategyOption = None,
    replicas: ReplicasOption = None,
    no_contract: Annotated[
        bool, typer.Option("--no-contract", help="Do not run the model to check its contract.")
    ] = False,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="On a terminal too, print keys that are not set, with their defaults.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Validate a config; print it (in a pipe, with all defaults), and the values derived from it."""
    config_path = require_config(config, "train check")
    import json
    import sys
    from pathlib import Path

    with uncollected():
        import torch

        from trainer.config.load import load_config, located, to_toml
        from trainer.extensions.contract_check import check_here, refuse_breaches, remarks
        from trainer.metrics.logger import get_logger
        from trainer.training.setup.plan import make_plan

    overrides = [*(overrides or []), *_overrides(strategy, replicas)]
    resolved = load_config(config_path, overrides)
    with located(config_path, overrides):
        plan = make_plan(resolved, Path(config_path), world_size)
        _refuse_what_a_run_would(plan)
        device = torch.device("cuda" if resolved.train.device != "cpu" and torch.cuda.is_available() else "cpu")
        preview = _preview(plan)
        _warn(plan, preview, device)
        facts = {**_derived(plan), **_memory(plan, device)}
        report = "--no-contract" if no_contract else check_here(plan)
        if not isinstance(report, str):
            refuse_breaches(plan, report)
    if isinstance(report, str):
        facts["forward_pass"] = facts["contract"] = f"not tried: {report}"
    else:
        for line in remarks(report):
            get_logger("check").warning("model: %s", line)
        facts["forward_pass"] = "ran" if report["forward"].status == "held" else report["forward"].text
        facts["contract"] = report.to_json() if as_json else report.summary()
    sources, eval_sources = _sources(plan, preview), _eval_sources(plan)
    if as_json:
        facts |= {"sources": sources, "eval_sources": eval_sources}
        content = {"config": resolved.model_dump(mode="json"), "facts": facts}
        echo(json.dumps(content, indent=2))
        return
    facts["tokens_in_run"] = _tokens_in_run(plan, preview)
    # The values are comments, so that the output is itself a config.
    with_defaults = defaults or not sys.stdout.isatty()
    echo(to_toml(resolved, with_defaults=with_defaults))
    if not with_defaults:
        echo("# All other keys have their defaults; --defaults prints them.")
    echo(f"# {config_path} is valid. Derived values for {counted(world_size, 'rank')}:")
    _print_facts(facts, sources)
    for name, found in eval_sources.items():
        echo(f"#   eval source {name}: {counted(found['streams'], 'stream')}, {found['bytes'] / 1e6:,.1f} MB")


def _warn(plan: Plan, preview: Preview | None, device: torch.device) -> None:
    """Log what a run on this machine would be refused for, and what the forecast shows."""
    from trainer.metrics.logger import get_logger
    from trainer.tools.preview.config_warnings import growth_warnings, mix_warnings, rank_warnings

    logger = get_logger("check")
    for unmet in plan.unmet_needs(device):
        logger.warning("a run on this machine is refused: %s", unmet.message)
    forecast = () if preview is None else (*mix_warnings(plan, preview), *rank_warnings(plan, preview))
    for warning in [*growth_warnings(plan), *forecast]:
        logger.warning("%s", warning.message)


def _derived(plan: Plan) -> dict[str, Any]:
    """What follows from the config, beside memory and the model's contract.

    Raises:
        UserError: the model lacks the state that a setting needs.
    """
    from dataclasses import asdict

    from trainer.config.rules import check_state_rules, costs_of_carry, why_no_noise_scale
    from trainer.training.setup.plausible import ledger_bytes

    config, batches = plan.config, plan.config.micro_batches
    facts = {**asdict(plan.facts), "parameters": plan.num_parameters(), "vocab_size": plan.vocab_size}
    if not batches.is_constant:
        words = f"{batches.least} to {batches.most}; cells_per_step and tokens_per_step are those of {batches.most}"
        facts["micro_batches"] = words
    if (reason := why_no_noise_scale(config, plan.facts.world_size)) is not None:
        facts["noise_scale"] = f"not measured: {reason}"
    check_state_rules(config, plan.state_width())
    if plan.state_width():
        facts["state_width"] = plan.state_width()
        facts["ledger_megabytes"] = round(ledger_bytes(config.ledger, plan.state_width()) / 1e6, 1)
    return {**facts, **costs_of_carry(config)}


def _tokens_in_run(plan: Plan, preview: Preview | None) -> str | int:
    """The number in words: what full batches would hold, and what the forecast finds in them."""
    most = plan.facts.tokens_in_run
    if plan.config.train.tokens or plan.config.micro_batches.auto is not None:
        return most
    drawn = [source.tokens for source in preview.sources] if preview is not None else [None]
    known = [tokens for tokens in drawn if tokens is not None]
    forecast = f", about {sum(known):,.0f} as forecast" if len(known) == len(drawn) else ""
    return f"at most {most:,} (with full batches{forecast})"


def _preview(plan: Plan) -> Preview | None:
    """What the run will draw, counted over its beginning; None for one rank on much data, which opening may tokenize."""
    import os

    from trainer.tools.preview.summary import make_preview

    size = sum(os.path.getsize(stream.path) for source in plan.sources for stream in source.streams)
    if plan.facts.world_size == 1 and size > MOST_BYTES:
        return None
    return make_preview(plan, plan.facts.world_size, most=COUNTED)


def _sources(plan: Plan, preview: Preview | None) -> dict[str, dict[str, Any]]:
    """Streams and modalities of each source, their shares, and what each of several ranks gets of them."""
    sources: dict[str, dict[str, Any]] = {
        source.name: {"streams": len(source.streams), "modalities": sorted({s.modality for s in source.streams})}
        for source in plan.sources
    }
    for view in preview.sources if preview is not None else ():
        if not view.modalities:
            continue
        found = sources[view.name]
        found["corpus_share"] = {each.name: each.corpus_share for each in view.modalities}
        found["drawn_share"] = {each.name: each.drawn_share for each in view.modalities}
        if plan.facts.world_size > 1:
            found["rank_token_shares"] = list(view.rank_token_shares)
            found["masked_share"] = dict(view.masked_share)
    return sources


def _eval_sources(plan: Plan) -> dict[str, dict[str, int]]:
    """Streams of each validation set, and their bytes."""
    import os

    return {
        source.name: {
            "streams": len(source.streams),
            "bytes": sum(os.path.getsize(stream.path) for stream in source.streams),
        }
        for source in plan.eval_sources
    }


def _refuse_what_a_run_would(plan: Plan) -> None:
    """What is refused before anything is built, with nothing read but the weights that the run would begin with."""
    import os

    from trainer.data.layout import refuse_empty
    from trainer.errors import UserError
    from trainer.storage import Storage, is_url
    from trainer.training.checkpointing.resume_checks import check_resume

    parent = plan.place(plan.config.run.dir)
    if os.path.exists(parent) and not os.path.isdir(parent):
        raise UserError("run.dir", f"{plan.config.run.dir} is not a directory", "name another one")
    plan.check_weights()
    plan.check_model_settings()
    refuse_empty([stream for source in (*plan.sources, *plan.eval_sources) for stream in source.streams])
    check_resume(plan.config, plan.resume)
    stored = plan.resume if is_url(plan.resume) else None
    for key, url in (("checkpoint.remote", plan.config.checkpoint.remote), ("checkpoint.resume", stored)):
        if url is not None:
            Storage(url, key=key)  # which sends nothing


def _overrides(strategy: str | None, replicas: int | None) -> list[str]:
    options = {"distributed.strategy": strategy, "distributed.replicas": replicas}
    return [f"{key}={value}" for key, value in options.items() if value is not None]


def _memory(plan: Plan, device: torch.device) -> dict[str, Any]:
    """What a rank's memory will hold: of several ranks, which part of the model; in MB, or why that is not known."""
    from trainer.distributed.env import RankInfo
    from trainer.training.setup.sharding import describe_shape, mesh_shape

    held: dict[str, Any] = {}
    if plan.facts.world_size > 1:
        shape = mesh_shape(plan.config.distributed, RankInfo(world_size=plan.facts.world_size))
        held["sharding"] = "none: each rank holds the whole model" if shape is None else describe_shape(*shape)
    return {**held, "memory_megabytes": _megabytes(plan, device)}


def _megabytes(plan: Plan, device: torch.device) -> dict[str, float] | str:
    """In MB (1e6 bytes), or why that is not known; warns if the machine has less."""
    from trainer.errors import UserError
    from trainer.import_path import format_error
    from trainer.metrics.logger import get_logger
    from trainer.tools.memory import predict_memory, resident_bytes
    from trainer.training.setup.plausible import memory_bytes
    from trainer.training.setup.sharding import bypassed

    try:
        memory = predict_memory(plan)
    except TimeoutError:
        return "not known: it would take long to find out"
    except Exception as error:
        if plan.facts.world_size > 1 and plan.config.distributed.strategy != "ddp":
            if isinstance(error, UserError):
                raise
            if (found := bypassed(error)) is not None:
                raise found from None
        return f"not known: the step cannot run without numbers ({format_error(error)})"
    needs = {**memory.parts(), "gradients": memory.gradients, "peak": memory.peak}
    if not memory.gradients:
        del needs["gradients"]
    if device.type == "cpu" and (process := resident_bytes()):
        needs["process"] = process
    if needs["peak"] > memory_bytes(device):
        text = "a step's tensors take %.1f GB per rank at their most; %s has %.1f GB of memory here"
        get_logger("check").warning(text, needs["peak"] / 1e9, device.type, memory_bytes(device) / 1e9)
    return {name: round(size / 1e6, 1) for name, size in needs.items()}


def _print_facts(facts: dict[str, Any], sources: dict[str, dict[str, Any]]) -> None:
    memory = facts.pop("memory_megabytes")
    for name, value in facts.items():
        echo(f"#   {name} = {value:,}" if isinstance(value, int) else f"#   {name} = {value}")
    if isinstance(memory, str):
        echo(f"#   memory per rank: {memory}")
    else:
        parts = ", ".join(f"{name} {size:,.1f}" for name, size in memory.items() if name not in TEMPORARY)
        line = f"#   memory per rank: {memory['peak']:,.1f} MB of tensors at the worst moment of a step "
        line += f"({parts} of them all the time"
        line += f", gradients {memory['gradients']:,.1f} after its backward)" if "gradients" in memory else ")"
        if "process" in memory:
            line += (
                f", and {memory['process']:,.0f} MB of the process itself: {memory['peak'] + memory['process']:,.0f} MB"
            )
        echo(line)
    for name, found in sources.items():
        what = f"{counted(found['streams'], 'stream')}, modalities {', '.join(found['modalities'])}"
        echo(f"#   source {name}: {what if found['streams'] else 'a data set of your own'}")
        for modality, share in found.get("corpus_share", {}).items():
            echo(f"#     {modality}: {share:.1%} of the corpus, {found['drawn_share'][modality]:.1%} of what is drawn")
        if "rank_token_shares" in found:
            tokens, masked = found["rank_token_shares"], found["masked_share"]
            by_mode = ", ".join(f"{share:.1%} with {mode}" for mode, share in masked.items())
            echo(f"#     tokens per rank: {min(tokens):.1%} to {max(tokens):.1%}, in both batching modes")
            echo(f"#     micro-batches without rows on the worst rank: {by_mode}")
