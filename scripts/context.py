"""What a short window costs, with and without carried states: the tables and the figure of docs/context.md.

Models are trained on equally many tokens in each step, in rows of 256, 1,024 or 4,096: single rows in shuffled order, each from
a zero state, as most trainers do it, or rows of documents whose state is carried. Each arrangement has the best of three and
more learning rates, chosen on a seed of its own. Finished runs are kept in --out, and not run again.

    make context               # about 3 hours on two cores
    make context SIZE=small    # 20 minutes: rglru, three arrangements
    make context SIZE=device   # larger models, 10 minutes on one CUDA device (DEVICE=cpu: a rehearsal)
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from context_tables import LONGER, Kind, tables, write_page
from experiments import Results, markdown, rows_of, train
from recall_gaps import GAPS, write_recall
from torch import Tensor, nn

from trainer.lab import gated_delta
from trainer.model import encoder

TRIAL_SEED = 100
JUDGED = r"eval_loss|eval/gap_\d+/loss"
VOCABULARY = 257  # bytes, and what begins a document
KEPT = r"eval_loss|eval/depth/.*|eval/gap_\d+/(loss|accuracy|depth/beyond_cell/(loss_from_zero|carry_gain))"
Job = Callable[[str, int], dict[str, Any]]
# (window, spread; 0: single rows in shuffled order). With rows of 256 these corpora have documents for a spread of 8:
# 16, the default, and 64 are the same run.
ARRANGEMENTS = ((256, 0), (256, 1), (256, 16), (1024, 0), (1024, 16), (4096, 0), (4096, 16))
FEW = ((256, 0), (256, 16), (4096, 0))
LARGE = ((1024, 0), (1024, 16), (16384, 0))


@dataclass(frozen=True)
class Size:
    """What is run, and how long."""

    families: tuple[str, ...] = ("rglru", "gated_delta")
    arrangements: tuple[tuple[int, int], ...] = ARRANGEMENTS
    tokens: int = 16384  # of a step
    seeds: int = 3
    dim: int = 96
    layers: int = 2
    steps: int = 200
    trial_steps: int = 60
    speed_steps: int = 12
    has_longer: bool = True  # runs of `LONGER` times as many steps, of the first family
    lrs: tuple[float, ...] = (4e-3, 8e-3, 16e-3)


SIZES = {
    "full": Size(),
    "small": Size(families=("rglru",), arrangements=FEW, has_longer=False),
    "device": Size(arrangements=LARGE, tokens=65536, seeds=2, dim=512, layers=6, lrs=(2e-3,), has_longer=False),
    "tiny": Size(arrangements=FEW, seeds=2, dim=16, layers=1, steps=2, trial_steps=2, speed_steps=2, lrs=(2e-3,)),
}


def run(name: str, seed: int, size: Size, device: str, text: Path, work: Path) -> dict[str, Any]:
    """Train once: losses of held-out documents, read whole; those by depth, and (tokens, nats) of each document of text."""
    task, family, window, spread, lr, *trial = name.split()
    of_task = {"speed": size.speed_steps, "longer": LONGER * size.steps}
    steps = of_task.get(task, size.trial_steps if trial else size.steps)
    sets = {
        "train.steps": steps,
        "train.device": f'"{device}"',
        "data.seq_len": window,
        "data.max_group_cells": int(spread == "0"),
        "data.mixing.batch_size": size.tokens // int(window),
        "data.mixing.spread": max(int(spread), 1),
        "data.mixing.num_streams_mixed": 256,  # all files: by default few rows would read few files at a time
        "eval.every": steps * (task != "speed"),
        "eval.depth": str(not trial).lower(),
        "model.family": f'"{family}"',
        "model.dim": size.dim,
        "model.num_layers": size.layers,
        "optimizer.lr": lr,
        "scheduler.warmup_steps": min(steps // 2, 20),
        "scheduler.min_lr_ratio": 0.1,
        "checkpoint.every": 0,
        "metrics.log_interval": 2,
    }
    if task != "recall":
        sets |= {"eval.holdout_fraction": 0.02, "eval.batches": 1_000_000}  # all of them
    run_dir = train(name, TRIAL_SEED if trial else seed, config_of(task, text, work / "recall"), work, sets)
    speeds = [row["tokens_per_sec"] for row in rows_of(run_dir, "train")[1:]]
    found: dict[str, Any] = {"tokens_per_sec": round(statistics.median(speeds))}
    for row in rows_of(run_dir, "eval"):
        found |= {key: round(row[key], 5) for key in row if re.fullmatch(KEPT, key)}
        # Which the chosen learning rate has lowest.
        found["judged"] = statistics.fmean(row[key] for key in row if re.fullmatch(JUDGED, key))
    if task in ("text", "longer"):
        lines = next((run_dir / "evaluations").iterdir()).read_text(encoding="utf-8").splitlines()
        documents = sorted((json.loads(line) for line in lines), key=itemgetter("stream", "document"))
        found["documents"] = [(each["tokens"], round(each["nats"], 2)) for each in documents]
    shutil.rmtree(run_dir)
    # On CPUs gated_delta keeps less than its kernels do.
    if task == "speed" and (family, device) != ("gated_delta", "cpu"):
        found["kept_mb"] = kept_mb(family, size, int(window), device)
    return found


def best_lrs(kinds: Sequence[Kind], lrs: Sequence[float], results: Results, job: Job, jobs: int) -> dict[Kind, float]:
    """The rate with the lowest loss after a short run. While that is a kind's lowest or highest, one beyond is tried."""
    rates, best = dict.fromkeys(kinds, tuple(lrs)), dict.fromkeys(kinds, lrs[0])
    for _ in lrs[1:] and lrs:  # of one there is nothing to choose
        results.complete([kind.run_name(lr, is_trial=True) for kind in kinds for lr in rates[kind]], 1, job, jobs)
        for kind in kinds:
            losses = {lr: results.of(kind.run_name(lr, is_trial=True), 1)[0]["judged"] for lr in rates[kind]}
            best[kind] = min(losses, key=losses.__getitem__)
            if best[kind] in (min(losses), max(losses)):
                rates[kind] += (best[kind] * (2 if best[kind] == max(losses) else 0.5),)
    return best


