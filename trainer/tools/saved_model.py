"""A trained model out of its run's directory, an exported one, or one of `transformers`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from trainer.cli.parts import PARTS
from trainer.config.load import load_config, to_toml
from trainer.config.schema import RunConfig
from trainer.data.fingerprint import FINGERPRINT_KEY, mark_files
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.files import parse_count, read_json, write_file
from trainer.import_path import users_code
from trainer.lab.extensions import AVERAGES, BEST
from trainer.lab.weights import SHARED_KEY, WEIGHTS_FILE, check_fit, read_weights, share, tokenizer_mark
from trainer.model.families import DEFAULT
from trainer.training import checkpoint
from trainer.training.plan import build_model, tokenizer_of
from trainer.training.tensor_files import CheckpointError, TensorFiles, save_tensors
from trainer.training.train_state import open_model

CONFIG_FILE = "config.toml"
TOKENIZER_CONFIG = "tokenizer_config.json"
HUGGING_FACE_CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
Step = int | str | None
"""A step; `BEST`, as `checkpoint.keep_best` says; or the latest."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole checkpoint, after `step`, with its run's config, and the weights on the CPU."""

    path: Path
    step: int
    config: RunConfig
    weights: dict[str, Tensor]
    shared: dict[str, str]  # tied weights, by the name of the one that they are
    data: Mapping[str, Any]  # the `Fingerprint` of what it was trained on


@dataclass(frozen=True)
class SavedModel:
    """A model with its weights, in evaluation mode, and the tokenizer that it was trained with."""

    model: nn.Module
    tokenizer: Tokenizer
    config: RunConfig
    step: int | None
    data: Mapping[str, Any] | None  # as in a checkpoint; None: an export


def find_checkpoint(run_dir: str | Path, step: Step) -> Path:
    """The run's checkpoint after `step`; None: the latest. Raises UserError: there is none."""
    found = checkpoint.complete_checkpoints(Path(run_dir) / checkpoint.CHECKPOINTS)
    wanted = step
    if step == BEST and found:
        with users_code("--step best", f"{found[0]} cannot be used", "name a step"):
            wanted = checkpoint.best_step(found[0])
    for path in found:
        if wanted in (None, checkpoint.step_of(path)):
            return path
    steps = ", ".join(str(checkpoint.step_of(path)) for path in reversed(found))
    key, problem, fix = "--step", f"{run_dir} has no checkpoint after step {wanted}", f"use one of {steps}"
    if not found:
        key, problem = str(run_dir), "has no complete checkpoint"
        fix = "name a run that has saved one: checkpoint.every, keep_last and keep_every say which a run keeps"
        if (Path(run_dir) / WEIGHTS_FILE).is_file():
            fix = "it is an export: name its run, or leave out --step and --ema"
    elif step == BEST:
        problem = f"{run_dir} has no best checkpoint: no checkpoint.keep_best, or no finite value yet"
    raise UserError(key, problem, fix)


def config_of(state: Mapping[str, Any], path: Path) -> RunConfig:
    """The config in the state.json of the checkpoint at `path`.
    Raises UserError: it is damaged, or another version's."""
    try:
        return RunConfig.model_validate(state.get("config"))
    except ValidationError as error:
        first = ".".join(map(str, error.errors()[0]["loc"]))
        problem = f"was made by another version: {first} of its config does not fit this one"
        raise UserError(str(path), problem, "use that version") from None


def read_checkpoint(run_dir: str | Path, step: Step = None, *, ema: bool = False) -> SavedCheckpoint:
    """The checkpoint after `step`, or the newest whole one; with `ema`, its averaged weights.
    Raises UserError: no run, no such checkpoint, a damaged one, or another version's."""
    named = find_checkpoint(run_dir, step)
    try:
        found = checkpoint.find(named.parent, "auto" if step is None else str(named))
    except UserError as error:
        error.key = str(run_dir)
        if step is not None:
            error.fix = "name another one with --step"
        raise
    assert found is not None
    path, state = found
    config, fix = config_of(state, path), "name another one with --step" + ", or leave out --ema" * ema
    with users_code(str(path), "cannot be used", fix):
        tensors = open_model(path, state)
        weights, shared = whole_weights(tensors, ema=ema), tensors.values.get("shared", {})
        return SavedCheckpoint(path, state["step"], config, weights, shared, state[FINGERPRINT_KEY])


