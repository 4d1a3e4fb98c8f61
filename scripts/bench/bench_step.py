"""The step of full runs, in variants, beside the model alone: tokens per second, MFU, memory, and the time to the first step.

Losses of the variants of a family must agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_table import Figure, Table, bench_parser, over, ratio_figure, run_bench
from torch import nn
from trainer_run import GPU_CONFIG, LOG_INTERVAL, TINY, plan_of, run_trainer
from turns import Block, Turn, run_in_turns

from trainer.cli.parts import PARTS
from trainer.distributed.strategy import compile_blocks
from trainer.on_device import compute_mfu, peak_tflops_of
from trainer.training.build import autocast_context
from trainer.training.plan import Plan, build_model

VARIANTS: dict[str, Sequence[str]] = {
    "run": (),
    "alone": (),
    "without graphs": ("train.cuda_graph=false",),
    "uncompiled": ("train.compile=false", "train.cuda_graph=false"),
    "without noise scale": ("gns.enabled=false",),
}
SMALL = 100e6  # parameters
FIRST_STEP_SEC = 10.0
AFTER_SEC = 2.5  # of training, at which losses of families are compared


def plan_here(folder: Path, family: str, args: argparse.Namespace, sets: Sequence[str] = ()) -> Plan:
    sizes = {"model.dim": args.dim, "model.num_layers": args.layers, "data.seq_len": args.length}
    sizes["data.mixing.batch_size"] = args.rows
    own = [*TINY] if args.tiny else []
    own += [f"{key}={value}" for key, value in sizes.items() if value]
    own += [f"model.family={family}", "train.micro_batches=2", *sets, *args.sets]
    return plan_of(folder, GPU_CONFIG, steps=args.steps, device=args.device, sets=own)


def trained(family: str, sets: Sequence[str], args: argparse.Namespace, turn: Turn) -> None:
    with tempfile.TemporaryDirectory() as name:
        run_trainer(plan_here(Path(name), family, args, sets), Path(name), torch.device(args.device), turn)


def alone(family: str, args: argparse.Namespace, turn: Turn) -> None:
    """The model on one batch that is there already: forward, loss, backward, clip, fused AdamW."""
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as name:
        config = (plan := plan_here(Path(name), family, args)).config
    model = build_model(config.model, plan.vocab_size, parts=PARTS).to(device)
    if config.train.compile:
        compile_blocks(model)
    parameters, autocast = list(model.parameters()), autocast_context(config, device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    tokens = torch.randint(plan.vocab_size, (config.data.mixing.batch_size, config.data.seq_len + 1), device=device)
    for step in range(1, args.steps + 1):
        for _ in range(2):
            with autocast():
                logits = model(tokens[:, :-1]).logits.flatten(0, 1).float()
                loss: Any = F.cross_entropy(logits, tokens[:, 1:].flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turn.update(step, loss.detach(), 2 * tokens[:, 1:].numel())


def measure(args: argparse.Namespace) -> list[Figure | Table]:
    figures: list[Figure] = []
    rows = []
    for family in args.families:
        names = [name for name in args.variants if name != "alone"]
        runs = {name: partial(trained, family, VARIANTS[name], args) for name in names}
        blocks = run_in_turns(runs, args.device, args.steps)
        if "alone" in args.variants:  # on other tokens, with other losses
            blocks |= run_in_turns({"alone": partial(alone, family, args)}, args.device, args.steps)
        with tempfile.TemporaryDirectory() as name, torch.device("meta"):
            plan = plan_here(Path(name), family, args)
            model = build_model(plan.config.model, plan.vocab_size, parts=PARTS)
        size, flops = sum(p.numel() for p in model.parameters()), model.flops_per_token(plan.config.data.seq_len)  # type: ignore[operator]
        speeds = {name: [block.tokens / block.seconds for block in each[1:]] for name, each in blocks.items()}
        figures += figures_of(family, size, speeds, blocks)
        for name, each in blocks.items():
            middle, peak = statistics.median(speeds[name]), peak_tflops_of(args.device)
            mfu = compute_mfu(tokens_per_sec=middle, flops_per_token=flops, num_devices=1, peak_tflops=peak)
            sizes = round(size / 1e6), round(middle), float(mfu or 0.0)
            after = "" if name == "alone" else loss_after(each)  # on tokens of no text
            rows.append((family, name, *sizes, each[-1].first_step_sec, each[-1].peak_mb / 1e3, after))
    sizes_of = ("million parameters", "tokens/s", "MFU", "first step after s", "GB", f"loss after {AFTER_SEC:g} s")
    columns = ("family", "variant", *sizes_of)
    return [*figures, Table("Medians", columns, rows)]


def loss_after(blocks: Sequence[Block]) -> str:
    """The mean loss of the block in which the time is over, not counting the first one, which compiles."""
    seconds = 0.0
    for block in blocks[1:]:
        seconds += block.seconds
        if seconds >= AFTER_SEC:
            return f"{statistics.mean(block.losses):.3f}"
    return "it ended before"


def figures_of(family: str, size: int, speeds: dict[str, list[float]], blocks: dict[str, list[Block]]) -> list[Figure]:
    if "run" not in speeds:
        return []
    is_small, own = size < SMALL, speeds["run"]
    goal = {"alone": 0.90 if is_small else 0.97, "without noise scale": 1 / (1.03 if is_small else 1.01)}
    found, text = [], f"{family}: tokens per second, run over"
    for name, each in speeds.items():
        if name != "run":
            found.append(ratio_figure(f"{text} {name}", over(own, each), at_least=goal.get(name)))
    first = blocks["run"][0].first_step_sec
    return [*found, Figure(f"{family}: first step after", first, "s", at_most=FIRST_STEP_SEC)]


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cuda", sets=True)
    parser.add_argument("--families", nargs="+", default=["rglru"])
    parser.add_argument("--variants", nargs="+", default=["run", "alone"], choices=list(VARIANTS))
    for name in ("dim", "layers", "rows", "length"):
        parser.add_argument(f"--{name}", type=int, default=0, help="0: as in train_configs/gpu_1x.toml")
    parser.add_argument("--tiny", action="store_true", help="shrink models and batches: a rehearsal")
    several = f"of each run, a multiple of {LOG_INTERVAL}"
    parser.add_argument("--steps", type=int, default=6 * LOG_INTERVAL, help=several)
    run_bench("step", parser, measure)
