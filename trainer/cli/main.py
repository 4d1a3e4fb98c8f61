"""The program `train`: its options, its verbs, its exit codes.

Exit codes: 0 done, or stopped with a checkpoint; 1 failed, or stopped before the first step; 2 a
user error (one message, no traceback); 3 findings of `train diagnose` and `train doctor`. Modules
of verbs import nothing slow (torch, numpy, pydantic) at the top: `train --help` answers at once.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import json
import logging
import os
import re
import sys
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from trainer.cli.parts import PARTS, VERBS, launcher
from trainer.cli.terminal import ConfigOption, SetOption, echo, refuse, require_config, uncollected
from trainer.errors import UserError

IS_LAUNCHED = "TRAINER_IS_LAUNCHED"  # set for the ranks of `--nproc`, which are given it too
app = typer.Typer(
    name="train",
    help="Train recurrent-state sequence models on mixed data streams, from a TOML config.",
    epilog="Several ranks: train --nproc 8 --config x.toml, or "
    "torchrun --no-python --nproc_per_node=8 train --config x.toml.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Options of `train` that stand for settings; `check` takes them, too.
SETTINGS = {
    "steps": "train.steps",
    "resume": "checkpoint.resume",
    "stdout": "metrics.stdout",
    "profile": "metrics.profile",
    "strategy": "distributed.strategy",
    "replicas": "distributed.replicas",
}
RESUME_HELP = "off, auto, or a checkpoint's path (checkpoint.resume)."
STRATEGY_HELP = "How ranks share the model (distributed.strategy)."
STDOUT_HELP = "Format of stdout: json, line or off (metrics.stdout)."
PROFILE_HELP = "Record N steps from the 11th on with torch's profiler (metrics.profile)."

for _name, _path in VERBS.items():
    _module, _, _function = _path.partition(":")
    _verb = getattr(import_module(_module), _function)
    if isinstance(_verb, typer.Typer):
        app.add_typer(_verb, name=_name)
    else:
        app.command(_name)(_verb)


@app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: SetOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps (train.steps).")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Run directory.", metavar="DIR")] = None,
    resume: Annotated[str | None, typer.Option(help=RESUME_HELP, metavar="off|auto|PATH")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, max=1024, help="Ranks on this machine.")] = None,
    strategy: Annotated[str | None, typer.Option(help=STRATEGY_HELP, metavar="ddp|fsdp|hsdp")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Replicas of hsdp (distributed.replicas).")] = None,
    stdout: Annotated[str | None, typer.Option(help=STDOUT_HELP, metavar="json|line|off")] = None,
    profile: Annotated[int | None, typer.Option(min=1, help=PROFILE_HELP, metavar="N")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train recurrent-state sequence models on mixed data streams, from a TOML config."""
    if version:
        echo(", ".join(f"{name} {metadata.version(name)}" for name in ("trainer", "torch")))
        raise typer.Exit
    verb = context.invoked_subcommand
    if verb is not None:
        given = [option for option, value in context.params.items() if value not in (None, False, [], ())]
        if given:
            name = f"--{given[0].replace('_', '-')}".replace("--overrides", "--set")
            fix = f"write it after, if {verb} takes it: train {verb} --help"
            raise UserError(name, f"stands before {verb}", fix)
        return
    config_path = require_config(config, "train")
    if run_dir == "":  # of a shell's variable that is not set
        raise typer.BadParameter("it is empty", param_hint="--run-dir")
    options = {key: context.params[name] for name, key in SETTINGS.items()}
    settings = [*(overrides or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]
    from trainer.config.load import load_config, located

    loaded = load_config(config_path, settings)
    if nproc is not None and IS_LAUNCHED not in os.environ:
        raise typer.Exit(launcher.launch_ranks(nproc))
    from trainer.ending import StopRequest
    from trainer.metrics.logger import get_logger

    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or on a full disk
        # A signal that ends the process (SIGBUS, SIGSEGV) then leaves a stack.
        faulthandler.enable()
        if "RANK" not in os.environ and "torch" not in sys.modules:  # whose import takes seconds
            echo("starting", err=True)
    # Before torch is imported, whose import a signal would otherwise kill.
    get_logger(__name__)  # makes the handler of what a signal logs
    logging.getLogger("trainer").propagate = False  # a user's module may call basicConfig
    stop = StopRequest()
    stop.install()
    with uncollected():
        import_module("torch._dynamo")  # which the optimizer's first step imports
        from trainer.training.main import train as train_here
        from trainer.training.open_run import Launch

    # The user's code, which is imported from here on, may change the working directory.
    run_dir = run_dir and os.path.abspath(run_dir)
    launch = Launch(stop=stop, config_path=Path(config_path).absolute(), run_dir=run_dir, parts=PARTS)
    try:
        with located(config_path, settings):
            raise typer.Exit(train_here(loaded, launch))
    except UserError as error:
        refuse(error.message, speaker=error.speaker, is_told_to_end=stop.requested)


def main() -> None:
    """Run the program and exit."""
    # The descriptor of a closed stream would be given to a file, which then gets what libraries print.
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Bytes of paths that are not UTF-8 are shown as escapes, not as a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(args=_with_settings(sys.argv[1:]), prog_name="train", standalone_mode=False)
    except UserError as error:
        _refuse(error.message)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        # Python flushes stdout once more at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:  # whoever read it is gone
            sys.exit(1)
        _refuse(f"cannot write: {error.strerror}")
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)  # 128 + SIGINT, as of a process that the signal ends
    except Exception as error:
        # A wrong command line: typer has no public name for click's UsageError.
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "train")
        message = str(error.format_message())
        _refuse(f"{command}: {message} (see {command} --help)" if message else "")
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> NoReturn:
    """See `refuse`; a program that has asked for JSON gets the message so, too."""
    if "--json" in sys.argv:
        try:
            echo(json.dumps({"error": message}))
        except OSError:  # nobody reads it; at its end, Python would try once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    refuse(message)


def _with_settings(arguments: list[str]) -> list[str]:
    """The command line with `--table.key value` and `--table.key=value` as `--set table.key=value`,
    where there is `--set`. `check` takes the options of `SETTINGS` so, too."""
    is_check, is_tokenize = arguments[:1] == ["check"], arguments[:2] == ["data", "tokenize"]
    if arguments and arguments[0] in VERBS and not is_check and not is_tokenize:
        return arguments
    found: list[str] = []
    given = iter(arguments)
    short = SETTINGS if is_check else {}
    for argument in given:
        key, is_whole, value = argument.removeprefix("--").partition("=")
        key = short.get(key, key)
        if not argument.startswith("--") or not re.fullmatch(r"\w+(\.[\w-]+)+", key):
            found += [argument]
            continue
        if not is_whole and (value := next(given, "--")).startswith("--"):
            raise UserError(argument, "has no value", f"write {argument}=VALUE")
        found += ["--set", f"{key}={value}"]
    return found
