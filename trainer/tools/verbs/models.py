"""The verbs of a trained model: `train sample`, `train eval` and `train export`."""

from __future__ import annotations

import glob
import itertools
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from trainer.cli.terminal import echo, uncollected
from trainer.errors import UserError
from trainer.files import did_you_mean, is_url
from trainer.tools.verbs import shared
from trainer.tools.verbs.shared import output, print_json, refuse_existing, require_run, writing

if TYPE_CHECKING:
    from trainer.config.data_tables import EvalSourceTable

ModelArgument = Annotated[str, Argument(help="A run directory, or an exported model.", metavar="RUN_DIR")]
ExportFormat = Literal["safetensors", "hf"]
HELD_OUT = "held-out documents"
FILE_SUFFIX = re.compile(
    r"\.(arrow|bin|ckpt|csv|gguf|h5|json|jsonl|np[yz]|onnx|parquet|pth?|safetensors|tsv|xlsx)", re.IGNORECASE
)
METRICS = {"loss": "loss", "bits_per_byte": "bits per byte", "perplexity": "perplexity", "accuracy": "accuracy"}


def sample(
    run_dir: ModelArgument,
    prompt: Annotated[str, Option(help="Text to continue; default: the start of a document.")] = "",
    tokens: Annotated[int, Option(min=1, help="Tokens to generate.")] = 200,
    temperature: Annotated[float, Option(min=0, help="Divides the logits; 0: greedy.")] = 1.0,
    top_k: Annotated[int, Option(min=0, help="Sample from the k most likely tokens; 0: from all.")] = 0,
    seed: Annotated[int, Option(min=0, help="Sampling seed.")] = 0,
    step: shared.StepOption = None,
    tokenizer: shared.MovedOption = None,
    device: shared.DeviceOption = "auto",
    trust_code: shared.TrustOption = False,
) -> None:
    """Generate text from a run's newest checkpoint, with the recurrent state carried from token to token."""
    require_run(run_dir)
    with uncollected():
        from trainer.data.tokenizer import prompt_ids
        from trainer.distributed.env import pick_device
        from trainer.lab.samples import Draw, GenerationError, TextStream, generate
        from trainer.tools.trained.saved_model import load_model

    on = pick_device(device)
    saved = load_model(run_dir, step=step, device=on, tokenizer=tokenizer, trust_code=trust_code)
    ids = prompt_ids(saved.tokenizer, prompt, "--prompt")
    generated = generate(
        saved.model,
        ids,
        draw=Draw(temperature, top_k, seed),
        cell=saved.config.data.seq_len,
        forbidden=[saved.tokenizer.bos_id],
        eod=saved.config.data.eod,
        device=on,
    )
    stream = TextStream(saved.tokenizer, ids)
    _write(prompt)
    try:
        for token in itertools.islice(generated, tokens):
            _write(stream.push(token))
    except GenerationError as error:
        raise UserError(run_dir, str(error), "take an earlier checkpoint with --step") from None
    _write(stream.flush() + "\n")


def _write(text: str) -> None:
    if sys.stdout.isatty():
        # A model may write anything; an escape sequence must not reach the terminal as one.
        text = "".join(map(_shown, text))
    if sys.stdout.encoding.lower().replace("-", "") != "utf8":
        text = text.encode(sys.stdout.encoding, errors="replace").decode(sys.stdout.encoding)
    sys.stdout.write(text)
    sys.stdout.flush()


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return "\ufffd"


