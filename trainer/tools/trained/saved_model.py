"""A trained model taken out of its run's directory (or out of what `train export` wrote), ready to be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from trainer.config.load import load_config
from trainer.config.schema import RunConfig
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.model.weights import WEIGHTS_FILE, check_fit, read_weights
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.model_part import open_model, whole_weights
from trainer.training.checkpointing.tensor_files import DamagedFile
from trainer.training.setup.plan import build_model

CONFIG_FILE = "config.toml"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole checkpoint: where it lies, its state.json, the config it was trained with, and the weights on the CPU."""

    path: Path
    state: dict[str, Any]
    config: RunConfig
    weights: dict[str, Tensor]

    @property
    def step(self) -> int:
        """The last step before it was saved."""
        return int(self.state["step"])


@dataclass(frozen=True)
class SavedModel:
    """A model with its weights, in evaluation mode, and the tokenizer that it was trained with."""

    model: nn.Module
    tokenizer: Tokenizer
    config: RunConfig
    step: int | None


def find_checkpoint(run_dir: str | Path, step: int | None, *, option: str = "--step") -> Path:
    """The run's complete checkpoint after `step`; None: the latest.

    Raises:
        UserError: there is none.
    """
    found = checkpoint.complete_checkpoints(Path(run_dir) / checkpoint.CHECKPOINTS)
    if not found:
        fix = "name a run that has saved one: checkpoint.every, keep_last and keep_every say which a run keeps"
        raise UserError(str(run_dir), "has no complete checkpoint", fix)
    for path in found:
        if step in (None, checkpoint.step_of(path)):
            return path
    steps = ", ".join(str(checkpoint.step_of(path)) for path in reversed(found))
    raise UserError(option, f"{run_dir} has no checkpoint after step {step}", f"use one of {steps}")


def config_of(state: Mapping[str, Any], path: Path) -> RunConfig:
    """The config in the state.json of the checkpoint at `path`.

    Raises:
        UserError: it is damaged, or another version's.
    """
    try:
        return RunConfig.model_validate(state.get("config"))
    except ValidationError as error:
        first = ".".join(map(str, error.errors()[0]["loc"]))
        problem = f"was made by another version: {first} of its config is unknown here"
        raise UserError(str(path), problem, "use that version") from None


def read_checkpoint(run_dir: str | Path, step: int | None = None) -> SavedCheckpoint:
    """The checkpoint after `step`, or the newest whole one.

    Raises:
        UserError: no run, no such checkpoint, a damaged one, or one of another version's config.
    """
    named = find_checkpoint(run_dir, step)
    found = checkpoint.find(named.parent, "auto" if step is None else str(named))
    assert found is not None
    path, state = found
    try:
        weights = whole_weights(open_model(path, state))
    except (DamagedFile, KeyError) as error:
        raise UserError(str(path), f"cannot be used: {error}", "name another one with --step") from None
    return SavedCheckpoint(path, state, config_of(state, path), weights)


def refuse_code(config: RunConfig, place: str | Path, *tables: str, trusted: bool) -> None:
    """Refuse a config that was not named by the user, but lay with a checkpoint, and names code to import.

    Args:
        place: where it was.
        tables: what is used of it; none: everything.

    Raises:
        UserError: it names some, and is not trusted.
    """
    for key, path in () if trusted else _named_code(config.model_dump()):
        if not tables or key.partition(".")[0] in tables:
            what = "includes a file, which may name code" if key.endswith("include") else "names code"
            problem = f"the config in {place} {what}: {path}"
            raise UserError(
                key, problem, "add --trust-code (in Python: trust_code=True) if it is yours, or you trust it"
            )


def _named_code(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, name) of all code that is imported, and of included files, which may name some."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        place = f"{key}.{name}" if key else str(name)
        if isinstance(inner, str) and (name in ("target", "include") or (name == "format" and ":" in inner)):
            yield place, inner
        elif name != "args":
            yield from _named_code(inner, place)


def load_model(
    directory: str | Path,
    *,
    step: int | None = None,
    device: torch.device,
    tokenizer: str | None = None,
    trust_code: bool = False,
) -> SavedModel:
    """The model of a run's checkpoint, or of an exported directory.

    Args:
        directory: a run's, or one that `train export --format safetensors` has written.
        step: which checkpoint; None: the newest.
        tokenizer: path of the tokenizer.json, if it has moved since.
        trust_code: import the model that the config in `directory` names.

    Raises:
        UserError: the config names code; nothing usable is there, or the weights do not fit the model.
    """
    place = Path(directory).absolute()  # building the model may change the working directory
    found: int | None
    if (place / WEIGHTS_FILE).is_file():
        if not (place / CONFIG_FILE).is_file():
            problem = f"has {WEIGHTS_FILE} but no {CONFIG_FILE}, which says what model they are of"
            raise UserError(str(directory), problem, "name the run, or an export with --format safetensors")
        config, source = load_config(place / CONFIG_FILE), place
        weights, metadata = read_weights(place)
        found = int(metadata["step"]) if metadata.get("step", "").isdigit() else None
        own = place / "tokenizer.json"
        tokenizer = tokenizer or (str(own) if own.is_file() else None)
    else:
        saved = read_checkpoint(directory, step)
        config, source, weights, found = saved.config, saved.path, saved.weights, saved.step
    refuse_code(config, source, "model", trusted=trust_code)
    name = tokenizer or config.data.tokenizer
    if name.endswith(".json") and not Path(name).is_file():
        problem = "the tokenizer of the model is not there (paths are relative to the working directory)"
        raise UserError(name, problem, "go where the run was started, or name the file with --tokenizer")
    words = load_tokenizer(name, vocab_size=config.data.vocab_size)
    model = model_with(weights, config, words.vocab_size, source)
    return SavedModel(model.to(device).eval(), words, config, found)


def model_with(weights: Mapping[str, Tensor], config: RunConfig, vocab_size: int, source: Path) -> nn.Module:
    """The model of a config with weights from `source`.

    Raises:
        UserError: they do not fit.
    """
    model = build_model(config.model, vocab_size, seq_len=config.data.seq_len)
    check_fit(model, weights, key=str(source), path="the file")
    model.load_state_dict(dict(weights))
    return model
