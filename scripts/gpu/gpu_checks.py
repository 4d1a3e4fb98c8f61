"""What `make gpu` runs, on CUDA and in its rehearsal on the CPU, and how the output of each becomes rows."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_results import FAILED, MEASURED, MISSED, PASSED, REHEARSED, SKIPPED, Row, Table
from limited_process import Ended

Findings = tuple[Sequence[Row], Sequence[Table]]
TEST_MARK, TAKES_LONG = "mark.cuda", "chosen_device"
TEST_SEC = 180.0
SLOWER_ON_CPU = 2.0  # a machine of which others use the most
VERDICT = re.compile(r"::(?P<name>\S.*?) (?P<status>PASSED|SKIPPED|FAILED|ERROR)\b")
STATUS = {"PASSED": PASSED, "SKIPPED": SKIPPED, "FAILED": FAILED, "ERROR": FAILED}


@dataclass(frozen=True)
class Check:
    """One process: a benchmark, or the tests of a file."""

    part: str
    name: str
    arguments: tuple[str, ...]  # of the interpreter
    limit_sec: float
    read: Callable[[Ended], Findings]  # its findings; raises `ValueError` if it printed none

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"


@dataclass(frozen=True)
class Bench:
    """A program of scripts/bench: its arguments on CUDA, and for a rehearsal in seconds."""

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
ONE, TRACE = "--families", "--trace build/gpu/trace.json.gz"
HEAD = "--dim 1024 --rows 16 --length 1024 --chunk 2048 --vocabularies 32000 128000"
LARGE_NOISE = "--dim 1024 --layers 12 --rows 16 --seq-len 1024 --micro-batches 2 8 --rounds 3"
NOISE, GRAPHS = "--variants run 'without noise scale'", "--variants run 'without graphs'"
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
        for family in ("rglru", "gated_delta", "transformer", "gpt")
    ),
    Bench("speed", "head", 120, HEAD, "--rows 2 --length 64 --rounds 1 --vocabularies 4096"),
    Bench("ledger", "ledger", 200, ROW_BYTES, FEW_ROWS),
    Bench("profile", "profile", 300, f"{TRACE} --set train.micro_batches=2", TRACE.replace("gpu", "gpu-cpu")),
)


def checks(root: Path, device: str, results: Path) -> list[Check]:
    """All checks, part by part; pytest writes to `results`."""
    found = [*_tests(root, results), *_benches(device)]
    if device == "cuda":
        return found
    return [replace(each, limit_sec=SLOWER_ON_CPU * each.limit_sec) for each in found]


def _tests(root: Path, results: Path) -> Iterator[Check]:
    """The tests marked cuda, a process per file: a hang costs that file alone."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        if TEST_MARK not in (text := path.read_text(encoding="utf-8")):
            continue
        report, name = results / f"{path.stem}.xml", str(path.relative_to(root / "tests"))
        options = ("-m", "pytest", "-vv", "-m", "cuda", "-p", "no:cacheprovider", f"--junitxml={report}")
        read, part = partial(read_tests, report=report), "runs" if TAKES_LONG in text else "tests"
        yield Check(part, name, (*options, str(path)), TEST_SEC, read)


def _benches(device: str) -> Iterator[Check]:
    for bench in BENCHES:
        own = bench.on_cuda if device == "cuda" else bench.on_cpu
        program = f"scripts/bench/bench_{bench.name.partition('-')[0]}.py"
        arguments = (program, "--device", device, "--json", *shlex.split(own))
        read = partial(read_figures, is_rehearsal=device == "cpu")
        yield Check(bench.part, bench.name, arguments, bench.limit_sec, read)


def read_tests(ended: Ended, report: Path) -> Findings:
    """A row per test: from pytest's report, or from what it printed until it was killed. Raises
    ValueError: no test was run."""
    rows = list(_of_report(report)) if report.exists() else []
    if not rows:
        rows = [Row(found["name"], STATUS[found["status"]]) for found in VERDICT.finditer(ended.stdout)]
    if not rows:
        raise ValueError(f"no test was run: {ended.last_error}")
    return rows, ()


def _of_report(report: Path) -> Iterator[Row]:
    for case in ET.parse(report).iter("testcase"):
        status, reason = PASSED, ""
        for kind, means in (("skipped", SKIPPED), ("failure", FAILED), ("error", FAILED)):
            if (found := case.find(kind)) is not None:
                status, reason = means, found.get("message", "").strip().partition("\n")[0][:200]
        yield Row(case.get("name", ""), status, seconds=float(case.get("time", 0)), reason=reason)


def read_figures(ended: Ended, *, is_rehearsal: bool) -> Findings:
    """The figures that a benchmark printed as JSON in its last line. Raises ValueError: none."""
    lines = ended.stdout.strip().splitlines()
    if not lines:
        raise ValueError("it printed nothing")
    content = json.loads(lines[-1])
    rows = [_row(figure, is_rehearsal=is_rehearsal) for figure in content["figures"]]
    return rows, [Table(**table) for table in content.get("tables", ())]


def _row(figure: dict[str, Any], *, is_rehearsal: bool) -> Row:
    value, goal = figure["value"], figure["goal"]
    status = {None: MEASURED, True: PASSED, False: MISSED}[figure["is_met"]]
    if is_rehearsal and goal:
        status = REHEARSED
    reason = f"{value:.4g} is not {goal}" if status == MISSED else ""
    return Row(figure["name"], status, value, figure["low"], figure["high"], figure["unit"], goal, reason=reason)