def tokenizer_with(config: RunConfig, data: Mapping[str, Any] | None) -> Tokenizer:
    """The tokenizer of a model that was trained on `data`, a `Fingerprint`; None: an export.
    Raises UserError: it is not there, or changed."""
    name, problem = config.data.tokenizer, ""
    if name.endswith(".json"):
        if not Path(name).is_file():
            problem = "the tokenizer is not there (paths are relative to the working directory)"
        elif data is not None and mark_files([[Path(name)]], blocks=data["blocks"]) != [data["tokenizer"]]:
            problem = "is not the tokenizer that the model was trained with: it changed"
    if problem:
        raise UserError(name, problem, "go where the run was started, or put the file back")
    return tokenizer_of(config.data, parts=PARTS)


def refuse_code(config: RunConfig, place: str | Path, *tables: str, trusted: bool) -> None:
    """Refuse a config that the user has not named, but that lay with a checkpoint at `place`, and
    names code to import in one of `tables` (none: in any). Raises UserError, unless `trusted`."""
    for key, path in _named_code(config.model_dump()):
        if not trusted and (not tables or key.partition(".")[0] in tables):
            fix = "add --trust-code (in Python: trust_code=True) if it is yours, or you trust it"
            raise UserError(key, f"the config in {place} names code: {path}", fix)


def _named_code(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, name) of all code that is imported."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, inner in items:
        place = f"{key}.{name}".lstrip(".")
        names_code = name == "target" or (name == "format" and ":" in str(inner))
        if isinstance(inner, str) and names_code:
            yield place, inner
        elif name != "args":
            yield from _named_code(inner, place)


def load_model(
    directory: str | Path, *, step: Step = None, ema: bool = False, device: torch.device, trust_code: bool = False
) -> SavedModel:
    """The model of a run's checkpoint, or of a directory that `train export` has written.

    Args:
        step: which checkpoint; None: the newest.
        ema: its averaged weights.
        trust_code: import the model that the config in `directory` names.

    Raises:
        UserError: the config names code; nothing usable is there, or the weights do not fit.
    """
    place = Path(directory).absolute()  # building the model may change the working directory
    found: int | None = None
    data: Mapping[str, Any] | None = None
    if (place / WEIGHTS_FILE).is_file() and not ema and step is None:  # an export has one kind
        config, source = load_config(place / CONFIG_FILE), place
        weights, metadata = read_weights(place)
        found = parse_count(metadata.get("step", ""))
        if (place / "tokenizer.json").is_file():
            own = {"data": config.data.model_copy(update={"tokenizer": str(place / "tokenizer.json")})}
            config = config.model_copy(update=own)
    else:
        saved = read_checkpoint(directory, step, ema=ema)
        config, source, weights, found, data = saved.config, saved.path, saved.weights, saved.step, saved.data
    refuse_code(config, source, "model", trusted=trust_code)
    words = tokenizer_with(config, data)
    model = model_with(weights, config, words.vocab_size, source)
    return SavedModel(model.to(device).eval(), words, config, found, data)


