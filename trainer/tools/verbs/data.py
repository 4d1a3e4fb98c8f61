"""`train data`: build corpora, tokenize text, and show what a step read."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from trainer.cli.parts import PARTS
from trainer.cli.terminal import ConfigOption, SetOption, echo, require_config, uncollected
from trainer.errors import UserError
from trainer.tools.verbs import shared
from trainer.tools.verbs.shared import print_json, print_table, require_run, writing
from trainer.wording import counted, few

app = typer.Typer(help="Build and tokenize data.", no_args_is_help=True)
build_app = typer.Typer(help="Build a corpus in the NESTED layout.", no_args_is_help=True)
synth_app = typer.Typer(help="Generate a synthetic corpus.", no_args_is_help=True)
app.add_typer(build_app, name="build")
app.add_typer(synth_app, name="synth")

OutOption = Annotated[str, Option(help="Directory of the corpus.", metavar="DIR")]
SHOWN = ("source", "stream", "documents", "cell", "tokens")  # columns of the table of rows


@build_app.command()
def pytext(out: OutOption = "data/pytext", force: shared.ForceOption = False) -> None:
    """Build a corpus of text that every installation has: sources, headers and prose of the installed packages."""
    from trainer.tools.corpora import build_pytext

    with writing(out):
        manifest = build_pytext(Path(out), force=force)
    _summarise(out, manifest)


@build_app.command()
def text(
    out: OutOption,
    modality: Annotated[list[str], Option(help="A modality and its files; repeatable.", metavar="NAME=GLOB")],
    force: shared.ForceOption = False,
) -> None:
    """Build a corpus of your own text: one document per file."""
    from trainer.tools.corpora import build_text

    globs: dict[str, list[str]] = {}
    for given in modality:
        name, _, pattern = given.partition("=")
        if not name or not pattern:
            fix = "write --modality 'prose=docs/**/*.md'"
            raise UserError(f"--modality {given}", "is not of the form NAME=GLOB", fix)
        globs.setdefault(name, []).append(pattern)
    with writing(out):
        manifest = build_text(Path(out), globs, force=force)
    _summarise(out, manifest)


def _summarise(out: str, manifest: Mapping[str, Any]) -> None:
    skipped = [f"{source} ({reason})" for source, reason in manifest["skipped"].items()]
    if skipped:
        echo(f"skipped {counted(len(skipped), 'file')}: {few(skipped)}; see manifest.json", err=True)
    for modality, found in manifest["modalities"].items():
        counts = f"{counted(found['documents'], 'document')}, {counted(found['streams'], 'stream')}"
        echo(f"{modality}: {counts}, {found['text_bytes'] / 1e6:.1f} MB of text", err=True)
    echo(f"the corpus is in {Path(out)}; contents: {Path(out)}/manifest.json", err=True)


@app.command()
def tokenize(config: ConfigOption = None, settings: SetOption = None) -> None:
    """Tokenize the text of a config ahead of its runs, into data.cache_dir. Run it again after an interruption."""
    from trainer.config.load import load_config, located
    from trainer.config.schema import DistributedTable
    from trainer.distributed.env import RankInfo
    from trainer.lab.tokenized import tokenize_source
    from trainer.training.plan import make_plan

    path = require_config(config, "train data tokenize")
    with located(path, settings or []):
        whole = load_config(path, settings or []).model_copy(update={"distributed": DistributedTable()})
        plan = make_plan(whole, 1, parts=PARTS)
    is_slow = plan.tokenizer.is_slow
    for source in (*plan.sources, *plan.eval_sources):
        found = tokenize_source(plan, source, RankInfo())
        is_slow |= bool(found)
        what = "nothing, or too little, to tokenize ahead"
        if found:
            what = f"tokens of {counted(len(found), 'file')} in {Path(next(iter(found.values()))).parent}"
        echo(f"source {source.name}: {what}", err=True)
    if not is_slow:
        problem = f"{plan.tokenizer.name!r} takes no time: runs read the files as they are"
        raise UserError("data.tokenizer", problem, "name a tokenizer.json")


@synth_app.command("key-recall")
def key_recall(
    out: OutOption,
    groups: Annotated[int, Option(help="Groups over all streams.")] = 1024,
    cells: Annotated[int, Option(min=2, help="Cells per group.")] = 16,
    seq_len: Annotated[int, Option(min=5, help="Bytes per cell.")] = 6,
    streams: Annotated[int, Option(min=1, help="Number of files.")] = 8,
    force: shared.ForceOption = False,
) -> None:
    """Generate groups whose first cell holds the answers to all later cells: not learnable without carried state."""
    from trainer.tools.corpora import NUM_SYMBOLS, build_key_recall

    with writing(out):
        build_key_recall(Path(out), groups=groups, cells=cells, seq_len=seq_len, streams=streams, force=force)
    nats = math.log(NUM_SYMBOLS)
    echo(f"answers, the digits: {nats:.4f} nats each without carried state, 0 with it", err=True)
    echo(f"with it {2 * nats / (cells * seq_len):.4f} nats a byte: the two revealed symbols", err=True)
    echo(f"wrote the corpus to {out}; train with data.seq_len = {seq_len}", err=True)


@app.command("at")
def at_step(
    run_dir: shared.RunDirArgument,
    step: Annotated[int, Argument(min=1, help="An optimizer step.", metavar="STEP")],
    text: shared.TextOption = False,
    trust_code: shared.TrustOption = False,
    as_json: shared.JsonOption = False,
) -> None:
    """Show what a step of a run read, from the data cursors of a checkpoint before it, if any, without the model."""
    logging.disable(logging.INFO)  # what a run says as it starts
    with uncollected():
        from trainer.tools.read_step import find_origin, read_step
    origin = find_origin(require_run(run_dir), step, trust_code=trust_code)
    rows = read_step(origin, step, with_text=text)
    if as_json:
        print_json({"run": run_dir, "step": step, "from_step": origin.step, "rows": rows})
        return
    shown = [key for key in SHOWN if any(row[key] is not None for row in rows)]
    columns = {"shard.micro.row": [*map(_place, rows)]} | {key: [_cell(row[key]) for row in rows] for key in shown}
    print_table(columns, title=f"Step {step} of {escape(run_dir)}, read from step {origin.step}")
    for row in rows:
        for each in row["documents"] or []:
            if "text" in each:
                echo(f"{_place(row)} {each['stream']} document {each['document']}: {each['text']!r}")
            if "trained" in each:
                echo(f"    trained of it: {', '.join(map(repr, each['trained'])) or 'nothing'}")


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['shard']}.{row['micro_batch']}.{row['row']}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        texts = [f"{each['document']} ({each['start']}:{each['stop']})" for each in value]
        for number, each in enumerate(value):
            if each["stream"] != value[0]["stream"]:
                texts[number] = f"{each['stream']} {texts[number]}"
        return escape(", ".join(texts))
    return escape(str(value)) * (value is not None)
