"""Runs every benchmark one after the other, and writes docs/benchmarks.md from what they print."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_table import Figure, as_text, verdict

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"
TITLES = {
    "loop": "The loop: the whole trainer against a bare one",
    "gns": "Gradient noise scale",
    "recurrence": "Recurrence: against nn.GRU and causal attention",
    "ledger": "Ledger",
    "data": "Data",
    "metrics": "Metrics",
    "startup": "Start-up",
    "growth": "Growth with the size of things",
}
# Fewer turns than each takes alone, so that all of them fit into a quarter of an hour on two cores.
# A picture beside its table.
GROWTH_PLOT = PAGE.parent / "images" / "growth.png"
SHORTER = {"gns": ["--rounds", "2"], "loop": ["--steps", "40", "--memory-rounds", "2"], "ledger": ["--steps", "1000"]}
SHORTER["growth"] = ["--plot", str(GROWTH_PLOT)]
ON_CUDA = ("loop", "recurrence")
INTRODUCTION = """\
# Benchmarks

Written by `{command}`; do not edit. Everything is a ratio or a median, measured in turn in one run, with its quartiles in
brackets where it was measured in pairs. A goal that is missed says so: these are the figures as they came.
One of them alone: `make bench-{example}`, or `python scripts/bench/bench_{example}.py --help`.
"""


def run(bench: str, arguments: Sequence[str]) -> tuple[dict[str, Any], float]:
    """What a benchmark measured, and the seconds it took."""
    began = time.perf_counter()
    command = [sys.executable, str(HERE / f"bench_{bench}.py"), "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1]), time.perf_counter() - began


def section(bench: str, found: dict[str, Any], spent: float) -> str:
    """One benchmark as a table."""
    first = "".join(HERE.joinpath(f"bench_{bench}.py").read_text(encoding="utf-8").split('"""')[1]).strip()
    rows = ["| what | measured | goal | |", "|---|---|---|---|"]
    for fields in found["figures"]:
        figure = Figure(**fields)
        rows.append(f"| {figure.name} | {as_text(figure)} | {figure.goal} | {verdict(figure)} |")
    picture = f"![growth](images/{GROWTH_PLOT.name})\n\n" if bench == "growth" else ""
    return f"## {TITLES[bench]}\n\n{first}\n\n{picture}" + "\n".join(rows) + f"\n\n{found['machine']}; {spent:.0f} s.\n"


def replace_section(page: Path, new: str) -> None:
    """Put a benchmark's section where the one of the same title is; the page must have one."""
    title = new.splitlines()[0]
    before, old, rest = page.read_text(encoding="utf-8").partition(f"{title}\n")
    if not old:
        raise SystemExit(f"{page} has no section {title!r}: run all benchmarks first")
    _, following, after = rest.partition("\n## ")
    page.write_text(f"{before}{new}{following}{after}", encoding="utf-8")


def main() -> None:
    """Run them and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--only", nargs="+", choices=list(TITLES), help="these alone; their sections of the page are replaced"
    )
    parser.add_argument("--config", default="train_configs/gpu_1x.toml", help="the run whose loop is measured on CUDA")
    args = parser.parse_args()
    is_cuda = args.device == "cuda"
    chosen = args.only or (ON_CUDA if is_cuda else list(TITLES))
    page = PAGE.with_name("benchmarks_gpu.md") if is_cuda else PAGE
    introduction = INTRODUCTION.format(command="make bench-gpu" if is_cuda else "make bench", example="loop")
    sections = [introduction]
    for bench in chosen:
        arguments = ["--device", "cuda"] if is_cuda else SHORTER.get(bench, [])
        if is_cuda and bench == "loop":
            arguments += ["--config", args.config]
        found, spent = run(bench, arguments)
        sections.append(section(bench, found, spent))
        print(sections[-1], flush=True)
        if args.only:
            replace_section(page, sections[-1])
        else:
            page.write_text("\n".join(sections), encoding="utf-8")  # what is there so far


if __name__ == "__main__":
    main()