def evaluate(
    run_dir: ModelArgument,
    source: Annotated[
        list[str] | None,
        Option(help="A set: a name, and a file, a glob or a directory. May be repeated.", metavar="NAME=PATH"),
    ] = None,
    batches: Annotated[
        int | None,
        Option(min=1, help="Draw about so many micro-batches of each set; default: all of --source and held-out."),
    ] = None,
    held_out: Annotated[
        bool, Option("--held-out", help="Evaluate on all held-out documents, not on the sets of its config.")
    ] = False,
    step: shared.StepOption = None,
    tokenizer: shared.MovedOption = None,
    device: shared.DeviceOption = "auto",
    trust_code: shared.TrustOption = False,
    as_json: shared.JsonOption = False,
) -> None:
    """Evaluate a checkpoint on the eval.source sets of its config and on --source; without any, on its held-out documents."""
    require_run(run_dir)
    sources = [_parse_source(text) for text in source or []]
    with uncollected():
        from trainer.distributed.env import pick_device
        from trainer.tools.trained.offline import evaluate_checkpoint

    at, metrics = evaluate_checkpoint(
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
        print_json({"run": run_dir, "step": at, "metrics": metrics})
    else:
        _print_metrics(run_dir if at is None else f"{run_dir}, step {at:,}", metrics)


def _parse_source(text: str) -> EvalSourceTable:
    """`NAME=PATH` of `--source`: a file, a glob, or a directory with everything below it. Raises
    UserError: it is not of this form, or the path does not exist."""
    from trainer.config.data_tables import EvalSourceTable

    name, separator, path = text.partition("=")
    is_plain = all(letter.isalnum() or letter in "_.-" for letter in name)
    if not (separator and path and name and is_plain):
        fix = "write for example --source books=data/books"
        raise UserError("--source", f"{text!r} is not NAME=PATH", fix)
    if os.path.isdir(path):
        path = os.path.join(path, "**", "*")
    elif not (glob.has_magic(path) or is_url(path) or os.path.exists(path)):
        fix = did_you_mean(path) or "check the path"
        raise UserError("--source", f"{path}: no such file or directory", fix)
    return EvalSourceTable(name=name, paths=[path])


def _print_metrics(title: str, metrics: dict[str, float]) -> None:
    from trainer.tools.fitted_table import Column, fitted_table
    from trainer.tools.runs.depth_curve import curves_of, in_words, is_by_depth

    rows: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        if is_by_depth(key):
            continue
        if key.startswith("eval/"):
            name, _, metric = key.removeprefix("eval/").rpartition("/")
        else:
            name, metric = HELD_OUT, key.removeprefix("eval_")
        rows.setdefault(name or "-", {})[metric] = f"{value:.4f}"
    # Tasks of the user's own may have any metric; parts of the held-out loss are in the JSON.
    own = {name for row in rows.values() for name in row if "/" not in name}
    names = [*METRICS, *sorted(own - METRICS.keys())]
    columns = [Column("set", list(rows))]
    for metric in names:
        cells = [row.get(metric, "") for row in rows.values()]
        if any(cells):
            columns.append(Column(METRICS.get(metric, metric), cells, "right"))
    console = output()
    console.print(fitted_table(columns, width=console.width, title=title))
    for name, curve in curves_of(metrics).items():
        console.print(f"{name or HELD_OUT}: {in_words(curve, 0)}")


def export(
    run_dir: shared.RunDirArgument,
    out: Annotated[str, Option(help="Directory to write.", metavar="PATH")],
    format: Annotated[ExportFormat, Option(help="safetensors, or hf for from_pretrained.")] = "safetensors",
    step: shared.StepOption = None,
    force: Annotated[bool, Option("--force", help="Replace an existing export.")] = False,
    trust_code: shared.TrustOption = False,
) -> None:
    """Write a run's weights: safetensors with a model card, or as Hugging Face's."""
    target = Path(out)
    if FILE_SUFFIX.fullmatch(target.suffix):
        raise UserError("--out", f"{out} would be a directory with weights", f"leave out {target.suffix}")
    refuse_existing(out, force=force)
    if target.is_dir() and not _is_export(target):
        raise UserError(out, "is a directory with other files than an export", "name a new one")
    from trainer.tools.trained.saved_model import export_model

    with writing(out):
        how: dict[str, bool] = {"as_hugging_face": format == "hf", "trust_code": trust_code}
        made = export_model(Path(run_dir), target, step=step, **how)
    echo(f"wrote the weights after step {made.step}, config and model card to {out}", err=True)


def _is_export(directory: Path) -> bool:
    """Whether the directory holds nothing but an export, which may be replaced."""
    from trainer.tools.trained.saved_model import TOKENIZER_PARTS

    own = {"model.safetensors", "config.toml", "README.md", "tokenizer.json"}
    own |= {"config.json", "generation_config.json"}
    names = {path.name for path in directory.iterdir()}
    if not names or not names <= own | set(TOKENIZER_PARTS):
        return not names
    card = directory / "README.md"  # a folder of someone else's model may have the same files
    return card.is_file() and "by `train export`" in card.read_text(encoding="utf-8", errors="replace")
