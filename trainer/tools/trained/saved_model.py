"""A trained model taken out of its run's directory, or of an exported one: loaded, or exported."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from trainer.cli.parts import PARTS
from trainer.config.load import load_config, to_toml
from trainer.config.schema import RunConfig
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.files import read_json, replacing_path, write_file
from trainer.lab.weights import SHARED_KEY, WEIGHTS_FILE, check_fit, read_weights
from trainer.metrics.run_status import usable
from trainer.model.families import DEFAULT
from trainer.tools.runs.load import load_run
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.tensor_files import CheckpointError, TensorFiles
from trainer.training.checkpointing.train_state import open_model
from trainer.training.run_dir import RunDir
from trainer.training.setup.plan import build_model

CONFIG_FILE = "config.toml"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Files beside a tokenizer.json from which `transformers` makes the same tokenizer.
TOKENIZER_PARTS = (
    TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model",
    "spiece.model",
)  # fmt: skip
HUGGING_FACE_CONFIG, GENERATION_CONFIG, CARD = "config.json", "generation_config.json", "README.md"
SHOWN_RESULTS = ("loss", "eval_loss")
FIRST_TOKEN = "<|document|>"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole checkpoint, after `step`, with its run's config, and the weights on the CPU."""

    path: Path
    step: int
    state: dict[str, Any]
    config: RunConfig
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class SavedModel:
    """A model with its weights, in evaluation mode, and the tokenizer that it was trained with."""

    model: nn.Module
    tokenizer: Tokenizer
    config: RunConfig
    step: int | None


def find_checkpoint(run_dir: str | Path, step: int | None, *, option: str = "--step") -> Path:
    """The run's checkpoint after `step`; None: the latest. Raises UserError: there is none."""
    found = checkpoint.complete_checkpoints(Path(run_dir) / checkpoint.CHECKPOINTS)
    if not found:
        keys = "checkpoint.every, keep_last and keep_every say which a run keeps"
        raise UserError(str(run_dir), "has no complete checkpoint", f"name a run that has saved one: {keys}")
    for path in found:
        if step in (None, checkpoint.step_of(path)):
            return path
    steps = ", ".join(str(checkpoint.step_of(path)) for path in reversed(found))
    raise UserError(option, f"{run_dir} has no checkpoint after step {step}", f"use one of {steps}")


def config_of(state: Mapping[str, Any], path: Path) -> RunConfig:
    """The config in the state.json of the checkpoint at `path`.
    Raises UserError: it is damaged, or another version's."""
    try:
        return RunConfig.model_validate(state.get("config"))
    except ValidationError as error:
        first = ".".join(map(str, error.errors()[0]["loc"]))
        problem = f"was made by another version: {first} of its config is unknown here"
        raise UserError(str(path), problem, "use that version") from None


def config_path_of(environment: Mapping[str, Any], run_dir: Path) -> Path:
    """The file that the run's included files are relative to."""
    command, named = usable(environment).get("command", []), RunDir(run_dir).resolved_config
    for word, following in zip(command, [*command, ""][1:], strict=True):
        if word in ("--config", "-c") or word.startswith("--config="):
            named = Path(word.partition("=")[2] or following)
    return named


def read_checkpoint(run_dir: str | Path, step: int | None = None) -> SavedCheckpoint:
    """The checkpoint after `step`, or the newest whole one.
    Raises UserError: no run, no such checkpoint, a damaged one, or another version's."""
    named = find_checkpoint(run_dir, step)
    found = checkpoint.find(named.parent, "auto" if step is None else str(named))
    assert found is not None
    path, state = found
    try:
        weights = whole_weights(open_model(path, state))
    except (CheckpointError, KeyError) as error:
        problem = f"cannot be used: {error}"
        raise UserError(str(path), problem, "name another one with --step") from None
    return SavedCheckpoint(path, int(state["step"]), state, config_of(state, path), weights)


def refuse_code(config: RunConfig, place: str | Path, *tables: str, trusted: bool) -> None:
    """Refuse a config that the user has not named, but that lay with a checkpoint at `place`, and
    names code to import in one of `tables` (none: in any). Raises UserError, unless `trusted`."""
    for key, path in _named_code(config.model_dump()):
        if not trusted and (not tables or key.partition(".")[0] in tables):
            what = "names code"
            if key.endswith("include"):
                what = "includes a file, which may name code"
            fix = "add --trust-code (in Python: trust_code=True) if it is yours, or you trust it"
            raise UserError(key, f"the config in {place} {what}: {path}", fix)


