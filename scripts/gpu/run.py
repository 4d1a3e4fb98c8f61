"""`make gpu`: tests, figures, ledger and a profile on one CUDA device; with --device cpu, a rehearsal of all that.

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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gpu_checks import Check, checks
from gpu_results import BAD, FAILED, NOT_RUN, PARTS, TIMED_OUT, Record, Row, load, render, save, summary
from limited_process import Ended, run_process

ROOT = Path(__file__).resolve().parents[2]
PART_SEC = {"cuda": 480.0, "cpu": 900.0}
CORPUS = ROOT / "data" / "pytext"
CORPUS_SEC = 240.0
EXIT_BAD, EXIT_CANNOT = 1, 2
NEED_CORPUS = frozenset({"speed", "models", "profile"})
OF_TORCH = """
import json, torch
cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()
device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"torch": torch.__version__, "cuda": cuda, "cudnn": cudnn, "device": device}))
"""


def versions() -> dict[str, str | None]:
    """Of device, driver, torch, CUDA, cuDNN and Python. torch is asked in a process of its own: to import it here would take
    the memory of the device that is measured."""
    of_torch = json.loads(_said(sys.executable, "-c", OF_TORCH) or "{}")
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        **{key: None if value is None else str(value) for key, value in of_torch.items()},
        "driver": driver or None,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of the checkout, with `-dirty` if it was changed; `COMMIT` of the environment where there is no git."""
    described = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return os.environ.get("COMMIT") or _said("git", "-C", str(ROOT), *described) or "unknown"


def _said(*command: str) -> str:
    """What a command prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def environment(device: str) -> dict[str, str]:
    """Of every check: this checkout first, then what PYTHONPATH says. Nothing asks for a network."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "TRAINER_TEST_DEVICE": device, "WANDB_MODE": "disabled", "NO_COLOR": "1"}
    return {**os.environ, **own}


def findings(check: Check, ended: Ended) -> Record:
    """What came of a check that has ended, or was ended."""
    rows, tables = [], []
    try:
        found, shown = check.read(ended)
        rows, tables = list(found), list(shown)
    except (ValueError, KeyError, TypeError) as error:
        if ended.code == 0:
            rows = [Row(check.name, FAILED, reason=f"no result: {error}")]
    if ended.code is None:
        said = (ended.stdout.strip() or ended.stderr.strip()).splitlines() or [""]  # pytest's test, while it runs
        rows.append(Row(check.name, TIMED_OUT, reason=f"after {ended.seconds:.0f} s: {said[-1]}"[:300]))
    elif ended.code != 0 and not any(row.status in BAD for row in rows):
        rows.append(Row(check.name, FAILED, reason=ended.last_error[:300]))
    return Record(check.part, check.name, "", "", ended.seconds, rows, tables)


def run_check(check: Check, *, limit_sec: float, environ: dict[str, str]) -> Record:
    """Run it, for no longer than `limit_sec`."""
    if limit_sec < 1.0:
        row = Row(check.name, NOT_RUN, reason="the time of the part is over")
        return Record(check.part, check.name, "", "", 0.0, [row])
    ended = run_process([sys.executable, *check.arguments], limit_sec=limit_sec, environ=environ, cwd=ROOT)
    record = findings(check, ended)
    if any(row.status in BAD for row in record.rows):
        print(ended.stdout[-2000:] + ended.stderr[-4000:], file=sys.stderr, flush=True)
    return record


def run_parts(
    chosen: Sequence[Check],
    environ: dict[str, str],
    machine: Mapping[str, str | None],
    keep: Callable[[Record], None],
    *,
    part_sec: float,
) -> list[Record]:
    """Run checks in turn, each part for no longer than `part_sec`; `keep` is called after each."""
    version, found = commit(), []
    began: dict[str, float] = {}
    for check in chosen:
        start = began.setdefault(check.part, time.monotonic())
        print(f"{check.key} ...", file=sys.stderr, flush=True)
        left = start + part_sec - time.monotonic()
        record = run_check(check, limit_sec=min(check.limit_sec, left), environ=environ)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = replace(record, date=now, commit=version, machine=machine)
        keep(record)
        found.append(record)
        print(summary([record]), file=sys.stderr, flush=True)
    return found


def make_corpus(environ: dict[str, str]) -> None:
    """Build the default corpus from the text of this machine, if it is not there. Raises ValueError."""
    if (CORPUS / "manifest.json").exists():
        return
    print("data/pytext ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(ROOT / "train"), "data", "build", "pytext", "--out", str(CORPUS), "--force"]
    ended = run_process(command, limit_sec=CORPUS_SEC, environ=environ, cwd=ROOT)
    if ended.code != 0:
        raise ValueError(f"data/pytext cannot be built: {ended.last_error}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--part", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--check", default="", help="run only checks whose name contains this")
    parser.add_argument("--json", type=Path, help="file that results are merged into; the page is written beside it")
    args = parser.parse_args(argv)
    results = ROOT / "build" / ("gpu" if args.device == "cuda" else "gpu-cpu")
    results.mkdir(parents=True, exist_ok=True)
    for report in results.glob("*.xml"):  # what an earlier run has left would pass for this one's
        report.unlink()
    # The figures of a rehearsal mean nothing: they stay where git does not see them.
    folder = ROOT / "docs" if args.device == "cuda" else results
    file = args.json or folder / "benchmarks-gpu.json"
    known = checks(ROOT, args.device, results)
    chosen = [check for check in known if args.part in (check.part, "all") and args.check in check.name]
    environ, machine = environment(args.device), versions()
    try:
        if not chosen:
            raise ValueError(f"no check of part {args.part} has {args.check!r} in its name")
        records = load(file, args.device)
        if args.device == "cuda" and machine.get("device") is None:
            raise ValueError(f"torch {machine.get('torch')} of {sys.executable} finds no CUDA device")
        if NEED_CORPUS & {check.part for check in chosen}:
            make_corpus(environ)
    except ValueError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return EXIT_CANNOT

    def keep(record: Record) -> None:
        records[record.key] = record
        merged = {check.key: records[check.key] for check in known if check.key in records}
        save(file, args.device, merged)
        file.with_suffix(".md").write_text(render(list(merged.values()), args.device), encoding="utf-8")

    found = run_parts(chosen, environ, machine, keep, part_sec=PART_SEC[args.device])
    print(f"\n{summary(found)}\n\n{file}")
    return EXIT_BAD if any(row.status in BAD for record in found for row in record.rows) else 0


def stop(number: int, _: object) -> None:
    """End the process that runs, whose session is its own, before this one."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
