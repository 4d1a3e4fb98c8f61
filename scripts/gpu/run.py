"""`make gpu`: tests, figures and ledger on one CUDA device; with --device cpu, a rehearsal of all that.

Each check is a process with a time limit. One that fails or takes too long is a row that says why, and the rest goes on. The
results are merged into a JSON file check by check, and a page is made of it. Only what each check itself needs has to be
installed; torch, triton and everything else are those of the interpreter that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_checks import FAILED, MISSED, NOT_RUN, PARTS, TIMED_OUT, Check, Ended, Row, checks, findings, last_error

ROOT = Path(__file__).resolve().parents[2]
# The figures of a rehearsal mean nothing: they stay where git does not see them.
RESULTS = {"cuda": ROOT / "docs", "cpu": ROOT / "build" / "gpu-cpu"}
PART_SEC = {"cuda": 480.0, "cpu": 900.0}
CORPUS = ROOT / "data" / "pytext"
CORPUS_SEC = 240.0
GRACE_SEC = 3.0
NEED_CORPUS = frozenset({"speed", "models", "context"})
BAD = (MISSED, FAILED, TIMED_OUT, NOT_RUN)
OF_TORCH = """
import json, torch
cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()
device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"torch": torch.__version__, "cuda": cuda, "cudnn": cudnn, "device": device}))
"""


def machine() -> dict[str, str]:
    """The commit, and the versions of device, driver, torch, CUDA, cuDNN and Python, where they are known."""
    described = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    # In a process of its own: to import torch here would take the memory of the device that is measured.
    found = json.loads(_said(sys.executable, "-c", OF_TORCH) or "{}")
    found["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    found["python"] = platform.python_version()
    commit = os.environ.get("COMMIT") or _said("git", "-C", str(ROOT), *described) or "unknown"
    return {"commit": commit, **{key: str(value) for key, value in found.items() if value}}


def _said(*command: str) -> str:
    """What a command prints; empty if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def run_process(command: Sequence[str], *, limit_sec: float, environ: Mapping[str, str], cwd: Path) -> Ended:
    """Run it to its end, or to its limit. Nothing of its session outlives it."""
    began = time.monotonic()
    code: int | None = None
    # Files and not pipes: a process that got away would keep a pipe open, and whoever reads it waiting.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, cwd=cwd, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_sec)
        finally:
            seconds = time.monotonic() - began
            process.terminate()  # a launcher ends its ranks, which have sessions of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SEC)
            _end_session(process.pid)
            process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read(), seconds)


def _end_session(session: int) -> None:
    """Kill its processes, whatever their groups are, and wait until they are gone with the memory of the device they held."""
    deadline = time.monotonic() + GRACE_SEC
    is_left = True
    while is_left and time.monotonic() < deadline:
        is_left = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                # The name, in parentheses, may hold anything; after it come state, parent, process group and session.
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    is_left = True
                    os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.01 * is_left)