def _named_code(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, name) of all code that is imported, and of included files, which may name some."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, inner in items:
        place = f"{key}.{name}".lstrip(".")
        names_code = name in ("target", "include") or (name == "format" and ":" in str(inner))
        if isinstance(inner, str) and names_code:
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
    """The model of a run's checkpoint, or of a directory that `train export` has written.

    Args:
        step: which checkpoint; None: the newest.
        tokenizer: path of the tokenizer.json, if it has moved since.
        trust_code: import the model that the config in `directory` names.

    Raises:
        UserError: the config names code; nothing usable is there, or the weights do not fit.
    """
    place = Path(directory).absolute()  # building the model may change the working directory
    found: int | None = None
    if (place / WEIGHTS_FILE).is_file():
        config, source = load_config(place / CONFIG_FILE), place
        weights, metadata = read_weights(place)
        if metadata.get("step", "").isdigit():
            found = int(metadata["step"])
        if tokenizer is None and (place / "tokenizer.json").is_file():
            tokenizer = str(place / "tokenizer.json")
    else:
        saved = read_checkpoint(directory, step)
        config, source, weights, found = saved.config, saved.path, saved.weights, saved.step
    refuse_code(config, source, "model", trusted=trust_code)
    name = tokenizer or config.data.tokenizer
    if name.endswith(".json") and not Path(name).is_file():
        problem = "the tokenizer of the model is not there (paths are relative to the working directory)"
        fix = "go where the run was started, or name the file with --tokenizer"
        raise UserError(name, problem, fix)
    words = load_tokenizer(name, vocab_size=config.data.vocab_size)
    model = model_with(weights, config, words.vocab_size, source)
    return SavedModel(model.to(device).eval(), words, config, found)


def model_with(weights: Mapping[str, Tensor], config: RunConfig, vocab_size: int, source: Path) -> nn.Module:
    """The model of a config with weights from `source`. Raises UserError: they do not fit."""
    model = build_model(config.model, vocab_size, seq_len=config.data.seq_len, parts=PARTS)
    check_fit(model, weights, key=str(source), path="the file")
    model.load_state_dict(dict(weights))
    return model


def copy_tokenizer(path: Path, directory: Path) -> None:
    """Copy a tokenizer.json, and what belongs to it, for `AutoTokenizer`."""
    shutil.copyfile(path, directory / "tokenizer.json")
    names = TOKENIZER_PARTS if path.name == "tokenizer.json" else ()
    for part in map(path.with_name, names):
        if part.is_dir():
            shutil.copytree(part, directory / part.name)
        elif part.exists():
            shutil.copyfile(part, directory / part.name)
    # Without it, `transformers` would take the tokenizer of the model's family and give it special
    # tokens, the first of which gets the id that begins documents.
    if not (directory / TOKENIZER_CONFIG).exists():
        write_file(directory / TOKENIZER_CONFIG, '{"tokenizer_class": "PreTrainedTokenizerFast"}\n')


def begin_texts(directory: Path, bos_id: int) -> bool:
    """Have the tokenizer of an export put the id that begins documents before a text.

    False if it cannot have such a token. Its own post-processor, which training leaves out, goes.
    """
    path, config = directory / "tokenizer.json", directory / TOKENIZER_CONFIG
    before = path.read_text(encoding="utf-8")
    spec, first = json.loads(before), {"SpecialToken": {"id": FIRST_TOKEN, "type_id": 0}}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": bos_id, "content": FIRST_TOKEN, **flags, "special": True}
    spec["added_tokens"] = [*(spec.get("added_tokens") or []), token]
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {
            FIRST_TOKEN: {"id": FIRST_TOKEN, "ids": [bos_id], "tokens": [FIRST_TOKEN]},
        },
    }
    write_file(path, json.dumps(spec, ensure_ascii=False))
    if load_tokenizer(str(path)).encode(FIRST_TOKEN).tolist() != [bos_id]:
        write_file(path, before)
        return False
    # No class of a family, which would make a post-processor of its own.
    named: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": FIRST_TOKEN}
    named |= {"model_input_names": ["input_ids", "attention_mask"]}
    text = json.dumps({**read_json(config), **named}, indent=2, ensure_ascii=False)
    write_file(config, f"{text}\n")
    return True


