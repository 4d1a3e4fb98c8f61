"""A benchmark's figures and goals, printed as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.wording import counted

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One measured number: a median, optionally with quartiles and a goal."""

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        is_high_enough = self.at_least is None or self.value >= self.at_least
        return is_high_enough and (self.at_most is None or self.value <= self.at_most)

    @property
    def goal(self) -> str:
        limits = {"at least": self.at_least, "at most": self.at_most}
        return " and ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)


def median_figure(name: str, values: Sequence[float], unit: str, **goal: float | None) -> Figure:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return Figure(name, middle, unit, low, high, **goal)


def ratio_figure(name: str, ratios: Sequence[float], **goal: float | None) -> Figure:
    return median_figure(name, ratios, "x", **goal)


def over(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    return [own / other for own, other in zip(ours, others, strict=True)]


def in_turns(actions: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each action returns, in turns, after a first one that warms up: other load on the machine falls on all alike."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            value = action()
            if turn:
                found[name].append(value)
    return found


def seconds_of(run: Callable[[], object], device: str) -> float:
    """How long it takes, to the end of what it queues on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def growth_mb(small: Callable[[], object], run: Callable[[], object], device: str) -> float:
    """MB by which it raises the peak in this process, after a small one that loads what torch loads once."""
    small()
    before = peak_mb(device)
    run()
    return peak_mb(device) - before


def in_child(function: Callable[..., T], *arguments: object) -> T:
    """What a function returns in a new process, which has memory of its own, and as many threads."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        return pool.submit(function, *arguments).result()


def machine() -> str:
    """Processor, accelerator and versions, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = counted(torch.get_num_threads(), "thread")
    return f"{cpu}{gpu}, Python {platform.python_version()}, torch {torch.__version__}, {threads}"


def peak_mb(device: str) -> float:
    """Highest memory so far: allocated on CUDA, resident on the CPU. `getrusage` would report that of a parent, too."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


@dataclass(frozen=True)
class Table:
    """What is shown below the figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int]]


def bench_parser(doc: str | None, *, device: str | None = None, sets: bool = False) -> argparse.ArgumentParser:
    """The options that benchmarks share; `--device` with this default and `--set` where asked for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    if device:
        parser.add_argument("--device", default=device, choices=["cpu", "cuda"])
    if sets:
        options: Any = {"dest": "sets", "action": "append", "default": []}
        parser.add_argument("--set", help="a setting of the config, KEY=VALUE", **options)
    return parser


def run_bench(
    bench: str, parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Sequence[Figure | Table]]
) -> None:
    """Measure, on the CPU in one thread, and print."""
    args = parser.parse_args()
    if getattr(args, "device", "cpu") == "cpu":
        torch.set_num_threads(1)
    found = measure(args)
    figures = [each for each in found if isinstance(each, Figure)]
    tables = [each for each in found if isinstance(each, Table)]
    if args.json:
        rows = [{**asdict(each), "goal": each.goal, "is_met": each.is_met} for each in figures]
        content = {"figures": rows, "tables": list(map(asdict, tables))}
        print(json.dumps({"bench": bench, "machine": machine(), **content}))
    else:
        print(f"{bench}: {machine()}")
        width = max(len(figure.name) for figure in figures)
        for figure in figures:
            print(f"{figure.name:{width}}  {as_text(figure):>28}  {figure.goal:15} {verdict(figure)}".rstrip())
        for table in tables:
            print(f"{table.title}: {', '.join(table.columns)}", *("  ".join(map(str, r)) for r in table.rows), sep="\n")


def as_text(figure: Figure) -> str:
    spread = f" ({figure.low:.4g} to {figure.high:.4g})" if figure.low is not None and figure.high is not None else ""
    return f"{figure.value:.4g}{' ' + figure.unit if figure.unit not in ('', 'x') else ''}{spread}"


def verdict(figure: Figure) -> str:
    """`met`, `MISSED`, or nothing without a goal."""
    return {None: "", True: "met", False: "MISSED"}[figure.is_met]
