"""Names of metrics in backends that group by prefix."""

from __future__ import annotations

from trainer.metrics.catalog.lookup import EVAL_PREFIX


def display_key(key: str) -> str:
    """`loss` -> `train/loss`, `eval_loss` -> `eval/loss`, `eval_x/y` -> `eval/x/y`, and `x/y` unchanged."""
    if key.startswith(EVAL_PREFIX):
        return f"eval/{key.removeprefix(EVAL_PREFIX)}"
    return key if "/" in key else f"train/{key}"
