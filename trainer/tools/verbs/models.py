"""What a trained model is used for: `train sample`, `train eval` and `train export`."""

from __future__ import annotations

import glob
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainer.cli.options import (
    DeviceOption,
    JsonOption,
    StepOption,
    TokenizerOption,
    TrustOption,
    pick_device,
    require_run,
    uncollected,
)
from trainer.cli.terminal import echo, output, print_json, refuse_existing, writing
from trainer.errors import UserError
from trainer.files import did_you_mean
from trainer.storage import is_url

if TYPE_CHECKING:
    import torch

    from trainer.config.data_tables import EvalSourceTable
    from trainer.extensions.samples import Draw
    from trainer.tools.runs.table import RowTable
    from trainer.tools.trained.saved_model import SavedModel

ModelArgument = Annotated[str, typer.Argument(help="A run directory, or an exported model.", metavar="RUN_DIR")]
ExportFormat = Literal["safetensors", "hf", "csv", "parquet", "tensorboard"]
FORMATS: tuple[ExportFormat, ...] = ("safetensors", "hf", "csv", "parquet", "tensorboard")
SUFFIXES: dict[str, ExportFormat] = {".csv": "csv", ".parquet": "parquet"}
"""Of a file to write -> the format without `--format`."""
DEFAULT_LENGTH = 200
HELD_OUT = "held-out documents"
METRICS = {"loss": "loss", "bits_per_byte": "bits per byte", "perplexity": "perplexity", "accuracy": "accuracy"}


