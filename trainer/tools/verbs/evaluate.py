"""`train eval`: evaluate a checkpoint, on validation sets of its config or on others."""

from __future__ import annotations

import glob
import os
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.cli.imports import uncollected
from trainer.cli.options import JsonOption, TrustOption, require_run
from trainer.cli.terminal import echo, output
from trainer.errors import UserError
from trainer.files import did_you_mean
from trainer.storage import is_url

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.config.data_tables import EvalSourceTable

HELD_OUT = "held-out documents"
METRICS = {"loss": "loss", "bits_per_byte": "bits per byte", "perplexity": "perplexity", "accuracy": "accuracy"}


def evaluate(
    run_dir: Annotated[str, typer.Argument(help="A run directory, or an exported model.", metavar="RUN_DIR")],
    source: Annotated[
        list[str] | None,
        typer.Option(help="A set: a name, and a file, a glob or a directory. May be repeated.", metavar="NAME=PATH"),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches of each set at most; default: all of --source and held-out."),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Evaluate on all held-out documents, not on the sets of its config.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the latest.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Path of the tokenizer.json if it moved.", metavar="PATH")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint on the eval.source sets of its config and on --source; without any, on its held-out documents."""
    import json

    require_run(run_dir)
    sources = [_parse_source(text) for text in source or []]
    with uncollected():
        from trainer.cli.options import pick_device
        from trainer.tools.trained.offline import evaluate_checkpoint

    found = evaluate_checkpoint(
        run_dir,
        sources,
        step=step,
        batches=batches,
        held_out=held_out,
        device=pick_device(device),
        tokenizer=tokenizer,
        trust_code=trust_code,
    )
    if as_json:
        echo(json.dumps({"run": run_dir, "step": found.step, "metrics": found.metrics}, indent=2))
        return
    output().print(_table(run_dir, found.step, found.metrics, output().width))


def _parse_source(text: str) -> EvalSourceTable:
    """`NAME=PATH` of `--source`: a file, a glob, or a directory with everything below it.

    Raises:
        UserError: it is not of this form, or the path does not exist.
    """
    from trainer.config.data_tables import EvalSourceTable

    name, separator, path = text.partition("=")
    if not (separator and path and name) or not all(letter.isalnum() or letter in "_.-" for letter in name):
        raise UserError("--source", f"{text!r} is not NAME=PATH", "write for example --source books=data/books")
    if os.path.isdir(path):
        path = os.path.join(path, "**", "*")
    elif not (glob.has_magic(path) or is_url(path) or os.path.exists(path)):
        raise UserError("--source", f"{path}: no such file or directory", did_you_mean(path) or "check the path")
    return EvalSourceTable(name=name, paths=[path])


def _table(run_dir: str, step: int | None, metrics: dict[str, float], width: int) -> Table:
    from trainer.tools.fitted_table import Column, fitted_table

    rows: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        if key.startswith("eval/"):
            name, _, metric = key.removeprefix("eval/").rpartition("/")
        else:
            name, metric = HELD_OUT, key.removeprefix("eval_")
        rows.setdefault(name or "-", {})[metric] = value
    # Tasks of the user's own may have metrics of any name; parts of the held-out loss are in the JSON.
    names = list(METRICS) + sorted({m for row in rows.values() for m in row if "/" not in m} - METRICS.keys())
    shown = [metric for metric in names if any(metric in row for row in rows.values())]
    cells = [[f"{row[metric]:.4f}" if metric in row else "" for row in rows.values()] for metric in shown]
    columns = [Column("set", list(rows))]
    columns += [Column(METRICS.get(m, m), column, "right") for m, column in zip(shown, cells, strict=True)]
    title = run_dir if step is None else f"{run_dir}, step {step:,}"
    return fitted_table(columns, width=width, hint="; --json has all", title=title, title_justify="left")
