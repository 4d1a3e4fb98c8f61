"""The program `train`: its options, its verbs, its exit codes.

Exit codes: 0 done, or stopped gracefully with a checkpoint; 2 the user's mistake (one message, no traceback); 3 findings of
`train diagnose`; 1 anything else.
Nothing here imports torch at the top, so that `train --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Annotated

import typer

from trainer.cli import config_verbs, export_verb, init_verb, ls_verb, sample_verb
from trainer.errors import UserError

EXIT_USER_ERROR = 2
# torchrun ends all ranks when one fails. The others wait this long for that, so that rank 0 can say what is wrong.
WAIT_FOR_RANK_0_SEC = 5.0
# What typer raises for a wrong command line. It has no public name of its own: newer releases carry click inside.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="train",
    help="Train recurrent-state sequence models on mixed data streams, from a TOML config.",
    epilog="Several ranks: torchrun --nproc_per_node=8 train --config x.toml, or train --nproc 8 --config x.toml.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Make, look at and check data.", no_args_is_help=True)
build_app = typer.Typer(help="Build a corpus in the NESTED layout.", no_args_is_help=True)
synth_app = typer.Typer(help="Make up a corpus.", no_args_is_help=True)
payload_app = typer.Typer(help="Metrics payloads, as another program would read them.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Checkpoints of a run.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(payload_app, name="payload")
app.add_typer(config_verbs.app, name="config")
for verb in (init_verb, ls_verb, sample_verb, export_verb):
    app.add_typer(verb.app)  # without a name its command is the program's own
data_app.add_typer(build_app, name="build")
data_app.add_typer(synth_app, name="synth")

ConfigOption = Annotated[str | None, typer.Option("--config", "-c", help="TOML config of the run.", metavar="X.TOML")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a value of the config; repeatable.", metavar="TABLE.KEY=VALUE"),
]


@app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: SetOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps (train.steps).")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Directory of the run.", metavar="DIR")] = None,
    resume: Annotated[
        str | None, typer.Option(help="off, auto, or a checkpoint's path (checkpoint.resume).", metavar="off|auto|PATH")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Start this many ranks on this machine.")] = None,
    stdout: Annotated[
        str | None,
        typer.Option(help="What stdout carries: json, line or off (metrics.stdout).", metavar="json|line|off"),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train recurrent-state sequence models on mixed data streams, from a TOML config."""
    if version:
        from trainer.cli.version import print_version

        print_version()
        return
    if context.invoked_subcommand is not None:
        if config is not None or overrides:
            problem = f"stands before {context.invoked_subcommand}"
            raise UserError("--config", problem, f"write it after: train {context.invoked_subcommand} --config x.toml")
        return
    if config is None:
        raise UserError("--config", "is required", "train --config train_configs/smoke.toml")
    options = {"train.steps": steps, "checkpoint.resume": resume, "metrics.stdout": stdout}
    from trainer.cli.run import run_training

    run_training(config, [*(overrides or []), *_as_overrides(options)], run_dir=run_dir, nproc=nproc)


