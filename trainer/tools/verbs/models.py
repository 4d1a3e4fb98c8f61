"""The verbs of a model: `train sample`, `train eval`, `train export` and `train doctor`."""

from __future__ import annotations

import glob
import itertools
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from typer import Argument, Option

from trainer.cli.parts import PARTS
from trainer.cli.terminal import echo, uncollected
from trainer.errors import UserError
from trainer.tools.verbs import shared
from trainer.tools.verbs.shared import coloured, output, print_json, print_table, refuse_existing, require_run, writing

if TYPE_CHECKING:
    from torch import nn

    from trainer.config.data_tables import EvalSourceTable
    from trainer.lab.contracts import Report

EXIT_BREACH = 3
# Controls of terminals and of the direction of text; half characters.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ModelArgument = Annotated[str, Argument(help="A run directory, or an exported model.", metavar="RUN_DIR")]


def sample(
    run_dir: ModelArgument,
    prompt: Annotated[str, Option(help="Text to continue; default: the start of a document.")] = "",
    tokens: Annotated[int, Option(min=1, max=10**9, help="Tokens to generate.")] = 200,
    temperature: Annotated[float, Option(min=0, max=1000, help="Divides the logits; 0: greedy.")] = 1.0,
    top_k: Annotated[int, Option(min=0, help="Sample from the k most likely tokens; 0: from all.")] = 0,
    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Sampling seed.")] = 0,
    step: shared.StepOption = None,
    ema: shared.EmaOption = False,
    device: shared.DeviceOption = "auto",
    trust_code: shared.TrustOption = False,
) -> None:
    """Generate text, with the recurrent state carried from token to token."""
    require_run(run_dir)
    with uncollected():
        from trainer.data.tokenizer import prompt_ids
        from trainer.distributed.env import pick_device
        from trainer.import_path import refuse_arguments
        from trainer.lab.samples import Draw, GenerationError, TextStream, generate
        from trainer.tools.saved_model import load_model

    on = pick_device(device)
    saved = load_model(run_dir, step=step, ema=ema, device=on, trust_code=trust_code)
    ids = prompt_ids(saved.tokenizer, prompt, "--prompt")
    refuse_arguments(saved.model.forward, "the model", {"tokens": ids, "state": None}, key=run_dir)
    generated = generate(
        saved.model,
        ids,
        draw=Draw(temperature, top_k, seed),
        cell=saved.config.data.seq_len,
        below=saved.tokenizer.bos_id,
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
        text = _CONTROLS.sub("\ufffd", text)
    sys.stdout.write(text)
    sys.stdout.flush()


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
    ema: shared.EmaOption = False,
    device: shared.DeviceOption = "auto",
    trust_code: shared.TrustOption = False,
    as_json: shared.JsonOption = False,
) -> None:
    """Evaluate a checkpoint on --source, or on the eval.source sets of its config, or on its held-out documents."""
    require_run(run_dir)
    sources = [_parse_source(text) for text in source or []]
    with uncollected():
        from trainer.distributed.env import pick_device
        from trainer.tools.offline import evaluate_checkpoint
        from trainer.tools.runs.readings import curves_of, depth_set, in_words, number_text

    at, metrics = evaluate_checkpoint(
        run_dir,
        sources,
        step=step,
        ema=ema,
        batches=batches,
        held_out=held_out,
        device=pick_device(device),
        trust_code=trust_code,
    )
    if as_json:
        print_json({"run": run_dir, "step": at, "ema": ema, "metrics": metrics})
        return
    heading = run_dir if at is None else f"{run_dir}, step {at:,}"
    echo(heading + ", averaged weights" * ema)
    for key, value in metrics.items():
        if depth_set(key) is None:
            echo(f"{key} {number_text(value, 5)}")
    for name, curve in curves_of(metrics).items():
        echo(f"{name or 'held-out documents'}: {in_words(curve, 0)}")
        shown = {
            "tokens before": [f"{point.start:,}" for point in curve.points],
            "loss": [str(point.loss) for point in curve.points],
            "from zero": [str(point.from_zero or "") for point in curve.points],
            "gain": [str(point.gain or "") for point in curve.points],
        }
        print_table(shown, right=shown, box=None)


def _parse_source(text: str) -> EvalSourceTable:
    """`NAME=PATH` of `--source`: a file, a glob, or a directory with everything below it. Raises
    UserError: it is not of this form."""
    from trainer.config.data_tables import EvalSourceTable

    name, _, path = text.partition("=")
    if os.path.isdir(path):
        path = os.path.join(glob.escape(path), "**", "*")
    try:
        return EvalSourceTable(name=name, paths=[path])
    except ValueError:  # as a config refuses such a name, or no path
        fix = "write for example --source books=data/books"
        raise UserError("--source", f"{text!r} is not NAME=PATH", fix) from None


