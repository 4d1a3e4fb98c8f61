"""Inspect the user's data, choose what `train init` writes, and time a few steps of it."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.formats import is_import_path, takes_option
from trainer.data.layout import Discovery, Stream, discover_direct, refuse_unheeded
from trainer.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.files import is_url, write_file
from trainer.lab.cache import Cache
from trainer.lab.stored import discover_stored
from trainer.metrics.logger import progress_bar
from trainer.tools.corpus.documents import discover, refuse_empty
from trainer.tools.fitted_table import duration_text
from trainer.tools.init.sizing import Part, choose_sizes, never_held_out, parts_of
from trainer.tools.init.starter import Starter, StarterSource, render_starter
from trainer.tools.inspection.survey import Guess, describe, guess, look, not_text
from trainer.wording import counted, few, printable

MAX_BYTES = 256_000_000  # of larger data, only evenly spread streams are inspected
MOST_SOURCES = 32  # modalities that get a source of their own, each with open streams of its own
TRIED_STEPS = 4  # the first is slower than the others, and is left out
TIMEOUT_SEC = 60.0
FEWEST_STEPS = 20
# Names of the mark that ends a text, for tokenizers without a tokenizer_config.json.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
QUIET = (
    *("eval.every=0", "metrics.log_interval=1", "metrics.stdout=off", "metrics.wandb.mode=disabled"),
    *("checkpoint.every=0", "scheduler.warmup_steps=0"),
)


def make_starter(
    paths: list[str],
    *,
    format: str = "auto",
    dtype: str | None = None,
    eod: int | None = None,
    column: str | None = None,
    tokenizer: str | None = None,
) -> Starter:
    """The starter config for the data at `paths`; the other arguments are the verb's options.
    Raises UserError: there is nothing to train on."""
    paths = [_expanded(path) for path in paths]
    if any(map(is_url, paths)):
        at = discover_stored(paths, format=format, cache=Cache(None))
    else:
        at = discover(paths, format=format)
    refuse_empty(at.streams)
    refuse_unheeded(at.streams, format, {"dtype": dtype, "eod": eod, "column": column})
    kind = guess(at.streams, format=format, dtype=dtype, column=column)
    # Only the user knows what a format of their own yields.
    if is_import_path(format) and tokenizer == "ids":
        kind = replace(kind, kind="ids")
    near, named = None, tokenizer or "ids"
    if kind.kind == "text" and tokenizer is None:
        if not is_url(paths[0]):
            near = _tokenizer_near(Path(paths[0]))
        named = near or "bytes"
    chosen, share = sample_streams(at.streams)
    with progress_bar() as report:
        how: dict[str, Any] = {"format": format, "eod": eod, "column": column, "report": report}
        lengths, largest = look(chosen, kind, tokenizer=named, **how)
    if not any(each.any() for each in lengths):
        fix = "name files with text or token ids in them"
        raise UserError(paths[0], "holds no token at all", fix)
    sizes = choose_sizes(chosen, lengths, share=share)
    parts = parts_of(chosen, lengths, sizes)
    notes = _notes(at, kind, share)
    if near:
        notes.append(f"the tokenizer of the data, {near}, is used; for bytes: --tokenizer bytes")
    strange = not_text(chosen, format)
    if strange:
        notes.append(describe(strange, len(chosen)))
    without = []
    if sizes.holdout_fraction:
        without = never_held_out(chosen, lengths, sizes.holdout_fraction)
    if len(parts) > 1 and without:
        note = f"all modalities are one source, without weights: in {', '.join(without)} no document "
        notes.append(note + "would be held out, and evaluation needs some of every source")
        parts = []
    given = {"format": format, "dtype": kind.dtype, "eod": eod, "column": column}
    if format == "auto":
        del given["format"]
    keys = {key: value for key, value in given.items() if value is not None}
    name = _run_name(paths[0])
    vocab_size = largest[0] + 1 if named == "ids" else 0
    ids = load_tokenizer(named, vocab_size=vocab_size)
    return Starter(
        name=name,
        found=_found_lines(at, chosen, lengths, kind),
        notes=notes,
        sources=_sources(at, parts, name, keys, format=format),
        tokenizer=named,
        vocab_size=vocab_size,
        num_ids=ids.vocab_size,
        end=_end_mark(ids, Path(named)),
        largest_id=largest,
        suggests_eod=eod is None and any(takes_option(name, "eod") for name in kind.formats),
        sizes=sizes,
        length=f"about {counted(sizes.passes, 'pass')} over the training documents on 1 rank",
    )


def _expanded(path: str) -> str:
    return path if is_url(path) else str(Path(path).expanduser())


def sample_streams(streams: Sequence[Stream], max_bytes: int = MAX_BYTES) -> tuple[list[Stream], float]:
    """(all streams, or evenly spread ones if there are more than `max_bytes`; their share)."""
    sizes = np.array([Path(stream.path).stat().st_size for stream in streams], dtype=np.float64)
    total = float(sizes.sum())
    if total <= max_bytes:
        return list(streams), 1.0
    chosen = range(0, len(streams), int(np.ceil(total / max_bytes)))
    return [streams[i] for i in chosen], float(sizes[list(chosen)].sum()) / total


def _tokenizer_near(path: Path) -> str | None:
    """A tokenizer.json in the folder of the data, or in the one above."""
    folder = next(each for each in (path, *path.parents) if each.is_dir())
    found = (each / "tokenizer.json" for each in (folder, folder.parent))
    return next((str(each) for each in found if each.is_file()), None)


def _end_mark(tokenizer: Tokenizer, path: Path) -> tuple[str, int] | None:
    """The mark of the end of a text and its id, by tokenizer_config.json or by its usual names."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    special = {each["content"]: int(each["id"]) for each in tokenizer.spec["added_tokens"]}
    named: Any = None
    with suppress(OSError, ValueError, AttributeError):
        text = path.with_name("tokenizer_config.json").read_text(encoding="utf-8")
        named = json.loads(text).get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    marks = [mark for mark in (str(named), *ENDS) if mark in special]
    return (printable(marks[0]), special[marks[0]]) if marks else None


