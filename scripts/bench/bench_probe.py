"""What probes of carry cost: the time of a probe over that of a step, and the share of the time at the default interval.

The trainer runs in full with a probe in every second step, so that probes and steps without one alternate; the trainer counts
a probe's time apart from the step's. Groups are just long enough for a probe to read all its `ledger.probe_cells` again, as the
default has them, and a step is a single micro-batch: longer groups cost no more, and more micro-batches make probes cheaper.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from pathlib import Path

import torch
from bench_table import Figure, bench_parser, print_figures, ratio_figure
from trainer_run import ALONE, CONFIG, write_corpus

from trainer.config.load import load_config
from trainer.config.schema import LedgerTable
from trainer.training.loop import run_loop
from trainer.training.setup.open_run import Launch, open_run
from trainer.training.setup.plan import Plan, make_plan

WARM_UP = 6
MOST_SHARE = 0.01


def plan_of(folder: Path, given: Path | None, *, steps: int, device: str) -> Plan:
    """A run that logs every step and probes every second one."""
    overrides = ["ledger.probe_every=2", f"train.steps={steps}", f'train.device="{device}"']
    if given is None:
        write_corpus(folder / "corpus")
        given = folder / "bench.toml"
        given.write_text(CONFIG.format(steps=steps, device=device, log_interval=1, corpus=folder / "corpus"))
        overrides += ["train.micro_batches=1", f"data.max_group_cells={LedgerTable().probe_cells + 1}"]
        overrides += ["data.mixing.num_streams_mixed=1"]  # so that groups soon have all their cells behind them
    quiet = ["eval.every=0", "checkpoint.every=0", 'metrics.wandb.mode="disabled"', "metrics.log_interval=1"]
    return make_plan(load_config(given, [*overrides, *quiet]), given, ALONE.world_size)


def rows_of(plan: Plan, folder: Path, device: torch.device) -> list[dict[str, float]]:
    """The logged steps of the run, in order."""
    with (
        open("/dev/null", "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.ExitStack() as stack,
    ):
        run = open_run(plan, Launch(run_dir=str(folder / "run")), ALONE, device, stack, stack)
        assert run is not None
        run_loop(run)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def measure(args: argparse.Namespace) -> list[Figure]:
    """Paired ratios of a probe and the step before it."""
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as name:
        plan = plan_of(Path(name), args.config, steps=args.steps, device=args.device)
        rows = rows_of(plan, Path(name), device)[WARM_UP:]
    pairs = [
        (plain["step_time_sec"], probed["time/probe_sec"])
        for plain, probed in zip(rows[::2], rows[1::2], strict=False)
        if "time/probe_sec" in probed
    ]
    ratios = [probe / step for step, probe in pairs]
    every = LedgerTable().probe_every
    return [
        Figure("seconds per step", statistics.median(step for step, _ in pairs), "s"),
        Figure("seconds per probe", statistics.median(probe for _, probe in pairs), "s"),
        ratio_figure("a probe over a step", ratios),
        ratio_figure(
            f"share of the time, one probe every {every} steps", [r / every for r in ratios], at_most=MOST_SHARE
        ),
        Figure("the same, longest probe of the run", max(ratios) / every, "x", at_most=MOST_SHARE),
    ]


def main() -> None:
    """Measure and print."""
    parser = bench_parser(__doc__, device="cpu")
    parser.add_argument("--config", type=Path, help="config of the run (default: 17.6 M parameters on synthetic text)")
    parser.add_argument("--steps", type=int, default=34)
    args = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads() if args.device == "cuda" else 1)
    print_figures("probe", measure(args), args)


if __name__ == "__main__":
    main()
