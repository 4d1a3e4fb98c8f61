"""`train mix`: other mixing weights for a run that is training."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.cli.options import RunArgument, require_run, uncollected
from trainer.cli.terminal import echo, writing
from trainer.errors import UserError
from trainer.files import open_plain, parse_json
from trainer.metrics.run_status import OWN_LOOP, run_state

MOST_WAIT_SEC, POLL_SEC = 600.0, 0.2


def mix(
    run_dir: RunArgument,
    settings: Annotated[
        list[str],
        typer.Option("--set", help="A source's weight; repeatable.", metavar="data.source.NAME.weight=NUMBER"),
    ],
    waits: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run says from which step on.")] = True,
) -> None:
    """Change mixing weights of a run that is training, from a step on that it announces at its next logged one."""
    run = require_run(run_dir)
    _refuse(run_dir, _why_not(run))
    with uncollected():
        from trainer.config.load import load_config
        from trainer.extensions.mix import REQUESTS, parse
    sources = load_config(run / "config.resolved.toml").data.source
    # Included files have sources of their own, which the run knows.
    is_known = all(source.include is None for source in sources)
    parse(settings, [source.name for source in sources] if is_known else None)
    if is_known and len(sources) == 1:
        _refuse(run_dir, "has a single source, which no weight changes")
    number = f"{os.getpid()}.{time.time_ns()}"
    with writing(run_dir):
        with open_plain(run / "events.jsonl") as events:
            offset = events.seek(0, os.SEEK_END)
        with open_plain(run / REQUESTS, "ab") as file:
            file.write(json.dumps({"id": number, "set": settings}).encode() + b"\n")
        if not waits:
            echo(f"asked {run_dir}, which answers in events.jsonl at its next logged step")
            return
        answer = _wait(run, number, offset)
    _refuse(run_dir, answer.get("problem", ""))
    for key, pair in answer["changed"].items():
        echo(f"{key}: {pair['before']:g} -> {pair['after']:g}")
    echo(f"from step {answer['global_step']} on (micro-batch {answer['batch']} of each data shard)")


def _refuse(run_dir: str, problem: str) -> None:
    if problem:
        raise UserError(run_dir, problem)


def _why_not(run: Path) -> str:
    """Why nothing can be asked of the run; empty: it is training, as far as can be seen from here."""
    status = run_state(run)
    state = "of another program" if status.get("loop") == OWN_LOOP else status.get("state", "no run")
    return (
        "" if state in ("running", "unknown") else f"is not training ({state}): only a run that is can change weights"
    )


def _wait(run: Path, number: str, offset: int) -> dict[str, Any]:
    """The run's answer to a request, an event; or why there is none, as its `problem`."""
    end = time.monotonic() + MOST_WAIT_SEC
    while True:
        is_over = bool(_why_not(run))  # before the last look
        with open_plain(run / "events.jsonl") as file:
            file.seek(offset)
            for line in file:
                if number.encode() in line and line.endswith(b"\n"):
                    return dict(parse_json(line))
        if is_over:
            return {"problem": "ended before it took this up: nothing was changed"}
        if time.monotonic() > end:
            return {"problem": f"has not answered in {MOST_WAIT_SEC:.0f} s; events.jsonl says when it does"}
        time.sleep(POLL_SEC)
