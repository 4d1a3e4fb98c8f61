"""`train mix`: other mixing weights for a run that is training."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from trainer.cli.terminal import echo, uncollected
from trainer.errors import UserError
from trainer.files import open_plain, parse_json
from trainer.metrics.run_status import run_state
from trainer.tools.verbs.shared import RunArgument, require_run, writing

MOST_WAIT_SEC, POLL_SEC = 600.0, 0.2
ALIVE = ("running", "unknown")  # which is on another machine


def mix(
    run_dir: RunArgument,
    settings: Annotated[
        list[str],
        Option("--set", help="A source's weight; repeatable.", metavar="data.source.NAME.weight=NUMBER"),
    ],
    waits: Annotated[bool, Option("--wait/--no-wait", help="Wait until the run says from which step on.")] = True,
) -> None:
    """Change mixing weights of a run that is training, from a step on that it announces at its next logged one."""
    answer = _ask(require_run(run_dir), settings, waits=waits)
    problem = answer.get("problem")
    if problem:
        raise UserError(run_dir, problem, "nothing was changed")
    for key, pair in answer.get("changed", {}).items():
        echo(f"{key}: {pair['before']:g} -> {pair['after']:g}")
    at = "from step {global_step} on (micro-batch {batch} of each data shard)"
    if answer:
        echo(at.format(**answer))
    else:
        echo(f"asked {run_dir}: its events.jsonl will have the answer")


def _ask(run: Path, settings: list[str], *, waits: bool) -> dict[str, Any]:
    """Ask the run. Returns the event that answers, {} if it is not waited for, or the `problem`."""
    state = run_state(run).get("state", "no run")
    if state not in ALIVE:
        return {"problem": f"is not training ({state}): only a run that is can change its weights"}
    with uncollected():
        from trainer.config.load import load_config
        from trainer.lab.mix import parse
        from trainer.training.run_dir import REQUESTS
    sources = load_config(run / "config.resolved.toml").data.source
    # Included files have sources of their own, which the run knows.
    is_known = all(source.include is None for source in sources)
    parse(settings, [source.name for source in sources if len(sources) > 1] if is_known else None)
    number, text, end = str(time.time_ns()), b"", time.monotonic() + MOST_WAIT_SEC
    with writing(str(run)), open_plain(run / "events.jsonl") as events:
        events.seek(0, 2)  # before asking: the answer cannot be missed
        with open_plain(run / REQUESTS, "ab") as file:
            file.write(json.dumps({"id": number, "set": settings}).encode() + b"\n")
        while waits and time.monotonic() < end:
            is_over = run_state(run).get("state", "no run") not in ALIVE  # before the last look
            text += events.read()
            for line in text.splitlines(keepends=True):
                if number.encode() in line and line.endswith(b"\n"):
                    return dict(parse_json(line))
            if is_over:
                return {"problem": "ended before it took this up"}
            time.sleep(POLL_SEC)
    if not waits:
        return {}
    problem = f"has not answered in {MOST_WAIT_SEC:.0f} s, but may, in events.jsonl; until then"
    return {"problem": problem}