@app.command()
def check(
    config: ConfigOption = None,
    overrides: SetOption = None,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks to reckon with.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Validate a config; print it with every default, and what follows from it."""
    if config is None:
        raise UserError("--config", "is required", "train check --config train_configs/smoke.toml")
    from trainer.cli.check import run_check

    run_check(config, overrides or [], world_size=nproc, as_json=as_json)


@app.command()
def preview(
    config: ConfigOption = None,
    overrides: SetOption = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to reckon with.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[str | None, typer.Option(help="Also draw it: .png or .svg.", metavar="PICTURE")] = None,
) -> None:
    """Show what a run will draw, hold and wait for, and warn of settings that will hurt. Nothing is trained."""
    if config is None:
        raise UserError("--config", "is required", "train preview --config train_configs/smoke.toml")
    from trainer.cli.preview import run_preview

    run_preview(config, overrides or [], world_size=world_size, as_json=as_json, out=out)


@app.command("diagnose")
def diagnose_run(
    run_dir: Annotated[str, typer.Argument(help="A run's directory, or a metrics.jsonl.", metavar="RUN_DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for faults in what a run has logged. Exit code 0: healthy, 3: something was found."""
    from trainer.cli.diagnose import run_diagnose

    run_diagnose(run_dir, as_json=as_json)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="Run directories, or metrics.jsonl files.", metavar="RUN_DIR...")],
    out: Annotated[str, typer.Option(help="The page.", metavar="X.HTML")] = "report.html",
) -> None:
    """Write one self-contained HTML page about a run, or about several overlaid."""
    from trainer.cli.report import write_report

    write_report(runs, out)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="Run directory, or metrics.jsonl.", metavar="A")],
    second: Annotated[str, typer.Argument(help="The other one.", metavar="B")],
    last: Annotated[int, typer.Option(min=1, help="Logged values that are averaged at the end.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How two runs differ: settings, outcome, and every key at the end."""
    from trainer.cli.compare import compare_runs

    compare_runs(first, second, window=last, as_json=as_json)


@build_app.command()
def pytext(
    out: Annotated[str, typer.Option(help="Directory of the corpus.", metavar="DIR")] = "data/pytext",
    force: Annotated[bool, typer.Option("--force", help="Replace another corpus there.")] = False,
) -> None:
    """Real text that every installation has: Python sources, C++ headers and prose of the installed packages."""
    from trainer.cli.data_build import build_pytext_corpus

    build_pytext_corpus(out, force=force)


@build_app.command()
def text(
    out: Annotated[str, typer.Option(help="Directory of the corpus.", metavar="DIR")],
    modality: Annotated[list[str], typer.Option(help="A modality and its files; repeatable.", metavar="NAME=GLOB")],
    force: Annotated[bool, typer.Option("--force", help="Replace another corpus there.")] = False,
) -> None:
    """Your own text files, one document a file."""
    from trainer.cli.data_build import build_text_corpus

    build_text_corpus(out, modality, force=force)


@synth_app.command("key-recall")
def key_recall(
    out: Annotated[str, typer.Option(help="Directory of the corpus.", metavar="DIR")],
    groups: Annotated[int, typer.Option(help="Groups over all streams.")] = 1024,
    cells: Annotated[int, typer.Option(help="Cells a group.")] = 16,
    seq_len: Annotated[int, typer.Option(help="Bytes a cell.")] = 6,
    streams: Annotated[int, typer.Option(help="Files.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the symbols.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace another corpus there.")] = False,
) -> None:
    """Groups whose first cell reveals what all later cells ask for: not to be learned without carried state."""
    from trainer.cli.data_synth import synth_key_recall

    synth_key_recall(out, groups=groups, cells=cells, seq_len=seq_len, streams=streams, seed=seed, force=force)


PathsArgument = Annotated[list[str], typer.Argument(help="A corpus's root, or files and globs.", metavar="PATH...")]
TokenizerOption = Annotated[
    str, typer.Option(help="As data.tokenizer: bytes, ids, or a tokenizer.json.", metavar="NAME")
]
VocabOption = Annotated[int, typer.Option(min=0, help="Tokenizer ids: how many ids there are.")]
FormatOption = Annotated[
    str, typer.Option(help="auto: by file extension; a format's name; or package.module:function.", metavar="NAME")
]
DtypeOption = Annotated[str | None, typer.Option(help="Of headerless .bin files.", metavar="DTYPE")]
EodOption = Annotated[int | None, typer.Option(help="The id that ends a document in .npy and headerless .bin files.")]


@data_app.command()
def inspect(
    paths: PathsArgument,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a cell, as data.seq_len.")] = 256,
    max_group_cells: Annotated[int, typer.Option(min=1, help="As data.max_group_cells.")] = 64,
    pack: Annotated[bool, typer.Option("--pack", help="As data.pack.")] = False,
    tokenizer: TokenizerOption = "bytes",
    vocab_size: VocabOption = 0,
    format: FormatOption = "auto",
    dtype: DtypeOption = None,
    eod: EodOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What is there: layout, modalities, streams, documents, groups, cells, padding, token histogram."""
    from trainer.cli.data_inspect import Cutting, Reading, inspect_data

    reading = Reading(tokenizer, vocab_size, format, dtype, eod)
    inspect_data(paths, reading, Cutting(seq_len, max_group_cells, pack), as_json=as_json)


@data_app.command()
def verify(
    paths: PathsArgument,
    tokenizer: TokenizerOption = "bytes",
    vocab_size: VocabOption = 0,
    format: FormatOption = "auto",
    dtype: DtypeOption = None,
    eod: EodOption = None,
) -> None:
    """Read everything once; report every damaged file, and exit with 2 if there is one."""
    from trainer.cli.data_inspect import Reading, verify_data

    verify_data(paths, Reading(tokenizer, vocab_size, format, dtype, eod))


RunDirArgument = Annotated[str, typer.Argument(help="Directory of the run.", metavar="RUN_DIR")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@checkpoint_app.command("list")
def list_(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """What a run can go on from, newest first."""
    from trainer.cli.checkpoint import list_checkpoints

    list_checkpoints(run_dir, as_json=as_json)


@checkpoint_app.command("verify")
def verify_checkpoint(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """Compare every file of every checkpoint with its hash; exit with 2 if one is not whole."""
    from trainer.cli.checkpoint import verify_checkpoints

    verify_checkpoints(run_dir, as_json=as_json)


@payload_app.command()
def validate(
    file: Annotated[str, typer.Argument(help="A metrics.jsonl or captured stdout; - for stdin.")],
    count_all: Annotated[bool, typer.Option("--all", help="Go on after the first violation, and count them.")] = False,
) -> None:
    """Check that every line is a payload of a schema version that is understood."""
    from trainer.cli.payload import validate_file

    validate_file(file, count_all=count_all)


def _as_overrides(options: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in options.items() if value is not None]


def main() -> None:
    """Run the program and exit."""
    try:
        result = app(standalone_mode=False)
    except UserError as error:
        _refuse(error.message)
    except UsageError as error:
        _refuse(_usage_message(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our stdout has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _usage_message(error: Exception) -> str:
    """A wrong command line in one line; empty where typer has shown the help already."""
    message = str(getattr(error, "format_message", lambda: str(error))())
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "train"
    return f"{command}: {message.rstrip('.')}; see {command} --help" if message else ""


def _refuse(message: str) -> None:
    """Say what is wrong, once for all ranks, and exit with the code for users' mistakes.

    Most mistakes are found by every rank, so rank 0 speaks for all, and torchrun ends the others when it has. A rank that
    is still there afterwards found something that rank 0 did not, such as a damaged file that only it read.
    """
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a stop handler would only set a flag that nobody reads now
        time.sleep(WAIT_FOR_RANK_0_SEC)
        message = f"[rank {os.environ['RANK']}] {message}"
    if message:
        print(message, file=sys.stderr, flush=True)  # noqa: T201 - the one message of a refused run
    sys.exit(EXIT_USER_ERROR)