def model_with(weights: Mapping[str, Tensor], config: RunConfig, vocab_size: int, source: Path) -> nn.Module:
    """The model of a config with weights from `source`. Raises UserError: they do not fit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)  # as the run did: it may draw more than its state_dict holds
        model = build_model(config.model, vocab_size, config=config, parts=PARTS)
    check_fit(model, weights, key=str(source), path="the file")
    model.load_state_dict(dict(weights))
    return model


def is_export(directory: Path) -> bool:
    """Whether the directory holds nothing but an export, which may be replaced."""
    own = (".safetensors", ".json", ".jinja", ".toml", ".model")
    names = ("merges.txt", "vocab.txt", "additional_chat_templates")
    files = [*directory.iterdir()]
    has_weights = any(path.suffix == ".safetensors" for path in files)
    is_plain = all(path.suffix in own or path.name in names for path in files)
    return (directory / CONFIG_FILE).is_file() and has_weights and is_plain


def export_model(
    run_dir: Path, out: Path, *, step: Step, ema: bool = False, as_hugging_face: bool = False, trust_code: bool = False
) -> SavedCheckpoint:
    """Write weights, config and, if one is used, the tokenizer into `out`.

    All is written next to `out` first, so that `out` is complete or absent.

    Args:
        step, ema: see `load_model`.
        as_hugging_face: weights and `config.json` as the model's own `save_pretrained` writes them,
            for `from_pretrained`, and the tokenizer so too.
        trust_code: import the model that the config names, which `as_hugging_face` builds.

    Raises:
        UserError: code without trust; no checkpoint, tokenizer, package, or fitting model.
        OSError: `out` cannot be written.
    """
    saved = read_checkpoint(run_dir, step, ema=ema)
    config = saved.config
    tokenizer = tokenizer_with(config, saved.data)
    run_dir, place = run_dir.absolute(), Path(os.path.realpath(out))
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as work:
        staging = Path(work, "new")
        staging.mkdir()
        if as_hugging_face:
            refuse_code(config, run_dir, "model", trusted=trust_code)
            with chdir(os.curdir):  # which the model's code may leave
                _save_pretrained(saved, tokenizer.vocab_size, staging)
        else:
            mark = tokenizer_mark(config.data.tokenizer)
            origin = {"step": str(saved.step), "tokenizer": mark, "run": run_dir.name, "ema": str(ema)}
            save_weights(saved.weights, saved.shared, staging / WEIGHTS_FILE, origin)
        write_file(staging / CONFIG_FILE, to_toml(config))
        if config.data.tokenizer.endswith(".json"):
            if as_hugging_face:
                with users_code("data.tokenizer", "transformers cannot read it", "use --format safetensors"):
                    _save_tokenizer(Path(config.data.tokenizer), config.data.eod, staging)
            else:
                shutil.copyfile(config.data.tokenizer, staging / "tokenizer.json")
        # The caller has made sure that only an export is replaced.
        if place.is_dir():
            place.rename(Path(work, "old"))
        staging.rename(place)
    return saved


def _save_pretrained(saved: SavedCheckpoint, vocab_size: int, directory: Path) -> None:
    from trainer.lab.hugging_face import writer_of

    table, seq_len, eod = saved.config.model, saved.config.data.seq_len, saved.config.data.eod
    first = vocab_size - 1  # the id that begins documents
    model: Any = model_with(saved.weights, saved.config, vocab_size, saved.path)
    write = writer_of(model)
    if write is None:
        problem = f"{table.target or table.family or DEFAULT} has no save_pretrained(directory)"
        raise UserError("--format hf", problem, "export with --format safetensors")
    write(directory)
    for file in (directory / HUGGING_FACE_CONFIG, directory / GENERATION_CONFIG):
        if not file.is_file():
            continue
        found = read_json(file)
        # Without a state it has seen a row at once.
        if not model.state_width and "max_position_embeddings" in found:
            found["max_position_embeddings"] = seq_len
        # A model that was trained further no longer ends texts as the one that it began from.
        for key, number in (("bos_token_id", first), ("eos_token_id", first if eod is None else eod)):
            if key in found or eod is not None:
                found[key] = number
        if file.name == GENERATION_CONFIG and eod != first:  # which is never a target
            found["suppress_tokens"] = [first]
        write_file(file, json.dumps(found, indent=2) + "\n")


def _save_tokenizer(path: Path, eod: int | None, directory: Path) -> None:
    """Write the tokenizer for `AutoTokenizer`; without an end it gets the id that ends documents."""
    from trainer.lab.hugging_face import NO_CODE, package

    transformers: Any = package()
    if path.name == "tokenizer.json" and path.with_name(TOKENIZER_CONFIG).is_file():
        words = transformers.AutoTokenizer.from_pretrained(path.parent, **NO_CODE)
    else:  # that of the model's family would add special tokens
        words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    end = None if eod is None else words.convert_ids_to_tokens(eod)
    if end is not None:
        words.eos_token = words.eos_token or end
        words.pad_token = words.pad_token or end
    words.save_pretrained(directory)


def whole_weights(tensors: TensorFiles, *, ema: bool = False) -> dict[str, Tensor]:
    """The model's `state_dict()`, whole, on the CPU; tensors alone. `ema`: with averages in place of
    the parameters that have one. Raises CheckpointError or ValueError: they cannot be read."""
    names = [name for name in tensors.shapes if name.startswith("model.")]
    found = {name.removeprefix("model."): tensors.read(name) for name in names}
    if ema:
        averages = [name for name in tensors.shapes if name.startswith(AVERAGES)]
        if not averages:
            raise CheckpointError("it has no averaged weights, for which a run has train.ema")
        for name in averages:
            own = name.removeprefix(AVERAGES)
            found[own] = tensors.read(name).to(found[own].dtype)  # as an evaluation of the run has it
    share(found, tensors.values.get("shared", {}))
    return found


def save_weights(
    state: Mapping[str, Tensor], shared: Mapping[str, str], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a model's state; tied tensors (`shared`, names by name) are written once.
    Raises OSError: the file cannot be written."""
    kept = {name: tensor for name, tensor in state.items() if name not in shared}
    save_tensors(path, kept, {**metadata, SHARED_KEY: json.dumps(shared)})