def export(
    run_dir: shared.RunDirArgument,
    out: Annotated[str, Option(help="Directory to write.", metavar="PATH")],
    format: Annotated[Literal["safetensors", "hf"], Option(help="hf: for from_pretrained.")] = "safetensors",
    step: shared.StepOption = None,
    ema: shared.EmaOption = False,
    force: shared.ForceOption = False,
    trust_code: shared.TrustOption = False,
) -> None:
    """Write a run's weights: safetensors with its config, or as Hugging Face's."""
    run, target = require_run(run_dir), Path(out)
    refuse_existing(out, force=force)
    from trainer.tools.saved_model import export_model, is_export

    with writing(out):
        if target.is_dir() and any(target.iterdir()) and not is_export(target):
            raise UserError(out, "is a directory with other files than an export", "name a new one")
        made = export_model(run, target, step=step, ema=ema, as_hugging_face=format == "hf", trust_code=trust_code)
    echo(f"wrote the {'averaged ' * ema}weights after step {made.step} and the config to {out}", err=True)


def doctor(
    model: Annotated[
        str | None, Option(help="As model.target, or as model.family.", metavar="PACKAGE.MODULE:FUNCTION|FAMILY")
    ] = None,
    hf: Annotated[
        str | None, Option(help="A model of transformers: a directory of save_pretrained.", metavar="PATH")
    ] = None,
    args: Annotated[str, Option(help="As model.args, a TOML table: '{ heads = 4 }'.", metavar="TABLE")] = "{}",
    vocab_size: Annotated[int, Option(min=2, max=10**6, help="Number of token ids.")] = 257,
    dim: Annotated[int, Option(min=1, max=10**6, help="As model.dim.")] = 64,
    num_layers: Annotated[int, Option(min=1, max=2000, help="As model.num_layers.")] = 2,
    seq_len: Annotated[int, Option(min=1, max=10**8, help="As data.seq_len.")] = 64,
    device: shared.DeviceOption = "cpu",
    trust_code: Annotated[bool, Option("--trust-code", help="Run the code in --hf.")] = False,
    as_json: shared.JsonOption = False,
) -> None:
    """Check that a model carries its state, is causal and keeps rows apart. Exit code 0: it does,
    3: it does not, or that could not be checked."""
    from trainer.config.load import parse_value
    from trainer.distributed.env import pick_device
    from trainer.lab.contracts import check_model

    given: Any = parse_value(args)
    if not isinstance(given, dict):
        raise UserError("--args", f"must be a TOML table, got {args}", "write --args '{ heads = 4 }'")
    if bool(model) == bool(hf) or (hf and given):
        fix = "name it with --model, and --args if it takes some, or with --hf alone"
        raise UserError("train doctor", "needs one model", fix)
    on, name = pick_device(device), str(hf or model)
    build: Callable[[], Any] = partial(_build, name, given, vocab_size, dim, num_layers)
    if hf:
        build = partial(_read, hf, trust_code=trust_code)
    built = build().to(on)
    if hf:
        vocab_size = built.model.config.get_text_config().vocab_size
        name = f"{name} ({type(built.model).__name__})"
    report = check_model(built, vocab_size=vocab_size, build=build, seq_len=seq_len)
    if as_json:
        print_json({"model": hf or model, "args": given, **report.to_json()})
    else:
        _print_report(name, report)
    if report.breaches or report.unchecked:
        raise typer.Exit(EXIT_BREACH)


def _read(folder: str, *, trust_code: bool) -> nn.Module:
    """The model of `--hf`."""
    from trainer.lab.hugging_face import HuggingFace, read_pretrained

    return HuggingFace(read_pretrained(folder, "--hf", trust_code=trust_code))


def _build(name: str, args: dict[str, Any], vocab_size: int, dim: int, num_layers: int) -> nn.Module:
    """The model of `--model`, of any class; what it lacks is for the check to say."""
    from torch import nn

    from trainer.config.schema import ModelTable
    from trainer.import_path import resolve_target, users_code
    from trainer.training.plan import build_model

    if ":" not in name:
        table = ModelTable.model_construct(family=name, args=args, dim=dim, num_layers=num_layers)
        return build_model(table, vocab_size, parts=PARTS)
    target = resolve_target(name, "--model")
    with users_code("--model", f"{name} fails"):
        made = target(vocab_size=vocab_size, dim=dim, num_layers=num_layers, **args)
    if not isinstance(made, nn.Module):
        raise UserError("--model", f"{name} gave a {type(made).__name__}", "return a torch.nn.Module")
    return made


def _print_report(model: str, report: Report) -> None:
    verdicts, console = report.verdicts, output()
    columns = {
        "check": [verdict.check for verdict in verdicts],
        "verdict": [coloured(verdict.status, otherwise="dim") for verdict in verdicts],
        "observation": [escape(verdict.text) for verdict in verdicts],
    }
    print_table(columns, box=None, pad_edge=False)
    breaches = ", ".join(verdict.check for verdict in report.breaches)
    summary = coloured("healthy", "keeps the contract")
    if breaches:
        summary = coloured("findings", f"breaks {breaches}")
    elif report.unchecked:
        first = report.unchecked[0]
        summary = coloured("findings", f"was not checked for {first.check}") + f": {escape(first.text)}"
    console.print(f"{escape(model)} {summary} ({report.how}; {report.seconds:.1f} s)", highlight=False)
