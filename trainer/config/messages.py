"""Turns pydantic's errors into messages with the key, its value and a fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.config.data_tables import FORMS, TAGS
from trainer.errors import UserError
from trainer.wording import short_repr

KeyPath = tuple[str | int, ...]  # with indices in arrays of tables: ("data", "source", 0, "name")

# pydantic's type of error -> what a value must be. The numbers in braces are the error's own.
_MUST = {
    "greater_than_equal": "be >= {ge}",
    "greater_than": "be > {gt}",
    "less_than_equal": "be <= {le}",
    "less_than": "be < {lt}",
    "too_short": "have a length >= {min_length}",
    "too_long": "have a length <= {max_length}",
    "string_too_short": "have a length >= {min_length}",
    "string_too_long": "have a length <= {max_length}",
    "int_type": "be an integer",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "bool_type": "be true or false",
    "string_type": "be a string",
    "list_type": "be a list",
    "dict_type": "be a table",
    "model_type": "be a table",
    "model_attributes_type": "be a table",
    # On the command line, where every value is text.
    "int_parsing": "be an integer",
    "float_parsing": "be a number",
}
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
# Name elsewhere -> key here, of the same meaning: read as that key.
SAME_KEYS = {
    "data.batch_size": "data.mixing.batch_size",
    "train.max_steps": "train.steps",
    "train.gradient_accumulation_steps": "train.micro_batches",
    "train.max_grad_norm": "train.clip_grad_norm",
    "optimizer.learning_rate": "optimizer.lr",
    "metrics.every": "metrics.log_interval",
    "eval.interval": "eval.every",
    "checkpoint.interval": "checkpoint.every",
    "sample.interval": "sample.every",
    "ledger.probe_interval": "ledger.probe_every",
}
_WANDB = 'set metrics.wandb.mode to "auto", "online", "offline" or "disabled"'
_ENTITY = "set WANDB_ENTITY in the environment"
_BASE_URL = "set WANDB_BASE_URL in the environment"
_LAUNCHER = "the launcher sets the number of processes: torchrun --nproc_per_node=N"
_EPOCHS = "set train.steps, or data.mixing.repeat = false to stop after one epoch"
# Names for which there is no single key.
EXPLAINED = {
    "enable_wandb": _WANDB,
    "use_wandb": _WANDB,
    "entity": _ENTITY,
    "base_url": _BASE_URL,
    "enable_tensorboard": "set metrics.tensorboard = true",
    "num_gpus": _LAUNCHER,
    "world_size": _LAUNCHER,
    "num_workers": "there are no worker processes; data.prefetch sets how many micro-batches a thread prepares ahead",
    "global_batch_size": "set train.micro_batches: rows over all ranks = micro_batches * data.batch_size * ranks",
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "debug_log_active_every_n_batches": "remove it: every logged step reports the open streams as stream_mixing/*",
}
_LAYOUT = "remove it: root is a nested layout, and paths are a direct one"
# Keys of earlier versions -> what to do instead. Checkpoints that have them can still be read.
REMOVED = {
    "data.cache_gb": "remove it: delete copies that no run reads from data.cache_dir by hand",
    "data.source.layout": _LAYOUT,
    "distributed.backend": "remove it: ranks use nccl on CUDA, and gloo on the CPU",
    "eval.source.layout": _LAYOUT,
    "gns.ema": "remove it: the moving averages span about 40 steps",
    "metrics.smoothing_alpha": "remove it: smoothed/* give the newest value a weight of 0.1",
    "metrics.wandb.base_url": _BASE_URL,
    "metrics.wandb.entity": _ENTITY,
    "sample.temperature": "remove it, or call train sample with --temperature",
    "sample.top_k": "remove it, or call train sample with --top-k",
    "source.layout": _LAYOUT,  # of a dataset file
    "train.max_skips": "remove it: a run ends after more than 10 skipped steps in a row",
}
# Removed keys -> the value that always applies; a config may still set it, as each resolved one does.
SETTLED = {
    "data.cache_gb": 100.0,
    "gns.ema": 0.95,
    "metrics.smoothing_alpha": 0.1,
    "sample.temperature": 1.0,
    "sample.top_k": 0,
    "train.max_skips": 10,
}
_RENAMED = {name: key for key, names in OTHER_NAMES.items() for name in names.split()}


def user_errors(error: ValidationError, model: type[BaseModel], locate: Callable[[KeyPath], str]) -> list[UserError]:
    """One `UserError` per mistake that pydantic found in a `model`, in the order of the tables.

    Args:
        locate: path of a key -> `file:line` (or `--set ...`).
    """
    found = []
    for details in error.errors(include_url=False):
        path = tuple(part for part in details["loc"] if part not in TAGS)
        problem, fix = _describe(details, path, model)
        found.append(UserError(_dotted(path) or "config", problem, fix, where=locate(path)))
    return found


def option_problem(error: ValidationError) -> str:
    """The problem with a command-line option's value, worded like the mistakes of a config."""
    return _describe(error.errors(include_url=False)[0], (), BaseModel)[0]