def _run_name(path: str) -> str:
    """A run's name from the data's path: the last part that has a plain character."""
    named = [part for part in Path(path).resolve().parts if re.search(r"[A-Za-z0-9]", part)]
    stem = ["run", *named][-1]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(stem).stem).strip("-_")
    return plain[:40] or "run"


def _found_lines(at: Discovery, chosen: list[Stream], lengths: list[Ints], kind: Guess) -> list[str]:
    def counts(modality: str | None) -> str:
        pairs = zip(lengths, chosen, strict=True)
        its = [each for each, stream in pairs if modality in (None, stream.modality)]
        streams, documents = counted(len(its), "stream"), counted(sum(map(len, its)), "document")
        return f"{streams}, {documents}, {sum(int(each.sum()) for each in its):,} tokens"

    what = {"text": "bytes of text", "ids": "token ids"}[kind.kind]
    of = ""
    if len(chosen) < len(at.streams):
        of = f" of {len(at.streams):,} streams"
    modalities = sorted({stream.modality for stream in chosen})
    formats = ", ".join(kind.formats)
    lines = [f"Found: {counts(None)}{of}, in layout {at.layout}, {what} ({formats})"]
    if len(modalities) > 1:
        lines += [f"  modality {name}: {counts(name)}" for name in modalities]
    return lines


def _notes(at: Discovery, kind: Guess, share: float) -> list[str]:
    notes = []
    if share < 1.0:
        notes.append(f"only {share:.0%} of the bytes were inspected; ids or lengths may differ in the rest")
    if at.left_out:
        notes.append(f"not read, because not in a modality's directory: {few(at.left_out)}")
    if kind.dtype is not None:
        notes.append(f"the dtype {kind.dtype} is guessed from the files' bytes; --dtype overrides it")
    return notes


def _sources(at: Discovery, parts: list[Part], name: str, keys: dict[str, Any], *, format: str) -> list[StarterSource]:
    """One source per modality, where a config can name each alone; otherwise a single one."""
    whole: dict[str, Any] = {"paths": list(at.paths)} if at.root is None else {"root": at.root}
    names = [part.modality for part in parts]
    apart: dict[str, dict[str, list[str]]] = {}
    if at.root is not None:
        apart = {name: {"modalities": [name]} for name in names}
    elif not any(map(is_url, at.paths)):
        for path in at.paths:
            found = {stream.modality for stream in discover_direct([path], format=format)}
            # A glob over several modalities stands under no name, so the sources stay one.
            modality = found.pop() if len(found) == 1 else ""
            apart.setdefault(modality, {"paths": []})["paths"].append(path)
    if not 1 < len(parts) <= MOST_SOURCES or apart.keys() != set(names):
        return [StarterSource(name, {**whole, **keys})]
    tables = [{**whole, **apart[part.modality], **keys} for part in parts]
    return [StarterSource(part.source, own, part) for part, own in zip(parts, tables, strict=True)]


def timed(starter: Starter, minutes: float) -> Starter:
    """The starter with as many steps as take `minutes` on a rank here, and the time in words.

    The time is that of a few real steps; a note says why, if they cannot be timed.
    """
    try:
        seconds = _seconds_per_step(starter)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        # Its text is the whole command, and what it captured is bytes.
        if isinstance(error, subprocess.TimeoutExpired):
            said = f"{TRIED_STEPS} steps took longer than {TIMEOUT_SEC:g} s"
        last = said.strip().splitlines()[-1] if said.strip() else type(error).__name__
        note = f"the time of a step could not be measured: {last}"
        return replace(starter, notes=[*starter.notes, note])
    sizes = starter.sizes
    steps = min(sizes.steps, max(int(minutes * 60 / seconds), FEWEST_STEPS))
    passes = sizes.passes * steps / sizes.steps
    length = f"about {counted(round(passes, 2), 'pass')} over the training documents on 1 rank, "
    length += f"{duration_text(steps * seconds)} on this machine ({seconds:.2g} s per step)"
    return replace(starter, sizes=replace(sizes, steps=steps, passes=passes), length=length)


def _seconds_per_step(starter: Starter) -> float:
    """The median time of the steps after the first of a short run. Raises OSError, SubprocessError:
    the run fails, or takes too long."""
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        config, run_dir = Path(folder, "x.toml"), Path(folder, "run")
        write_file(config, render_starter(starter, schema=None).encode(), sync=False)
        # A process of its own: its threads, caches and signals leave nothing behind here.
        line = [sys.executable, "-m", "trainer", "--config", str(config), "--run-dir", str(run_dir)]
        line += [part for setting in QUIET for part in ("--set", setting)]
        line += ["--steps", str(TRIED_STEPS)]
        subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=True)
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    metrics = [row["metrics"] for row in rows if row.get("mode") == "train"]
    times: list[float] = [each["step_time_sec"] for each in metrics]
    return statistics.median(times[1:])
