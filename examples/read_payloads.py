"""Reads a run's metrics with the standard library and one module of the trainer that needs nothing
else, no torch.

python examples/read_payloads.py runs/smoke-.../metrics.jsonl
torchrun ... train ... | python examples/read_payloads.py -
"""

import sys

from trainer.metrics.payload_contract import parse_payload, strip_launcher_prefix

if len(sys.argv) != 2:
    sys.exit(__doc__)
with sys.stdin if sys.argv[1] == "-" else open(sys.argv[1], encoding="utf-8") as lines:
    losses: dict[int, float] = {}
    for line in lines:
        row = parse_payload(strip_launcher_prefix(line))  # raises PayloadError, which names the invalid key
        if row.restart is not None:  # rows after the checkpoint are superseded
            losses = {step: loss for step, loss in losses.items() if step <= row.restart.global_step}
        if row.mode == "train" and "loss" in row.metrics:
            losses[row.global_step] = row.metrics["loss"]
        elif row.non_finite:
            print(f"step {row.global_step}: not finite: {', '.join(row.non_finite)}")
if not losses:
    sys.exit("no training loss found")
best = min(losses, key=losses.__getitem__)
print(f"{len(losses)} logged steps; last {max(losses)}: {losses[max(losses)]:.4f}; lowest {best}: {losses[best]:.4f}")
