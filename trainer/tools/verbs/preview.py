"""`train preview`: sampling, memory and wait times of a run, before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.cli.options import ConfigOption, JsonOption, SetOption, require_config
from trainer.cli.terminal import echo, output


def preview(
    config: ConfigOption = None,
    overrides: SetOption = None,
    world_size: Annotated[int, typer.Option("--world-size", "--nproc", min=1, help="World size to assume.")] = 1,
    as_json: JsonOption = False,
    out: Annotated[
        str | None, typer.Option(help="Also draw a picture: a page that opens from disk.", metavar="X.HTML")
    ] = None,
) -> None:
    """Forecast sampling, memory and wait times, and warn about harmful settings. Nothing is trained."""
    config_path = require_config(config, "train preview")
    import json
    from dataclasses import asdict
    from pathlib import Path

    from trainer.config.load import load_config, located
    from trainer.metrics.logger import counted_warnings
    from trainer.tools.pictures import check_page
    from trainer.tools.preview.config_warnings import find_warnings
    from trainer.tools.preview.picture import draw
    from trainer.tools.preview.summary import make_preview
    from trainer.training.setup.plan import make_plan

    picture = None if out is None else check_page(out)
    resolved = load_config(config_path, overrides or [])
    with counted_warnings() as logged, located(config_path, overrides or []):
        plan = make_plan(resolved, Path(config_path), world_size, logs_doubts=False)
        forecast = make_preview(plan, world_size)
    warnings = find_warnings(plan, forecast)
    if picture is not None:
        draw(forecast, picture)
        echo(f"wrote the picture to {out}", err=True)
    if as_json:
        found = [{**asdict(each), "message": each.message} for each in warnings]
        content = {"schema_version": 1, "config": config_path, **asdict(forecast), "warnings": found}
        echo(json.dumps(content, indent=2))
        return
    from trainer.tools.preview.terminal import print_preview  # needs plotext, which JSON does not

    print_preview(forecast, warnings, output(), num_logged=logged.count)
