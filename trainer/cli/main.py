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

from trainer.cli import config_verbs, data_verbs, export_verb, init_verb, ls_verb, run_verbs, sample_verb
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
app.add_typer(data_verbs.app, name="data")
app.add_typer(run_verbs.checkpoint_app, name="checkpoint")
app.add_typer(run_verbs.payload_app, name="payload")
app.add_typer(config_verbs.app, name="config")
for verb in (run_verbs, init_verb, ls_verb, sample_verb, export_verb):
    app.add_typer(verb.app)  # without a name its command is the program's own

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
    # What pydantic puts before a message of its own validators, which typer passes on.
    message = message.replace(": Value error, ", ": ")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "train"
    if not message and context is not None and context.parent is None:
        return f"{command}: nothing to do: --config x.toml (to train) or a command is missing"
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
