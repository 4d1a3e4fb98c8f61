"""What to write instead of an unknown key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from trainer.config.lines import KeyPath

# Key here -> its names in other trainers; with a table in front, in that table only.
OTHER_NAMES = {
    "checkpoint.every": "save_every save_steps save_interval save_freq checkpoint.interval checkpoint.steps",
    "checkpoint.keep_last": "save_total_limit keep_checkpoints",
    "checkpoint.resume": "resume_from resume_from_checkpoint load_from",
    "data.mixing.batch_size": "micro_batch_size train_batch_size per_device_batch_size per_device_train_batch_size",
    "data.mixing.num_streams_mixed": "num_active",
    "data.seq_len": "max_seq_len max_length sequence_length block_size context_length",
    "eval.batches": "eval_iters",
    "eval.every": "eval.steps eval.interval eval_steps eval_interval",
    "eval.holdout_fraction": "val_fraction val_split validation_split",
    "metrics.log_interval": "log_every log_freq log_steps logging_steps log_every_n_steps",
    "metrics.peak_tflops": "gpu_peak_tflops",
    "metrics.smoothing_alpha": "alpha ema_alpha",
    "model.dim": "width d_model n_embd hidden_size hidden_dim embed_dim",
    "model.num_layers": "n_layer n_layers num_hidden_layers depth",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.lr": "learning_rate max_lr peak_lr",
    "run.dir": "output_dir out_dir save_dir log_dir",
    "scheduler.min_lr_ratio": "min_lr lr_min",
    "scheduler.name": "lr_scheduler lr_scheduler_type lr_schedule",
    "scheduler.warmup_steps": "warmup warmup_iters warmup_ratio",
    "train.clip_grad_norm": "max_grad_norm grad_clip gradient_clip_val gradient_clipping",
    "train.micro_batches": "grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps "
    "rampup_batch_size batch_size_schedule",
    "train.precision": "mixed_precision amp dtype bf16 fp16",
    "train.steps": "max_steps num_steps total_steps train_steps max_iters",
}
# Names for which there is no single key.
EXPLAINED = {
    "enable_wandb": 'set metrics.wandb.mode to "auto", "online", "offline" or "disabled"',
    "use_wandb": 'set metrics.wandb.mode to "auto", "online", "offline" or "disabled"',
    "enable_tensorboard": "set metrics.tensorboard = true",
    "num_gpus": "the launcher sets the number of processes: torchrun --nproc_per_node=N",
    "world_size": "the launcher sets the number of processes: torchrun --nproc_per_node=N",
    "num_workers": "there are no worker processes; data.prefetch sets how many micro-batches a thread prepares ahead",
    "global_batch_size": "set data.mixing.batch_size (cells per micro-batch and rank) and train.micro_batches",
    "epochs": "set train.steps, or data.mixing.repeat = false to stop after one epoch",
    "num_epochs": "set train.steps, or data.mixing.repeat = false to stop after one epoch",
    "debug_log_active_every_n_batches": "remove it: every logged step reports the open streams as stream_mixing/*",
}
_RENAMED = {name: key for key, names in OTHER_NAMES.items() for name in names.split()}


def hint(path: KeyPath, model: type[BaseModel]) -> str:
    """The fix for the unknown key at `path` of a config that `model` describes.

    An explanation; or the keys that may be meant: what other trainers call so, the same name in other tables (`lr` and
    `optimizer_lr` for `optimizer.lr`), and the closest key of this table; or all keys of this table.
    """
    word = str(path[-1]).lower().replace("-", "_")
    if word in EXPLAINED:
        return EXPLAINED[word]
    known = keys_of(model, path[:-1])
    renamed = _RENAMED.get(".".join(map(str, path))) or _RENAMED.get(word)
    same = [".".join(keys) for keys in _all_keys(model) if word in ("_".join(keys[i:]) for i in range(len(keys)))]
    # `optimizer.weight_decay`, rather than that of its groups.
    tables = {key.rpartition(".")[0] for key in same} - {""}
    same = [key for key in same if not any(key.rpartition(".")[0].startswith(f"{table}.") for table in tables)]
    # `optimizer.lr`, rather than how it follows the batch; a source to train on, rather than one to evaluate on.
    same = [key for key in same if not key.startswith(("train.micro_batches.", "eval.source."))]
    # A name that many tables have (`name`, `every`) does not tell which one was meant.
    found = ([renamed] if renamed else []) + (same if len(same) <= 2 else [])
    close = [] if renamed else difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    found += [key for key in close if not any(other.endswith(f".{key}") for other in found)]
    if found:
        return f"did you mean {' or '.join(dict.fromkeys(found))}?"
    return f"known keys: {', '.join(known)}" if known else ""


def keys_of(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys of the table at `path` below `model`, sorted; empty if there is no table."""
    table = tuple(part for part in path if isinstance(part, str))
    return sorted({keys[-1] for keys in _all_keys(model) if keys[:-1] == table})


def _all_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every table and key below `model`, without indices."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for table in _models_in(field.annotation):
            yield from _all_keys(table, (*prefix, name))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation mentions, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]