def sample(
    run_dir: ModelArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue; default: the start of a document.")] = "",
    num_bytes: Annotated[int | None, typer.Option("--bytes", min=1, help="Bytes of text to generate [200].")] = None,
    num_tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Tokens to generate, instead of --bytes.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Divides the logits; 0: greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0: from all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    step: StepOption = None,
    tokenizer: TokenizerOption = None,
    device: DeviceOption = "auto",
    trust_code: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generate text from a run's newest checkpoint, with the recurrent state carried from token to token."""
    if num_bytes is not None and num_tokens is not None:
        raise UserError("--bytes", "does not go with --tokens", "give one of the two")
    require_run(run_dir)
    with uncollected():
        from trainer.extensions.samples import Draw, GenerationError
        from trainer.tools.trained.saved_model import load_model

    on = pick_device(device)
    saved = load_model(run_dir, step=step, device=on, tokenizer=tokenizer, trust_code=trust_code)
    draw = Draw(temperature, top_k, seed)
    pieces = []
    if not as_json:
        _write(prompt)
    try:
        for piece in _text_pieces(saved, prompt, draw, num_bytes=num_bytes, num_tokens=num_tokens, device=on):
            pieces.append(piece)
            if not as_json:
                _write(piece)
    except GenerationError as error:
        raise UserError(run_dir, str(error), "take an earlier checkpoint with --step") from None
    if as_json:
        _write(json.dumps({"step": saved.step, "prompt": prompt, "text": "".join(pieces)}, ensure_ascii=False))
    _write("\n")


def _text_pieces(
    saved: SavedModel,
    prompt: str,
    draw: Draw,
    *,
    num_bytes: int | None,
    num_tokens: int | None,
    device: torch.device,
) -> Iterator[str]:
    """The generated text, piece by piece, up to the requested length."""
    from trainer.data.tokenizer import TextStream, prompt_ids
    from trainer.extensions.samples import generate

    is_text = saved.tokenizer.name != "ids"
    if num_bytes is not None and not is_text:
        raise UserError("--bytes", "the model was trained on token ids, which have no bytes", "use --tokens")
    limit = num_tokens or num_bytes or DEFAULT_LENGTH
    tokens = generate(
        saved.model,
        prompt_ids(saved.tokenizer, prompt, "--prompt"),
        draw=draw,
        cell=saved.config.data.seq_len,
        forbidden=[saved.tokenizer.bos_id],
        device=device,
    )
    stream = TextStream(saved.tokenizer)
    written = 0
    # A token has one byte or more, so that a limit in bytes limits the tokens too.
    for token in itertools.islice(tokens, limit):
        piece = stream.push(token)
        written += len(piece.encode("utf-8"))
        yield piece
        # With the bytes tokenizer a token is a byte, so that counting tokens is enough.
        if num_tokens is None and is_text and saved.tokenizer.name != "bytes" and written >= limit:
            break
    yield stream.flush()


def _write(text: str) -> None:
    if sys.stdout.isatty():
        # A model may write anything; an escape sequence must not reach the terminal as one.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    if sys.stdout.encoding.lower().replace("-", "") != "utf8":
        text = text.encode(sys.stdout.encoding, errors="replace").decode(sys.stdout.encoding)
    sys.stdout.write(text)
    sys.stdout.flush()


def evaluate(
    run_dir: ModelArgument,
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
    step: StepOption = None,
    tokenizer: TokenizerOption = None,
    device: DeviceOption = "auto",
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint on the eval.source sets of its config and on --source; without any, on its held-out documents."""
    require_run(run_dir)
    sources = [_parse_source(text) for text in source or []]
    with uncollected():
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
        print_json({"run": run_dir, "step": found.step, "metrics": found.metrics})
    else:
        _print_metrics(run_dir if found.step is None else f"{run_dir}, step {found.step:,}", found.metrics)


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


def _print_metrics(title: str, metrics: dict[str, float]) -> None:
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
    columns = [Column("set", list(rows))]
    for metric in names:
        cells = [f"{row[metric]:.4f}" if metric in row else "" for row in rows.values()]
        if any(cells):
            columns.append(Column(METRICS.get(metric, metric), cells, "right"))
    console = output()
    hint = "; --json has all"
    console.print(fitted_table(columns, width=console.width, hint=hint, title=title, title_justify="left"))


def export(
    run_dir: Annotated[
        str, typer.Argument(help="A run directory; for metrics also a metrics.jsonl.", metavar="RUN_DIR")
    ],
    out: Annotated[str, typer.Option(help="File (csv, parquet) or directory (the others) to write.", metavar="PATH")],
    format: Annotated[
        ExportFormat | None,
        typer.Option(
            help="Weights: safetensors; hf, for from_pretrained. Metrics: csv, parquet, tensorboard. Default: csv or parquet "
            "if PATH ends so, otherwise safetensors."
        ),
    ] = None,
    step: StepOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    trust_code: TrustOption = False,
) -> None:
    """Write a run's weights (safetensors with a model card, or as Hugging Face's) or metrics (CSV, Parquet, TensorBoard)."""
    target = Path(out)
    if format is None:
        format = SUFFIXES.get(target.suffix, "safetensors")
        others = ", ".join(each for each in FORMATS if each != format)
        echo(f"no --format: writing {format}; the others: {others}", err=True)
    refuse_existing(out, force=force)
    if target.is_dir() and not _is_export(target):
        raise UserError(out, "is a directory with other files than an export", "name a new one")
    if not target.absolute().parent.is_dir():
        raise UserError(out, "is in a directory that does not exist", f"mkdir -p {target.absolute().parent}")
    if format in ("safetensors", "hf"):
        from trainer.tools.trained.saved_model import export_model

        with writing(out):
            saved = export_model(
                Path(run_dir), target, step=step, as_hugging_face=format == "hf", trust_code=trust_code
            )
        echo(f"wrote the weights after step {saved.step}, config and model card to {out}", err=True)
        return
    from trainer.tools.runs.load import load_run
    from trainer.tools.runs.table import write_csv, write_parquet

    if step is not None:
        raise UserError("--step", "chooses a checkpoint", "use it with --format safetensors or hf")
    writers = {"csv": write_csv, "parquet": write_parquet, "tensorboard": _write_tensorboard}
    run = load_run(run_dir)
    with writing(out):
        count = writers[format](run.train, run.evals, target)
    for note in run.notes:
        echo(f"note: {note}", err=True)
    echo(f"wrote {count:,} rows of {len(run.keys)} keys to {out}", err=True)


def _write_tensorboard(train: RowTable, evals: RowTable, out: Path) -> int:
    from trainer.metrics.payload_contract import build_payload
    from trainer.metrics.services import TensorboardSink
    from trainer.tools.runs.table import rows_of

    shutil.rmtree(out, ignore_errors=True)
    sink, rows = TensorboardSink(out), rows_of(train, evals)
    try:
        for row in rows:
            sink.log(build_payload(row.mode, row.step, row.values))
    except ModuleNotFoundError as error:
        raise UserError("--format tensorboard", str(error), "run: pip install tensorboard") from None
    sink.close()
    return len(rows)


def _is_export(directory: Path) -> bool:
    """Whether the directory holds nothing but an export, which may be replaced."""
    from trainer.tools.trained.saved_model import TOKENIZER_PARTS

    own = {"model.safetensors", "config.toml", "README.md", "config.json", "generation_config.json", "tokenizer.json"}
    names = {path.name for path in directory.iterdir()}
    card = directory / "README.md"  # a folder of someone else's model may have the same files
    if names and names <= own | set(TOKENIZER_PARTS):
        return card.is_file() and "by `train export`" in card.read_text(encoding="utf-8", errors="replace")
    return all(name.startswith("events.out.tfevents.") for name in names)