def export_model(
    run_dir: Path, out: Path, *, step: int | None, as_hugging_face: bool = False, trust_code: bool = False
) -> SavedCheckpoint:
    """Write weights, config, card and, if one is used, the tokenizer's files into `out`.

    All is written next to `out` first, so that `out` is complete or absent.

    Args:
        as_hugging_face: weights and `config.json` as the model's own `save_pretrained` writes them,
            for `from_pretrained`; no `config.toml`.
        trust_code: import the model that the config names, which `as_hugging_face` builds.

    Raises:
        UserError: code without trust; no checkpoint, tokenizer, package, or fitting model.
        OSError: `out` cannot be written.
    """
    saved = read_checkpoint(run_dir, step)
    config = saved.config
    tokenizer = load_tokenizer(config.data.tokenizer, vocab_size=config.data.vocab_size)
    run_dir, place = run_dir.absolute(), out.absolute()
    staging = place.with_name(f".{out.name}.{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        if as_hugging_face:
            refuse_code(config, run_dir, "model", trusted=trust_code)
            with chdir(os.curdir):  # which the model's code may leave
                _save_pretrained(saved, tokenizer.vocab_size, staging)
        else:
            origin = {"step": str(saved.step), "tokenizer": tokenizer.name, "run": run_dir.name}
            save_weights(saved.weights, staging / WEIGHTS_FILE, {"format": "pt", **origin})
            write_file(staging / CONFIG_FILE, to_toml(config))
        use = "transformers" if as_hugging_face else "trainer"
        if config.data.tokenizer.endswith(".json"):
            copy_tokenizer(Path(config.data.tokenizer), staging)
            if as_hugging_face and begin_texts(staging, tokenizer.bos_id):
                use = "transformers_tokenizer"
        write_file(staging / CARD, _card(saved, run_dir, tokenizer.vocab_size, str(out), use))
        # The caller has made sure that only an export is replaced.
        shutil.rmtree(place, ignore_errors=True)
        staging.rename(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
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
        found = json.loads(file.read_text()) if file.is_file() else {}
        if not found:
            continue
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


def _last_results(run_dir: Path, step: int) -> Iterator[tuple[str, str]]:
    """Rows of the card: what was logged last, at `step` or before."""
    with suppress(UserError):
        run = load_run(run_dir)
        for key in SHOWN_RESULTS:
            values = [value for at, value in zip(*run.column(key), strict=True) if at <= step]
            if values:
                yield f"`{key}`", f"{values[-1]:.4f}"


def _card(saved: SavedCheckpoint, run_dir: Path, vocab_size: int, out: str, use: str) -> str:
    """README.md of an exported model in `out`; `use`: which text says how to load it."""
    config, model = saved.config, saved.config.model
    origin = model.args.get("from", f"dim {model.dim}, {model.num_layers} layers")
    numbers = {tensor.data_ptr(): tensor.numel() for tensor in saved.weights.values()}  # tied ones once
    steps = f"{saved.step:,} of {config.train.steps:,} steps"
    ids = f"{vocab_size:,} ids, the one that begins a document included"
    rows = [
        ("parameters", f"{sum(numbers.values()):,}"),
        ("model", f"`{model.target or model.family or DEFAULT}`, {origin}"),
        ("tokenizer", f"`{config.data.tokenizer}`, {ids}"),
        ("trained for", f"{steps} in cells of {config.data.seq_len} tokens"),
        ("tokens seen", f"{int(saved.state['tracker']['tokens_seen']):,}"),
        ("data", ", ".join(source.name for source in config.data.source)),
        *_last_results(run_dir, saved.step),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    option = argument = ""
    if model.target is not None:
        option, argument = " --trust-code", ", trust_code=True"
    facts = {"library": use.partition("_")[0], "name": config.run.name, "step": saved.step}
    facts |= {"table": table, "out": out, "bos": vocab_size - 1, "option": option, "argument": argument}
    cards = resources.files("trainer.tools.trained") / "cards"
    texts = [(cards / f"{name}.md").read_text(encoding="utf-8") for name in ("card", use)]
    return "".join(texts).format(**facts)


def whole_weights(tensors: TensorFiles) -> dict[str, Tensor]:
    """The model's `state_dict()`, whole, on the CPU; tensors alone.
    Raises CheckpointError: they cannot be read."""
    names = [name for name in tensors.shapes if name.startswith("model.")]
    found = {name.removeprefix("model."): tensors.read(name) for name in names}
    for name, owner in tensors.values.get("shared", {}).items():
        found[name] = found[owner]
    return found


def save_weights(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a model's state; tied tensors are written once, with the names of the others.
    Raises UserError: two tensors overlap in part; OSError: the file cannot be written."""
    kept: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        owner = owners.setdefault(same, name) if tensor.numel() else name
        if owner == name:
            kept[name] = tensor.detach().cpu().contiguous()
        else:
            shared[name] = owner
    try:
        with replacing_path(path) as temporary:
            described = {**metadata, SHARED_KEY: json.dumps(shared)}
            safetensors.torch.save_file(kept, str(temporary), described)
    except RuntimeError as error:  # partially shared tensors, which safetensors names
        problem = f"cannot be written as safetensors: {error}"
        raise UserError("model", problem, "give each tensor its own memory") from None
