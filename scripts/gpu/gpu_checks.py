"""What `make gpu` runs, on CUDA and in its rehearsal on the CPU, and how the output of each becomes rows.

A row is one test or figure: `name`, `status`, of a figure also `value`, `low`, `high`, `unit`, `goal`, and `reason`, why it is
not good or, where the line has room, was skipped.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("tests", "runs", "speed", "models", "ledger", "context")
PASSED, MEASURED, REHEARSED, SKIPPED = "passed", "measured", "rehearsed", "skipped"
MISSED, FAILED, TIMED_OUT, NOT_RUN = "MISSED", "FAILED", "TIMED OUT", "NOT RUN"
TEST_MARK, TAKES_LONG = "mark.cuda", "chosen_device"
TEST_SEC = 180.0
SLOWER_ON_CPU = 2.0  # a machine of which others use the most
VERDICT = re.compile(r"^\S+?\.py::(.+?) (PASSED|SKIPPED|FAILED|ERROR)\b(?: \((.*)\))?", re.M)
REASON = re.compile(r"^(?:FAILED|ERROR) \S+?\.py::(.+?) - (.*)", re.M)
STATUS = {"PASSED": PASSED, "SKIPPED": SKIPPED, "FAILED": FAILED, "ERROR": FAILED}

Row = dict[str, Any]


class Ended(NamedTuple):
    """How a process ended."""

    code: int | None  # its exit code; None if it ran past its limit and was killed
    stdout: str
    stderr: str
    seconds: float


class Check(NamedTuple):
    """One process: a benchmark, or the tests of a file."""

    part: str
    name: str
    arguments: tuple[str, ...]  # of the interpreter
    limit_sec: float

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"


class Bench(NamedTuple):
    """A program of scripts/bench, or scripts/context.py: its arguments on CUDA, and for a rehearsal in seconds."""

    part: str
    name: str
    limit_sec: float
    on_cuda: str
    on_cpu: str


ROW_BYTES = "--row-bytes 2048 65536 1048576 20971520"
FEW_ROWS = "--row-bytes 2048 65536 1048576 --megabytes 64 --wide-steps 6"
SETS = "--set objective.z_loss=0 --set objective.token_types=false --set train.micro_batches=2"
LOOP = f"--config train_configs/gpu_1x.toml --launches 1 {SETS}"
SMALL = "--dim 384 --layers 12 --rows 8 --length 512"
SMALL_SETS = "--set model.dim=384 --set model.num_layers=12 --set data.seq_len=512 --set data.mixing.batch_size=8"
ONE = "--families"
HEAD = "--dim 1024 --rows 16 --length 1024 --chunk 2048 --vocabularies 32000 128000"
LARGE_NOISE = "--dim 1024 --layers 12 --rows 16 --seq-len 1024 --micro-batches 2 8 --rounds 3"
NOISE, GRAPHS = "--variants run 'without noise scale'", "--variants run 'without graphs'"
CONTEXT = "--size device --out build/context-gpu/results.json --work build/context-gpu"
# A part ends within 8 minutes on CUDA whatever happens; what has a goal comes first.
BENCHES = (
    Bench("speed", "recurrence", 90, "--dim 1024 --tokens 32768", "--dim 64 --tokens 512 --lengths 64 256 --rounds 2"),
    Bench("speed", "gns", 120, LARGE_NOISE, "--dim 64 --layers 2 --seq-len 32 --micro-batches 4 --rounds 1"),
    Bench("speed", "step-small", 90, f"{SMALL} --steps 200", "--tiny --steps 20"),
    Bench("speed", "step-large", 90, "--steps 40", "--tiny --steps 20"),
    Bench("speed", "step-small-noise", 90, f"{SMALL} {NOISE} --steps 200", f"--tiny {NOISE} --steps 20"),
    Bench("speed", "step-large-noise", 90, f"{NOISE} --steps 40", f"--tiny {NOISE} --steps 20"),
    Bench("speed", "step-large-graphs", 90, f"{GRAPHS} --steps 40", f"--tiny {GRAPHS} --steps 20"),
    Bench("speed", "loop-small", 90, f"{LOOP} {SMALL_SETS} --steps 200", f"{LOOP} --tiny"),
    Bench("speed", "loop-large", 90, f"{LOOP} --steps 40", f"{LOOP} --tiny"),
    *(
        Bench(
            "models",
            f"step-{family}-{size}M-{length}",
            90,
            f"{ONE} {family} --steps 40 --dim {dim} --layers {layers} --rows {32768 // length} --length {length}",
            f"{ONE} {family} --steps 20 --tiny",
        )
        for size, dim, layers in ((30, 384, 12), (130, 768, 20), (277, 1024, 24))
        for length in (1024, 4096)
        for family in ("rglru", "gated_delta", "transformer")
    ),
    Bench("speed", "head", 120, HEAD, "--rows 2 --length 64 --rounds 1 --vocabularies 4096"),
    Bench("ledger", "ledger", 200, ROW_BYTES, FEW_ROWS),
    Bench("context", "context", 450, CONTEXT, CONTEXT),
)


def checks(root: Path, device: str) -> list[Check]:
    """All checks, part by part. The tests marked cuda have a process per file: a hang costs that file alone."""
    found, slower = [], SLOWER_ON_CPU if device == "cpu" else 1.0
    for path in sorted((root / "tests").rglob("test_*.py")):
        if TEST_MARK in (text := path.read_text(encoding="utf-8")):
            options = ("-m", "pytest", "-vv", "-m", "cuda", "-p", "no:cacheprovider", str(path))
            part, name = "runs" if TAKES_LONG in text else "tests", str(path.relative_to(root / "tests"))
            found.append(Check(part, name, options, slower * TEST_SEC))
    for bench in BENCHES:
        own = shlex.split(bench.on_cuda if device == "cuda" else bench.on_cpu)
        name = bench.name.partition("-")[0]
        program = "scripts/context.py" if name == "context" else f"scripts/bench/bench_{name}.py"
        arguments = (program, "--device", device, "--json", *own)
        found.append(Check(bench.part, bench.name, arguments, slower * bench.limit_sec))
    return found


def read_tests(printed: str) -> list[Row]:
    """A row per test of what pytest printed, be it killed or not. Raises ValueError: no test was run."""
    reasons = dict(REASON.findall(printed))
    verdicts = VERDICT.findall(printed)
    if not verdicts:
        raise ValueError("no test was run")
    return [
        {"name": name, "status": STATUS[verdict], "reason": (why or reasons.get(name, ""))[:200]}
        for name, verdict, why in verdicts
    ]


def read_figures(printed: str, *, is_rehearsal: bool) -> tuple[list[Row], list[dict[str, Any]]]:
    """The figures and tables that a benchmark printed as JSON in its last line. Raises ValueError: none."""
    content = json.loads((printed.strip().splitlines() or ["nothing"])[-1])
    rows = []
    for figure in content["figures"]:
        is_met = figure.pop("is_met")
        status = {None: MEASURED, True: PASSED, False: MISSED}[is_met]
        if is_rehearsal and figure["goal"]:
            status = REHEARSED
        reason = f"{figure['value']:.4g} is not {figure['goal']}" if status == MISSED else ""
        rows.append({**figure, "status": status, "reason": reason})
    return rows, content.get("tables", [])


def findings(check: Check, ended: Ended, *, is_rehearsal: bool) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows and tables of a check that has ended, or was ended: what it found, and why it is not all there is."""
    rows, tables = list[Row](), list[dict[str, Any]]()
    try:
        if "pytest" in check.arguments:
            rows = read_tests(ended.stdout)
        else:
            rows, tables = read_figures(ended.stdout, is_rehearsal=is_rehearsal)
    except (ValueError, KeyError, TypeError) as error:
        if ended.code == 0:
            rows = [{"name": check.name, "status": FAILED, "reason": f"no result: {error}"}]
    if ended.code is None:
        said = (ended.stdout.strip() or ended.stderr.strip()).splitlines() or [""]  # pytest's test, while it runs
        reason = f"after {ended.seconds:.0f} s: {said[-1]}"[:300]
        rows.append({"name": check.name, "status": TIMED_OUT, "reason": reason})
    elif ended.code != 0 and not any(row["status"] in (MISSED, FAILED) for row in rows):
        rows.append({"name": check.name, "status": FAILED, "reason": last_error(ended)[:300]})
    return rows, tables


def last_error(ended: Ended) -> str:
    """The last line of its error, or its exit code if it wrote none."""
    return (ended.stderr.strip().splitlines() or [f"exit code {ended.code}"])[-1].strip()