def kept_mb(family: str, size: Size, window: int, device: str) -> float:
    """What a row keeps from the forward for the backward, without parameters."""
    build: Callable[..., nn.Module] = encoder.build if family == "rglru" else gated_delta.build
    model = build(VOCABULARY, size.dim, size.layers).to(device)
    kept: dict[int, Tensor] = {}
    tokens = torch.zeros(1, window, dtype=torch.long, device=device)

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own) / 1e6


def config_of(task: str, text: Path, recall: Path) -> str:
    """The run's name, and its sources."""
    sources = [f'[[data.source]]\nname = "text"\nroot = "{text}"']
    if task == "recall":
        files = [("data", "recall", "train/*"), *(("eval", gap, f"eval/{gap}") for gap in GAPS)]
        sources = [
            f'[[{table}.source]]\nname = "{name}"\npaths = ["{recall.resolve()}/{path}.jsonl"]\nloss_mask = "answers"'
            for table, name, path in files
        ]
    return "\n".join(['[run]\nname = "context"', *sources])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=SIZES, default="full", help="only the full one is written into docs/context.md"
    )
    parser.add_argument("--text", type=Path, default=Path("data/pytext"), help="made by `make data`")
    parser.add_argument("--out", type=Path, default=Path("docs/context.json"), help="the results, kept")
    parser.add_argument("--work", type=Path, default=Path("build/context"), help="directory of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="print tables as JSON")
    args = parser.parse_args()
    size, results = SIZES["tiny" if (args.size, args.device) == ("device", "cpu") else args.size], Results(args.out)
    if not (args.work / "recall").exists():
        write_recall(args.work / "recall")
    job = partial(run, size=size, device=args.device, text=args.text.resolve(), work=args.work)
    chosen: dict[Kind, str] = {}
    for task, family in ((task, family) for family in size.families for task in ("recall", "text")):
        kinds = [Kind(task, family, *each) for each in size.arrangements]
        best = best_lrs(kinds, size.lrs, results, job, args.jobs)
        chosen |= {kind: kind.run_name(best[kind]) for kind in kinds}
        results.complete([chosen[kind] for kind in kinds], size.seeds, job, args.jobs)
    longer = [Kind("longer", size.families[0], *each) for each in FEW if size.has_longer]
    chosen |= {kind: chosen[kind._replace(task="text")].replace("text", "longer") for kind in longer}
    results.complete([chosen[kind] for kind in longer], size.seeds, job, args.jobs)
    for kind in [Kind("speed", family, *each) for family in size.families for each in size.arrangements]:
        chosen[kind] = kind.run_name(size.lrs[0])
        results.complete([chosen[kind]], 1, job, 1)  # with nothing beside it
    found = {kind: results.of(name, 1 if kind.task == "speed" else size.seeds) for kind, name in chosen.items()}
    lrs = {kind: name.split()[4] for kind, name in chosen.items()}
    shown = list(tables(found, lrs))
    if args.json:
        named = [dict(zip(("title", "columns", "rows"), table, strict=True)) for table in shown]
        print(json.dumps({"figures": [], "tables": named}))
    elif args.size == "full":
        write_page(shown, found)
    else:
        print(*(f"{title}:\n{markdown(columns, rows)}" for title, columns, rows in shown), sep="\n\n")


if __name__ == "__main__":
    main()
