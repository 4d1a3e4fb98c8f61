"""`train check`: is this config right, and what follows from it?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from trainer.config.load import load_config, to_toml
from trainer.training.setup.plan import make_plan
from trainer.training.setup.probe import try_forward


def run_check(config_path: str, overrides: list[str], *, world_size: int, as_json: bool) -> None:
    """Print the config with every default, and below it, as TOML comments, what follows from it.

    Raises:
        UserError: whatever a run with this config would refuse before it starts.
    """
    config = load_config(config_path, overrides)
    plan = make_plan(config, Path(config_path), world_size)
    plan.check_weights()
    facts: dict[str, Any] = {**asdict(plan.facts), "parameters": plan.num_parameters(), "vocab_size": plan.vocab_size}
    facts["forward_pass"] = try_forward(plan)
    facts["sources"] = {
        source.name: {"streams": len(source.streams), "modalities": sorted({s.modality for s in source.streams})}
        for source in plan.sources
    }
    if as_json:
        typer.echo(json.dumps({"config": config.model_dump(mode="json"), "facts": facts}, indent=2))
        return
    typer.echo(to_toml(config))
    typer.echo(f"# {config_path} is valid. What follows from it on {world_size} rank(s):")
    for name, value in facts.items():
        if name == "sources":
            for source, found in value.items():
                typer.echo(
                    f"#   source {source}: {found['streams']} streams, modalities {', '.join(found['modalities'])}"
                )
        else:
            typer.echo(f"#   {name} = {value:,}" if isinstance(value, int) else f"#   {name} = {value}")
