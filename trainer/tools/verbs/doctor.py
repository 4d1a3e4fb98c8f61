"""`train doctor`: a model against the contract of a sequence model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from trainer.cli.options import JsonOption
from trainer.cli.terminal import coloured, echo, output
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.contracts import Report

EXIT_BREACH = 3
COLOURS = {"held": "healthy", "broken": "error", "warning": "warning"}


def doctor(
    model: Annotated[
        str, typer.Option(help="As model.target, or as model.family.", metavar="PACKAGE.MODULE:FUNCTION|FAMILY")
    ],
    args: Annotated[str, typer.Option(help="As model.args, a TOML table: '{ heads = 4 }'.", metavar="TABLE")] = "{}",
    vocab_size: Annotated[int, typer.Option(min=2, help="Number of token ids.")] = 257,
    dim: Annotated[int, typer.Option(min=1, help="As model.dim.")] = 64,
    num_layers: Annotated[int, typer.Option(min=1, help="As model.num_layers.")] = 2,
    seq_len: Annotated[int, typer.Option(min=1, help="As data.seq_len.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.", metavar="DEVICE")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Check that a model carries its state, is causal and keeps rows apart. Exit code 0: it does, 3: it does not, or
    nothing could be checked."""
    import torch

    from trainer.config.load import parse_value
    from trainer.config.schema import ModelTable
    from trainer.contracts import check_model
    from trainer.training.setup.plan import build_model

    given: Any = parse_value(args)
    if not isinstance(given, dict):
        raise UserError("--args", f"must be a TOML table, got {args}", "write --args '{ heads = 4 }'")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError("--device", f"{device} is not available here", "use cpu")
    named = {"target": model} if ":" in model else {"family": model}
    settings: dict[str, Any] = {**named, "dim": dim, "num_layers": num_layers, "args": given}
    table = ModelTable.model_construct(**settings)
    built = build_model(table, vocab_size, seq_len=seq_len).to(device)
    report = check_model(built, vocab_size=vocab_size, seq_len=seq_len)
    if as_json:
        echo(json.dumps({"model": model, "args": given, **report.to_json()}, indent=2))
    else:
        _print(model, report)
    if report.breaches or _is_unchecked(report):
        raise typer.Exit(EXIT_BREACH)


def _is_unchecked(report: Report) -> bool:
    """Whether nothing could be judged: a model without a state is still judged for causality."""
    return report["causality"] in report.unchecked


def _print(model: str, report: Report) -> None:
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
    if breaches:
        summary = coloured("findings", f"breaks {breaches}")
    elif _is_unchecked(report):
        summary = coloured("findings", "was not checked") + f": {escape(report['causality'].text)}"
    elif report.unchecked:
        summary = coloured("warning", "keeps the contract, except that carry could not be checked")
    else:
        summary = coloured("healthy", "keeps the contract")
    untested = sum(verdict.status == "not testable here" for verdict in verdicts)
    tail = f"; {untested} of {len(verdicts)} checks could not be made" if untested else ""
    console.print(f"{escape(model)} {summary}{tail} ({report.how}; {report.seconds:.1f} s)", highlight=False)
