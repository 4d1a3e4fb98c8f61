"""`train preview`: what a run will draw, hold and wait for, before it starts; and which settings will hurt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console

from trainer.config.load import load_config
from trainer.preview.config_warnings import find_warnings
from trainer.preview.picture import check_picture, draw
from trainer.preview.summary import make_preview
from trainer.training.setup.plan import make_plan

WIDTH = 120  # where stdout is no terminal


def run_preview(config_path: str, overrides: list[str], *, world_size: int, as_json: bool, out: str | None) -> None:
    """Print a preview as tables and plots, or as JSON; with `out`, draw it too.

    Raises:
        UserError: whatever a run with this config would refuse before it starts, a damaged stream, or a picture that
            cannot be drawn.
    """
    if out is not None:
        check_picture(out)
    plan = make_plan(load_config(config_path, overrides), Path(config_path), world_size)
    preview = make_preview(plan, world_size)
    warnings = find_warnings(plan, preview)
    if out is not None:
        draw(preview, out)
        typer.echo(f"the picture is in {out}", err=True)
    if as_json:
        content = {
            "schema_version": 1,
            "config": config_path,
            **asdict(preview),
            "warnings": [{**asdict(each), "message": each.message} for each in warnings],
        }
        typer.echo(json.dumps(content, indent=2))
        return
    # plotext, which the tables' module needs, is only asked for where something is printed for people.
    from trainer.preview.terminal import print_preview

    print_preview(preview, warnings, Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH))