def _describe(details: ErrorDetails, path: KeyPath, model: type[BaseModel]) -> tuple[str, str]:
    """(problem, fix) of one error."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    is_table = bool(keys_of(model, path))
    if kind == "extra_forbidden":
        return "unknown key", hint(path, model)
    if kind == "missing":
        return "is required but missing", f"add a table [{_dotted(path)}]" if is_table else f"add {path[-1]}"
    if kind == "list_type" and isinstance(value, Mapping):
        return f"must be a list, got {shown(value)}", f"write [[{_dotted(path)}]]"
    if kind == "literal_error":  # in TOML's spelling, not Python's
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        allowed = allowed.replace("True", "true").replace("False", "false")
        return f"must be one of {allowed}; got {shown(value)}", ""
    if kind in _MUST:
        return f"must {_MUST[kind].format(**context)}, got {shown(value)}", ""
    if kind == "string_pattern_mismatch":
        return f"must be {FORMS[context['pattern']]}; got {shown(value)}", ""
    if kind == "value_error":  # raised by a validator of ours
        text = details["msg"].removeprefix("Value error, ")
        return text[:1].lower() + text[1:], ""
    return f"cannot be {shown(value)}", ""


def shown(value: Any) -> str:
    """A value in TOML's spelling, cut to a readable length."""
    if isinstance(value, Mapping):
        return "a table"
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # an integer of thousands of digits
        text = short_repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def hint(path: KeyPath, model: type[BaseModel]) -> str:
    """The fix for the unknown key at `path` of a config that `model` describes.

    An explanation; or the keys that may be meant: the one that other trainers call so, keys of the
    same name in other tables (`lr` and `optimizer_lr` for `optimizer.lr`), and the closest key of
    this table; or all keys of this table.
    """
    word, known = str(path[-1]).lower().replace("-", "_"), keys_of(model, path[:-1])
    explained = REMOVED.get(_dotted(_names(path))) or EXPLAINED.get(word)
    if explained:
        return explained
    renamed = _RENAMED.get(_dotted(path)) or _RENAMED.get(word)
    found = [*filter(None, [renamed]), *_keys_named(word, model)]
    if not renamed:
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
        found += [key for key in close if not any(other.endswith(f".{key}") for other in found)]
    if not found:
        # A slip in the name that another trainer has for a key of this table.
        table = _dotted(path[:-1])
        others = {name: key for name, key in _RENAMED.items() if key.rpartition(".")[0] == table}
        found = [others[name] for name in difflib.get_close_matches(word, others, n=1, cutoff=0.8)]
    if found:
        return f"did you mean {' or '.join(dict.fromkeys(found))}?"
    return f"known keys: {', '.join(known)}" if known else ""


def _keys_named(word: str, model: type[BaseModel]) -> list[str]:
    """The keys that end with this name; none if it is too common (`name`, `every`)."""
    found = []
    for keys in _all_keys(model):
        is_named = word in ("_".join(keys[start:]) for start in range(len(keys)))
        # `optimizer.lr`, rather than how it follows the batch; a source to train on, not to evaluate on.
        if is_named and keys[:2] not in (("train", "micro_batches"), ("eval", "source")):
            found.append(".".join(keys))
    return found if len(found) <= 2 else []


def keys_of(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys of the table at `path` below `model`, sorted; empty if there is no table."""
    table = _names(path)
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


def _names(path: KeyPath) -> tuple[str, ...]:
    """The path without the indices of its elements."""
    return tuple(part for part in path if isinstance(part, str))


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))