def run_check(check: Check, *, device: str, limit_sec: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run it, for no longer than `limit_sec`; what came of it."""
    record = {"part": check.part, "name": check.name, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if limit_sec < 1.0:
        row = {"name": check.name, "status": NOT_RUN, "reason": "the time of the part is over"}
        return {**record, "seconds": 0.0, "rows": [row], "tables": []}
    ended = run_process([sys.executable, *check.arguments], limit_sec=limit_sec, environ=environ, cwd=ROOT)
    rows, tables = findings(check, ended, is_rehearsal=device == "cpu")
    if any(row["status"] in BAD for row in rows):
        print(ended.stdout[-2000:] + ended.stderr[-4000:], file=sys.stderr, flush=True)
    return {**record, "seconds": ended.seconds, "rows": rows, "tables": tables}


def summary(record: Mapping[str, Any]) -> str:
    """What came of a check, for the terminal, with the rows that are not good."""
    counts = Counter(row["status"] for row in record["rows"])
    told = ", ".join(f"{number} {status}" for status, number in counts.items())
    lines = [f"{record['part']}/{record['name']:32} {record['seconds']:6.0f} s  {told}"]
    bad = [row for row in record["rows"] if row["status"] in BAD]
    return "\n".join(lines + [f"    {row['status']}: {row['name']}: {row['reason']}" for row in bad])


def render(records: Sequence[Mapping[str, Any]], device: str) -> str:
    """The page."""
    about = "one CUDA device" if device == "cuda" else "the CPU: a rehearsal, whose figures mean nothing"
    lines = [f"# Benchmarks on {about}", "", "Generated by `make gpu`; do not edit.", ""]
    for record in records:
        known = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
        lines += [f"- {record['date'][:10]}: {known}"] * (f"- {record['date'][:10]}: {known}" not in lines)
    for record in records:
        rows = [(row["name"], figure(row), row.get("goal", ""), outcome(row)) for row in record["rows"]]
        lines += ["", f"## {record['part']}: {record['name']}", "", *table(("what", "measured", "goal", ""), rows)]
        for each in record["tables"]:
            lines += ["", f"{each['title']}:", "", *table(each["columns"], each["rows"])]
        lines += ["", f"{record['seconds']:.0f} s."]
    return "\n".join(lines) + "\n"


def figure(row: Row) -> str:
    """A figure with unit and quartiles; nothing for a test."""
    if "value" not in row:
        return ""
    spread = "" if row["low"] is None else f" ({row['low']:.4g} to {row['high']:.4g})"
    return f"{row['value']:.4g} {row['unit'].removesuffix('x')}".rstrip() + spread


def outcome(row: Row) -> str:
    """The status, with its reason."""
    return f"{row['status']}: {row['reason']}" if row["reason"] else row["status"]


def table(columns: Sequence[str], rows: Sequence[Sequence[str | float | int]]) -> list[str]:
    """Lines of Markdown."""

    def cell(value: str | float | int) -> str:
        text = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return lines + ["| " + " | ".join(map(cell, each)) + " |" for each in rows]


def make_corpus(environ: Mapping[str, str]) -> None:
    """Build the default corpus from the text of this machine, if it is not there. Raises ValueError."""
    if not (CORPUS / "manifest.json").exists():
        print("data/pytext ...", file=sys.stderr, flush=True)
        command = [sys.executable, str(ROOT / "train"), "data", "build", "pytext", "--out", str(CORPUS), "--force"]
        ended = run_process(command, limit_sec=CORPUS_SEC, environ=environ, cwd=ROOT)
        if ended.code != 0:
            raise ValueError(f"data/pytext cannot be built: {last_error(ended)}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--part", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--check", default="", help="run only checks whose name contains this")
    args = parser.parse_args(argv)
    known = checks(ROOT, args.device)
    chosen = [check for check in known if args.part in (check.part, "all") and args.check in check.name]
    # Of every check: this checkout first, then what PYTHONPATH says. Nothing asks for a network.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "TRAINER_TEST_DEVICE": args.device, "WANDB_MODE": "disabled", "NO_COLOR": "1"}
    environ, made_on = {**os.environ, **own}, machine()
    try:
        if not chosen:
            raise ValueError(f"no check of part {args.part} has {args.check!r} in its name")
        if args.device == "cuda" and "device" not in made_on:
            raise ValueError(f"torch {made_on.get('torch')} of {sys.executable} finds no CUDA device")
        if NEED_CORPUS & {check.part for check in chosen}:
            make_corpus(environ)
    except ValueError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    file = RESULTS[args.device] / "benchmarks-gpu.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    records = json.loads(file.read_text(encoding="utf-8"))["checks"] if file.exists() else {}
    began: dict[str, float] = {}
    for check in chosen:
        print(f"{check.key} ...", file=sys.stderr, flush=True)
        left = began.setdefault(check.part, time.monotonic()) + PART_SEC[args.device] - time.monotonic()
        record = run_check(check, device=args.device, limit_sec=min(check.limit_sec, left), environ=environ)
        records[check.key] = {**record, "machine": made_on}
        print(summary(record), file=sys.stderr, flush=True)
        merged = {each.key: records[each.key] for each in known if each.key in records}
        text = json.dumps({"device": args.device, "checks": merged}, indent=1)
        temporary = file.with_name(f".{file.name}.tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, file)
        file.with_suffix(".md").write_text(render(list(merged.values()), args.device), encoding="utf-8")
    done = [records[check.key] for check in chosen]
    print("\n".join(["", *map(summary, done), "", str(file)]))
    return int(any(row["status"] in BAD for record in done for row in record["rows"]))


def stop(number: int, _: object) -> None:
    """End the process that runs, whose session is its own, before this one."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
